package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// buildContext is the directory of a build as it is sent: less what an ignore file
// says, and of the rest what the Dockerfile names.
type buildContext struct {
	dir    string
	ignore *patternmatcher.PatternMatcher // nil = nothing
	needs  [][]string                     // sources by their parts, with wildcards; nil = all
}

// errWhole says that a source leads through a link, and so to anything.
var errWhole = errors.New("the whole context is needed")

// giveContext gives the server the files of a build that it lacks: what its
// Dockerfile names, or with whole all of them.
func (a *app) giveContext(ctx context.Context, api *wire.Client, req *covev1.BuildImageRequest, dir, file string, whole bool) (err error) {
	c := &buildContext{dir: dir}
	// As BuildKit has it, a Dockerfile may have an ignore file of its own.
	ignore := filepath.Join(dir, ".dockerignore")
	if own := file + ".dockerignore"; exists(own) {
		ignore = own
		if rel, err := filepath.Rel(dir, own); err == nil && filepath.IsLocal(rel) {
			req.IgnoreFile = filepath.ToSlash(rel)
		}
	}
	if c.ignore, err = ignored(ignore); err != nil {
		return err
	}
	if sources, ok := build.Needs([]byte(req.Dockerfile)); ok && !whole {
		for _, s := range append(sources, ".dockerignore", req.IgnoreFile) {
			c.needs = append(c.needs, strings.Split(s, "/"))
		}
	}
	req.Context, err = a.giveFiles(ctx, api, c)
	if errors.Is(err, errWhole) {
		c.needs = nil
		req.Context, err = a.giveFiles(ctx, api, c)
	}
	req.ContextPartial = c.needs != nil
	return err
}

// wantsWhole says whether a build failed for having only what its Dockerfile names:
// its base has an ONBUILD that copies.
func wantsWhole(req *covev1.BuildImageRequest, err error) bool {
	var e *sandbox.Error
	return req.ContextPartial && errors.As(err, &e) && e.Class == sandbox.Precondition && e.Field == "context"
}

// giveFiles packs the context and uploads it unless the server has just that.
func (a *app) giveFiles(ctx context.Context, api *wire.Client, c *buildContext) (key string, err error) {
	spool, err := os.CreateTemp("", "cove-context-")
	if err != nil {
		return "", err
	}
	defer spool.Close()
	if err := os.Remove(spool.Name()); err != nil {
		return "", err
	}
	sum := sha256.New()
	skipped := func(name, why string) { fmt.Fprintf(a.Stderr, "cove: left out %s: %s\n", escape(name), why) }
	if err := mktar(io.MultiWriter(spool, sum), c.dir, c.leaves, skipped); err != nil {
		return "", err
	}
	key = "sha256-" + hex.EncodeToString(sum.Sum(nil))
	resp, err := api.Images.HasFiles(ctx, connect.NewRequest(&covev1.HasFilesRequest{Key: key}))
	if err != nil || resp.Msg.GetHas() {
		return key, err
	}
	n, err := spool.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = spool.Seek(0, io.SeekStart)
	}
	if err != nil {
		return "", err
	}
	return key, api.PutBuildFiles(ctx, key, (&copier{app: a}).progress("context", n, spool), n)
}

// ignored reads an ignore file; nil if there is none.
func ignored(file string) (*patternmatcher.PatternMatcher, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	patterns, err := ignorefile.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Invalid, Msg: file, Err: err}
	}
	return m, nil
}

// leaves says whether a name is not sent, nor what is below it. Ignore files go
// along: the server has the last word.
func (c *buildContext) leaves(name string, d fs.DirEntry) (bool, error) {
	if c.needs != nil {
		if needed, err := c.needed(strings.Split(name, "/"), d); !needed || err != nil {
			return true, err
		}
	}
	if c.ignore == nil || d.IsDir() && c.ignore.Exclusions() || strings.HasSuffix(name, ".dockerignore") {
		return false, nil // something below may be let in again
	}
	return c.ignore.MatchesOrParentMatches(name)
}

// needed says whether a source of the Dockerfile is a name, above it or below it.
func (c *buildContext) needed(parts []string, d fs.DirEntry) (bool, error) {
	for _, source := range c.needs {
		n, all := min(len(parts), len(source)), true
		for i := range n {
			// A pattern that is none is the server's to refuse.
			ok, err := path.Match(source[i], parts[i])
			all = all && (ok || err != nil || source[i] == parts[i])
		}
		switch {
		case !all || len(parts) < len(source) && !d.IsDir() && d.Type()&fs.ModeSymlink == 0:
		case len(parts) <= len(source) && d.Type()&fs.ModeSymlink != 0:
			return false, errWhole
		default:
			return true, nil
		}
	}
	return false, nil
}
