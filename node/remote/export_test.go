package remote

import (
	"maps"
	"slices"

	"github.com/cove-sandbox/cove/node"
)

// Served are the names of the methods that Handler serves.
func Served(n node.Node) []string { return slices.Sorted(maps.Keys(methodsOf(n))) }
