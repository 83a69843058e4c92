package sandbox

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Defaults fill the fields of a Spec that are left zero.
type Defaults struct {
	Image     string
	Resources Resources // MemoryLimit 0 = the sandbox's Memory
	Network   NetworkMode
	// Timeout of a sandbox that says nothing about its end: no timeout, no idle
	// timeout, no lease. 0 = it lives until it is killed.
	Timeout time.Duration
}

// IdleMemory is what an idle sandbox takes of the machine, and so what is kept
// for one that says only how large it may grow.
const IdleMemory = 8 * MiB

// StandardDefaults are those of a server that is told nothing else.
func StandardDefaults() Defaults {
	return Defaults{Image: "base", Resources: Resources{MilliCPU: 1000, Memory: 512 * MiB, Disk: 10 * GiB, Pids: 1024, Reserve: IdleMemory}, Network: NetworkNone,
		Timeout: 24 * time.Hour}
}

// Limits bound what a Spec may ask for at all. What is free now is admission's
// question, not theirs. A maximum of 0 is none.
type Limits struct {
	MinMilliCPU, MaxMilliCPU int64
	MinMemory, MaxMemory     int64 // of both Memory and MemoryLimit
	MinDisk, MaxDisk         int64
	MinPids, MaxPids         int64
	MaxTimeout               time.Duration // of Timeout and IdleTimeout
}

// StandardLimits are those of a server that is told nothing else. Of the smallest
// memory an idle gVisor kernel with its guest takes about 10 MiB.
func StandardLimits() Limits {
	return Limits{
		MinMilliCPU: 50, MaxMilliCPU: 256_000,
		MinMemory: 32 * MiB,
		MinDisk:   16 * MiB,
		MinPids:   16, MaxPids: 65536,
		MaxTimeout: maxTimeout,
	}
}

const maxTimeout = 10 * 365 * 24 * time.Hour // beyond ten years a duration is a mistake of units

// Bounds of what a request carries; the messages below print them.
const (
	maxLabels     = 64
	maxLabelValue = 256
	maxEnv        = 256
	maxEnvBytes   = 256 * int(KiB)
	maxPath       = 4095 // PATH_MAX less its NUL
	maxArgs       = 65536
	maxArgBytes   = 2 * int(MiB)
	maxCommand    = int(MiB)
	maxUser       = 256
	maxTerm       = 10000
	maxName       = 256
	maxImageName  = 512
)

var (
	labelKeyPattern = pattern(`^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,62}[a-zA-Z0-9])?$`)
	envNamePattern  = pattern(`^[A-Za-z_][A-Za-z0-9_]*$`)
	execIDPattern   = pattern(`^[A-Za-z0-9._:-]{1,128}$`)
)

// WithDefaults returns s with its zero fields filled from d. A memory limit
// given alone and below the default memory lowers the request to itself, since
// nobody asks for more memory than they allow. Who gives both, memory and limit,
// has the memory reserved; memory alone is a size, of which the default is.
// What starts from a snapshot or template has its image from there.
func (s Spec) WithDefaults(d Defaults) Spec {
	s = s.withDeterminism()
	if s.Image == "" && s.Snapshot == "" && s.Template == "" {
		s.Image = d.Image
	}
	r := &s.Resources
	fill := func(p *int64, v int64) {
		if *p == 0 {
			*p = v
		}
	}
	fill(&r.MilliCPU, d.Resources.MilliCPU)
	if r.Memory == 0 || r.MemoryLimit == 0 {
		fill(&r.Reserve, d.Resources.Reserve)
	}
	fill(&r.Reserve, r.Memory)
	if r.Memory == 0 && r.MemoryLimit > 0 {
		r.Memory = min(r.MemoryLimit, d.Resources.Memory)
	}
	fill(&r.Memory, d.Resources.Memory)
	// A default limit below what was asked for would refuse a good request.
	fill(&r.MemoryLimit, max(d.Resources.MemoryLimit, r.Memory))
	fill(&r.Disk, d.Resources.Disk)
	fill(&r.Pids, d.Resources.Pids)
	s = s.WithEnd(d)
	if s.Snapshot == "" && s.Template == "" { // those may bring one
		s.Network = s.Network.WithDefault(d.Network)
	}
	return s
}

