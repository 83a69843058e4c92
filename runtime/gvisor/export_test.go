package gvisor

import (
	"context"
	"net"
)

// Dial connects to a guest as the driver does.
func Dial(ctx context.Context, k *Kernel) (net.Conn, error) { return k.dial(ctx) }
