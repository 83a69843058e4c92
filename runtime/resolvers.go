package runtime

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// WriteResolvers has a container ask the resolvers for names. None: nothing is
// changed. Lookups in a container without a network fail at once, with an empty
// file (the loopback refuses) as with one that names a resolver (no route).
func WriteResolvers(ctx context.Context, g *guest.Client, resolvers []netip.Addr) error {
	if len(resolvers) == 0 {
		return nil
	}
	var conf strings.Builder
	for _, r := range resolvers {
		fmt.Fprintf(&conf, "nameserver %s\n", r)
	}
	if _, err := g.WriteFile(ctx, "/etc/resolv.conf", []byte(conf.String()), sandbox.WriteOptions{Parents: true}); err != nil {
		return fmt.Errorf("resolv.conf: %w", err)
	}
	return nil
}
