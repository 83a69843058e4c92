package netns

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// filter loads the one table of a namespace, in one transaction, in place of
// what an earlier version may have loaded:
//
//	table inet cove {
//	  chain in {
//	    type filter hook prerouting priority mangle; policy drop;
//	    iifname "lo" meta mark 0xc0e meta l4proto tcp ip|ip6 tproxy to :1 accept
//	    iifname "lo" accept
//	    iifname "gate" meta l4proto tcp tcp flags & (syn | ack) == syn drop
//	    iifname "gate" ip  saddr 10.200.0.2        meta l4proto {tcp, udp} tproxy ip  to :1 mark set 0xc0e accept
//	    iifname "gate" ip6 saddr fd00:c0e:200::2   meta l4proto {tcp, udp} tproxy ip6 to :1 mark set 0xc0e accept
//	  }
//	}
//
// Nothing is let through that does not end in our own sockets: no ICMP, no
// neighbour discovery (neighbours are fixed), no other source, no other
// protocol. What begins a connection of TCP is let through only where the Door
// sent it. Policies are not in it, so it never changes.
func filter() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	// Made, so that there is one to remove, removed, and made again.
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "cove"}
	c.AddTable(table)
	c.DelTable(table)
	t := c.AddTable(table)
	drop := nftables.ChainPolicyDrop
	in := c.AddChain(&nftables.Chain{Name: "in", Table: t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityMangle, Policy: &drop})
	rule := func(exprs ...[]expr.Any) {
		var all []expr.Any
		for _, e := range exprs {
			all = append(all, e...)
		}
		c.AddRule(&nftables.Rule{Table: t, Chain: in, Exprs: all})
	}
	accept := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	type family struct {
		family byte
		source netip.Addr
		offset uint32
	}
	families := []family{{unix.NFPROTO_IPV4, Inner4.Addr(), 12}, {unix.NFPROTO_IPV6, Inner6.Addr(), 8}}
	hand := func(f family, proto byte) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.family}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: uint32(f.source.BitLen() / 8)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: f.source.AsSlice()},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
			&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
			&expr.TProxy{Family: f.family, TableFamily: byte(nftables.TableFamilyINet), RegPort: 1},
			&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
		}
	}
	for _, f := range families {
		rule(from("lo"), []expr.Any{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		}, hand(f, unix.IPPROTO_TCP), accept)
	}
	rule(from("lo"), accept)
	rule(from(gate), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{flagSYN | flagACK}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{flagSYN}},
		&expr.Verdict{Kind: expr.VerdictDrop},
	})
	for _, f := range families {
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			rule(from(gate), hand(f, proto), accept)
		}
	}
	return c.Flush()
}

func from(device string) []expr.Any {
	name := make([]byte, 16)
	copy(name, device)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
	}
}
