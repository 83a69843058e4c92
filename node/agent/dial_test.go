package agent

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// echoes counts the lines of each connection. The fake's machines have the
// loopback of this one.
func echoes(t *testing.T) (port int) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for n := 1; ; n++ {
					line, err := in.ReadString('\n')
					if err != nil {
						return
					}
					fmt.Fprintf(c, "%d %s", n, line)
				}
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// A connection from outside does not keep a sandbox awake, and bytes on it wake
// it, whoever put it to sleep.
func TestBytesFromOutsideWakeASandbox(t *testing.T) {
	w := newGuestWorld(t)
	w.open(nil)
	w.create("sb", pauses, func(s *sandbox.Spec) { s.IdleTimeout = 3 * time.Second }) // it is looked at within
	c, err := w.Dial(t.Context(), "sb", echoes(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	in := bufio.NewReader(c)
	asleep := func() {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); w.StandbyNow()["sb"] != sandbox.Hot; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the sandbox does not sleep under a silent connection")
			}
		}
	}
	ask := func(n int, line string) {
		t.Helper()
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := in.ReadString('\n'); err != nil || got != fmt.Sprintf("%d %s\n", n, line) {
			t.Fatalf("%q, %v", got, err)
		}
		if st := w.StandbyNow()["sb"]; st != sandbox.Awake {
			t.Fatalf("it answered and is %q", st)
		}
	}
	ask(1, "awake")
	if err := w.Pause(t.Context(), "sb", false); err != nil {
		t.Fatal(err)
	}
	ask(2, "paused")
	asleep()
	ask(3, "idle")
}
