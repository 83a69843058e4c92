package main

// netEdits hand on what the network says of a connect.
var netEdits = []edit{
	// A host that does not answer over IPv6 is told to the socket, as one of
	// IPv4 is: a connect then ends with EHOSTUNREACH at once, and not with the
	// client's time-out. gVisor has the error and never hands it on.
	{
		file: "pkg/tcpip/network/ipv6/icmp.go",
		old: `		case header.ICMPv6PortUnreachable:
			e.handleControl(&icmpv6DestinationPortUnreachableSockError{}, pkt)
`,
		new: `		case header.ICMPv6PortUnreachable:
			e.handleControl(&icmpv6DestinationPortUnreachableSockError{}, pkt)
		case header.ICMPv6AddressUnreachable:
			e.handleControl(&icmpv6DestinationAddressUnreachableSockError{}, pkt)
`,
	},
}
