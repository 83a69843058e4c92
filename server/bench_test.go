package server

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// The API's own share: the node does nothing here, the store is real.

func benchWorld(b *testing.B) *world {
	return newWorld(b, func(c *Config) { c.Logger = slog.New(slog.DiscardHandler) })
}

func BenchmarkCreate(b *testing.B) {
	for name, key := range map[string]bool{"plain": false, "idempotent": true} {
		b.Run(name, func(b *testing.B) {
			w := benchWorld(b)
			for b.Loop() {
				k := ""
				if key {
					k = sandbox.NewID(w.server.cfg.Rand)
				}
				if _, err := w.createWith(b.Context(), k, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkExecTrue(b *testing.B) {
	w := benchWorld(b)
	sb := w.create(nil)
	for b.Loop() {
		if _, end, err := rest(w.start(sb.Id, "", "true")); err != nil || end == nil {
			b.Fatal(err)
		}
	}
}

// What a step adds to an exec, and nothing else of it: two records.
func BenchmarkStep(b *testing.B) {
	w, sb := stepping(b, func(c *Config) { c.Logger = slog.New(slog.DiscardHandler) })
	end := sandbox.ProcessEnd{End: sandbox.End{Cause: sandbox.Exited, At: time.Now()}}
	for b.Loop() {
		st, err := w.server.beginStep(w.all(), StartRequest{Sandbox: sb.Id, Process: sandbox.ProcessSpec{ExecID: sandbox.NewID(w.server.cfg.Rand), Args: []string{"true"}}})
		if err != nil || st == nil {
			b.Fatal(st, err)
		}
		w.server.endStep(st, stepEnded, end)
	}
}

func BenchmarkGet(b *testing.B) {
	w := benchWorld(b)
	sb := w.create(nil)
	for b.Loop() {
		w.get(sb.Id)
	}
}

// pipeNode moves bulk content at the speed of a pipe.
type pipeNode struct{ *double }

func (n pipeNode) Upload(_ context.Context, _ string, _ node.Upload, r io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, make([]byte, 1<<20))
	return err
}

func (n pipeNode) Download(_ context.Context, _ string, from node.Download, w io.Writer) error {
	buf := make([]byte, 1<<20)
	for left := from.Length; left > 0; {
		m, err := w.Write(buf[:min(left, int64(len(buf)))])
		if err != nil {
			return err
		}
		left -= int64(m)
	}
	return nil
}

func BenchmarkTransfer(b *testing.B) {
	const size = 64 << 20
	data := make([]byte, size)
	w := newWorld(b, func(c *Config) {
		c.Logger = slog.New(slog.DiscardHandler)
		c.Node = pipeNode{c.Node.(*double)}
	})
	sb := w.create(nil)
	w.put(sb.Id, "/f", data)
	b.Run("up", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			if err := w.client.Upload(b.Context(), sb.Id, "/f", bytes.NewReader(data), size, sandbox.WriteOptions{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("down", func(b *testing.B) {
		b.SetBytes(size)
		buf := make([]byte, 1<<20)
		for b.Loop() {
			body, _, err := w.client.Download(b.Context(), sb.Id, "/f", 0, 0)
			if err != nil {
				b.Fatal(err)
			}
			if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{body}, buf); n != size || err != nil {
				b.Fatal(n, err)
			}
			_ = body.Close()
		}
	})
}
