package proxy_test

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/sandbox"
)

// A connect inside ends as the one outside did.
func TestConnectsAreTruthful(t *testing.T) {
	w := egresstest.NewWorld(t)
	const nobody, nobody6, down, down6 = "203.0.113.250", "2001:db8:9::1", "203.0.113.251", "2001:db8:9::2"
	w.Unreachable(t, down)
	w.Unreachable(t, down6)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	for _, c := range []struct {
		what, address string
		want          error
	}{
		{"a server", egresstest.Good + ":22", nil},
		{"a server, IPv6", "[" + egresstest.Good6 + "]:22", nil},
		{"a port where nothing listens", egresstest.Good + ":81", syscall.ECONNREFUSED},
		{"the same, IPv6", "[" + egresstest.Good6 + "]:81", syscall.ECONNREFUSED},
		{"no such network", nobody + ":80", syscall.ENETUNREACH},
		{"no such network, IPv6", "[" + nobody6 + "]:80", syscall.ENETUNREACH},
		{"no such host", down + ":80", syscall.EHOSTUNREACH},
		{"no such host, IPv6", "[" + down6 + "]:80", syscall.EHOSTUNREACH},
		{"what the policy denies", egresstest.Private + ":80", syscall.ECONNREFUSED},
	} {
		conn, err := x.Dial("tcp", c.address)
		if conn != nil {
			conn.Close()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
	}
	// The log says of which of them it was allowed, and that it was not there.
	for _, f := range x.Box.Status(100).Flows {
		if f.Port == 81 && (!f.Allowed || f.Reason != "unreachable") || f.Address.String() == egresstest.Private && f.Allowed {
			t.Errorf("flow %+v", f)
		}
	}
}

// A connection waits at the door while ours is made, and then it is one.
func TestAConnectWaitsForOurs(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	l, err := w.Listen(egresstest.Good + ":7000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 20 {
		c, err := x.Dial("tcp", egresstest.Good+":7000")
		if err != nil {
			t.Fatal(err)
		}
		// It is in the server's queue already: connect did not return before.
		l.(*net.TCPListener).SetDeadline(time.Now().Add(10 * time.Second))
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		c.Close()
	}
}

// More connections than a sandbox may have are refused.
func TestRefusedBeyondTheLimit(t *testing.T) {
	w := egresstest.NewWorld(t)
	n := network(t, "public")
	n.Limits = sandbox.NetworkLimits{Connections: 1}
	x := egresstest.NewAttacker(t, w, n)
	connect(t, x, egresstest.Good+":22")
	if _, err := x.Dial("tcp", egresstest.Good+":22"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a second connection: %v", err)
	}
}

// What begins a connection and goes round the door leads nowhere: fragments,
// other sources.
func TestNothingGoesRoundTheDoor(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	syn := make([]byte, 20)
	syn[0], syn[2], syn[3], syn[12], syn[13] = 0x30, 0, 22, 0x50, 0x02
	w.Hits()
	for _, source := range []string{"10.200.0.9", "203.0.113.99"} {
		if err := x.Packet(source, egresstest.Good, 6, syn); err != nil {
			t.Fatal(err)
		}
	}
	if got := x.Line(egresstest.Good + ":22"); got != "hello from "+egresstest.Good+"\n" {
		t.Errorf("afterwards: %q", got)
	}
	if s := x.Box.Status(100); len(s.Flows) != 1 {
		t.Errorf("flows: %+v", s.Flows)
	}
}
