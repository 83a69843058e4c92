package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// ownAddress is one of the machine's that is not the loopback.
func ownAddress(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	t.Skip("this machine has no address but the loopback")
	return ""
}

// Real binaries: a policy is enforced, also while the server is dead (nothing
// leaves) and after it came back.
func TestNetworkOutlivesTheServer(t *testing.T) {
	w := world.New(t, world.Options{})
	ip := ownAddress(t)
	site := func() (string, *http.Server) {
		l, err := net.Listen("tcp", ip+":0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "reached") })}
		go s.Serve(l)
		t.Cleanup(func() { s.Close() })
		return l.Addr().String(), s
	}
	open, _ := site()
	shut, _ := site()
	_, port, _ := net.SplitHostPort(open)
	var n uint16
	fmt.Sscan(port, &n)
	spec := world.Small()
	spec.Network = sandbox.Network{Mode: sandbox.NetworkRules, Rules: []sandbox.NetworkRule{{Action: sandbox.NetworkAllow, CIDR: ip, Ports: []sandbox.PortRange{{From: n}}}}}
	b := w.Create(t, spec)
	get := func(addr string) string {
		return strings.TrimSpace(b.Must(t, fmt.Sprintf(`python3 -c 'import urllib.request
try: print(urllib.request.urlopen("http://%s/", timeout=10).read().decode())
except OSError as e: print("failed")'`, addr)))
	}
	both := func(when string) {
		t.Helper()
		if a, b := get(open), get(shut); a != "reached" || b != "failed" {
			t.Errorf("%s: %q and %q", when, a, b)
		}
	}
	both("at first")
	if r := b.Root(t, fmt.Sprintf("python3 -c 'import urllib.request; urllib.request.urlopen(\"http://%s/\")'", shut)); r.End.EgressDenied != 1 {
		t.Errorf("an exec that was denied something: %+v", r.End)
	}
	// A process inside tries all the time and notes what it gets.
	b.Must(t, fmt.Sprintf(`nohup python3 -c '
import socket, time
while True:
    began = time.time()
    try: s = socket.create_connection(("%s", %s), timeout=1); s.sendall(b"GET / HTTP/1.0\r\n\r\n"); got = s.recv(100); s.close()
    except OSError: got = b""
    open("/tmp/tries", "a").write("%%.3f %%.3f %%s\n" %% (began, time.time(), "reached" if got else "failed"))
    time.sleep(0.05)
' >/dev/null 2>&1 &`, ip, port))
	world.Eventually(t, time.Minute, "it is at it", func() bool { return strings.Count(b.Must(t, "cat /tmp/tries || true"), "reached") > 5 })
	w.Kill(t)
	dead := time.Now()
	time.Sleep(2 * time.Second) // nobody serves
	back := time.Now()
	w.Start(t)
	both("after kill -9 and a start")
	var during, failed int
	for line := range strings.Lines(b.Must(t, "cat /tmp/tries")) {
		var began, ended float64
		var what string
		fmt.Sscan(line, &began, &ended, &what)
		died := float64(dead.UnixMilli())/1000 + 0.2
		if ended < died || ended > float64(back.UnixMilli())/1000 {
			continue
		}
		if what == "failed" {
			during, failed = during+1, failed+1
		} else if began > died { // one from before may have been noted late
			during++
		}
	}
	if during == 0 || during != failed {
		t.Errorf("of %d tries while no server ran %d failed", during, failed)
	}
	r, err := w.Client().Sandboxes.SetNetwork(t.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: b.ID, Network: &covev1.Network{Mode: "none"}}))
	if err != nil || r.Msg.Generation != 2 {
		t.Fatalf("%v, %v", r, err)
	}
	if got := get(open); got != "failed" {
		t.Errorf("after none: %q", got)
	}
}

// Inside, a connect ends as it does outside: to what is denied and to what is not
// there it fails, at once.
func TestConnectsAreTruthful(t *testing.T) {
	w := world.New(t, world.Options{})
	ip := ownAddress(t)
	l, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dead, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	port := func(l net.Listener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }
	spec := world.Small()
	spec.Network = sandbox.Network{Mode: sandbox.NetworkRules, Rules: []sandbox.NetworkRule{
		{Action: sandbox.NetworkAllow, CIDR: ip, Ports: []sandbox.PortRange{{From: port(l)}}},
		{Action: sandbox.NetworkAllow, CIDR: ip, Protocol: sandbox.TCP, Ports: []sandbox.PortRange{{From: port(dead)}}}}}
	b := w.Create(t, spec)
	try := func(addr string, port uint16) string {
		return strings.TrimSpace(b.Must(t, fmt.Sprintf(`python3 -c 'import socket
try: socket.create_connection(("%s", %d), timeout=60); print("connected")
except OSError as e: print(type(e).__name__)'`, addr, port)))
	}
	denied := func(when string) {
		t.Helper()
		for _, to := range []string{"203.0.113.1", "10.1.2.3", "169.254.169.254"} {
			if got := try(to, 22); got != "ConnectionRefusedError" {
				t.Errorf("%s: to %s, which is denied: %s", when, to, got)
			}
		}
	}
	if got := try(ip, port(l)); got != "connected" {
		t.Errorf("to a server: %s", got)
	}
	if got := try(ip, port(dead)); got != "ConnectionRefusedError" {
		t.Errorf("to a port where nothing listens: %s", got)
	}
	denied("by address")
	if _, err := w.Client().Sandboxes.SetNetwork(t.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: b.ID, Network: &covev1.Network{Mode: "rules",
		Rules: []*covev1.NetworkRule{{Action: "allow", Domain: "pypi.org", Ports: []*covev1.PortRange{{From: 443}}}}}})); err != nil {
		t.Fatal(err)
	}
	denied("by domain")
}
