package runtime

import (
	"maps"
	"slices"
)

// Environ is the image's environment with the sandbox's over it, sorted, so
// that equal sandboxes look equal. The last of a name counts.
func Environ(c Container) []string {
	env := slices.Clone(c.Rootfs.Env)
	if c.Sandbox != "" {
		env = append(env, "COVE_SANDBOX_ID="+c.Sandbox)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		env = append(env, name+"="+c.Env[name])
	}
	return env
}
