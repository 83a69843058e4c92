package server

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

func pulledOnly(sh sandbox.Shipment) error {
	if sh.Sink.Kind != sandbox.PullSink {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "shipment '" + sh.Name + "' delivers by itself", Hint: "one of kind pull is read: cove ship create NAME --pull"}
	}
	return nil
}

// ReadShipment tells a consumer of the records of a shipment that is pulled, each run
// from where it was acknowledged, or from a cursor that the consumer kept of it. With
// follow it does not end.
func (s *Server) ReadShipment(ctx context.Context, ref, from string, follow bool, tell RecordSink) (err error) {
	ctx, call, err := s.begin(ctx, "shipment.read", about("shipment", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	sh, err := s.shipment(ctx, ref)
	if err == nil {
		err = firstError(pulledOnly(sh), call.needs(reads("", "processes"), reads("", "grades")))
	}
	if err != nil {
		return err
	}
	p := s.ships.get(sh.ID)
	if p == nil {
		return sandbox.NoSuchShipment(ref)
	}
	places := map[string]int64{}
	if from != "" {
		run, at, err := splitCursor(from)
		if err != nil {
			return err
		}
		places[run] = at
	}
	quiet := time.NewTicker(s.cfg.KeepAlive)
	defer quiet.Stop()
	for {
		p.mu.Lock()
		changed, gone, paused := p.mu.changed.Next(), p.mu.gone, p.mu.Paused
		var runs []string
		for run, place := range p.mu.runs {
			if _, known := places[run]; !known {
				places[run] = place.at
			}
			if place.end > places[run] {
				runs = append(runs, run)
			}
		}
		p.mu.Unlock()
		if gone {
			return sandbox.NoSuchShipment(ref)
		}
		slices.Sort(runs)
		if paused {
			runs = nil
		}
		for _, run := range runs {
			log, err := s.steps.logs.Load().Open(p.tenant, run)
			if err != nil {
				return err
			}
			if places[run], err = readRecords(ctx, log, p.tenant, run, places[run], tell); err != nil {
				return err
			}
		}
		if !follow {
			return nil
		}
		select {
		case <-changed:
		case <-quiet.C:
			if err := tell(nil, ""); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func splitCursor(c string) (run string, at int64, err error) {
	run, _, _ = strings.Cut(c, ".")
	at, err = position(run, c)
	if err == nil && !sandbox.ValidID(run) {
		err = sandbox.InvalidField("cursor", "%.80q is none; that of a record is accepted", c)
	}
	return run, at, err
}

// AckShipment says that all records of a run up to a cursor have arrived: they are not
// told again, and hold nothing back. What was acknowledged before changes nothing.
func (s *Server) AckShipment(ctx context.Context, ref, upTo string) (out ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.ack", about("shipment", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	sh, err := s.shipment(ctx, ref)
	if err == nil {
		err = pulledOnly(sh)
	}
	if err != nil {
		return out, err
	}
	run, to, err := splitCursor(upTo)
	if err != nil {
		return out, err
	}
	s.shipTurn.Lock() // one at a time: what is durable and what is in memory go together
	defer s.shipTurn.Unlock()
	p := s.ships.get(sh.ID)
	if p == nil {
		return out, sandbox.NoSuchShipment(ref)
	}
	p.mu.Lock()
	have := p.mu.runs[run]
	var place shipPlace
	if have != nil {
		place = *have
	}
	p.mu.Unlock()
	switch {
	case have == nil || to > place.end:
		return out, sandbox.InvalidField("cursor", "%.80q is not one of this shipment; that of a record is accepted", upTo)
	case to <= place.at:
		return p.status(), nil
	}
	// It counts what is acknowledged, and finds out whether the cursor is the end of a record.
	log, err := s.steps.logs.Load().Open(p.tenant, run)
	if err != nil {
		return out, err
	}
	if err := log.Sync(); err != nil {
		return out, err
	}
	last, bad := place.at, error(nil)
	_, err = log.Read(place.at, func(raw []byte, after int64) bool {
		var kind byte
		if kind, _, _, _, bad = decodeRecord(raw); bad != nil || after > to {
			return false
		}
		if last = after; isShipped(kind) {
			place.records++
		}
		return after < to
	})
	if err := firstError(err, bad); err != nil {
		return out, err
	}
	if last != to {
		return out, sandbox.InvalidField("cursor", "%.80q is not one of this shipment; that of a record is accepted", upTo)
	}
	place.at = to
	ctx = context.WithoutCancel(ctx)
	if err := s.store.PutPosition(ctx, p.id, sandbox.ShipmentPosition{Run: run, At: to, Records: place.records}); err != nil {
		return out, err
	}
	p.mu.Lock()
	if have := p.mu.runs[run]; have != nil {
		p.mu.lag -= to - have.at
		p.mu.records += place.records - have.records
		have.at, have.records = to, place.records
	}
	p.mu.took = s.cfg.Clock().UTC()
	p.mu.changed.Tell()
	p.mu.Unlock()
	return p.status(), nil
}
