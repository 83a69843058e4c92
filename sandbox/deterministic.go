package sandbox

import (
	"strconv"
	"time"
)

// Deterministic is what is fixed of a sandbox, so that the same commands see the same.
type Deterministic struct {
	Clock time.Time `json:"clock"`          // the clock of day starts here; zero = DeterministicClock
	Seed  int64     `json:"seed,omitempty"` // of hashes, and for programs that ask for one (COVE_SEED)
}

// DeterministicClock is where the clock starts unless told.
var DeterministicClock = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// DeterministicName is the name of the host inside, and what COVE_SANDBOX_ID says.
const DeterministicName = "deterministic"

// maxSeed is the largest that PYTHONHASHSEED takes.
const maxSeed = 1<<32 - 1

// NotFixed is what differs all the same from one deterministic sandbox to another, for
// those who ask why a replay does.
func (d *Deterministic) NotFixed() []string {
	if d == nil {
		return nil
	}
	return []string{
		"random numbers of the kernel: /dev/urandom, /dev/random, getrandom, AT_RANDOM, uuids made of them",
		"addresses of memory: ASLR is the kernel's and cannot be switched off",
		"the clock of day below a second, and above for a command that takes long before it looks; it starts each exec at a whole minute",
		"clocks that measure (monotonic, processor time) and all that timeouts make of them",
		"the order in which threads and processes run, with one core too",
		"pids after a process that was started beside others",
		"the processor: its model and what it can do",
	}
}

// withDeterminism fills in what a deterministic sandbox has: no network, and seeds where
// programs look for them, below what the request says.
func (s Spec) withDeterminism() Spec {
	if s.Deterministic == nil {
		return s
	}
	d := *s.Deterministic
	if d.Clock.IsZero() {
		d.Clock = DeterministicClock
	}
	d.Clock = d.Clock.UTC().Truncate(time.Second)
	s.Deterministic = &d
	if s.Network.Mode == "" && len(s.Network.Rules) == 0 {
		s.Network.Mode = NetworkNone
	}
	env := map[string]string{
		"PYTHONHASHSEED":    strconv.FormatInt(d.Seed, 10),
		"PERL_HASH_SEED":    strconv.FormatInt(d.Seed, 10),
		"COVE_SEED":         strconv.FormatInt(d.Seed, 10),
		"SOURCE_DATE_EPOCH": strconv.FormatInt(d.Clock.Unix(), 10),
		"TZ":                "UTC",
	}
	for k, v := range s.Env {
		env[k] = v
	}
	s.Env = env
	return s
}

func validateDeterministic(s Spec) error {
	const field = "spec.deterministic"
	d := s.Deterministic
	switch {
	case d == nil:
		return nil
	case d.Seed < 0 || d.Seed > maxSeed:
		return InvalidField(field+".seed", "%d is not accepted; 0 to %d is", d.Seed, int64(maxSeed))
	case d.Clock.Before(time.Unix(0, 0)) || d.Clock.Year() > 2200:
		return InvalidField(field+".clock", "%s is not accepted; 1970 to 2200 is", d.Clock.Format(time.RFC3339))
	case s.Network.Mode != NetworkNone && s.Network.Mode != "":
		return InvalidField("spec.network", "a deterministic sandbox has no network but a replay").WithHint("leave network out, or replay a recording")
	case s.Reuse != "":
		return InvalidField("spec.reuse", "a deterministic sandbox has a kernel of its own").WithHint("leave reuse out")
	}
	return nil
}
