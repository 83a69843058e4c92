package policy_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// rules reads "allow *.a.org tcp 80,443" and "deny 10.0.0.0/8".
func rules(t interface{ Fatalf(string, ...any) }, lines ...string) (out []sandbox.NetworkRule) {
	for _, l := range lines {
		r, err := policy.ParseRule(l)
		if err != nil {
			t.Fatalf("%q: %v", l, err)
		}
		out = append(out, r)
	}
	return out
}

func TestDecide(t *testing.T) {
	host := func(a netip.Addr) bool { return a == netip.MustParseAddr("198.51.100.7") }
	const pub, pub6 = "203.0.113.5", "2001:db8::5"
	tests := []struct {
		name  string
		mode  sandbox.NetworkMode
		rules []string
		flow  string // name|- address port protocol
		want  string // allow|deny rule reason
	}{
		{"public reaches the internet", "public", nil, "- " + pub + " 443 tcp", "allow -1 mode"},
		{"public reaches IPv6", "public", nil, "- " + pub6 + " 443 tcp", "allow -1 mode"},
		{"public speaks UDP", "public", nil, "- " + pub + " 123 udp", "allow -1 mode"},
		{"rules deny the rest", "rules", nil, "a.org " + pub + " 443 tcp", "deny -1 mode"},
		{"none denies", "none", nil, "- " + pub + " 443 tcp", "deny -1 mode"},

		{"private", "public", nil, "- 10.1.2.3 80 tcp", "deny -1 builtin_private"},
		{"private 172", "public", nil, "- 172.31.0.1 80 tcp", "deny -1 builtin_private"},
		{"private 192", "public", nil, "- 192.168.0.1 80 tcp", "deny -1 builtin_private"},
		{"cgnat", "public", nil, "- 100.64.0.1 80 tcp", "deny -1 builtin_cgnat"},
		{"link local", "public", nil, "- 169.254.1.1 80 tcp", "deny -1 builtin_link_local"},
		{"metadata", "public", nil, "- 169.254.169.254 80 tcp", "deny -1 builtin_metadata"},
		{"metadata IPv6", "public", nil, "- fd00:ec2::254 80 tcp", "deny -1 builtin_metadata"},
		{"loopback", "public", nil, "- 127.8.8.8 80 tcp", "deny -1 builtin_loopback"},
		{"loopback IPv6", "public", nil, "- ::1 80 tcp", "deny -1 builtin_loopback"},
		{"unspecified", "public", nil, "- 0.0.0.0 80 tcp", "deny -1 builtin_this_network"},
		{"unspecified IPv6", "public", nil, "- :: 80 tcp", "deny -1 builtin_ipv4_compatible"},
		{"multicast", "public", nil, "- 224.0.0.251 5353 udp", "deny -1 builtin_multicast"},
		{"multicast IPv6", "public", nil, "- ff02::fb 5353 udp", "deny -1 builtin_multicast"},
		{"broadcast", "public", nil, "- 255.255.255.255 67 udp", "deny -1 builtin_reserved"},
		{"mapped private", "public", nil, "- ::ffff:10.0.0.1 80 tcp", "deny -1 builtin_private"},
		{"mapped public", "public", nil, "- ::ffff:203.0.113.5 80 tcp", "allow -1 mode"},
		{"nat64", "public", nil, "- 64:ff9b::a00:1 80 tcp", "deny -1 builtin_nat64"},
		{"6to4", "public", nil, "- 2002:a00:1:: 80 tcp", "deny -1 builtin_6to4"},
		{"teredo", "public", nil, "- 2001::1 80 tcp", "deny -1 builtin_teredo"},
		{"ula", "public", nil, "- fd12::1 80 tcp", "deny -1 builtin_private"},
		{"link local IPv6", "public", nil, "- fe80::1 80 tcp", "deny -1 builtin_link_local"},
		{"the host's own", "public", nil, "- 198.51.100.7 22 tcp", "deny -1 builtin_host"},
		{"the host's own under an allowed range", "rules", []string{"allow 198.51.100.0/24"}, "- 198.51.100.7 22 tcp", "deny -1 builtin_host"},
		{"the host's own by its address", "rules", []string{"allow 198.51.100.7"}, "- 198.51.100.7 22 tcp", "allow 0 rule"},
		{"everything does not open private", "rules", []string{"allow 0.0.0.0/0"}, "- 10.0.0.1 80 tcp", "deny -1 builtin_private"},
		{"everything opens public", "rules", []string{"allow 0.0.0.0/0"}, "- " + pub + " 80 tcp", "allow 0 rule"},
		{"a private range opens itself", "public", []string{"allow 10.1.0.0/16"}, "- 10.1.2.3 80 tcp", "allow 0 rule"},
		{"and no other", "public", []string{"allow 10.1.0.0/16"}, "- 10.2.2.3 80 tcp", "deny -1 builtin_private"},
		{"link-local does not open metadata", "public", []string{"allow 169.254.0.0/16"}, "- 169.254.169.254 80 tcp", "deny -1 builtin_metadata"},
		{"metadata by its address", "public", []string{"allow 169.254.169.254"}, "- 169.254.169.254 80 tcp", "allow 0 rule"},
		{"a port opens nothing built in", "public", []string{"allow * tcp 80"}, "- 10.0.0.1 80 tcp", "deny -1 builtin_private"},

		{"a domain", "rules", []string{"allow pypi.org"}, "pypi.org " + pub + " 443 tcp", "allow 0 rule"},
		{"not its children", "rules", []string{"allow pypi.org"}, "a.pypi.org " + pub + " 443 tcp", "deny -1 mode"},
		{"not what ends like it", "rules", []string{"allow pypi.org"}, "xpypi.org " + pub + " 443 tcp", "deny -1 mode"},
		{"a wildcard", "rules", []string{"allow *.pypi.org"}, "a.b.pypi.org " + pub + " 443 tcp", "allow 0 rule"},
		{"not its apex", "rules", []string{"allow *.pypi.org"}, "pypi.org " + pub + " 443 tcp", "deny -1 mode"},
		{"not what ends like a wildcard", "rules", []string{"allow *.pypi.org"}, "xpypi.org " + pub + " 443 tcp", "deny -1 mode"},
		{"a name that is private inside", "rules", []string{"allow a.org"}, "a.org 10.0.0.1 443 tcp", "deny -1 builtin_private"},
		{"a name opened to a private range", "rules", []string{"allow a.org", "allow 10.0.0.0/24"}, "a.org 10.0.0.1 443 tcp", "allow 0 rule"},
		{"a domain says nothing of UDP", "rules", []string{"allow a.org"}, "a.org " + pub + " 443 udp", "deny -1 mode"},
		{"a domain needs a name", "rules", []string{"allow a.org"}, "- " + pub + " 443 tcp", "deny -1 mode"},

		{"exact before wildcard", "rules", []string{"deny *.a.org", "allow x.a.org"}, "x.a.org " + pub + " 443 tcp", "allow 1 rule"},
		{"longer wildcard before shorter", "rules", []string{"allow *.a.org", "deny *.x.a.org"}, "y.x.a.org " + pub + " 443 tcp", "deny 1 rule"},
		{"longer prefix before shorter", "rules", []string{"deny 203.0.113.0/24", "allow 203.0.113.5"}, "- " + pub + " 443 tcp", "allow 1 rule"},
		{"longer prefix denies", "public", []string{"allow 203.0.113.0/24", "deny 203.0.113.5"}, "- " + pub + " 443 tcp", "deny 1 rule"},
		{"fewer ports before all", "rules", []string{"deny a.org", "allow a.org tcp 443"}, "a.org " + pub + " 443 tcp", "allow 1 rule"},
		{"fewer ports before all, the rest", "rules", []string{"deny a.org", "allow a.org tcp 443"}, "a.org " + pub + " 80 tcp", "deny 0 rule"},
		{"one protocol before any", "rules", []string{"allow 203.0.113.0/24", "deny 203.0.113.0/24 udp"}, "- " + pub + " 9 udp", "deny 1 rule"},
		{"equals deny", "rules", []string{"allow a.org 80-90", "deny a.org 85-95"}, "a.org " + pub + " 85 tcp", "deny 1 rule"},
		{"an allowed name at a denied address", "rules", []string{"allow a.org", "deny 203.0.113.0/24"}, "a.org " + pub + " 443 tcp", "deny 1 rule"},
		{"a denied name at an allowed address", "rules", []string{"deny a.org", "allow 203.0.113.5"}, "a.org " + pub + " 443 tcp", "deny 0 rule"},
		{"deny before the default", "public", []string{"deny 203.0.113.0/24"}, "- " + pub + " 443 tcp", "deny 0 rule"},
		{"deny a domain under public", "public", []string{"deny a.org"}, "a.org " + pub + " 443 tcp", "deny 0 rule"},
		{"another domain under public", "public", []string{"deny a.org"}, "b.org " + pub + " 443 tcp", "allow -1 mode"},
		{"no name where a domain is denied", "public", []string{"deny a.org"}, "- " + pub + " 443 tcp", "deny -1 no_name"},
		{"no name, and its address allowed", "public", []string{"deny a.org", "allow 203.0.113.5"}, "- " + pub + " 443 tcp", "allow 1 rule"},
		{"no name, and its port allowed", "public", []string{"deny a.org", "allow * tcp 443"}, "- " + pub + " 443 tcp", "deny -1 no_name"},
		{"a port", "public", []string{"deny * tcp 25"}, "- " + pub + " 25 tcp", "deny 0 rule"},
		{"a port, unless the name is allowed", "public", []string{"deny * tcp 25", "allow mx.org tcp 25"}, "mx.org " + pub + " 25 tcp", "allow 1 rule"},
		{"a port range, its end", "rules", []string{"allow 203.0.113.0/24 8000-8010"}, "- " + pub + " 8010 tcp", "allow 0 rule"},
		{"a port range, past its end", "rules", []string{"allow 203.0.113.0/24 8000-8010"}, "- " + pub + " 8011 tcp", "deny -1 mode"},
		{"the last port", "rules", []string{"allow * 65535"}, "- " + pub + " 65535 tcp", "allow 0 rule"},
		{"IPv4 rules say nothing of IPv6", "rules", []string{"allow 0.0.0.0/0"}, "- " + pub6 + " 443 tcp", "deny -1 mode"},
		{"no address", "public", nil, "a.org - 443 tcp", "deny -1 builtin_no_address"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := policy.Compile(sandbox.Network{Mode: tt.mode, Rules: rules(t, tt.rules...)})
			if err != nil {
				t.Fatal(err)
			}
			if got := verdict(p.Decide(flow(t, tt.flow), host)); got != tt.want {
				t.Errorf("%s: %s, want %s", tt.flow, got, tt.want)
			}
		})
	}
}

