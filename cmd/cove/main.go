// Command cove is the server and the client of Cove in one binary. This
// package wires and exits; what it wires is elsewhere.
package main

import (
	"context"
	"os"
	"runtime/debug"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/cli/doctor"
)

// version is set by the linker: -X main.version=v0.1.0.
var version = ""

func main() {
	os.Exit(run(context.Background(), os.Args[1:]))
}

func run(ctx context.Context, args []string) int {
	d := cli.Deps{Version: buildVersion(), Probes: doctor.System()}
	wireServer(&d)
	return cli.Main(ctx, d, args)
}

// buildVersion is what the linker was told, with the commit where the build
// knows it.
func buildVersion() string {
	v := version
	if v == "" {
		v = "dev"
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 7 {
			return v + " (" + s.Value[:7] + ")"
		}
	}
	return v
}
