package doctor

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// gvisorModule is the module runsc comes from.
const gvisorModule = "gvisor.dev/gvisor"

// System probes this machine. What only Linux has is added by platform.
func System() Probes {
	p := Probes{
		GOOS: runtime.GOOS, GOARCH: runtime.GOARCH,
		EUID: os.Geteuid, ReadFile: os.ReadFile, Stat: os.Stat, LookPath: exec.LookPath,
		Executable: func() (string, error) {
			exe, err := os.Executable()
			if err != nil {
				return "", err
			}
			return filepath.EvalSymlinks(exe)
		},
		Output: output,
		TryDir: func(parent string) error {
			dir, err := os.MkdirTemp(parent, "cove-doctor-")
			if err != nil {
				return err
			}
			return os.Remove(dir)
		},
		GVisor: gvisorVersions,
	}
	p.Space, p.Namespaces, p.Network = platform()
	return p
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if err != nil && out.Len() > 0 {
		err = fmt.Errorf("%w: %s", err, firstLine(out.String()))
	}
	return out.String(), err
}

// gvisorVersions reads the module versions the linker wrote into both
// binaries: "runsc --version" of a plain go build knows none.
func gvisorVersions(runsc string) (got, want string, err error) {
	info, err := buildinfo.ReadFile(runsc)
	if err != nil {
		return "", "", err
	}
	if got = moduleVersion(info); got == "" {
		return "", "", fmt.Errorf("%s was not built from the module %s", runsc, gvisorModule)
	}
	if own, ok := debug.ReadBuildInfo(); ok {
		want = moduleVersion(own)
	}
	return got, want, nil
}

func moduleVersion(info *debug.BuildInfo) string {
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == gvisorModule {
			if m.Replace != nil {
				return m.Replace.Version
			}
			return strings.TrimSpace(m.Version)
		}
	}
	return ""
}
