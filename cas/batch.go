package cas

import (
	"context"
	"io"
	"sync/atomic"

	"github.com/cove-sandbox/cove/sandbox"
)

// plainBatch is a Batch over a store that has none of its own.
type plainBatch struct {
	s    Store
	over atomic.Bool
}

func (b *plainBatch) Put(ctx context.Context, r io.Reader, opts ...PutOption) (Info, error) {
	if b.over.Load() {
		return Info{}, ErrBatchOver("cas.put")
	}
	return b.s.Put(ctx, r, opts...)
}

func (b *plainBatch) Commit(context.Context) error {
	if b.over.Swap(true) {
		return ErrBatchOver("cas.commit")
	}
	return nil
}

func (b *plainBatch) Abort() error {
	b.over.Store(true)
	return nil
}

// ErrBatchOver is the answer to a call on a batch that was committed or aborted.
func ErrBatchOver(op string) error {
	return &sandbox.Error{Class: sandbox.Precondition, Op: op, Msg: "the batch is over", Hint: "begin another"}
}
