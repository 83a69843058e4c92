package gvisor

import (
	"debug/buildinfo"
	"fmt"
	"math"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"

	"gvisor.dev/gvisor/pkg/cpuid"

	"github.com/cove-sandbox/cove/sandbox"
)

const gvisorModule = "gvisor.dev/gvisor"

// build is what a checkpoint depends on beside its files. The state of a sentry
// is only understood by the same gVisor; the guest's code is mapped from its
// file, not saved; and programs inside have looked at the CPU and chosen their
// instructions.
type build struct {
	gvisor, guest, arch, line string
	form                      int // of the state; see stateForm
	cpu                       []string
}

// stateForm counts the changes that our edits (cmd/runsc/edits) have made to how
// gVisor writes its state. Earlier ones are read: 0 is gVisor's own, 1 has bytes
// as strings, 2 the files of /sys/fs/cgroup and cores of now in /proc/cpuinfo, 3
// can leave out pages that an earlier checkpoint has.
const stateForm = 3

// thisBuild is what this machine and its binaries are.
func thisBuild(runsc, guestHash string) (build, error) {
	b, err := versionOf(runsc)
	if err != nil {
		return build{}, err
	}
	b.guest, b.arch = guestHash, goruntime.GOARCH
	cpuid.Initialize()
	host := cpuid.HostFeatureSet()
	b.cpu = strings.Fields(host.FlagString())
	slices.Sort(b.cpu)
	b.line = cacheLine(host)
	return b, nil
}

// versionOf is the gVisor of a runsc and the form of its state, by what the
// linker wrote into it.
func versionOf(runsc string) (b build, err error) {
	info, err := buildinfo.ReadFile(runsc)
	if err != nil {
		return build{}, fmt.Errorf("version of %s: %w", runsc, err)
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == gvisorModule {
			b.gvisor = m.Version
			switch {
			case m.Replace == nil:
			case m.Replace.Version == "(devel)": // a directory: our edits
				b.form = stateForm
			default:
				b.gvisor = m.Replace.Version
			}
		}
	}
	if b.gvisor == "" {
		return build{}, fmt.Errorf("%s does not say which gVisor it is", runsc)
	}
	return b, nil
}

func (b build) String() string {
	return fmt.Sprintf("gvisor=%s;form=%d;guest=%s;arch=%s;line=%s;cpu=%s", b.gvisor, b.form, b.guest, b.arch, b.line, strings.Join(b.cpu, ","))
}

func parseBuild(s string) build {
	var b build
	for part := range strings.SplitSeq(s, ";") {
		key, value, _ := strings.Cut(part, "=")
		switch key {
		case "gvisor":
			b.gvisor = value
		case "form":
			// What is no number was written by who counts otherwise: later.
			var err error
			if b.form, err = strconv.Atoi(value); err != nil {
				b.form = math.MaxInt
			}
		case "guest":
			b.guest = value
		case "arch":
			b.arch = value
		case "line":
			b.line = value
		case "cpu":
			b.cpu = strings.Split(value, ",")
		}
	}
	return b
}

// restores says whether a checkpoint of was can go on with these programs on
// this machine.
func (b build) restores(was build) error {
	if err := b.reads(was); err != nil {
		return err
	}
	return b.runs(was)
}

// reads says whether these programs understand it.
func (b build) reads(was build) error {
	switch {
	case was.gvisor != b.gvisor:
		return refuseRestore("the checkpoint was made by gVisor %q, this is %q", was.gvisor, b.gvisor)
	case was.form > b.form:
		return refuseRestore("the checkpoint was written by a later Cove: its state has form %d, this reads up to %d", was.form, b.form)
	case was.guest != b.guest:
		return refuseRestore("the checkpoint was made with guest %q, this node has %q", was.guest, b.guest)
	}
	return nil
}

// runs says whether this machine can run what was saved.
func (b build) runs(was build) error {
	var missing []string
	for _, f := range was.cpu {
		if _, ok := slices.BinarySearch(b.cpu, f); !ok {
			missing = append(missing, f)
		}
	}
	switch {
	case was.arch != b.arch:
		return refuseRestore("the checkpoint is of a %q CPU, this is %q", was.arch, b.arch)
	case len(missing) > 0:
		return refuseRestore("this CPU lacks what the checkpoint's had: %s", strings.Join(missing, " "))
	case was.line != b.line:
		return refuseRestore("the checkpoint's CPU had cache lines of %s bytes, this has %s", was.line, b.line)
	}
	return nil
}

func refuseRestore(format string, args ...any) error {
	return sandbox.Errorf(sandbox.Precondition, "gvisor.restore", format, args...).WithReason(sandbox.RestoreRefused).
		WithHint("processes and memory cannot go on here; the files of the snapshot can still be used")
}
