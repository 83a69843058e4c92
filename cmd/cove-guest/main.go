// Command cove-guest is what runs inside a kernel: "agent" as PID 1 of the
// root container, "init" as PID 1 of the user's container, and "bulk JSON" for
// one large transfer with donated descriptors.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/guest/wire"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		json.NewEncoder(os.Stderr).Encode(wire.FlattenError(err))
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "agent":
		return runAgent()
	case len(args) == 1 && args[0] == "true":
		return nil // what a kernel rehearses with
	case len(args) == 1 && args[0] == "init":
		return runInit()
	case len(args) == 2 && args[0] == "bulk":
		var op guest.BulkOp
		if err := json.Unmarshal([]byte(args[1]), &op); err != nil {
			return fmt.Errorf("bulk: %w", err)
		}
		return agent.RunBulk(agent.NewContainerSpace(), op, os.Stdin, os.Stdout)
	}
	return errors.New("usage: cove-guest agent | init | bulk JSON")
}

// runAgent serves the guest protocol on a loopback port. The secret and the
// port come by environment: unlike arguments it can be taken back.
func runAgent() error {
	// The agent waits for most of its life. Two threads of Go code are plenty,
	// and a small heap that is collected late rather than often costs a
	// megabyte at most; 48 MiB is far above anything but large inputs.
	runtime.GOMAXPROCS(2)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(48 << 20)
	// Between fork and execve a child shares this memory and is visible to
	// the user's container: not dumpable, it cannot be traced there.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_DUMPABLE: %w", err)
	}
	secret, err := hex.DecodeString(os.Getenv("COVE_GUEST_SECRET"))
	if err != nil || len(secret) < 16 {
		return errors.New("COVE_GUEST_SECRET must be at least 16 bytes in hex")
	}
	port := os.Getenv("COVE_GUEST_PORT")
	os.Clearenv()
	// The other end is the sentry's: it needs no keepalive, which is four calls a connection.
	l, err := (&net.ListenConfig{KeepAlive: -1}).Listen(context.Background(), "tcp4", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	return agent.New(agent.Config{Secret: secret, Space: agent.NewKernelSpace(), Frugal: true}).Serve(context.Background(), l)
}

// runInit is PID 1 of the user's container: it adopts and reaps what loses its
// parent, and otherwise sleeps.
func runInit() error {
	runtime.GOMAXPROCS(2)
	debug.SetGCPercent(-1)
	child := make(chan os.Signal, 1)
	signal.Notify(child, unix.SIGCHLD)
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGPIPE, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	for {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if err == unix.EINTR {
				continue
			}
			if pid <= 0 {
				break
			}
		}
		<-child
	}
}
