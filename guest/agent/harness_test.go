package agent_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

// box is an agent on a loopback port that serves a directory, with a client.
type box struct {
	*guest.Client
	root  string
	addr  string
	agent *agent.Agent
}

func newBox(t *testing.T) *box {
	t.Helper()
	root := t.TempDir()
	b := serve(t, agent.HostSpace(root))
	b.root = root
	if err := b.Enter(t.Context(), guest.Container{WorkingDir: "/work", Env: []string{"COLOUR=green"}}); err != nil {
		t.Fatal(err)
	}
	return b
}

// serve starts an agent; both ends are gone when the test is over.
func serve(t *testing.T, sp agent.Space) *box {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := agent.New(agent.Config{Secret: secret, Space: sp})
	served := make(chan error, 1)
	go func() { served <- a.Serve(context.Background(), l) }()
	c := guest.NewClient(dialer(l.Addr().String()), secret)
	t.Cleanup(func() {
		c.Close()
		a.Close()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return &box{Client: c, addr: l.Addr().String(), agent: a}
}

func dialer(addr string) guest.Dialer {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp4", addr)
	}
}

// result is a process seen from its first event to its last.
type result struct {
	started        sandbox.ProcessStarted
	stdout, stderr bytes.Buffer
	lost           []sandbox.Lost
	end            sandbox.ProcessEnd
	next           int64 // offset behind the last byte
}

// take adds an event and fails if it is out of order.
func (r *result) take(t *testing.T, ev sandbox.ProcessEvent) {
	t.Helper()
	switch {
	case ev.Started != nil:
		r.started = *ev.Started
	case ev.Output != nil:
		if ev.Output.Offset != r.next {
			t.Fatalf("output at %d, want %d", ev.Output.Offset, r.next)
		}
		r.next += int64(len(ev.Output.Data))
		if ev.Output.Stream == sandbox.Stderr {
			r.stderr.Write(ev.Output.Data)
		} else {
			r.stdout.Write(ev.Output.Data)
		}
	case ev.Lost != nil:
		if ev.Lost.From != r.next || ev.Lost.To <= ev.Lost.From {
			t.Fatalf("lost %+v at %d", *ev.Lost, r.next)
		}
		r.next = ev.Lost.To
		r.lost = append(r.lost, *ev.Lost)
	case ev.End != nil:
		r.end = *ev.End
	default:
		t.Fatal("empty event")
	}
}

func (b *box) start(t *testing.T, spec sandbox.ProcessSpec, offset int64) (*result, error) {
	t.Helper()
	r := &result{next: offset}
	err := b.Start(t.Context(), spec, offset, func(ev sandbox.ProcessEvent) error { r.take(t, ev); return nil })
	return r, err
}

// sh runs a command line to its end.
func (b *box) sh(t *testing.T, id, line string, with ...func(*sandbox.ProcessSpec)) *result {
	t.Helper()
	spec := sandbox.ProcessSpec{ExecID: id, Command: line}
	for _, f := range with {
		f(&spec)
	}
	r, err := b.start(t, spec, 0)
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return r
}

// background starts a process and returns once it has started, with what it
// becomes.
func (b *box) background(t *testing.T, spec sandbox.ProcessSpec) (sandbox.ProcessStarted, <-chan *result) {
	t.Helper()
	started := make(chan sandbox.ProcessStarted, 1)
	done := make(chan *result, 1)
	r := &result{}
	go func() {
		err := b.Start(context.Background(), spec, 0, func(ev sandbox.ProcessEvent) error {
			r.take(t, ev)
			if ev.Started != nil {
				started <- *ev.Started
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", spec.ExecID, err)
			close(started)
		}
		done <- r
	}()
	return <-started, done
}

// eventually waits for what another process does; the bound only keeps a
// failing test from hanging.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// alive says whether a process exists and is not a zombie.
func alive(pid string) bool {
	b, err := os.ReadFile("/proc/" + strings.TrimSpace(pid) + "/stat")
	if err != nil {
		return false
	}
	s := string(b[bytes.LastIndexByte(b, ')')+1:])
	return !strings.HasPrefix(s, " Z") && !strings.HasPrefix(s, " X")
}
