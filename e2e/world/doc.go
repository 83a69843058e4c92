// Package world runs the real Cove for tests: bin/cove, bin/runsc and
// bin/cove-guest as processes, with a data directory of their own.
//
// A test speaks to the server only as a user does, through the API
// ([World.Client], [Box]) and the CLI ([World.CLI]), and looks at the host only
// from outside ([World.Kernels], [World.AssertHostClean]): processes, cgroups,
// mounts, namespaces, sockets and files that carry the data directory's name.
//
// Kernels survive the server by design, so they survive a test that dies, too.
// The server has the test process's death as its own (Pdeathsig); kernels and
// files that are left are removed by the next test that opens a world, which
// finds them by the lock the dead test no longer holds.
package world
