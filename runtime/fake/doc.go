// Package fake is a runtime driver without a kernel: the real guest agent runs
// in this process on a temporary directory, over in-memory pipes. It isolates
// nothing and limits nothing, so only tests may use it, but it speaks the
// whole contract in microseconds, which makes everything above a driver
// testable: runtimetest passes on it as far as its capabilities go.
//
// A [Host] stands for the machine. It holds the kernels, so they outlive the
// [Driver] that booted them, as real ones outlive their process: a test drops
// a driver with [Driver.Crash], opens another on the same host and adopts.
//
// Faults are asked for by name: [Driver.Fail] makes the next calls of an
// operation fail, [Driver.Hook] runs code (a delay, a block) inside one, and
// [Host.Kill] ends a kernel as the memory limit or a crash would.
package fake