func TestMayResolve(t *testing.T) {
	tests := []struct {
		mode  sandbox.NetworkMode
		rules []string
		name  string
		want  bool
	}{
		{"public", nil, "a.org", true},
		{"public", []string{"deny a.org"}, "a.org", false},
		{"public", []string{"deny a.org tcp 80"}, "a.org", true},
		{"public", []string{"deny *"}, "a.org", false},
		{"public", []string{"deny *", "allow a.org"}, "a.org", true},
		{"rules", []string{"allow a.org tcp 22"}, "a.org", true},
		{"rules", []string{"allow a.org"}, "data.tunnel.a.org", false},
		{"rules", []string{"allow 0.0.0.0/0"}, "a.org", false}, // the question itself would get out
		{"rules", []string{"allow * tcp 80"}, "a.org", true},
		{"rules", []string{"allow *.a.org", "deny x.a.org"}, "x.a.org", false},
	}
	for _, tt := range tests {
		p, err := policy.Compile(sandbox.Network{Mode: tt.mode, Rules: rules(t, tt.rules...)})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.MayResolve(tt.name); got != tt.want {
			t.Errorf("%s %q: %s may resolve = %v", tt.mode, tt.rules, tt.name, got)
		}
	}
}

func TestWrongPolicies(t *testing.T) {
	allow := func(r sandbox.NetworkRule) sandbox.NetworkRule { r.Action = "allow"; return r }
	long := strings.Repeat("a", 64)
	ok := sandbox.NetworkRule{Action: "allow", Domain: "ok.org"}
	tests := map[string]sandbox.NetworkRule{
		"network.rules[1].action":   {Action: "reject", Domain: "a.org"},
		"network.rules[1].protocol": allow(sandbox.NetworkRule{Domain: "a.org", Protocol: "udp"}),
		"network.rules[1].ports[0]": allow(sandbox.NetworkRule{Domain: "a.org", Ports: []sandbox.PortRange{{From: 0}}}),
		"network.rules[1].ports[1]": allow(sandbox.NetworkRule{Ports: []sandbox.PortRange{{From: 1}, {From: 9, To: 8}}}),
		"network.rules[1].ports":    allow(sandbox.NetworkRule{Ports: []sandbox.PortRange{{From: 1, To: 9}, {From: 9}}}),
		"network.rules[1]":          {Action: "deny", Domain: "ok.org"}, // contradicts
	}
	check := func(field string, r sandbox.NetworkRule) {
		t.Helper()
		_, err := policy.Compile(sandbox.Network{Mode: "rules", Rules: []sandbox.NetworkRule{ok, r}})
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.Invalid || e.Field != field {
			t.Errorf("%+v: %v, want an error of %s", r, err, field)
		}
	}
	for field, r := range tests {
		check(field, r)
	}
	check("network.rules[1]", ok)
	check("network.rules[1]", sandbox.NetworkRule{Action: "allow", Domain: "OK.org"})
	check("network.rules[1]", allow(sandbox.NetworkRule{Domain: "a.org", CIDR: "10.0.0.0/8"}))
	check("network.rules[1].protocol", allow(sandbox.NetworkRule{CIDR: "10.0.0.0/8", Protocol: "sctp"}))
	check("network.rules[1].protocol", allow(sandbox.NetworkRule{CIDR: "10.0.0.0/8", Protocol: "icmp"}))
	for _, d := range []string{"*", "*.", "a.*.org", "*a.org", "**.org", "a.org.", ".org", "a..org", "-a.org", "a-.org", "_dmarc.org", "a b.org",
		"https://a.org", "a.org:443", "a.org/x", "user@a.org", "1.2.3.4", "::1", "a.1", "0x7f.0x1", "*.org", "xn--zzzzzz--.org", "xn--a.org", "\u202ea.org", "a\x00.org",
		long + ".org", strings.Repeat("a.", 130) + "org"} {
		check("network.rules[1].domain", allow(sandbox.NetworkRule{Domain: d}))
	}
	for _, c := range []string{"10.0.0.1/8", "10.0.0.0/33", "300.1.1.1", "::ffff:10.0.0.0/104", "fe80::1%eth0", "10.0.0.0/8/8", "010.0.0.1", "2001:db8::1/32"} {
		check("network.rules[1].cidr", allow(sandbox.NetworkRule{CIDR: c}))
	}
	for _, n := range []sandbox.Network{{Mode: "all"}, {}, {Mode: "none", Rules: []sandbox.NetworkRule{ok}}, {Mode: "public", Limits: sandbox.NetworkLimits{BytesPerSecond: 1}},
		{Mode: "public", Limits: sandbox.NetworkLimits{Connections: -1}}} {
		if _, err := policy.Compile(n); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%+v: %v", n, err)
		}
	}
	p, err := policy.Compile(sandbox.Network{Mode: "rules", Rules: []sandbox.NetworkRule{{Action: "allow", Domain: "Bücher.DE"}}})
	if err != nil {
		t.Fatal(err)
	}
	if v := p.Decide(policy.Flow{Name: policy.Name("XN--BCHER-KVA.de."), Addr: netip.MustParseAddr("203.0.113.5"), Port: 443, Protocol: "tcp"}, nil); !v.Allow {
		t.Error("a name in punycode does not match its rule in Unicode")
	}
}

