package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/steplog"
)

// RecordSink is told of each record with the cursor after it, and now and then of none:
// the caller is there, and nothing happens.
type RecordSink func(r *ship.Record, cursor string) error

// ExportRequest asks for the records of a run.
type ExportRequest struct {
	Run      string
	Format   string // "" = jsonl; parquet and atif are one file
	Cursor   string // of jsonl: from where
	Follow   bool   // of jsonl: until the run is over
	HeadOnly bool
}

// ExportRun tells of all records of a run, as jsonl, or sends them as one file: Parquet,
// or a trajectory of ATIF a line.
func (s *Server) ExportRun(ctx context.Context, r ExportRequest, tell RecordSink, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "run.export", about("run", r.Run))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := call.needs(reads("", "grades")); err != nil {
		return err
	}
	switch r.Format {
	case "", "jsonl":
		return s.tellRecords(ctx, r.Run, r.Cursor, r.Follow, tell)
	case "parquet", "atif":
		return s.sendRecords(ctx, r, to)
	}
	return sandbox.InvalidField("format", "%.40q is not accepted; jsonl, parquet and atif are", r.Format)
}

// tellRecords begins at a cursor; with follow it goes on until the run is over.
func (s *Server) tellRecords(ctx context.Context, run, from string, follow bool, tell RecordSink) error {
	r, at, err := s.readSteps(ctx, run, from)
	if err != nil {
		return err
	}
	quiet := time.NewTicker(s.cfg.KeepAlive)
	defer quiet.Stop()
	look := time.NewTicker(time.Second) // a run that ends tells nobody
	defer look.Stop()
	for {
		_, changed := r.log.End()
		lasts := follow && (s.leases.seeRun(ctx, r.run, func(*heldLease) {}) || r.busy() > 0) // before reading, so that its last records are read
		if at, err = readRecords(ctx, r.log, r.tenant, r.run, at, tell); err != nil || !lasts {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-look.C:
		case <-quiet.C:
			if err := tell(nil, cursor(r.run, at)); err != nil {
				return err
			}
		}
	}
}

// readRecords tells of what a log has from a place on, and returns the place it came to.
func readRecords(ctx context.Context, log *steplog.Log, tenant, run string, from int64, tell RecordSink) (at int64, err error) {
	var bad error
	at, err = log.Read(from, func(raw []byte, after int64) bool {
		rec, ok, err := shippedRecord(tenant, raw)
		if bad = errors.Join(err, ctx.Err()); bad == nil && ok {
			bad = tell(&rec, cursor(run, after))
		}
		return bad == nil
	})
	return at, errors.Join(err, bad)
}

func (s *Server) sendRecords(ctx context.Context, req ExportRequest, to Sending) error {
	r, _, err := s.readSteps(ctx, req.Run, "")
	if err != nil {
		return err
	}
	body := &firstWrite{to: to, what: FileContent{Length: -1}}
	switch {
	case req.HeadOnly:
	case req.Format == "parquet":
		err = exportParquet(ctx, r, body)
	default:
		err = exportATIF(ctx, r, s.cfg.Version, body)
	}
	return body.finish(err)
}

func exportParquet(ctx context.Context, r opened, to io.Writer) error {
	w := ship.NewParquetWriter(to)
	_, err := readRecords(ctx, r.log, r.tenant, r.run, 0, func(rec *ship.Record, _ string) error { return w.Write(*rec) })
	if err != nil {
		return err
	}
	return w.Close()
}

// maxTrajectory is what an episode may have to be one document, which is made in memory.
const maxTrajectory = 128 << 20

// exportATIF goes through the log twice: first for where the records of each episode
// are, then episode by episode, so that no more than one is in memory.
func exportATIF(ctx context.Context, r opened, version string, to io.Writer) error {
	places, sizes := map[ship.EpisodeKey][]int64{}, map[ship.EpisodeKey]int64{}
	var order []ship.EpisodeKey
	before := int64(0)
	var bad error
	_, err := r.log.Read(0, func(raw []byte, after int64) bool {
		rec, ok, err := shippedRecord(r.tenant, raw)
		if bad = errors.Join(err, ctx.Err()); bad != nil {
			return false
		}
		if ok {
			k := rec.Key()
			if places[k] == nil {
				order = append(order, k)
			}
			places[k] = append(places[k], before)
			if sizes[k] += after - before; sizes[k] > maxTrajectory {
				bad = &sandbox.Error{Class: sandbox.TooLarge, Msg: "the episode " + k.Sandbox + " has more than " + sandbox.FormatSize(maxTrajectory) + " of records, too much for one document",
					Hint: "export it as jsonl or parquet"}
				return false
			}
		}
		before = after
		return true
	})
	if err := errors.Join(err, bad); err != nil {
		return err
	}
	out := json.NewEncoder(to)
	out.SetEscapeHTML(false)
	for _, k := range order {
		records := make([]ship.Record, 0, len(places[k]))
		for _, at := range slices.Compact(places[k]) {
			raw, err := r.log.ReadAt(at)
			if err != nil {
				return err
			}
			rec, _, err := shippedRecord(r.tenant, raw)
			if err != nil {
				return err
			}
			records = append(records, rec)
		}
		if t, ok := ship.NewTrajectory(version, k, records); ok {
			if err := out.Encode(t); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}
