package build

import (
	"bytes"
	"path"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// Needs are the paths and patterns that a Dockerfile copies or mounts of its
// context, so that no more of it is sent. False if that takes the whole of it, or
// is not known before the build. It may say more than a build needs, never less:
// what the base's ONBUILD copies is not in the file, which [Action.Trigger] tells.
func Needs(dockerfile []byte) (sources []string, ok bool) {
	if len(dockerfile) > MaxDockerfile {
		return nil, false
	}
	ast, err := parser.Parse(bytes.NewReader(dockerfile))
	if err != nil {
		return nil, false // the server says what is wrong
	}
	stages, _, err := instructions.Parse(ast.AST, linter.New(&linter.Config{}))
	if err != nil {
		return nil, false
	}
	for _, st := range stages {
		for _, c := range st.Commands {
			if on, isOn := c.(*instructions.OnbuildCommand); isOn { // a later stage may be built on this one
				t, err := trigger(on.Expression)
				if err != nil {
					return nil, false
				}
				c = t.cmd
			}
			sources = append(sources, ofContext(c)...)
		}
	}
	for i, s := range sources {
		if strings.ContainsRune(s, '$') {
			return nil, false
		}
		if sources[i] = strings.TrimPrefix(path.Clean("/"+s), "/"); sources[i] == "" {
			return nil, false
		}
	}
	return sources, true
}

func ofContext(c instructions.Command) (sources []string) {
	switch c := c.(type) {
	case *instructions.CopyCommand:
		if c.From == "" {
			return c.SourcePaths
		}
	case *instructions.AddCommand:
		for _, s := range c.SourcePaths {
			if !isHTTP(s) {
				sources = append(sources, s)
			}
		}
	case *instructions.RunCommand:
		// The parser reads the parts of a mount when it expands them.
		if err := c.Expand(func(word string) (string, error) { return word, nil }); err != nil {
			return nil // the server says what is wrong
		}
		for _, m := range instructions.GetMounts(c) {
			if m.Type == instructions.MountTypeBind && m.From == "" {
				sources = append(sources, "/"+m.Source)
			}
		}
	}
	return sources
}
