package main

// unpackEdits have the sentry unpack a small tar itself. By system calls of the
// guest forty files took 6 to 10 ms, which was the largest part of a grade: its
// artifacts are unpacked while somebody waits.
var unpackEdits = []edit{
	{file: "pkg/sentry/control/unpack.go", add: "unpack_control.go.in"},
}
