package runtime

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// ResolvConf is the content of /etc/resolv.conf that asks resolvers for names;
// "" for none. Lookups in a container without a network fail at once, with an
// empty file (the loopback refuses) as with one that names a resolver (no route).
func ResolvConf(resolvers []netip.Addr) string {
	var conf strings.Builder
	for _, r := range resolvers {
		fmt.Fprintf(&conf, "nameserver %s\n", r)
	}
	return conf.String()
}

// WriteResolvers has a running container ask the resolvers for names.
func WriteResolvers(ctx context.Context, g *guest.Client, resolvers []netip.Addr) error {
	if _, err := g.WriteFile(ctx, "/etc/resolv.conf", []byte(ResolvConf(resolvers)), sandbox.WriteOptions{Parents: true}); err != nil {
		return fmt.Errorf("resolv.conf: %w", err)
	}
	return nil
}
