// Package guest is the protocol between a node and the agent inside a kernel,
// and the host's side of it ([Client]).
//
// The agent (package guest/agent, binary cmd/cove-guest) is PID 1 of the
// kernel's root container. It shares a network loopback with the user's
// container, so every connection starts with a mutual challenge on a
// per-kernel secret that never crosses the wire.
//
// A guest outlives the node that started it, running or in a checkpoint, and may
// be years older than the node that talks to it: the protocol only grows, and
// what an old guest does not know it refuses by sandbox.ErrUnsupported.
package guest
