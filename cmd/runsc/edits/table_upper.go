package main

// upperEdits have the sentry say what is in the writable layer without its content:
// what changed in a sandbox is known by that, and a tar of the layer is as long as all
// that was ever written.
var upperEdits = []edit{
	{file: "pkg/sentry/vfs/upper.go", add: "upper_vfs.go.in"},
	{file: "pkg/sentry/fsimpl/tmpfs/upper.go", add: "upper_tmpfs.go.in"},
	{file: "pkg/sentry/fsimpl/overlay/upper.go", add: "upper_overlay.go.in"},
	{file: "pkg/sentry/control/upper.go", add: "upper_control.go.in"},
}
