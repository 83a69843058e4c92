// Package cli is the cove command: it turns arguments into calls of the API
// and answers into text.
//
// What every command keeps:
//   - stdout carries the result and nothing else; progress, warnings and
//     errors go to stderr.
//   - --json prints the shapes of docs/cli-json.md, which only ever grow.
//   - 0 is success, 1 a failure, 2 wrong usage. run and exec end with the exit
//     code of the command they ran, and with 125 where Cove itself failed, so
//     that a script can tell the two apart (docker's rule).
//   - text that code inside a sandbox chose (command lines, file names,
//     details) is shown with control characters escaped, except the output of
//     a process itself, which is passed on byte by byte.
//
// The package speaks to a server over HTTP only. What needs the server's own
// machine (serve, doctor, image bootstrap) is handed in by cmd/cove through
// [Deps], so nothing here imports server or node.
package cli
