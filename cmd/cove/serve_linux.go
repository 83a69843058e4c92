package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/gateway/sshd"
	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/e2b"
	"github.com/cove-sandbox/cove/server/native"
	"github.com/cove-sandbox/cove/store/sqlite"
)

// wireServer gives the command line what needs this machine.
func wireServer(d *cli.Deps) {
	version := d.Version
	d.Serve = func(ctx context.Context, c cli.ServeConfig) error { return serve(ctx, c, version) }
	d.Bootstrap = bootstrap
	d.Reap = reap
}

// drainFor is how long calls under way may take after the first signal. Longer
// ones are streams of running processes: their readers come back by offset.
const drainFor = 10 * time.Second

// flushFor is how long connections may take to become idle after that.
const flushFor = time.Second

// serve runs the whole server: it opens what it is made of in order, serves
// until a signal, and closes in reverse. Sandboxes live on.
func serve(ctx context.Context, c cli.ServeConfig, version string) (err error) {
	log, err := newLogger(c)
	if err != nil {
		return err
	}
	// A second signal ends the process at once: after the first, stop hands
	// signals back to the kernel's default.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()

	at := places{c.Data}
	if err := at.make(); err != nil {
		return err
	}
	// First, because it is what fails when a server runs already. Callers that
	// come before we are ready wait in the queue instead of being refused.
	ln, err := listen(ctx, c.Listen, at)
	if err != nil {
		return err
	}
	defer ln.Close()

	secure, certHost, err := publicTLS(c, at, log)
	if err != nil {
		return err
	}

	db, err := sqlite.Open(ctx, at.database())
	if err != nil {
		return err
	}
	defer closing(&err, "store", db.Close)

	ca, err := sandboxCA(c)
	if err != nil {
		return err
	}
	trusted, err := roots(ca, "")
	if err != nil {
		return err
	}
	library, err := image.Open(at.images(), image.Options{Log: log, Registries: c.RegistryAllow, Roots: trusted})
	if err != nil {
		return err
	}
	defer closing(&err, "images", library.Close)

	if c.Runtime == "gvisor" {
		raiseCeilings(log)
	}
	driver, err := openDriver(ctx, c, at, log)
	if err != nil {
		return explain(ctx, c, log, err)
	}
	defer closing(&err, "runtime", driver.Close)

	state, blobs, err := openState(c, at)
	if err != nil {
		return err
	}
	defer closing(&err, "state", blobs.Close)
	if state.Plain == at.plainInMemory() {
		defer os.RemoveAll(state.Plain)
	}

	recordings, err := openRecordings(c, at, log)
	if err != nil {
		return err
	}
	defer closing(&err, "recordings", recordings.Close) // after networks: what they cut is recorded so

	networks, err := openNetworks(c, ca, at, driver, log)
	if err != nil {
		return err
	}
	if networks != nil {
		defer closing(&err, "networks", networks.Close)
	}

	started := time.Now()
	n, err := agent.Open(ctx, agent.Config{Dir: at.node(), Name: nodeName(c), Classes: classes(driver), Images: library, Logger: log,
		State: state, VolumeDir: at.volumes(), Networks: networks, Recordings: recordings, Authorities: ca})
	if err != nil {
		return explain(ctx, c, log, err)
	}
	defer closing(&err, "node", n.Close)

	gate, err := openGate(c, at, ln, secure != nil)
	if err != nil {
		return err
	}
	sealing, err := secretKeys(c, at)
	if err != nil {
		return err
	}
	defaults := sandbox.StandardDefaults()
	defaults.Network = sandbox.NetworkMode(c.Network)
	defaults.Timeout = c.DefaultTimeout
	if err := sandbox.ValidateTimeout("default-timeout", c.DefaultTimeout, 0); err != nil {
		return err
	}
	shipTo, err := inward.Parse("ship-allow", c.ShipAllow)
	if err != nil {
		return err
	}
	conf := server.Config{Store: db, Node: n, Logger: log, Version: version, Defaults: defaults,
		Ports: gate, SecretKeys: sealing, KeyRotated: followKey(at, log), QueueWait: c.QueueWait, AuditRetention: c.AuditRetention, StepDir: at.steps(), MaxStepBytes: c.MaxStepBytes, RunRetention: cmp.Or(c.RunRetention, -1),
		ShipDir: c.ShipDir, ShipTo: shipTo, ShipCA: trusted}
	signer, err := openSSH(c, at)
	if err != nil {
		return err
	}
	if signer != nil {
		defer signer.ln.Close()
		conf.SSH = signer
	}
	srv, err := server.New(conf)
	if err != nil {
		return err
	}
	if err := srv.Reconcile(ctx); err != nil {
		return err
	}
	if err := firstKey(ctx, srv, db, at, log); err != nil {
		return err
	}

	// Background work ends before what it stands on is closed.
	work, endWork := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer endWork()
	wg.Go(func() { _ = srv.Run(work) })
	if !c.NoBase {
		wg.Go(func() { ensureBase(work, c, db, library, log) })
	}

	ports := gateway.New(gateway.Config{Backend: srv.Reach(), Tokens: gate.tokens, Domain: gate.domain, Logger: log})
	defer ports.Close()
	if signer != nil {
		shell := sshd.New(sshd.Config{CA: signer.LoginCA, Backend: sshBackend{srv.Reach(), srv}, SFTP: sftpProgram(driver), Logger: log})
		defer shell.Close()
		wg.Go(func() {
			if err := shell.Serve(signer.ln); err != nil {
				log.Error("the SSH server ended", "err", err)
			}
		})
	}
	visit := func(w http.ResponseWriter, r *http.Request, id string, port int, key string) {
		ports.Serve(w, r, gateway.Target{Sandbox: id, Port: port}, key)
	}
	speaks := e2b.Wrap(e2b.Config{Server: srv, Key: gate.secret, Domain: gate.domain.Host(), Port: visit, Logger: log}, ports.Wrap(native.Handler(srv, log)))
	web := native.HTTPServer(speaks)
	web.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	url := localURL(ln.Addr())
	if secure != nil {
		web.TLSConfig = secure
		url = secureURL(url, certHost)
	}
	// Before the first answer: whoever has one finds the server's pid and url.
	if err := at.announce(url); err != nil {
		return err
	}
	defer at.retract()
	served := make(chan error, 1)
	if secure != nil {
		wg.Go(func() { served <- web.ServeTLS(ln, "", "") })
	} else {
		wg.Go(func() { served <- web.Serve(ln) })
	}
	live, _ := n.Live(ctx)
	log.Info("serving", "url", url, "data", c.Data, "runtime", driver.Name(), "sandboxes", len(live), "recovery", time.Since(started).Round(time.Millisecond))

	select {
	case err := <-served:
		return fmt.Errorf("the HTTP server ended: %w", err)
	case <-ctx.Done():
	}
	stop()
	log.Info("stopping: calls under way may finish, sandboxes live on; a second signal ends this at once", "within", drainFor)
	drainCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainFor)
	defer cancel()
	if left := srv.Drain(drainCtx); left > 0 {
		log.Warn("calls did not return", "count", left)
	}
	// What was answered last must still reach its caller: closing a connection
	// with unread bytes on it resets it, and takes the answer along.
	flushCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushFor)
	defer cancel()
	if err := web.Shutdown(flushCtx); err != nil {
		if err := web.Close(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			log.Warn("closing connections", "err", err)
		}
	}
	return nil
}