// The address of a flow that is allowed is public, or a rule allows a CIDR
// that has it and is inside what denies it.
func TestATargetThatIsMoreThanAHost(t *testing.T) {
	for target, want := range map[string]string{
		"https://pypi.org":               "URL write pypi.org, or 'pypi.org tcp 443' for this port alone",
		"http://pypi.org:8080/simple?a#": "URL write pypi.org, or 'pypi.org tcp 8080' for this port alone",
		"HTTPS://u:p@pypi.org/":          "URL write pypi.org, or 'pypi.org tcp 443' for this port alone",
		"https://*.pypi.org":             "URL write *.pypi.org, or '*.pypi.org tcp 443' for this port alone",
		"https://[2001:db8::1]/":         "URL write 2001:db8::1, or '2001:db8::1 tcp 443' for this port alone",
		"ftp://pypi.org":                 "URL write pypi.org",
		"https://a b":                    "URL write a, or 'a tcp 443' for this port alone",
		"https://%zz/":                   "URL write its host",
		"pypi.org:443":                   "port write pypi.org, or 'pypi.org tcp 443' for this port alone",
		"203.0.113.7:80":                 "port write 203.0.113.7, or '203.0.113.7 tcp 80' for this port alone",
		"pypi.org/simple":                "path write pypi.org",
	} {
		_, err := policy.ParseRule("allow " + target)
		what, hint, _ := strings.Cut(want, " ")
		var e *sandbox.Error
		if !errors.As(err, &e) || !strings.Contains(e.Msg, what+"; a rule names a host") || e.Hint != hint {
			t.Errorf("%s: %v, hint %q; want %s", target, err, e.Hint, want)
		}
	}
	for _, target := range []string{"*", "pypi.org", "*.pypi.org", "10.0.0.0/8", "2001:db8::/32", "::1", "10.0.0/8", "a:b:c"} { // not all are right, none is one of those
		if _, err := policy.ParseRule("allow " + target); err != nil {
			t.Errorf("%s: %v", target, err)
		}
	}
}

