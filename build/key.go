package build

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
)

// Key is what the cache knows the result of a step by: all that it was made of.
// Values that are secret are not to be among the parts.
func Key(parts ...any) string {
	b, err := json.Marshal(parts)
	if err != nil {
		panic(err) // strings, numbers and structs of them
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Key of a command over a state. Where a mount is from is said by its content:
// from has one for each mount, "" where there is none.
func (r *Run) Key(state string, from []string) string {
	mounts := make([]Mount, len(r.Mounts))
	for i, m := range r.Mounts {
		m.Stage, m.Image = nil, "" // from says what they hold
		mounts[i] = m
	}
	return Key("run", state, r.Args, r.Script, r.Env, r.User, r.Dir, mounts, r.Offline, from)
}
