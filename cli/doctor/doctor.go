// Package doctor says whether a machine can run a Cove server and, for each
// thing that is missing, the command that fixes it.
//
// The checks are pure: all they know of the machine comes through [Probes],
// so each is tested against machines nobody has. [System] probes this one.
// "cove doctor" prints every result; "cove serve" asks on a failed start.
package doctor

import (
	"context"
	"errors"
	"io/fs"
)

// Status of a check. A warning lets a server start.
type Status string

const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Result of one check. Fix is a command or a sentence; "" when all is well.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"`
}

// Config is what is to run here.
type Config struct {
	Data  string // state directory
	Runsc string // "" = beside this executable, then $PATH
	Guest string
	URL   string // of the server, for messages
}

// Probes are the questions a check may ask of the machine.
type Probes struct {
	GOOS, GOARCH string
	EUID         func() int
	Executable   func() (string, error)
	ReadFile     func(name string) ([]byte, error)
	Stat         func(name string) (fs.FileInfo, error)
	LookPath     func(name string) (string, error)
	Output       func(ctx context.Context, name string, args ...string) (string, error)
	// TryDir makes and removes a directory: the only honest test of a cgroup
	// file system, which may be mounted writable and still refuse.
	TryDir func(parent string) error
	// Space is what a user of the file system may still write.
	Space func(dir string) (bytes, inodes int64, err error)
	// Namespaces starts a child in new mount, pid, net, ipc and uts namespaces.
	Namespaces func(ctx context.Context) error
	// Network makes and removes what a sandbox with a network has: a namespace
	// with a pair of devices and a table of nftables.
	Network func() error
	// GVisor is the version a runsc binary was built from, and the one this
	// binary was.
	GVisor func(runsc string) (got, want string, err error)
	// Server makes one authenticated call; nil when there is no client.
	Server func(ctx context.Context) error
}

// ErrNoServer is what Probes.Server returns when nobody listens.
var ErrNoServer = errors.New("no server")

// Run makes every check, in the order in which a missing thing explains the
// next. It never fails: what cannot be asked is a result too.
func Run(ctx context.Context, p Probes, c Config) []Result {
	results := []Result{checkOS(p)}
	if results[0].Status == Fail {
		// The rest would be a list of consequences; a client works anywhere.
		return append(results, checkServer(ctx, p, c)...)
	}
	results = append(results,
		checkRoot(p),
		checkKernel(p),
		checkNamespaces(ctx, p),
		checkPtrace(p),
		checkCgroups(p),
		checkRunsc(ctx, p, c),
		checkGuest(p, c),
		checkErofs(p),
		checkMmdebstrap(p, c),
		checkNetwork(p),
		checkVolumes(p),
		checkDisk(p, c),
		checkMemory(p),
		checkLimits(p),
	)
	return append(results, checkServer(ctx, p, c)...)
}

// Preflight is what must hold before a server starts: the failures of Run
// that are not about a running one.
func Preflight(ctx context.Context, p Probes, c Config) []Result {
	p.Server = nil
	var bad []Result
	for _, r := range Run(ctx, p, c) {
		if r.Status == Fail {
			bad = append(bad, r)
		}
	}
	return bad
}

func ok(name, detail string) Result        { return Result{name, OK, detail, ""} }
func warn(name, detail, fix string) Result { return Result{name, Warn, detail, fix} }
func fail(name, detail, fix string) Result { return Result{name, Fail, detail, fix} }
