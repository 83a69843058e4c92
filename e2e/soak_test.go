package e2e

import "os"

// soaking has the suites repeat what they do as often as it takes to find what is rare:
// "make soak-tests". In CI each does it often enough to see that it works.
var soaking = os.Getenv("COVE_SOAK") != ""

// times is how often something is done: whole while soaking, else short.
func times(whole, short int) int {
	if soaking {
		return whole
	}
	return short
}
