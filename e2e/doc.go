// Package e2e holds the tests that run the real binaries and do to them what
// users, hostile code and crashes do. Everything here speaks to the server
// through its API or CLI and looks at the host from outside; see package
// e2e/world.
package e2e