func TestNothingBuiltInOpensByItself(t *testing.T) {
	gen := rapid.Custom(func(t *rapid.T) sandbox.NetworkRule {
		return sandbox.NetworkRule{
			Action:   rapid.SampledFrom([]sandbox.NetworkAction{"allow", "deny"}).Draw(t, "action"),
			Domain:   rapid.SampledFrom([]string{"", "a.org", "*.a.org", "b.org"}).Draw(t, "domain"),
			Protocol: rapid.SampledFrom([]sandbox.NetworkProtocol{"", "tcp"}).Draw(t, "protocol"),
			Ports:    rapid.SampledFrom([][]sandbox.PortRange{nil, {{From: 443}}, {{From: 1, To: 1000}}}).Draw(t, "ports"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		n := sandbox.Network{Mode: rapid.SampledFrom([]sandbox.NetworkMode{"public", "rules"}).Draw(t, "mode"), Rules: rapid.SliceOfN(gen, 0, 6).Draw(t, "rules")}
		if rapid.Bool().Draw(t, "all") {
			n.Rules = append(n.Rules, sandbox.NetworkRule{Action: "allow", CIDR: "0.0.0.0/0"}, sandbox.NetworkRule{Action: "allow", CIDR: "::/0"})
		}
		p, err := policy.Compile(n)
		if err != nil {
			t.Skip()
		}
		addr := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "v4")))
		if rapid.Bool().Draw(t, "v6") {
			b := [16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "v6"))
			copy(b[:2], rapid.SampledFrom([][]byte{{0xfd, 0}, {0xfe, 0x80}, {0x20, 0x02}, {0, 0}, {0x20, 0x01}}).Draw(t, "prefix"))
			addr = netip.AddrFrom16(b)
		}
		f := policy.Flow{Name: rapid.SampledFrom([]string{"", "a.org", "x.a.org", "b.org", "c.org"}).Draw(t, "name"), Addr: addr,
			Port: rapid.SampledFrom([]uint16{1, 80, 443, 8080}).Draw(t, "port"), Protocol: rapid.SampledFrom([]sandbox.NetworkProtocol{"tcp", "udp"}).Draw(t, "proto")}
		v := p.Decide(f, nil)
		if v.Allow && !policy.Public(addr, nil) {
			t.Fatalf("%+v is allowed: %+v", f, v)
		}
		if v.Allow && f.Name != "" && f.Protocol == "tcp" && !v.ByAddress && !p.MayResolve(f.Name) {
			t.Fatalf("%s may be reached and not be looked up", f.Name)
		}
	})
}

