package ship

import (
	"context"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
)

// Batch is records of one run, in the order of its log. From and To are places in
// it: a batch that is delivered again has the same.
type Batch struct {
	Run      string
	From, To int64
	Records  []Record
}

// Name is the same for the same batch and sorts in the order of the log.
func (b Batch) Name() string { return fmt.Sprintf("%016d-%016d", b.From, b.To) }

// Sink takes batches, one at a time. When Deliver returns nil, the batch outlives a
// crash of both sides. Any error means that the batch comes again, later; one with
// RetryAfter says when, and one of class TooLarge that halves of it may be taken. A
// sink never drops a record.
type Sink interface {
	Deliver(ctx context.Context, b Batch) error
	Close() error
}

// Deliver has a sink take a batch, in parts where all of it is too large.
func Deliver(ctx context.Context, s Sink, b Batch) error {
	err := s.Deliver(ctx, b)
	if sandbox.ClassOf(err) != sandbox.TooLarge || len(b.Records) < 2 {
		return err
	}
	half := len(b.Records) / 2
	for _, part := range [][]Record{b.Records[:half], b.Records[half:]} {
		if err := Deliver(ctx, s, Batch{Run: b.Run, From: b.From, To: b.To, Records: part}); err != nil {
			return err
		}
	}
	return nil
}

// encode is a batch in the format of a sink.
func encode(format sandbox.ShipFormat, b Batch) ([]byte, error) {
	if format == sandbox.Parquet {
		return encodeParquet(b.Records)
	}
	return encodeLines(b.Records)
}

func encodeLines(records []Record) (out []byte, err error) {
	for _, r := range records {
		if out, err = r.AppendJSON(out); err != nil {
			return nil, err
		}
	}
	return out, nil
}
