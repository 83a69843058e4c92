package recording

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// Exchanges lists what is on a recording, after a number, at most so many.
func (l *Library) Exchanges(ctx context.Context, id string, after int64, limit int) ([]sandbox.RecordedExchange, error) {
	t, release, err := l.Read(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	return t.list(uint32(min(max(after, 0), maxExchanges)), limit)
}

// Export writes a recording as anybody can read it: not sealed, without whose it was,
// and with an end, so that whoever imports it can tell that it is all there. With
// har it is a HAR instead.
func (l *Library) Export(ctx context.Context, id string, har bool, w io.Writer) error {
	if har {
		return l.exportHAR(ctx, id, w)
	}
	t, release, err := l.Read(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	out := bufio.NewWriterSize(w, 128<<10)
	out.Write(preamble(false)) // a failure stays until Flush
	h := t.Header
	h.Tenant, h.Name = "", ""
	c := copier{w: out}
	if err := c.json(kindHeader, h); err != nil {
		return err
	}
	if err := c.frames(ctx, t); err != nil {
		return err
	}
	end := finish{At: l.cfg.Now().UTC()}
	if t.finished != nil {
		end = *t.finished
	}
	if err := c.json(kindFinish, end); err != nil {
		return err
	}
	return out.Flush()
}

// unpackedPerByte is how much larger than a recording may be on disk its content may
// be, all frames together: text packs ten to one.
const unpackedPerByte = 32

// Import takes in a recording that Export wrote, or that somebody says it did. All of
// it is checked before it is there.
func (l *Library) Import(ctx context.Context, id string, r io.Reader) (is sandbox.Recording, err error) {
	const op = "recordings.import"
	now := l.cfg.Now().UTC()
	h := Header{ID: id, Created: now, Imported: now}
	if !validID.MatchString(h.ID) {
		return is, sandbox.InvalidField("recording.id", "%q", h.ID)
	}
	raw, err := os.CreateTemp(l.cfg.Dir, importMark+"*")
	if err != nil {
		return is, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	defer os.Remove(raw.Name())
	defer raw.Close()
	n, err := io.Copy(raw, io.LimitReader(r, l.cfg.Limits.Recording+1))
	switch {
	case err != nil:
		return is, err
	case n > l.cfg.Limits.Recording:
		return is, &sandbox.Error{Class: sandbox.TooLarge, Op: op, Msg: "a recording has at most " + sandbox.FormatSize(l.cfg.Limits.Recording)}
	}
	// Two passes over what a few bytes may stand for megabytes of.
	left := 2 * unpackedPerByte * l.cfg.Limits.Recording
	t, err := read(raw, n, nil, func(n int) error {
		if left -= int64(n); left < 0 {
			return &sandbox.Error{Class: sandbox.TooLarge, Op: op, Msg: "the recording unpacks to far more than it says; it holds at most " +
				sandbox.FormatSize(unpackedPerByte*l.cfg.Limits.Recording)}
		}
		return ctx.Err()
	})
	if err != nil {
		return is, invalid(op, err)
	}
	if t.finished == nil || t.whole != n {
		return is, (&sandbox.Error{Class: sandbox.Invalid, Op: op, Msg: "the recording is cut off"}).WithHint("export it again")
	}
	final, err := os.CreateTemp(l.cfg.Dir, importMark+"*")
	if err != nil {
		return is, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	defer os.Remove(final.Name()) // if it is not renamed by then
	rec, err := l.start(final, h)
	if err != nil {
		return is, sandbox.Errorf(sandbox.Unavailable, op, "%w", errors.Join(err, final.Close()))
	}
	c := copier{sealer: rec.sealer, at: rec.mu.size, w: io.NewOffsetWriter(final, rec.mu.size)}
	if err := c.frames(ctx, t); err != nil {
		return is, errors.Join(err, final.Close())
	}
	rec.mu.size, rec.mu.is.Dropped = c.at, t.finished.Dropped
	t.count(&rec.mu.is)
	is, err = rec.finish(t.finished.Interrupted)
	if err != nil {
		return is, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return is, errClosed
	}
	if l.mu.recordings[h.ID] != nil {
		return is, sandbox.Errorf(sandbox.AlreadyExists, op, "recording %s exists", h.ID)
	}
	if err := durable.Rename(final.Name(), l.path(h.ID)); err != nil {
		return is, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	l.mu.recordings[h.ID] = &held{is: is}
	return is, nil
}

// invalid is what is wrong with a recording that somebody sent: their mistake, where
// of one of our own it would be damage.
func invalid(op string, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return err
	}
	c := *e
	c.Op = op
	switch e.Class {
	case sandbox.Corrupt:
		c.Class = sandbox.Invalid
	case sandbox.Precondition:
		c.Class, c.Hint = sandbox.Invalid, "cove recording export writes one that is not encrypted"
	}
	return &c
}

// copier writes frames of one recording into another.
type copier struct {
	sealer Sealer
	at     int64
	w      io.Writer
}

func (c *copier) json(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.put(k, 0, b)
}

func (c *copier) put(k kind, exchange uint32, payload []byte) error {
	b := appendFrame(nil, c.sealer, c.at, k, exchange, payload)
	n, err := c.w.Write(b)
	c.at += int64(n)
	return err
}

// frames copies all but the recording's own, up to the last whole one.
func (c *copier) frames(ctx context.Context, t *Recording) error {
	sc := t.scan
	sc.at, sc.size = preambleLen, t.whole
	for {
		f, err := sc.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if k := f.kind &^ compressed; k == kindHeader || k == kindFinish {
			continue
		}
		p, err := sc.payload(f)
		if err != nil {
			return err
		}
		if err := c.put(f.kind&^compressed, f.exchange, p); err != nil {
			return err
		}
	}
}

func (t *Recording) list(after uint32, limit int) (out []sandbox.RecordedExchange, err error) {
	sc := t.scan
	for i := range t.Exchanges {
		e := &t.Exchanges[i]
		if e.Number <= after {
			continue
		}
		if len(out) == limit {
			break
		}
		x := sandbox.RecordedExchange{Number: int64(e.Number), Method: e.Request.Method, URL: e.Request.URL(), Sent: e.end.Request, Received: e.end.Answer,
			Truncated: e.unreplayable() != ""}
		var h requestHead
		if err := sc.json(e.request, &h); err != nil {
			return nil, err
		}
		x.At, x.Took = h.At, max(0, e.end.At.Sub(h.At)).Round(time.Microsecond)
		if e.end.Failed != nil {
			x.Failed = fmt.Sprintf("%s: %s", e.end.Failed.Class, e.end.Failed.Msg)
		} else {
			var a answerHead
			if err := sc.json(e.answer, &a); err != nil {
				return nil, err
			}
			x.Status = a.Status
		}
		out = append(out, x)
	}
	return out, nil
}