// The order of rules does not matter, and a rule more that denies never opens.
func TestOrderDoesNotMatter(t *testing.T) {
	pool := rules(t, "allow a.org", "deny *.a.org", "allow x.a.org tcp 443", "deny a.org 80-90", "allow 203.0.113.0/24", "deny 203.0.113.5 udp",
		"allow 203.0.113.5 1-500", "deny * 25", "allow * tcp 443", "deny 0.0.0.0/0", "allow 10.0.0.0/24")
	rapid.Check(t, func(t *rapid.T) {
		perm := rapid.Permutation(pool).Draw(t, "rules")[:rapid.IntRange(0, len(pool)).Draw(t, "n")]
		mode := rapid.SampledFrom([]sandbox.NetworkMode{"public", "rules"}).Draw(t, "mode")
		f := policy.Flow{Name: rapid.SampledFrom([]string{"", "a.org", "x.a.org", "b.org"}).Draw(t, "name"),
			Addr: netip.MustParseAddr(rapid.SampledFrom([]string{"203.0.113.5", "203.0.113.6", "10.0.0.1", "8.8.8.8"}).Draw(t, "addr")),
			Port: rapid.SampledFrom([]uint16{25, 80, 443, 600}).Draw(t, "port"), Protocol: rapid.SampledFrom([]sandbox.NetworkProtocol{"tcp", "udp"}).Draw(t, "proto")}
		decide := func(rs []sandbox.NetworkRule) policy.Verdict {
			p, err := policy.Compile(sandbox.Network{Mode: mode, Rules: rs})
			if err != nil {
				t.Fatal(err)
			}
			return p.Decide(f, nil)
		}
		got := decide(perm)
		again := rapid.Permutation(perm).Draw(t, "again")
		if v := decide(again); v.Allow != got.Allow {
			t.Fatalf("%+v or %+v, by the order", got, v)
		}
		if got.Rule >= 0 && got.Allow != (perm[got.Rule].Action == "allow") {
			t.Fatalf("the verdict %+v is not that of its rule", got)
		}
		if !got.Allow && decide(append(perm[:len(perm):len(perm)], sandbox.NetworkRule{Action: "deny", CIDR: "203.0.113.6", Ports: []sandbox.PortRange{{From: 7}}})).Allow {
			t.Fatal("a rule that denies opened something")
		}
	})
}

