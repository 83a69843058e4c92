package server

import (
	"context"
	"net/http"
	"sync"
	"time"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

const (
	// pumpRoom is how much output waits for a slow reader before the guest is
	// made to wait.
	pumpRoom = 1 << 20
	// pumpMerge is the largest message that small outputs are joined to.
	pumpMerge = 256 << 10
)

// pump carries a process's events from the guest to the client. An event is
// sent as soon as the one before is out; what arrives meanwhile is joined and
// sent together. Nothing is ever held back to wait for more, except the end:
// its sender may know better why.
type pump struct {
	send  func(*covev1.ProcessEvent) error
	batch *batchWriter
	quiet time.Duration

	// Set by run, read after it.
	started bool
	offset  int64 // after the last byte sent
	end     *sandbox.ProcessEnd
	sendErr error

	mu     sync.Mutex
	queue  []sandbox.ProcessEvent
	queued int           // bytes of output in queue
	wake   chan struct{} // capacity 1: queue is not empty
	room   chan struct{} // capacity 1: queue was emptied
}

func newPump(send func(*covev1.ProcessEvent) error, batch *batchWriter, quiet time.Duration) *pump {
	return &pump{send: send, batch: batch, quiet: quiet, wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// run calls follow with a sink until it returns and everything it gave is
// sent, and returns follow's error. After a failed send (sendErr) follow's
// context ends.
func (p *pump) run(ctx context.Context, follow func(context.Context, func(sandbox.ProcessEvent) error) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- follow(ctx, func(ev sandbox.ProcessEvent) error { return p.put(ctx, ev) }) }()

	quiet := time.NewTimer(p.quiet)
	defer quiet.Stop()
	for {
		select {
		case <-p.wake:
		case err := <-done:
			p.flush()
			return err
		case <-quiet.C:
			p.deliver([]sandbox.ProcessEvent{{}}) // an event without content is a keep-alive
		}
		p.flush()
		if p.sendErr != nil {
			cancel()
			return <-done
		}
		quiet.Reset(p.quiet)
	}
}

// put queues an event, or waits for room. The data is copied: the guest's
// connection reads the next frame into the same buffer.
func (p *pump) put(ctx context.Context, ev sandbox.ProcessEvent) error {
	for {
		p.mu.Lock()
		if p.queued < pumpRoom || ev.Output == nil {
			break
		}
		p.mu.Unlock()
		select {
		case <-p.room:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	defer p.mu.Unlock()
	if o := ev.Output; o != nil {
		p.queued += len(o.Data)
		if last := p.lastOutputLocked(); last != nil && last.Stream == o.Stream && last.Offset+int64(len(last.Data)) == o.Offset &&
			len(last.Data)+len(o.Data) <= pumpMerge {
			last.Data = append(last.Data, o.Data...)
			return nil
		}
		ev.Output = &sandbox.Output{Stream: o.Stream, Offset: o.Offset, Data: append([]byte(nil), o.Data...)}
	}
	p.queue = append(p.queue, ev)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

func (p *pump) lastOutputLocked() *sandbox.Output {
	if len(p.queue) == 0 {
		return nil
	}
	return p.queue[len(p.queue)-1].Output
}

// flush sends what is queued now, as one write where it fits.
func (p *pump) flush() {
	p.mu.Lock()
	evs := p.queue
	p.queue, p.queued = nil, 0
	p.mu.Unlock()
	select {
	case p.room <- struct{}{}:
	default:
	}
	p.deliver(evs)
}

func (p *pump) deliver(evs []sandbox.ProcessEvent) {
	if len(evs) == 0 || p.sendErr != nil {
		return
	}
	sent := 0
	p.batch.hold()
	for _, ev := range evs {
		switch {
		case ev.End != nil:
			p.end = ev.End
			continue
		case ev.Started != nil:
			p.started = true
		case ev.Output != nil:
			p.offset = ev.Output.Offset + int64(len(ev.Output.Data))
		case ev.Lost != nil:
			p.offset = ev.Lost.To
		}
		if p.sendErr = p.send(wire.Event(ev)); p.sendErr != nil {
			return
		}
		sent++
	}
	// With an end in hand the stream is about to finish, which flushes.
	p.batch.release(sent > 0 && p.end == nil)
}

// finish sends the end. The stream's own end follows in the same write.
func (p *pump) finish(end sandbox.ProcessEnd) error {
	p.batch.hold()
	return p.send(wire.Event(sandbox.ProcessEvent{End: &end}))
}

// batchWriter lets a handler send several messages and flush once: Connect
// flushes each, which over HTTP/2 is a frame, two goroutine switches and a
// system call. Used by one goroutine. A nil one does nothing.
type batchWriter struct {
	http.ResponseWriter
	flusher http.Flusher
	held    bool
}

func (w *batchWriter) Flush() {
	if !w.held {
		w.flusher.Flush()
	}
}

func (w *batchWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *batchWriter) hold() {
	if w != nil {
		w.held = true
	}
}

func (w *batchWriter) release(flush bool) {
	if w == nil {
		return
	}
	w.held = false
	if flush {
		w.flusher.Flush()
	}
}

type batchContext struct{}

func batchFrom(ctx context.Context) *batchWriter {
	w, _ := ctx.Value(batchContext{}).(*batchWriter)
	return w
}

// batched gives the handlers of process streams their batchWriter.
func batched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f, ok := w.(http.Flusher); ok && (r.URL.Path == covev1.ProcessesStartProcedure || r.URL.Path == covev1.ProcessesAttachProcedure) {
			bw := &batchWriter{ResponseWriter: w, flusher: f}
			w, r = bw, r.WithContext(context.WithValue(r.Context(), batchContext{}, bw))
		}
		next.ServeHTTP(w, r)
	})
}