// WithEnd returns s with the default timeout if it says nothing about its end. An
// idle timeout is no end: a process that goes on keeps it away for ever. Who has it
// paused when it is idle wants to keep it.
func (s Spec) WithEnd(d Defaults) Spec {
	if s.Timeout == 0 && !s.NoTimeout && s.Lease == "" && s.OnIdle != IdlePause {
		s.Timeout = d.Timeout
	}
	return s
}

// Validate checks a Spec that has its defaults. The first wrong field is an
// Invalid error with the field in the API's spelling.
func (s Spec) Validate(l Limits) error {
	r := s.Resources
	return first(
		ValidateImageName("spec.image", s.Image),
		validateCPU("spec.resources.cpu", r.MilliCPU, l.MinMilliCPU, l.MaxMilliCPU),
		validateBytes("spec.resources.memory", r.Memory, l.MinMemory, l.MaxMemory),
		validateBytes("spec.resources.memory_limit", r.MemoryLimit, l.MinMemory, l.MaxMemory),
		validateMemoryPair(r),
		validateBytes("spec.resources.disk", r.Disk, l.MinDisk, l.MaxDisk),
		validatePids("spec.resources.pids", r.Pids, l.MinPids, l.MaxPids),
		ValidateEnv("spec.env", s.Env),
		ValidateLabels("spec.labels", s.Labels),
		ValidateTimeout("spec.timeout", s.Timeout, l.MaxTimeout),
		ValidateTimeout("spec.idle_timeout", s.IdleTimeout, l.MaxTimeout),
		validateOnIdle(s.OnIdle, s.IdleTimeout),
		validateOnTimeout(s.OnTimeout),
		validateVolumes(s.Volumes),
		validateReuse(s),
		validateDeterministic(s),
		validateRollout(s.Rollout),
		s.Ingress.validate(),
	)
}