// reuseClass is the class of kernels that serve the sandboxes of a trust group one
// after another. Nothing of it is kept warm before somebody asks for one.
const reuseClass = "reuse"

func classes(d runtime.Driver) []agent.Class {
	out := []agent.Class{{Driver: d}}
	if d.Capabilities().Reuse {
		out = append(out, agent.Class{Class: runtime.Class{Name: reuseClass}, Driver: d, Reuse: true, Pool: agent.PoolSettings{Min: -1, Blank: -1}})
	}
	return out
}

// closing keeps the first error: what fails after it is mostly its consequence.
func closing(err *error, what string, f func() error) {
	if cerr := f(); cerr != nil && *err == nil {
		*err = fmt.Errorf("closing the %s: %w", what, cerr)
	}
}

// listenPatience is how long the socket of a server that was killed may outlive
// it: a child that it was forking just then holds it until it executes.
const listenPatience = 10 * time.Second

func listen(ctx context.Context, addr string, at places) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	for until := time.Now().Add(listenPatience); errors.Is(err, syscall.EADDRINUSE) && at.crashed() && time.Now().Before(until) && ctx.Err() == nil; {
		time.Sleep(5 * time.Millisecond)
		ln, err = net.Listen("tcp", addr)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, (&sandbox.Error{Class: sandbox.Precondition, Msg: addr + " is in use", Err: nil}).
			WithHint("'cove health' says whether a Cove server runs there; --listen takes another address")
	}
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Invalid, Field: "listen", Err: err, Hint: "like 127.0.0.1:7777"}
	}
	return ln, nil
}

// localURL is how a client on this machine reaches the address.
func localURL(a net.Addr) string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return "http://" + a.String()
	}
	host := tcp.IP.String()
	if tcp.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, fmt.Sprint(tcp.Port))
}

// secureURL is a URL under TLS, by the name that the certificate has.
func secureURL(plain, host string) string {
	at := strings.TrimPrefix(plain, "http://")
	if _, port, err := net.SplitHostPort(at); err == nil && host != "" {
		at = net.JoinHostPort(host, port)
	}
	return "https://" + at
}

func nodeName(c cli.ServeConfig) string {
	if c.Node != "" {
		return c.Node
	}
	if h, err := os.Hostname(); err == nil {
		return h
	}
	return "local"
}

func newLogger(c cli.ServeConfig) (*slog.Logger, error) {
	var level slog.Level
	if c.LogLevel != "" {
		if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
			return nil, sandbox.InvalidField("log-level", "%q; debug, info, warn or error", c.LogLevel)
		}
	}
	opts := &slog.HandlerOptions{Level: level}
	if c.LogJSON {
		return slog.New(slog.NewJSONHandler(os.Stderr, opts)), nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, opts)), nil
}

// explain asks the doctor what a failed start is a consequence of.
func explain(ctx context.Context, c cli.ServeConfig, log *slog.Logger, err error) error {
	if c.Runtime != "gvisor" || ctx.Err() != nil {
		return err
	}
	bad := doctor.Preflight(ctx, doctor.System(), doctor.Config{Data: c.Data, Runsc: c.RunscPath, Guest: c.GuestPath})
	if len(bad) == 0 {
		return err
	}
	for _, r := range bad[1:] {
		log.Error("this machine: "+r.Name, "problem", r.Detail, "fix", r.Fix)
	}
	return &sandbox.Error{Class: sandbox.Precondition, Msg: bad[0].Name + ": " + bad[0].Detail, Hint: bad[0].Fix + " ('cove doctor' checks everything)", Err: err}
}