func flow(t *testing.T, s string) policy.Flow {
	f := strings.Fields(s)
	var fl policy.Flow
	if f[0] != "-" {
		fl.Name = f[0]
	}
	if f[1] != "-" {
		fl.Addr = netip.MustParseAddr(f[1])
	}
	for _, c := range f[2] {
		fl.Port = fl.Port*10 + uint16(c-'0')
	}
	fl.Protocol = sandbox.NetworkProtocol(f[3])
	return fl
}

func verdict(v policy.Verdict) string {
	s := "deny "
	if v.Allow {
		s = "allow "
	}
	if v.Rule < 0 {
		return s + "-1 " + v.Reason
	}
	return s + string(rune('0'+v.Rule)) + " " + v.Reason
}

// What a cloud hands to whoever asks from inside a machine (keys, certificates,
// user data) is opened by nothing but a rule for exactly that address.
func TestMetadataOfEveryCloud(t *testing.T) {
	for cloud, addr := range map[string]string{
		"AWS, Google, Azure, …": "169.254.169.254", "AWS IPv6": "fd00:ec2::254", "AWS tasks": "169.254.170.2",
		"AWS pods": "169.254.170.23", "AWS pods IPv6": "fd00:ec2::23", "Google IPv6": "fd20:ce::254", "Azure": "168.63.129.16",
		"Alibaba": "100.100.100.200", "Oracle": "192.0.0.192", "Oracle IPv6": "fd00:c1::a9fe:a9fe", "OpenStack IPv6": "fe80::a9fe:a9fe",
		"Tencent": "169.254.0.23", "Scaleway": "169.254.42.42", "Scaleway IPv6": "fd00:42::42", "Linode IPv6": "fd00:a9fe:a9fe::1",
		"Equinix Metal": "192.80.8.124",
	} {
		a := netip.MustParseAddr(addr)
		wider, err := a.Prefix(a.BitLen() - 1)
		if err != nil {
			t.Fatal(err)
		}
		for target, want := range map[string]bool{"": false, "0.0.0.0/0": false, "::/0": false, wider.String(): false, addr: true} {
			n := sandbox.Network{Mode: sandbox.NetworkPublic}
			if target != "" {
				n.Rules = []sandbox.NetworkRule{{Action: sandbox.NetworkAllow, CIDR: target}}
			}
			p, err := policy.Compile(n)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"", "metadata.test"} {
				v := p.Decide(policy.Flow{Name: name, Addr: a, Port: 80, Protocol: sandbox.TCP}, nil)
				if v.Allow != want || !want && v.Reason != policy.ReasonBuiltin+"metadata" {
					t.Errorf("%s, %s, allow %q: %+v", cloud, addr, target, v)
				}
			}
		}
	}
}

