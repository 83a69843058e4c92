package volume

import (
	"context"
	"maps"

	"github.com/cove-sandbox/cove/sandbox"
)

// SetLabels replaces what a volume is labelled with.
func (s *Set) SetLabels(_ context.Context, ref string, labels map[string]string) (Volume, error) {
	const op = "volume.set_labels"
	s.mu.Lock()
	defer s.mu.Unlock() // over the write too: it is short and rare
	v, err := s.findLocked(op, ref)
	if err != nil {
		return Volume{}, err
	}
	rec := v.rec
	rec.Labels = maps.Clone(labels)
	if err := s.write(rec); err != nil {
		return Volume{}, sandbox.WithOp(op, fail(op, err))
	}
	v.rec = rec
	return s.describeLocked(v), nil
}
