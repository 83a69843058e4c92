package server

import (
	"context"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxExchanges is how many one GetRecording lists.
const maxExchanges = 1000

// GetRecording finds a recording by its name or id, with so many of its exchanges
// after a number.
func (s *Server) GetRecording(ctx context.Context, name string, after int64, exchanges int) (rec sandbox.Recording, list []sandbox.RecordedExchange, err error) {
	ctx, call, err := s.begin(ctx, "recording.get", about("name", name))
	if err != nil {
		return rec, nil, err
	}
	defer call.end(&err)
	if exchanges < 0 || exchanges > maxExchanges {
		return rec, nil, sandbox.InvalidField("exchanges", "%d; 0 to %d are accepted", exchanges, maxExchanges)
	}
	if after < 0 {
		return rec, nil, sandbox.InvalidField("after", "%d; the number of an exchange is accepted", after)
	}
	err = s.withRecording(ctx, name, func(set node.Recordings, found sandbox.Recording) error {
		rec = found
		if exchanges > 0 {
			list, err = set.Exchanges(ctx, found.ID, after, exchanges)
		}
		return err
	})
	return rec, list, err
}

// ListRecordings costs one query, and one look at those that are being recorded.
func (s *Server) ListRecordings(ctx context.Context) (list []sandbox.Recording, err error) {
	ctx, call, err := s.begin(ctx, "recording.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if _, err := s.recordings(); err != nil {
		return nil, err
	}
	return s.listRecordings(ctx)
}

// DeleteRecording removes a recording that no sandbox records or replays.
func (s *Server) DeleteRecording(ctx context.Context, name string) (err error) {
	ctx, call, err := s.begin(ctx, "recording.delete", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.withRecording(ctx, name, func(_ node.Recordings, rec sandbox.Recording) error { return s.deleteRecording(ctx, rec) })
}

// ExportRecording sends a recording as an archive, or with format "har" as a HAR
// 1.2; with headOnly it only looks whether it could.
func (s *Server) ExportRecording(ctx context.Context, name, format string, headOnly bool, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "recording.export", about("id", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if format != "" && format != "tape" && format != "har" {
		return sandbox.InvalidField("format", "%.40q; tape and har are accepted", format)
	}
	return s.withRecording(ctx, name, func(set node.Recordings, rec sandbox.Recording) error {
		body := &firstWrite{to: to, what: FileContent{Length: -1}}
		if !headOnly {
			err = set.Export(ctx, rec.ID, format == "har", body)
		}
		return body.finish(err)
	})
}

// ImportRecording takes in an archive, under a name or none.
func (s *Server) ImportRecording(ctx context.Context, name string, archive Upload) (rec sandbox.Recording, err error) {
	ctx, call, err := s.begin(ctx, "recording.import", about("name", name))
	if err != nil {
		return rec, err
	}
	defer call.end(&err)
	if name != "" {
		if err := sandbox.ValidateRecordingName("name", name); err != nil {
			return rec, err
		}
	}
	if err := s.admitSnapshot(ctx); err != nil {
		return rec, err
	}
	body, err := boundedUpload(archive, s.cfg.MaxUpload)
	if err != nil {
		return rec, err
	}
	rec, err = s.importRecording(ctx, name, body)
	return rec, body.or(err)
}
