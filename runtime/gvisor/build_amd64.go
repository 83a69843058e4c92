package gvisor

import (
	"strconv"

	"gvisor.dev/gvisor/pkg/cpuid"
)

// cacheLine must match for programs that flush by it; gVisor checks it too.
func cacheLine(fs cpuid.FeatureSet) string { return strconv.Itoa(int(fs.CacheLine())) }
