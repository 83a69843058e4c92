package server

import (
	"context"
	"crypto/sha256"
	"maps"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// contentSizes says what the content of snapshots in one scope takes, by the blobs it
// is in. What
// a snapshot added to the store is no measure: what others hold too costs it
// nothing, and stays when they go.
type contentSizes struct {
	blobs map[string][]snapshot.Blob // by manifest
	added map[string]int64
}

func (s *Server) sizes(ctx context.Context) (sc contentSizes, err error) {
	if sc.added, err = s.store.SnapshotContents(ctx); err != nil {
		return sc, err
	}
	sc.blobs, err = s.node.Blobs(ctx, slices.Sorted(maps.Keys(sc.added)))
	return sc, err
}

// content of a manifest. What the node cannot read takes what it added, as far
// as anybody knows.
func (sc contentSizes) content(manifest string) []snapshot.Blob {
	if blobs, ok := sc.blobs[manifest]; ok {
		return blobs
	}
	return unread(manifest, sc.added[manifest])
}

// unread stands for content that the node cannot read.
func unread(manifest string, size int64) []snapshot.Blob {
	return []snapshot.Blob{{Sum: sha256.Sum256([]byte(manifest)), Stored: size}}
}

func (sc contentSizes) of(c sandbox.Content) []snapshot.Blob {
	blobs := slices.Clone(sc.content(c.Manifest))
	for _, m := range c.Needs {
		blobs = append(blobs, sc.content(m)...)
	}
	return blobs
}

// snapshotBytes is what the snapshots in scope take, each blob once. Hidden ones
// count: a template's content takes room too.
func (s *Server) snapshotBytes(ctx context.Context) (int64, error) {
	sc, err := s.sizes(ctx)
	if err != nil {
		return 0, err
	}
	var h snapshot.Holding
	for m := range sc.added {
		h.Add(sc.content(m))
	}
	return h.Bytes(), nil
}
