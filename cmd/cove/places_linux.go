package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
)

// places is the layout of the data directory.
//
//	key       the first API key, mode 0600
//	url       where the server of this directory listens or listened last
//	pid       of the running server
//	ssh_ca.key, ssh_host.key  of the SSH server, if there is one; mode 0600
//	gateway.key  what tokens for ports are signed with, mode 0600
//	cove.db   sandboxes, ends, names of images, hashes of keys
//	images/   content, shared by every sandbox
//	node/     the journal and the lock
//	gvisor/   kernels
//	state/    content of snapshots and of sandboxes in cold standby
//	state.keys  with what that is encrypted, if it is there
//	checkpoints/  such content as a kernel reads it, while one does
//	volumes/  volumes
//	tls/      the authority of --tls-self, and certificates of --tls-acme
//	recordings/  HTTP traffic of sandboxes, to be replayed; encrypted with state.keys
//	steps/    what the sandboxes of runs did: TENANT/RUN/
//	networks/  network namespaces of sandboxes, mounted
type places struct{ dir string }

func (p places) database() string { return filepath.Join(p.dir, "cove.db") }
func (p places) images() string   { return filepath.Join(p.dir, "images") }
func (p places) node() string     { return filepath.Join(p.dir, "node") }
func (p places) gvisor() string   { return filepath.Join(p.dir, "gvisor") }
func (p places) fake() string     { return filepath.Join(p.dir, "fake") }
func (p places) steps() string    { return filepath.Join(p.dir, "steps") }
func (p places) key() string      { return filepath.Join(p.dir, "key") }

// make lets others pass through but not look: sentries run as nobody and reach
// their files below.
func (p places) make() error {
	err := os.MkdirAll(p.dir, 0o711)
	if err == nil {
		// Made by hand or by an older "make start" it may be open to look into.
		if st, serr := os.Stat(p.dir); serr == nil && st.Mode().Perm()&0o066 != 0 {
			err = os.Chmod(p.dir, st.Mode().Perm()&0o711)
		}
	}
	if err != nil {
		e := &sandbox.Error{Class: sandbox.Precondition, Err: err, Hint: "--data takes another directory"}
		if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
			e.Hint = "run it as root (sudo); sandboxes need it anyway"
		}
		return e
	}
	return nil
}

// announce says that a server runs here and where.
func (p places) announce(url string) error {
	for _, name := range []string{"url", "pid", "key"} { // of a server that was killed right here
		left, _ := filepath.Glob(filepath.Join(p.dir, "."+name+"-*"))
		for _, f := range left {
			_ = os.Remove(f)
		}
	}
	if err := durable.Write(filepath.Join(p.dir, "url"), []byte(url+"\n"), 0o644); err != nil {
		return err
	}
	return durable.Write(filepath.Join(p.dir, "pid"), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644)
}

// crashed says whether the last server here ended without a word.
func (p places) crashed() bool {
	pid, runs := p.server()
	return pid > 0 && !runs
}

// server is the process that serves this directory, or the one that did and
// ended without a word; 0 for none.
func (p places) server() (pid int, runs bool) {
	b, err := os.ReadFile(filepath.Join(p.dir, "pid"))
	if err != nil {
		return 0, false // it ended properly, or there was none
	}
	pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, false
	}
	return pid, agent.Alive(pid)
}

func (p places) retract() { _ = os.Remove(filepath.Join(p.dir, "pid")) }

func openDriver(ctx context.Context, c cli.ServeConfig, at places, log *slog.Logger) (runtime.Driver, error) {
	switch c.Runtime {
	case "fake":
		log.Warn("the fake runtime isolates nothing: code in a sandbox runs on this machine as this user")
		host := fake.NewHost(at.fake(), fake.Options{})
		return fakeDriver{host.Open(), host}, nil
	case "gvisor", "":
	default:
		return nil, sandbox.InvalidField("runtime", "%q; gvisor is the one there is", c.Runtime)
	}
	probes := doctor.System()
	runsc, err := doctor.FindBinary(probes, c.RunscPath, "runsc")
	if err != nil {
		return nil, (&sandbox.Error{Class: sandbox.Precondition, Err: err}).WithHint("'make build' makes it; --runsc or COVE_RUNSC names it")
	}
	guest, err := doctor.FindBinary(probes, c.GuestPath, "cove-guest")
	if err != nil {
		return nil, (&sandbox.Error{Class: sandbox.Precondition, Err: err}).WithHint("'make build' makes it; --guest or COVE_GUEST names it")
	}
	return gvisor.Open(ctx, gvisor.Config{Dir: at.gvisor(), RunscPath: runsc, GuestPath: guest, Logger: log})
}

// fakeDriver ends its kernels with the process: they live in it.
type fakeDriver struct {
	*fake.Driver
	host *fake.Host
}

func (f fakeDriver) Close() error { return f.host.Close() }

// firstKey leaves a usable key in the key file. A crash between making a key
// and writing it down leaves one nobody knows; unused, it is made again.
func firstKey(ctx context.Context, srv *server.Server, db store.Store, at places, log *slog.Logger) error {
	ctx = store.Installation(ctx)
	_, statErr := os.Stat(at.key())
	if errors.Is(statErr, fs.ErrNotExist) {
		keys, err := db.ListKeys(ctx)
		if err != nil {
			return err
		}
		switch {
		case len(keys) == 1 && keys[0].LastUsedAt.IsZero():
			if err := db.RevokeKey(ctx, keys[0].ID); err != nil {
				return err
			}
		case len(keys) > 0:
			log.Warn("no key file: this machine's cove needs COVE_KEY", "file", at.key())
		}
	}
	secret, created, err := srv.EnsureFirstKey(ctx)
	if err != nil || !created {
		return err
	}
	return durable.Write(at.key(), []byte(secret+"\n"), 0o600)
}

// followKey keeps the key file good: where the key in it got another secret, that
// is written there. Whoever can read the file is this machine's owner, and would
// be locked out by a rotation from anywhere otherwise.
func followKey(at places, log *slog.Logger) func(old []byte, secret string) {
	return func(old []byte, secret string) {
		b, err := os.ReadFile(at.key())
		if sum := sha256.Sum256(bytes.TrimSpace(b)); err != nil || !bytes.Equal(sum[:], old) {
			return // none, or another's
		}
		if err := durable.Write(at.key(), []byte(secret+"\n"), 0o600); err != nil {
			log.Error("the key file keeps a secret that ends with its grace", "file", at.key(), "err", err)
		}
	}
}

// reap removes every kernel of a data directory whose server does not run. The
// next start finds them gone and says so in the sandboxes' ends.
func reap(ctx context.Context, c cli.ServeConfig) ([]string, error) {
	at := places{c.Data}
	lock, err := os.OpenFile(filepath.Join(at.node(), "lock"), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // never started
	}
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, (&sandbox.Error{Class: sandbox.Precondition, Msg: "the server of " + c.Data + " is running"}).WithHint("'make stop' ends it first")
	}
	driver, err := openDriver(ctx, c, at, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	defer driver.Close()
	removed, err := driver.Sweep(ctx, nil)
	return removed, errors.Join(err, at.removeNetworks(), at.unmount(ctx))
}
