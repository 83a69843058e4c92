package agent

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"
	"unique"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// collect removes what neither keep nor pending content needs, and says what
// it kept.
func (c *contents) collect(ctx context.Context, keep []string) (freed int64, kept map[string]bool, err error) {
	roots := map[cas.ID]bool{}
	kept = map[string]bool{}
	for _, k := range keep {
		id, err := cas.ParseID(k)
		if err != nil {
			return 0, nil, err
		}
		roots[id] = true
	}
	now := time.Now()
	s := &sweep{Store: c.cfg.Store, c: c}
	c.mu.Lock()
	for p := range c.mu.packs {
		s.spareLocked(p)
	}
	c.mu.sweeps[s] = true
	for id, at := range c.mu.pending {
		switch {
		case roots[id] || now.Sub(at) > pendingFor:
			delete(c.mu.pending, id)
		default:
			roots[id] = true
		}
	}
	for name, d := range c.mu.plain {
		if id := cas.ID(name); !roots[id] && d.refs == 0 {
			delete(c.mu.plain, name)
			d.gone = true
			c.removeLocked(d)
		}
	}
	c.unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.mu.sweeps, s)
		c.forgetBlobsLocked(roots)
	}()
	removed, err := snapshot.Collector{Grace: -1}.Collect(ctx, s, slices.Sorted(maps.Keys(roots)), false)
	for _, b := range removed {
		freed += b.Stored
	}
	for id := range roots {
		kept[string(id)] = true
	}
	return freed, kept, err
}

// sweep is the store as one collection sees it. What a pack stored, or found
// there and relies on, since the roots were listed is in none of them; the store
// spares it only until the pack's batch ends. A sweep therefore spares all that
// is as young as the oldest pack it ran beside. A lock that keeps the two apart
// was rejected: a collection reads every manifest.
type sweep struct {
	cas.Store
	c *contents

	oldest time.Time // beginning of a pack; guarded by c.mu
}

// tick is how far the time of a file may lie before the clock's, on file systems
// that count whole seconds.
const tick = 2 * time.Second

func (s *sweep) spareLocked(p *pack) {
	if s.oldest.IsZero() || p.began.Before(s.oldest) {
		s.oldest = p.began
	}
}

// Sweep is one step with the beginning of a pack: that finds the blob gone, or
// is spared.
func (s *sweep) Sweep(ctx context.Context, id cas.ID, before time.Time) (bool, error) {
	sw, ok := s.Store.(cas.Sweeper)
	if !ok {
		return false, sandbox.Errorf(sandbox.Unsupported, "node.collect", "the store cannot sweep")
	}
	s.c.removal.Lock()
	defer s.c.removal.Unlock()
	s.c.mu.Lock()
	oldest := s.oldest
	s.c.mu.Unlock()
	if young := oldest.Add(-tick); !oldest.IsZero() && young.Before(before) {
		before = young
	}
	return sw.Sweep(ctx, id, before)
}

// madeWith is what a checkpoint was made with.
type madeWith struct{ driver, build string }

// builds lists what the checkpoints of a driver among kept, and those at hand,
// were made with. What it has read it remembers: with programs of an earlier
// build there, every collection asks.
func (c *contents) builds(ctx context.Context, kept map[string]bool, driver string) ([]string, error) {
	found := map[madeWith]bool{}
	c.mu.Lock()
	known := maps.Clone(c.mu.buildOf)
	c.mu.Unlock()
	for id := range kept {
		if made, ok := known[id]; ok {
			found[made] = true
			continue
		}
		var cp runtime.Checkpoint
		b, err := snapshot.Memory{}.ReadFile(ctx, c.cfg.Store, cas.ID(id), checkpointFile)
		switch {
		case err == nil:
			err = json.Unmarshal(b, &cp)
		case errors.Is(err, sandbox.ErrNotFound): // of files
			err = nil
		}
		if err != nil {
			return nil, err
		}
		made := madeWith{cp.Driver, unique.Make(cp.Build).Value()} // a kilobyte each, and mostly the same
		known[id], found[made] = made, true
	}
	maps.DeleteFunc(known, func(id string, _ madeWith) bool { return !kept[id] })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.buildOf = known
	for _, d := range c.mu.plain {
		select {
		case <-d.ready:
			found[madeWith{d.cp.Driver, d.cp.Build}] = true
		default: // in the store, and so among kept
		}
	}
	var builds []string
	for made := range found {
		if made.driver == driver {
			builds = append(builds, made.build)
		}
	}
	return builds, nil
}

// inBlobs says what content is in. It never changes, so what was read is
// remembered: a tenant with a quota has all of its own asked for with every
// snapshot.
func (c *contents) inBlobs(ctx context.Context, manifest string) ([]snapshot.Blob, error) {
	c.mu.Lock()
	known, ok := c.mu.blobsOf[manifest]
	c.mu.Unlock()
	if ok {
		return known, nil
	}
	id, err := cas.ParseID(manifest)
	if err != nil {
		return nil, err
	}
	found, whole, err := snapshot.Blobs(ctx, c.cfg.Store, id)
	if err != nil || !whole {
		return found, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.blobs+len(found) > mostBlobs {
		clear(c.mu.blobsOf)
		c.mu.blobs = 0
	}
	if _, ok := c.mu.blobsOf[manifest]; !ok {
		c.mu.blobsOf[manifest] = found
		c.mu.blobs += len(found)
	}
	return found, nil
}

// forgetBlobsLocked forgets what content was in that is gone.
func (c *contents) forgetBlobsLocked(kept map[cas.ID]bool) {
	for m, blobs := range c.mu.blobsOf {
		if !kept[cas.ID(m)] {
			delete(c.mu.blobsOf, m)
			c.mu.blobs -= len(blobs)
		}
	}
}