var reusePattern = pattern(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,62}[a-zA-Z0-9])?$`)

// validateReuse refuses what would make a kernel that is never used again: a network
// device and volumes are a sandbox's own, and stay in its kernel.
func validateReuse(s Spec) error {
	switch {
	case s.Reuse == "":
		return nil
	case !reusePattern().MatchString(s.Reuse):
		return InvalidField("spec.reuse", "%q cannot name a trust group", clip(s.Reuse)).
			WithHint("1 to 64 of letters, digits, dots, dashes and underscores, the first and last a letter or digit")
	case s.Network.Mode != NetworkNone && s.Network.Mode != "":
		return InvalidField("spec.reuse", "a kernel with a network is its sandbox's alone").WithHint("ask for no network (--network none), or leave reuse out")
	case len(s.Volumes) > 0:
		return InvalidField("spec.reuse", "a kernel with volumes is its sandbox's alone").WithHint("leave out the volumes, or reuse")
	}
	return nil
}

// Validate checks a process that has its ExecID.
func (p ProcessSpec) Validate() error {
	return first(
		ValidateExecID("process.exec_id", p.ExecID),
		p.validateCommand(),
		validateCwd("process.cwd", p.Cwd),
		ValidateEnv("process.env", p.Env),
		ValidateUser("process.user", p.User),
		validatePTY("process.pty", p.PTY),
		ValidateProcessTimeout("process.timeout", p.Timeout),
	)
}

func (p ProcessSpec) validateCommand() error {
	switch {
	case len(p.Args) > 0 && p.Command != "":
		return InvalidField("process.args", "args and command are both set; exactly one is accepted")
	case len(p.Args) == 0 && p.Command == "":
		return InvalidField("process.args", "neither args nor command is set; exactly one is accepted")
	case len(p.Command) > maxCommand:
		return InvalidField("process.command", "has %d bytes; at most %s are accepted", len(p.Command), bytesText(int64(maxCommand))).
			WithHint("write it to a file and run that")
	case strings.IndexByte(p.Command, 0) >= 0:
		return InvalidField("process.command", "holds a NUL byte, which no process can be given")
	case len(p.Args) > maxArgs:
		return InvalidField("process.args", "has %d entries; at most %d are accepted", len(p.Args), maxArgs)
	}
	total := 0
	for i, a := range p.Args {
		total += len(a)
		if strings.IndexByte(a, 0) >= 0 {
			return InvalidField("process.args", "entry %d holds a NUL byte, which no process can be given", i)
		}
	}
	if total > maxArgBytes {
		return InvalidField("process.args", "has %d bytes in all; at most %s are accepted", total, bytesText(int64(maxArgBytes))).
			WithHint("write it to a file and pass its path, or send it on stdin")
	}
	if len(p.Args) > 0 && p.Args[0] == "" {
		return InvalidField("process.args", "entry 0 is empty; it must name a program")
	}
	return nil
}

// ValidateImageName checks a name or reference of an image, as a word: 1 to
// 512 printable ASCII bytes without spaces. Whether it exists is not asked.
func ValidateImageName(field, s string) error {
	ok := s != "" && len(s) <= maxImageName && s[0] != '-'
	for i := 0; ok && i < len(s); i++ {
		ok = s[i] > ' ' && s[i] < 0x7f
	}
	if !ok {
		return InvalidField(field, "%q is no image name; 1 to %d printable ASCII characters without spaces are accepted, the first not '-'", clip(s), maxImageName)
	}
	return nil
}

// ValidateName checks a free-text name, as of a key: 1 to 256 bytes of UTF-8
// without control characters.
func ValidateName(field, s string) error {
	if s == "" || len(s) > maxName || !plainText(s) {
		return InvalidField(field, "%q is no name; 1 to %d bytes of UTF-8 without control characters are accepted", clip(s), maxName)
	}
	return nil
}

// ValidateIdempotencyKey checks a key a caller chose; "" is none.
func ValidateIdempotencyKey(field, s string) error {
	if s == "" {
		return nil
	}
	return ValidateName(field, s)
}

// ValidateLabels checks the labels of a sandbox or of a filter.
func ValidateLabels(field string, labels map[string]string) error {
	if len(labels) > maxLabels {
		return InvalidField(field, "has %d labels; at most %d are accepted", len(labels), maxLabels)
	}
	for _, k := range sortedKeys(labels) {
		v := labels[k]
		if !labelKeyPattern().MatchString(k) {
			return InvalidField(field, "key %q is not accepted; keys are 1 to 64 of letters, digits, '.', '_', '/' and '-', with a letter or digit first and last", clip(k))
		}
		if len(v) > maxLabelValue {
			return InvalidField(field, "the value of %q has %d bytes; at most %d are accepted", k, len(v), maxLabelValue)
		}
		if !plainText(v) {
			return InvalidField(field, "the value of %q is not UTF-8 without control characters", k)
		}
	}
	return nil
}

// ValidateEnv checks environment variables.
func ValidateEnv(field string, env map[string]string) error {
	if len(env) > maxEnv {
		return InvalidField(field, "has %d variables; at most %d are accepted", len(env), maxEnv)
	}
	total := 0
	for _, k := range sortedKeys(env) {
		v := env[k]
		total += len(k) + len(v)
		if !envNamePattern().MatchString(k) {
			return InvalidField(field, "name %q is not accepted; names are letters, digits and '_', not beginning with a digit", clip(k))
		}
		if strings.IndexByte(v, 0) >= 0 {
			return InvalidField(field, "the value of %q holds a NUL byte, which no process can be given", clip(k))
		}
	}
	if total > maxEnvBytes {
		return InvalidField(field, "has %d bytes of names and values; at most %s are accepted", total, bytesText(int64(maxEnvBytes)))
	}
	return nil
}

// ValidatePath checks an absolute path inside a sandbox or volume.
func ValidatePath(field, path string) error {
	if path == "" || path[0] != '/' {
		return InvalidField(field, "%q is not absolute; a path beginning with / is accepted", clip(path))
	}
	return ValidateFilePath(field, path)
}

// ValidateFilePath checks a path of a file inside a sandbox; a relative one is
// below the working directory of its image.
func ValidateFilePath(field, path string) error {
	switch {
	case path == "":
		return InvalidField(field, "is missing; a path is accepted")
	case len(path) > maxPath:
		return InvalidField(field, "has %d bytes; at most %d are accepted", len(path), maxPath)
	case strings.IndexByte(path, 0) >= 0:
		return InvalidField(field, "holds a NUL byte, which no path can")
	}
	return nil
}

// ValidateExecID checks the id of a process.
func ValidateExecID(field, id string) error {
	if !execIDPattern().MatchString(id) {
		return InvalidField(field, "%q is not accepted; 1 to 128 of letters, digits, '.', '_', ':' and '-' are", clip(id))
	}
	return nil
}

// ValidateUser checks a user as written in a request: name, uid, name:group or
// uid:gid, "" for the image's. Whether it exists is known only inside.
func ValidateUser(field, user string) error {
	if len(user) > maxUser || strings.IndexByte(user, 0) >= 0 {
		return InvalidField(field, "%q is not accepted; name, uid, name:group or uid:gid of at most %d bytes without NUL is", clip(user), maxUser)
	}
	return nil
}

// ValidateTermSize checks a terminal's size.
func ValidateTermSize(field string, t TermSize) error {
	if t.Rows < 1 || t.Rows > maxTerm {
		return InvalidField(field+".rows", "%d is not accepted; 1 to %d is", t.Rows, maxTerm)
	}
	if t.Cols < 1 || t.Cols > maxTerm {
		return InvalidField(field+".cols", "%d is not accepted; 1 to %d is", t.Cols, maxTerm)
	}
	return nil
}

// ValidateTimeout checks a lifetime of a sandbox: 0 for none, or from a second
// to most (0 = ten years).
func ValidateTimeout(field string, d, most time.Duration) error {
	if most == 0 {
		most = maxTimeout
	}
	if d != 0 && (d < time.Second || d > most) {
		return InvalidField(field, "%s is not accepted; 1s to %s is, or 0 for none", d, most)
	}
	return nil
}

// ValidateProcessTimeout checks the time a process may take, which may be less than
// a second: cutting off runaway steps early is what trainers do with it.
func ValidateProcessTimeout(field string, d time.Duration) error {
	if d != 0 && (d < time.Millisecond || d > maxTimeout) {
		return InvalidField(field, "%s is not accepted; 1ms to %s is, or 0 for none", d, maxTimeout)
	}
	return nil
}

func validateCPU(field string, milli, least, most int64) error {
	if milli < least || most > 0 && milli > most {
		return InvalidField(field, "%s is not accepted; %s cores are", cores(milli), between(cores(least), cores(most), most))
	}
	return nil
}

func validateBytes(field string, n, least, most int64) error {
	if n < least || most > 0 && n > most {
		return InvalidField(field, "%s is not accepted; %s is", bytesText(n), between(bytesText(least), bytesText(most), most))
	}
	return nil
}

func validatePids(field string, n, least, most int64) error {
	if n < least || most > 0 && n > most {
		return InvalidField(field, "%d is not accepted; %s is", n, between(strconv.FormatInt(least, 10), strconv.FormatInt(most, 10), most))
	}
	return nil
}

func validateMemoryPair(r Resources) error {
	if r.MemoryLimit < r.Memory {
		return InvalidField("spec.resources.memory_limit", "%s is below the memory of %s; a limit of at least that is accepted",
			bytesText(r.MemoryLimit), bytesText(r.Memory))
	}
	return nil
}

func validateCwd(field, cwd string) error {
	if cwd == "" {
		return nil
	}
	return ValidatePath(field, cwd)
}

func validatePTY(field string, t *TermSize) error {
	if t == nil {
		return nil
	}
	return ValidateTermSize(field, *t)
}

// MilliCPU turns the API's cores into thousandths of one. What no int64 can
// hold becomes -1, which Validate refuses.
func MilliCPU(cores float64) int64 {
	m := math.Round(cores * 1000)
	if math.IsNaN(m) || math.Abs(m) > math.MaxInt32 {
		return -1
	}
	if m == 0 && cores != 0 {
		return -1 // 0.0001 is not "the default"
	}
	return int64(m)
}

func cores(milli int64) string { return strconv.FormatFloat(float64(milli)/1000, 'f', -1, 64) }

func between(least, most string, n int64) string {
	if n == 0 {
		return "at least " + least
	}
	return least + " to " + most
}

func plainText(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys) // the same request gets the same error every time
	return keys
}

// first returns the first error that is not nil.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
