//go:build !amd64

package main

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

var programs []precompiledseccomp.Program
