package runtimetest

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// counter answers each line of its one client with its number, and notes how the
// client left.
const counter = `
import socket
l = socket.create_server(("127.0.0.1", 0))
with open("port.new", "w") as f: f.write(str(l.getsockname()[1]))
import os; os.rename("port.new", "port")
c, _ = l.accept()
n, end = 0, "ended"
try:
    for line in c.makefile("rb"):
        n += 1
        c.sendall(b"%d %s" % (n, line))
except ConnectionResetError:
    end = "reset"
with open("left", "w") as f: f.write(end)
`

// A connection from outside stands still with its kernel and goes on with it, over
// a checkpoint and a pause. In a child it is nobody's, and reset.
func (s *suite) testConnectionsOverACheckpoint(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	started, _ := s.background(t, k, sandbox.ProcessSpec{ExecID: "counter", Args: []string{"python3", "-c", counter}})
	waitFor(t, "the server", started)
	port, err := strconv.Atoi(strings.TrimSpace(s.sh(t, k, "while ! test -e port; do sleep 0.05; done; cat port")))
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Guest().Connect(deadline(t), port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	in := bufio.NewReader(c)
	n := 0
	answer := func(line string) {
		t.Helper()
		n++
		if got, err := in.ReadString('\n'); err != nil || got != fmt.Sprintf("%d %s\n", n, line) {
			t.Fatalf("%q, %v; want line %d, %q", got, err, n, line)
		}
	}
	say := func(line string) {
		t.Helper()
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	say("first")
	answer("first")
	dir, cp := s.checkpoint(t, k)
	say("after a checkpoint")
	answer("after a checkpoint")
	p := k.(runtime.Pauser)
	if err := p.Pause(deadline(t)); err != nil {
		t.Fatal(err)
	}
	say("paused")
	s.checkpoint(t, k) // what is on its way to a paused kernel is not lost to it
	if err := p.Resume(deadline(t)); err != nil {
		t.Fatal(err)
	}
	answer("paused")
	if d.Capabilities().Isolated { // others do not save processes
		child := s.restore(t, d, dir, cp)
		if got := s.sh(t, child, "while ! test -e left; do sleep 0.05; done; cat left"); strings.TrimSpace(got) != "reset" {
			t.Errorf("the server in the child says that its client %s", got)
		}
	}
	say("last")
	answer("last")
	s.sh(t, k, "! test -e left")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got := s.sh(t, k, "while ! test -e left; do sleep 0.05; done; cat left"); strings.TrimSpace(got) != "ended" {
		t.Errorf("the server says that its client %s", got)
	}
}
