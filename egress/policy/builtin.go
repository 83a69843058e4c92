package policy

import "net/netip"

// denied is a range nobody reaches by a name or by default.
type denied struct {
	prefix netip.Prefix
	name   string // of the reason
}

// builtins are looked up by the longest prefix, so that a rule that opens
// link-local does not open the metadata service within. The forms of IPv6 that
// carry an IPv4 address are denied whole: which of them a router translates is
// not ours to know.
var builtins = func() []denied {
	var d []denied
	for _, r := range []struct{ prefix, name string }{
		{"0.0.0.0/8", "this_network"},
		{"10.0.0.0/8", "private"},
		{"100.64.0.0/10", "cgnat"},
		{"100.100.100.200/32", "metadata"}, // Alibaba Cloud
		{"127.0.0.0/8", "loopback"},
		{"169.254.0.0/16", "link_local"},
		{"169.254.0.23/32", "metadata"},    // Tencent Cloud
		{"169.254.10.10/32", "metadata"},   // Tencent Cloud, of old
		{"169.254.42.42/32", "metadata"},   // Scaleway
		{"169.254.169.254/32", "metadata"}, // AWS, Google, Azure, DigitalOcean, Hetzner, Huawei, IBM, Linode, OpenStack, OVH, Vultr
		{"169.254.170.2/32", "metadata"},   // AWS tasks
		{"169.254.170.23/32", "metadata"},  // AWS pods
		{"168.63.129.16/32", "metadata"},   // Azure's host agent and its certificates: a public address that ends at the host
		{"192.80.8.124/32", "metadata"},    // Equinix Metal, likewise
		{"172.16.0.0/12", "private"},
		{"192.0.0.0/24", "reserved"},
		{"192.0.0.192/32", "metadata"}, // Oracle Cloud
		{"192.88.99.0/24", "6to4"},
		{"192.168.0.0/16", "private"},
		{"198.18.0.0/15", "benchmark"},
		{"224.0.0.0/4", "multicast"},
		{"240.0.0.0/4", "reserved"},
		{"::/96", "ipv4_compatible"},
		{"::1/128", "loopback"},
		{"::ffff:0:0:0/96", "ipv4_translated"},
		{"64:ff9b::/96", "nat64"},
		{"64:ff9b:1::/48", "nat64"},
		{"100::/64", "reserved"},
		{"2001::/32", "teredo"},
		{"2002::/16", "6to4"},
		{"fc00::/7", "private"},
		{"fd00:42::42/128", "metadata"},        // Scaleway
		{"fd00:a9fe:a9fe::1/128", "metadata"},  // Linode
		{"fd00:c1::a9fe:a9fe/128", "metadata"}, // Oracle Cloud
		{"fd00:ec2::23/128", "metadata"},       // AWS pods
		{"fd00:ec2::254/128", "metadata"},      // AWS
		{"fd20:ce::254/128", "metadata"},       // Google
		{"fe80::/10", "link_local"},
		{"fe80::a9fe:a9fe/128", "metadata"}, // OpenStack
		{"fec0::/10", "private"},
		{"ff00::/8", "multicast"},
	} {
		d = append(d, denied{netip.MustParsePrefix(r.prefix), r.name})
	}
	return d
}()

// builtin finds the range that denies an address. One of the host's own is a
// range by itself: only a rule for exactly that address opens it.
func builtin(a netip.Addr, host func(netip.Addr) bool) (found denied, is bool) {
	if !a.IsValid() {
		return denied{name: "no_address"}, true
	}
	if host != nil && host(a) {
		return denied{netip.PrefixFrom(a, a.BitLen()), "host"}, true
	}
	for _, d := range builtins {
		if d.prefix.Contains(a) && (!is || d.prefix.Bits() > found.prefix.Bits()) {
			found, is = d, true
		}
	}
	return found, is
}

// Public says whether an address is none of those built in as denied.
func Public(a netip.Addr, host func(netip.Addr) bool) bool {
	_, is := builtin(a.Unmap().WithZone(""), host)
	return !is
}
