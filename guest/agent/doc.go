// Package agent is the guest: what runs inside a kernel and acts on the user's
// container for the host.
//
// An [Agent] speaks the guest protocol on connections it is given. What it
// acts on is a [Space]: in a kernel the user's container, entered by setns on
// locked threads ([NewContainerSpace]); in tests and the fake driver a
// directory of this machine ([HostSpace]).
//
// The code it serves is root in its container and hostile. It shares nothing
// with the agent but the loopback device (see package wire for the handshake)
// and what the agent itself opens inside: every path may be a symlink, a FIFO
// or gone by the time it is used, and every process may have left its group.
package agent
