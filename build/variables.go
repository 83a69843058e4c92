package build

import (
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/cove-sandbox/cove/sandbox"
)

// variables are names and values in the order they were first set, as an
// environment has them.
type variables struct{ list []string }

func (v *variables) set(name, value string) {
	for i, kv := range v.list {
		if k, _, _ := strings.Cut(kv, "="); k == name {
			// A list that is shared stays as it is.
			v.list = append([]string(nil), v.list...)
			v.list[i] = name + "=" + value
			return
		}
	}
	v.list = append(v.list[:len(v.list):len(v.list)], name+"="+value)
}

// Get implements shell.EnvGetter.
func (v *variables) Get(name string) (string, bool) {
	for _, kv := range v.list {
		if k, value, ok := strings.Cut(kv, "="); ok && k == name {
			return value, true
		}
	}
	return "", false
}

// Keys implements shell.EnvGetter.
func (v *variables) Keys() []string {
	keys := make([]string, len(v.list))
	for i, kv := range v.list {
		keys[i], _, _ = strings.Cut(kv, "=")
	}
	return keys
}

// expand puts values into a word as a shell would. It is bounded before it is
// done: a word may name a long value often.
func expand(lex *shell.Lex, word string, env *variables) (string, error) {
	refs := strings.Count(word, "$")
	if refs == 0 && !strings.ContainsAny(word, `"'\`+"`") {
		return word, nil
	}
	longest := 0
	for _, kv := range env.list {
		longest = max(longest, len(kv))
	}
	if refs*longest > maxExpanded {
		return "", sandbox.Errorf(sandbox.TooLarge, "", "variables could make %d bytes of one word; at most %d are accepted", refs*longest, maxExpanded)
	}
	out, _, err := lex.ProcessWord(word, env)
	return out, err
}

// check refuses what no process could be given.
func checkVariable(name, value string) error {
	switch {
	case name == "" || strings.ContainsAny(name, "=\x00"):
		return sandbox.Errorf(sandbox.Invalid, "", "%q is no name of a variable", clip(name))
	case strings.IndexByte(value, 0) >= 0:
		return sandbox.Errorf(sandbox.Invalid, "", "the value of %s has a NUL byte", clip(name))
	case len(name)+len(value) > maxValue:
		return sandbox.Errorf(sandbox.TooLarge, "", "%s has %d bytes; at most %d are accepted", clip(name), len(value), maxValue)
	}
	return nil
}
