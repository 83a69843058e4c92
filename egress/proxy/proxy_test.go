package proxy_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/sandbox"
)

func set(t *testing.T, x *egresstest.Attacker, generation int64, n sandbox.Network) {
	t.Helper()
	p, err := policy.Compile(n)
	if err != nil {
		t.Fatal(err)
	}
	x.Box.Set(p, generation)
}

// talks says whether a connection to a banner server still echoes.
func talks(c net.Conn) bool {
	if _, err := io.WriteString(c, "x"); err != nil {
		return false
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

func connect(t *testing.T, x *egresstest.Attacker, address string) net.Conn {
	t.Helper()
	c, err := x.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	b := make([]byte, 1)
	for b[0] != '\n' {
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// A connection whose name cannot matter is decided by one answer of the policy,
// the one that holds; where names matter the address is looked at before the
// client has spoken, and the answer that holds is asked for once.
func TestThePolicyIsAskedOnce(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	for _, c := range []struct {
		network sandbox.Network
		want    int64
	}{
		{network(t, "public"), 1},
		{network(t, "rules", "allow 203.0.113.0/24"), 1},
		{network(t, "public", "deny 203.0.113.10"), 1}, // refused
		{network(t, "public", "deny evil.test"), 2},    // refused, for it shows no name
	} {
		set(t, x, 2, c.network)
		// On a slow machine a SYN is sent again, and is a connection of its own.
		least, got := int64(math.MaxInt64), ""
		for range 3 {
			w.Asked(egresstest.Good)
			got = x.Line(egresstest.Good + ":22")
			least = min(least, w.Asked(egresstest.Good))
		}
		if least > c.want {
			t.Errorf("%+v: asked %d times for %q, want %d", c.network, least, got, c.want)
		}
	}
}

func TestANewPolicyIsInForceWhenSetReturns(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	keeps, loses := connect(t, x, egresstest.Good+":22"), connect(t, x, egresstest.Evil+":22")
	if x.UDP(egresstest.Evil+":9999", "x") == "timeout" {
		t.Fatal("UDP does not pass")
	}
	u, err := x.Dial("udp", egresstest.Evil+":9999")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if !talks(u) {
		t.Fatal("UDP does not pass")
	}
	set(t, x, 7, network(t, "public", "deny 203.0.113.66"))
	if talks(loses) {
		t.Error("a connection that the new policy denies goes on")
	}
	if !talks(keeps) {
		t.Error("a connection that the new policy allows was cut")
	}
	u.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if talks(u) {
		t.Error("a flow of datagrams that the new policy denies goes on")
	}
	if got := x.Line(egresstest.Evil + ":22"); got != "refused" {
		t.Errorf("after Set: %q", got)
	}
	s := x.Box.Status(100)
	// The first datagram may have met the refusal of the one that was cut off,
	// and not have left.
	for until := time.Now().Add(20 * time.Second); s.Denied < 2 && time.Now().Before(until); s = x.Box.Status(100) {
		talks(u)
		u.SetDeadline(time.Now().Add(100 * time.Millisecond))
	}
	if s.Generation != 7 || len(s.Network.Rules) != 1 || s.Denied < 2 {
		t.Errorf("status %+v", s)
	}
	set(t, x, 8, network(t, "none"))
	if talks(keeps) {
		t.Error("a connection outlives mode none")
	}
	set(t, x, 9, network(t, "public"))
	if got := x.Line(egresstest.Evil + ":22"); !strings.HasPrefix(got, "hello") {
		t.Errorf("back to public: %q", got)
	}
}

// The flow log has what was tried, allowed or not, and how much passed.
func TestFlowsAreLogged(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test", "allow 203.0.113.20"))
	x.HTTPS(egresstest.Good+":443", "good.test", "good.test")
	x.HTTPS(egresstest.Evil+":443", "evil.test", "evil.test")
	x.HTTP(egresstest.Good+":80", "good.test")
	x.HTTP(egresstest.Good+":80", "evil.test")
	x.Ask("udp", "10.200.0.1", "evil.test", 1)
	x.UDP(egresstest.Evil+":9999", "x")
	var got []string
	for _, f := range x.Box.Status(100).Flows {
		got = append(got, fmt.Sprintf("%s %s %d %s %v %d %s %v", f.Name, f.Address, f.Port, f.Protocol, f.Allowed, f.Rule, f.Reason, f.Sent > 0))
	}
	want := `good.test 203.0.113.10 443 tcp true 0 rule true
evil.test 203.0.113.66 443 tcp false -1 mode false
good.test 203.0.113.10 80 tcp true 0 rule true
evil.test 203.0.113.10 80 tcp false -1 mode false
evil.test invalid IP 53 dns false -1 mode false
 203.0.113.66 9999 udp false -1 mode false`
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("flows:\n%s\nwant:\n%s", s, want)
	}
	if d := x.Box.Denied(); d != 4 {
		t.Errorf("%d denied", d)
	}
}

func TestLimits(t *testing.T) {
	w := egresstest.NewWorld(t)
	n := network(t, "public")
	n.Limits = sandbox.NetworkLimits{Connections: 3, BytesPerSecond: 1 << 20}
	x := egresstest.NewAttacker(t, w, n)
	var open []net.Conn
	for range 3 {
		open = append(open, connect(t, x, egresstest.Good+":22"))
	}
	if got := x.Line(egresstest.Good + ":22"); got != "refused" {
		t.Errorf("a fourth connection: %q", got)
	}
	open[0].Close()
	for got := ""; !strings.HasPrefix(got, "hello"); got = x.Line(egresstest.Good + ":22") {
		if t.Context().Err() != nil {
			t.Fatal("a connection that was closed is still counted")
		}
	}
	// A MiB there and back at a MiB a second, a quarter of it in the bucket:
	// what is over that cannot take less than it must.
	start := time.Now()
	go func() {
		open[1].Write(make([]byte, 1<<20))
	}()
	if _, err := io.ReadFull(open[1], make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 1200*time.Millisecond {
		t.Errorf("2 MiB passed in %v at 1 MiB/s", took)
	}
}

// A connection that the proxy speaks HTTP on counts once, though there are two.
func TestHTTPCountsOnce(t *testing.T) {
	w := egresstest.NewWorld(t)
	n := network(t, "rules", "allow good.test", "allow other.test")
	n.Limits.Connections = 3
	x := egresstest.NewAttacker(t, w, n)
	ask := func(c net.Conn, host string) string {
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", host)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err.Error()
		}
		b, _ := io.ReadAll(res.Body)
		return string(b)
	}
	var open []net.Conn
	for range 3 {
		c, err := x.Dial("tcp", egresstest.Good+":80")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if got := ask(c, "good.test"); got != "good.test at "+egresstest.Good {
			t.Errorf("connection %d: %q", len(open), got)
		}
		open = append(open, c)
	}
	if got := x.HTTP(egresstest.Good+":80", "good.test"); got != "refused" {
		t.Errorf("one more: %q", got)
	}
	// What is kept for the server before is in nobody's way.
	for _, c := range open {
		if got := ask(c, "other.test"); got != "other.test at "+egresstest.Other {
			t.Errorf("another server: %q", got)
		}
	}
	for _, c := range open {
		c.Close()
	}

	// At once it may be several, and those count.
	n.Limits.Connections = 1
	set(t, x, 2, n)
	ca := newAuthority(t, "abc")
	for _, a := range []string{egresstest.Good, egresstest.Other} {
		w.HTTPS(t, a+apiPort, api)
	}
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test", "other.test")})
	client := x.Client(t, egresstest.Good+apiPort, ca.PEM())
	r, in := io.Pipe()
	defer in.Close()
	var res *http.Response
	for deadline := time.Now().Add(time.Minute); res == nil; time.Sleep(5 * time.Millisecond) { // until those that were closed are gone
		req, err := http.NewRequest("POST", "https://good.test"+apiPort+"/stream", io.MultiReader(strings.NewReader("0\n"), r))
		if err != nil {
			t.Fatal(err)
		}
		if res, err = client.Do(req); err != nil && time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	defer res.Body.Close()
	second, err := http.NewRequest("GET", "https://good.test"+apiPort+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	second.Host = "other.test"
	denied, err := client.Do(second)
	if err != nil {
		t.Fatal(err)
	}
	defer denied.Body.Close()
	if b, _ := io.ReadAll(denied.Body); denied.StatusCode != 403 || !strings.HasPrefix(string(b), "cove: too many connections") {
		t.Errorf("%d %q", denied.StatusCode, b)
	}
	in.Close()
	if _, err := io.ReadAll(res.Body); err != nil {
		t.Error(err)
	}
}

// Without the process that serves it nothing leaves a namespace, and the next
// process takes it over.
func TestNothingLeavesWhileNobodyServes(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	c := connect(t, x, egresstest.Good+":22")
	if err := x.Box.Close(); err != nil {
		t.Fatal(err)
	}
	w.Hits()
	if talks(c) {
		t.Error("a connection outlives its proxy")
	}
	for _, got := range []string{x.Line(egresstest.Good + ":22"), x.UDP(egresstest.Good+":9999", "x"), x.Line("10.200.0.1:22"), x.Line("[" + egresstest.Good6 + "]:22")} {
		if got != "refused" && got != "timeout" && got != "reset" {
			t.Errorf("with no proxy: %q", got)
		}
	}
	if reached, asked := w.Hits(); len(reached)+len(asked) > 0 {
		t.Errorf("reached %q, asked %q", reached, asked)
	}
	x.Serve(t, network(t, "rules", "allow 203.0.113.10"), 2)
	if got := x.Line(egresstest.Good + ":22"); !strings.HasPrefix(got, "hello") {
		t.Errorf("served again: %q", got)
	}
	if got := x.Line(egresstest.Evil + ":22"); got != "refused" {
		t.Errorf("served again, not allowed: %q", got)
	}
}

// What is not TCP or UDP from the sandbox's own address goes nowhere.
func TestRawPackets(t *testing.T) {
	w := egresstest.NewWorld(t)
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	udp := append([]byte{0x30, 0x39, 0x27, 0x0f, 0, 9, 0, 0}, 'x') // to port 9999, no checksum
	echo := []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}
	for _, p := range []struct {
		source, dest string
		protocol     byte
		payload      []byte
	}{
		{"10.200.0.3", egresstest.Good, 17, udp},     // another's source
		{"127.0.0.1", egresstest.Good, 17, udp},      // the loopback's
		{"203.0.113.99", egresstest.Good, 17, udp},   // a public one
		{"10.200.0.2", egresstest.Good, 1, echo},     // ICMP
		{"10.200.0.2", "10.200.0.1", 1, echo},        // ICMP to the gateway
		{"10.200.0.2", egresstest.Good, 47, udp},     // GRE
		{"10.200.0.2", egresstest.Good, 4, udp},      // IP in IP
		{"10.200.0.2", egresstest.Good, 132, udp},    // SCTP
		{"10.200.0.2", egresstest.Private, 17, udp},  // denied
		{"10.200.0.2", egresstest.Metadata, 17, udp}, // denied
		{"10.200.0.2", "255.255.255.255", 17, udp},   // broadcast
		{"10.200.0.2", "10.200.0.3", 17, udp},        // broadcast of the link
	} {
		if err := x.Packet(p.source, p.dest, p.protocol, p.payload); err != nil {
			t.Fatal(err)
		}
	}
	// Packets keep their order, so that once this one has arrived the others
	// would have.
	if err := x.Packet("10.200.0.2", egresstest.Other, 17, udp); err != nil {
		t.Fatal(err)
	}
	var reached []string
	for deadline := time.Now().Add(10 * time.Second); len(reached) == 0 && time.Now().Before(deadline); {
		r, _ := w.Hits()
		reached = append(reached, r...)
		time.Sleep(5 * time.Millisecond)
	}
	if len(reached) != 1 || reached[0] != egresstest.Other+" udp" {
		t.Errorf("reached %q", reached)
	}
	if f := x.Box.Status(100).Flows; len(f) != 5 {
		t.Errorf("flows %+v", f)
	}
}

// A request that comes slowly, or after a silence in which the server might have
// spoken, is one all the same.
func TestALateRequestIsNotTakenForTheNameLookedUp(t *testing.T) {
	w := egresstest.NewWorld(t)
	w.Name("co.test", egresstest.Good)
	ca := newAuthority(t, "abc")
	const request = "GET / http/1.1\r\nHost: co.test\r\n\r\n"
	for _, c := range []struct {
		name    string
		network sandbox.Network
		i       *proxy.Interception
	}{
		{"allowed by name", network(t, "rules", "allow good.test"), nil},
		{"denied by name", network(t, "public", "deny co.test"), nil},
		{"recorded", network(t, "public"), &proxy.Interception{Authority: ca, All: true, Recording: note("recording")}},
		{"secrets", network(t, "public"), &proxy.Interception{Authority: ca, Names: names("co.test"), Secrets: note("secrets")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x := egresstest.NewAttacker(t, w, c.network)
			x.Box.Intercept(c.i)
			if got := x.Ask("tcp", "10.200.0.1", "good.test", dns.TypeA); got != "NOERROR "+egresstest.Good {
				t.Fatal(got)
			}
			if got := x.Raw(egresstest.Good+":8080", request); got != "reset" {
				t.Errorf("at once: %q", got)
			}
			slow, err := x.Dial("tcp", egresstest.Good+":8080")
			if err != nil {
				t.Fatal(err)
			}
			defer slow.Close()
			slow.SetDeadline(time.Now().Add(time.Minute)) // it is refused after ten seconds, with load later
			io.WriteString(slow, "GET")
			for _, text := range []string{request, "GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"} {
				s := connect(t, x, egresstest.Good+":22")
				io.WriteString(s, text)
				if b, err := io.ReadAll(s); err == nil || len(b) > 0 {
					t.Errorf("%q after a banner: %q %v", text, b, err)
				}
			}
			for _, text := range []string{"EHLO x\r\n", "SSH-2.0-x\r\n", "\x54\x00\x00\x01"} {
				s := connect(t, x, egresstest.Good+":22")
				io.WriteString(s, text)
				b := make([]byte, len(text))
				if _, err := io.ReadFull(s, b); err != nil || string(b) != text {
					t.Errorf("%q after a banner: %q %v", text, b, err)
				}
			}
			if b, err := io.ReadAll(slow); len(b) > 0 || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("slowly: %q %v", b, err)
			}
			malformed := 0
			for _, f := range x.Box.Status(100).Flows {
				if f.Reason == "http_malformed" && !f.Allowed {
					malformed++
				}
			}
			if d := x.Box.Denied(); malformed != 3 || d != 4 { // and one in good order
				t.Errorf("%d malformed of %d denied", malformed, d)
			}
		})
	}
}
