package server

import (
	"context"
	"errors"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Images count for each tenant that has a name of its own for them or keeps them
// by use, whoever else does: were the first to pull an image to pay for all, each would learn from
// its own usage what others hold.

// imageBound is how many bytes of images the tenant in scope may name; 0 = any,
// as for names that are everybody's.
func (s *Server) imageBound(ctx context.Context) (int64, error) {
	tenant := store.ScopeOf(ctx).Tenant()
	if tenant == "" {
		return 0, nil
	}
	q, err := s.quotaOf(ctx, tenant, imageQuota)
	return q.ImageBytes, err
}

// admitImage refuses to fetch an image for a tenant that could not name one byte
// more. How large one is, is known only when it is here; the store has the last
// word then, see publish.
func (s *Server) admitImage(ctx context.Context) error {
	most, err := s.imageBound(ctx)
	if err != nil || most == 0 {
		return err
	}
	have, err := s.store.ImageBytes(ctx)
	if err != nil {
		return err
	}
	return quota.Image(sandbox.Quota{ImageBytes: most}, quota.Usage{ImageBytes: have}, 1)
}

// publish gives content a name, unless it was pruned meanwhile or is more than
// the tenant may name. What was fetched for nothing then goes at once, unless
// somebody else has it: a tenant at its bound does not fill the disk.
func (b *imageBook) publish(ctx context.Context, img sandbox.Image, name string) (sandbox.Image, error) {
	most, err := b.bound(ctx)
	if err != nil {
		return sandbox.Image{}, err
	}
	got, err := b.publishWithin(ctx, img, name, most)
	if errors.Is(err, sandbox.ErrQuotaExceeded) {
		if _, cerr := b.collect(ctx, img.ID, false); cerr != nil {
			return got, cerr
		}
	}
	return got, err
}
