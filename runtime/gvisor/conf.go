package gvisor

import (
	"flag"
	"io"
	"path/filepath"

	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
)

// newConf makes the two runsc configurations of a driver. boot is what the
// sentry runs with. start differs only in network=none: StartRoot then gives
// the kernel a plain loopback instead of copying the interfaces of a namespace,
// which saves a pool of namespaces with lo up and 4 ms a boot, while the sentry
// itself keeps network=sandbox, without which it refuses port forwarding.
func newConf(c Config, root string) (boot, start *config.Config, err error) {
	fs := flag.NewFlagSet("runsc", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	config.RegisterFlags(fs)
	platform := c.Platform
	if platform == "" {
		platform = "systrap"
	}
	set := map[string]string{
		"root":     root,
		"platform": platform,
		"network":  "sandbox",
		// Without directfs the sentry runs as nobody in its own user
		// namespace; there is no gofer whose files it could reach anyway.
		"directfs": "false",
		// Cgroups are ours: they are made before the sentry and outlive calls.
		"ignore-cgroups": "true",
		// For the guest: with version 1 the sentry charges a fork to a random
		// one of seven hierarchies, and a pids limit does not hold.
		"in-sandbox-cgroup": "v2",
		// sudo in the base image.
		"allow-suid":                  "true",
		"allow-rootfs-tar-annotation": "true",
		"host-settings":               "ignore",
		"net-raw":                     "false",
		"overlay2":                    "none",
		// It compares paths, which differ from node to node, and not what lies
		// there. What must be the same is in the build of a checkpoint.
		"restore-spec-validation": "ignore",
		// What a sentry says that dies; see logTail.
		"panic-log": filepath.Join(c.Dir, "k", "%ID%", wordsFile),
	}
	if c.DebugLog != "" {
		set["debug"], set["debug-log"] = "true", c.DebugLog+"/"
	}
	for k, v := range set {
		if err := fs.Set(k, v); err != nil {
			return nil, nil, err
		}
	}
	if boot, err = config.NewFromFlags(fs); err != nil {
		return nil, nil, err
	}
	if err := fs.Set("network", "none"); err != nil {
		return nil, nil, err
	}
	if start, err = config.NewFromFlags(fs); err != nil {
		return nil, nil, err
	}
	// The runsc packages log to a global logger of their own; ours would be
	// flooded with a line per call.
	log.SetLevel(log.Warning)
	log.SetTarget(&log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	return boot, start, nil
}
