package server

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
)

// deliverAll is the work of one shipment until ctx ends.
func (b *shipBook) deliverAll(ctx context.Context, p *shipping) {
	p.mu.Lock()
	pace := ship.Pace{Size: ship.SizeFor(p.mu.Sink), Linger: p.mu.Linger}
	pace.Size.Bytes = min(pace.Size.Bytes, p.mu.MaxLag/2) // long before steps are held back
	p.mu.Unlock()
	var sink ship.Sink
	defer func() {
		if sink != nil {
			_ = sink.Close() // what was delivered is durable
		}
	}()
	for ctx.Err() == nil {
		p.mu.Lock()
		lag, paused, flush, kept := p.mu.lag, p.mu.Paused, p.mu.flush, p.mu.Shipment
		p.mu.Unlock()
		now := time.Now()
		if lag > 0 {
			pace.Waits(now)
		}
		wait, due := pace.Due(now, lag)
		if due && flush && pace.Failures() == 0 {
			wait = 0
		}
		switch {
		case paused || !due:
			wait = time.Hour
		case wait == 0:
			err := ctx.Err()
			if sink == nil {
				sink, err = b.s.openSink(kept)
			}
			if err == nil {
				err = b.sweep(ctx, p, sink, pace.Size)
			}
			b.note(ctx, p, &pace, err)
			if err != nil && sink != nil { // a file that failed once is opened anew
				_ = sink.Close()
				sink = nil
			}
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-p.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// note keeps what came of a sweep.
func (b *shipBook) note(ctx context.Context, p *shipping, pace *ship.Pace, err error) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.mu.failed, p.mu.flush = nil, p.mu.flush && p.mu.lag > 0
		pace.Delivered(now, p.mu.lag > 0)
	case ctx.Err() != nil:
		return
	default:
		e := *sandbox.AsError(err)
		if p.mu.failed == nil {
			b.s.log.Warn("a shipment is not taken; it is tried again", "shipment", p.mu.Name, "tenant", p.tenant, "err", err)
		}
		p.mu.failed, p.mu.failedAt, p.mu.flush = &e, b.s.cfg.Clock().UTC(), false
		pace.Failed(now, err)
	}
	p.mu.changed.Tell()
}

// sweep delivers what waits now, run by run.
func (b *shipBook) sweep(ctx context.Context, p *shipping, sink ship.Sink, size ship.Size) error {
	p.mu.Lock()
	ends := map[string]int64{}
	for run, place := range p.mu.runs {
		if place.end > place.at {
			ends[run] = place.end
		}
	}
	p.mu.Unlock()
	runs := make([]string, 0, len(ends))
	for run := range ends {
		runs = append(runs, run)
	}
	slices.Sort(runs)
	for _, run := range runs {
		for more := true; more; {
			var err error
			if more, err = b.deliverOne(ctx, p, sink, size, run, ends[run]); err != nil {
				return err
			}
		}
	}
	return nil
}

// deliverOne delivers a batch of a run and says whether there is more up to an end.
func (b *shipBook) deliverOne(ctx context.Context, p *shipping, sink ship.Sink, size ship.Size, run string, end int64) (more bool, err error) {
	p.mu.Lock()
	have := p.mu.runs[run]
	if have == nil || p.mu.Paused {
		p.mu.Unlock()
		return false, nil
	}
	place := *have
	p.mu.Unlock()
	if place.pending > 0 { // the same bytes as the last time
		end, size = place.pending, ship.Size{Records: int(^uint(0) >> 1), Bytes: place.pending - place.at}
	}
	select {
	case b.turns <- struct{}{}:
		defer func() { <-b.turns }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	batch, reached, err := b.read(p.tenant, run, place.at, end, size)
	if err != nil {
		return false, err
	}
	if reached < place.end { // half a record at its end, which a crash left, was cut off
		p.mu.Lock()
		defer p.mu.Unlock()
		if have := p.mu.runs[run]; have != nil && have.end == place.end {
			have.end = max(reached, have.at)
			p.countLocked()
		}
		return false, nil
	}
	if len(batch.Records) > 0 {
		if place.pending == 0 {
			place.pending = batch.To
			if err := b.put(ctx, p, run, place); err != nil {
				return false, err
			}
		}
		if err := ship.Deliver(ctx, sink, batch); err != nil {
			return false, err
		}
		place.records += int64(len(batch.Records))
		place.at, place.pending = batch.To, 0
		if err := b.put(ctx, p, run, place); err != nil {
			return false, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if have := p.mu.runs[run]; have != nil {
		p.mu.lag -= batch.To - have.at
		p.mu.records += place.records - have.records
		have.at, have.pending, have.records = batch.To, 0, place.records
	}
	if len(batch.Records) > 0 {
		p.mu.took = b.s.cfg.Clock().UTC()
	}
	p.mu.changed.Tell()
	return batch.To < end, nil
}

// put keeps how far a shipment is. What is in memory follows when it is durable: a
// batch whose end is not on record yet has none.
func (b *shipBook) put(ctx context.Context, p *shipping, run string, place shipPlace) error {
	if err := b.s.store.PutPosition(ctx, p.id, sandbox.ShipmentPosition{Run: run, At: place.at, Pending: place.pending, Records: place.records}); err != nil {
		return err
	}
	if place.pending > 0 {
		p.mu.Lock()
		defer p.mu.Unlock()
		if have := p.mu.runs[run]; have != nil {
			have.pending = place.pending
		}
	}
	return nil
}

// read is what of a log is shipped between two places, as much as a batch may have, and
// where the log ends. What is shipped is durable: a machine that loses its last tenth of
// a second must not write other records where a shipment has been already.
func (b *shipBook) read(tenant, run string, from, end int64, size ship.Size) (batch ship.Batch, reached int64, err error) {
	log, err := b.s.steps.logs.Load().Open(tenant, run)
	if err != nil {
		return batch, 0, err
	}
	batch = ship.Batch{Run: run, From: from, To: from}
	if reached, _ = log.End(); from >= reached {
		return batch, reached, nil
	}
	if err := log.Sync(); err != nil {
		return batch, reached, err
	}
	var bad error
	_, err = log.Read(from, func(raw []byte, after int64) bool {
		r, ok, err := shippedRecord(tenant, raw)
		if bad = err; bad != nil {
			return false
		}
		batch.To = after
		if ok {
			batch.Records = append(batch.Records, r)
		}
		return after < end && len(batch.Records) < size.Records && after-from < size.Bytes
	})
	return batch, reached, errors.Join(err, bad)
}
