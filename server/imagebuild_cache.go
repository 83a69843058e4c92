package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// The cache of builds is a tenant's own: what another one has built is neither
// used nor told, not by how long a build takes either. Content that two tenants
// have is stored once all the same.

const (
	buildCacheAge   = 7 * 24 * time.Hour
	buildCacheBytes = 10 * sandbox.GiB // of a tenant
	// buildTouch is how old the note of a use may get: it is a write.
	buildTouch = time.Hour
)

// cached is the record of something that was built.
type cached struct {
	Layer *sandbox.Layer   `json:"layer,omitempty"` // nil = the step changed nothing
	State string           `json:"state,omitempty"` // key of what the step led to
	Image string           `json:"image,omitempty"`
	Files *sandbox.Content `json:"files,omitempty"` // uploaded, or of a cache mount
}

func (c cached) content() sandbox.Content {
	switch {
	case c.Layer != nil:
		return c.Layer.Content
	case c.Files != nil:
		return *c.Files
	}
	return sandbox.Content{}
}

// putBuilt records what a key gives.
func (s *Server) putBuilt(ctx context.Context, key string, c cached) error {
	record, err := json.Marshal(c)
	if err != nil {
		return err
	}
	content := c.content()
	return s.store.PutBuilt(ctx, store.Built{Key: key, Record: string(record), Manifest: content.Manifest, Size: content.Size, UsedAt: s.cfg.Clock().UTC()})
}

// useBuilt finds what a key gives and keeps its content until release.
func (s *Server) useBuilt(ctx context.Context, key string) (c cached, release func(), found bool, err error) {
	for {
		b, err := s.store.GetBuilt(ctx, key)
		if errors.Is(err, sandbox.ErrNotFound) {
			return c, nil, false, nil
		}
		if err != nil {
			return c, nil, false, err
		}
		if err := json.Unmarshal([]byte(b.Record), &c); err != nil {
			return c, nil, false, &sandbox.Error{Class: sandbox.Corrupt, Msg: "a record of the build cache", Err: err}
		}
		release = s.content.use(c.content())
		// Again, now that it is held: it may have been deleted in between.
		again, err := s.store.GetBuilt(ctx, key)
		if err == nil && again.Record == b.Record {
			if now := s.cfg.Clock().UTC(); now.Sub(b.UsedAt) > buildTouch {
				b.UsedAt = now
				if err := s.store.PutBuilt(ctx, b); err != nil {
					release()
					return c, nil, false, err
				}
			}
			return c, release, true, nil
		}
		release()
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return c, nil, false, err
		}
		c = cached{}
	}
}

var buildKey = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

func validBuildKey(field, key string) error {
	if !buildKey.MatchString(key) {
		return sandbox.InvalidField(field, "%.128q is no key of files; 1 to 128 letters, digits, '.', '_' and '-' are accepted", key)
	}
	return nil
}

func filesKey(key string) string { return "files:" + key }

// HasBuildFiles says whether the tenant gave files under a key.
func (s *Server) HasBuildFiles(ctx context.Context, key string) (has bool, err error) {
	ctx, call, err := s.begin(ctx, "image.has_files", about("files", key))
	if err != nil {
		return false, err
	}
	defer call.end(&err)
	if err := validBuildKey("key", key); err != nil {
		return false, err
	}
	_, release, has, err := s.useBuilt(ctx, filesKey(key))
	if has {
		release()
	}
	return has, err
}

// PutBuildFiles keeps the files of a tar under a key, for builds to copy from. A key
// that is "sha256-" and a digest is held to it: who else builds with the same key
// may upload nothing, and take what is there.
func (s *Server) PutBuildFiles(ctx context.Context, key string, tar Upload) (err error) {
	ctx, call, err := s.begin(ctx, "image.put_files", about("files", key))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := validBuildKey("key", key); err != nil {
		return err
	}
	body, err := boundedUpload(tar, s.cfg.MaxImage)
	if err != nil {
		return err
	}
	end, err := s.content.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	sum := sha256.New()
	whole := io.TeeReader(body, sum)
	c, err := s.node.Images().Keep(ctx, whole)
	if err = body.or(err); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, whole) // a tar may be padded
	if want, ok := strings.CutPrefix(key, "sha256-"); err == nil && ok && want != hex.EncodeToString(sum.Sum(nil)) {
		err = sandbox.InvalidField("key", "what was uploaded has another digest")
	}
	if err == nil {
		err = s.putBuilt(ctx, filesKey(key), cached{Files: &c})
	}
	if err != nil {
		s.letGo(c)
		return body.or(err)
	}
	return nil
}

// forgetBuilds lets go of what builds have not used for long, and of what is over
// the bound of its tenant.
func (s *Server) forgetBuilds(ctx context.Context) {
	all, err := s.store.ListBuilt(asServer(ctx))
	if err != nil {
		s.log.Warn("cannot look for old builds", "err", err)
		return
	}
	bytes := map[string]int64{}
	for _, b := range all {
		bytes[b.Tenant] += b.Size
	}
	before := s.cfg.Clock().Add(-buildCacheAge)
	gone := 0
	for _, b := range all { // used longest ago first
		if b.UsedAt.After(before) && bytes[b.Tenant] <= buildCacheBytes {
			continue
		}
		if err := s.store.DeleteBuilt(store.In(ctx, b.Tenant), b.Key, b.UsedAt); err != nil {
			s.log.Warn("cannot forget an old build", "err", err)
			return
		}
		bytes[b.Tenant] -= b.Size
		gone++
	}
	if gone > 0 {
		s.content.want()
	}
}