// What can be refused by address and port alone is what no name would open.
func TestRefuses(t *testing.T) {
	for _, c := range []struct {
		mode  sandbox.NetworkMode
		rules []string
		to    string
		want  bool
	}{
		{"none", nil, "203.0.113.1:80", true},
		{"public", nil, "203.0.113.1:80", false},
		{"public", nil, "10.0.0.1:80", true},
		{"public", []string{"allow 10.0.0.1 tcp 80"}, "10.0.0.1:80", false},
		{"public", []string{"allow 10.0.0.1 tcp 80"}, "10.0.0.1:81", true},
		{"public", []string{"deny evil.test"}, "203.0.113.1:80", false},
		{"public", []string{"deny * tcp 25"}, "203.0.113.1:25", true},
		{"public", []string{"deny * tcp 25", "allow mail.test tcp 25"}, "203.0.113.1:25", false},
		{"public", []string{"deny 203.0.113.0/24", "allow good.test"}, "203.0.113.1:80", true},
		{"rules", []string{"allow good.test tcp 443"}, "203.0.113.1:443", false},
		{"rules", []string{"allow good.test tcp 443"}, "203.0.113.1:22", true},
		{"rules", []string{"allow good.test tcp 443"}, "169.254.169.254:443", true},
		{"rules", []string{"allow *.good.test", "deny *.good.test tcp 25"}, "203.0.113.1:25", true},
		{"rules", []string{"allow *.good.test", "deny *.good.test tcp 25", "allow mx.good.test"}, "203.0.113.1:25", false},
		{"rules", []string{"allow good.test", "deny good.test tcp 25"}, "203.0.113.1:25", true},
		{"rules", []string{"allow good.test", "deny good.test tcp 25"}, "203.0.113.1:26", false},
		{"rules", []string{"allow 203.0.113.1 udp"}, "203.0.113.1:80", true},
		{"rules", []string{"allow 203.0.113.1 tcp 80", "allow good.test tcp 443"}, "203.0.113.2:80", true},
	} {
		p, err := policy.Compile(sandbox.Network{Mode: c.mode, Rules: rules(t, c.rules...)})
		if err != nil {
			t.Fatal(err)
		}
		to := netip.MustParseAddrPort(c.to)
		if v, got := p.Refuses(policy.Flow{Addr: to.Addr(), Port: to.Port()}, nil); got != c.want || got && (v.Allow || v.Reason == "") {
			t.Errorf("%s %q, %s: %v %+v", c.mode, c.rules, c.to, got, v)
		}
	}
}
