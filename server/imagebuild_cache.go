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

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// The cache of builds is a tenant's own: what another one has built is neither
// used nor told, not by how long a build takes either. Content that two tenants
// have is stored once all the same.

const (
	buildCacheAge   = 7 * 24 * time.Hour
	buildCacheBytes = 10 * sandbox.GiB // of a tenant, at most: see cacheBound
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

// cacheBound is how much is kept of the builds of the tenant in scope: as much again
// as its images may take. It is not taken from those, because what is cached gives
// way by itself, and no build shall fail of it.
func (s *Server) cacheBound(ctx context.Context) (int64, error) {
	most, err := s.imageBound(ctx)
	if err == nil && (most == 0 || most > buildCacheBytes) {
		most = buildCacheBytes
	}
	return most, err
}

// putBuilt records what a key gives, and forgets what was used longest ago where that
// is too much. What would be too much alone is not recorded: whoever holds it has it
// until then.
func (s *Server) putBuilt(ctx context.Context, key string, c cached) error {
	record, err := json.Marshal(c)
	if err != nil {
		return err
	}
	content := c.content()
	most, err := s.cacheBound(ctx)
	if err != nil || content.Size > most {
		return err
	}
	err = s.store.PutBuilt(ctx, store.Built{Key: key, Record: string(record), Manifest: content.Manifest, Size: content.Size, UsedAt: s.cfg.Clock().UTC()})
	if err != nil || content.Size == 0 {
		return err
	}
	all, err := s.store.ListBuilt(ctx)
	if err != nil {
		return err
	}
	return s.forgetOver(ctx, all, most, time.Time{}, key)
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
	most, err := s.cacheBound(ctx)
	if err != nil {
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
		err = quota.BuildFiles(most, c.Size)
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
	before := s.cfg.Clock().Add(-buildCacheAge)
	of := map[string][]store.Built{}
	for _, b := range all {
		of[b.Tenant] = append(of[b.Tenant], b)
	}
	for tenant, list := range of {
		ctx := store.In(ctx, tenant)
		most, err := s.cacheBound(ctx)
		if err != nil {
			most = buildCacheBytes // a tenant that is going: its cache goes with age
		}
		if err := s.forgetOver(ctx, list, most, before, ""); err != nil {
			s.log.Warn("cannot forget an old build", "err", err)
			return
		}
	}
}

// forgetOver lets go of what of a tenant's cache was not used since a time, and of more
// while it takes more than most, but for one key. The list has the one used longest
// ago first.
func (s *Server) forgetOver(ctx context.Context, list []store.Built, most int64, before time.Time, but string) error {
	var bytes int64
	for _, b := range list {
		bytes += b.Size
	}
	gone := false
	for _, b := range list {
		if b.Key == but || b.UsedAt.After(before) && (bytes <= most || b.Size == 0) {
			continue
		}
		if err := s.store.DeleteBuilt(ctx, b.Key, b.UsedAt); err != nil {
			return err
		}
		bytes -= b.Size
		gone = true
	}
	if gone {
		s.content.want()
	}
	return nil
}
