//go:build !amd64

package gvisor

import "gvisor.dev/gvisor/pkg/cpuid"

func cacheLine(cpuid.FeatureSet) string { return "0" }
