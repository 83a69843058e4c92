// Package sandbox is the domain of Cove: what a user asks for ([Spec]), what
// they hold ([Sandbox]), what runs in it ([ProcessSpec], [ProcessEvent]), how
// it ended ([End]) and how a request fails ([Error]).
//
// It does no I/O, reads no clock and imports nothing of ours, so every other
// package can speak these words without learning anything else. Values are
// plain data and not safe for concurrent mutation.
package sandbox
