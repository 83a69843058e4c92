package server

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// pumpBytes is how much output waits for a slow reader before the guest is
	// made to wait.
	pumpBytes = 1 << 20
	// pumpMerge is the largest message that small outputs are joined to.
	pumpMerge = 256 << 10
)

// pump carries a process's events from the guest to the client. An event is
// sent as soon as the one before is out; what arrives meanwhile is joined and
// sent together. Nothing is ever held back to wait for more, except the end:
// its sender may know better why.
type pump struct {
	sink  ProcessSink
	quiet time.Duration

	// Set by run, read after it.
	started bool
	offset  int64 // after the last byte sent
	end     *sandbox.ProcessEnd
	sendErr error

	wake    chan struct{} // capacity 1: the queue is not empty
	emptied chan struct{} // capacity 1: it was

	mu struct {
		sync.Mutex
		queue []sandbox.ProcessEvent
		bytes int // of output in queue
	}
}

func newPump(sink ProcessSink, quiet time.Duration) *pump {
	return &pump{sink: sink, quiet: quiet, wake: make(chan struct{}, 1), emptied: make(chan struct{}, 1)}
}

// run ranges over what follow gives until it ends and everything it gave is
// sent, and returns its error. After a failed send (sendErr) follow's context
// ends.
func (p *pump) run(ctx context.Context, follow func(context.Context) iter.Seq2[sandbox.ProcessEvent, error]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- p.take(ctx, follow(ctx)) }()

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

// take queues events as they come.
func (p *pump) take(ctx context.Context, events iter.Seq2[sandbox.ProcessEvent, error]) error {
	for ev, err := range events {
		if err == nil {
			err = p.put(ctx, ev)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// put queues an event, or waits until there is less of it. The data is copied: the guest's
// connection reads the next frame into the same buffer.
func (p *pump) put(ctx context.Context, ev sandbox.ProcessEvent) error {
	for {
		p.mu.Lock()
		if p.mu.bytes < pumpBytes || ev.Output == nil {
			break
		}
		p.mu.Unlock()
		select {
		case <-p.emptied:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	defer p.mu.Unlock()
	if o := ev.Output; o != nil {
		p.mu.bytes += len(o.Data)
		if last := p.lastOutputLocked(); last != nil && last.Stream == o.Stream && last.Offset+int64(len(last.Data)) == o.Offset &&
			len(last.Data)+len(o.Data) <= pumpMerge {
			last.Data = append(last.Data, o.Data...)
			return nil
		}
		ev.Output = &sandbox.Output{Stream: o.Stream, Offset: o.Offset, Data: append([]byte(nil), o.Data...)}
	}
	p.mu.queue = append(p.mu.queue, ev)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

func (p *pump) lastOutputLocked() *sandbox.Output {
	if len(p.mu.queue) == 0 {
		return nil
	}
	return p.mu.queue[len(p.mu.queue)-1].Output
}

// flush sends what is queued now, as one write where it fits.
func (p *pump) flush() {
	p.mu.Lock()
	evs := p.mu.queue
	p.mu.queue, p.mu.bytes = nil, 0
	p.mu.Unlock()
	select {
	case p.emptied <- struct{}{}:
	default:
	}
	p.deliver(evs)
}

func (p *pump) deliver(evs []sandbox.ProcessEvent) {
	if len(evs) == 0 || p.sendErr != nil {
		return
	}
	for i, ev := range evs {
		switch {
		case ev.End != nil: // there is nothing behind it
			p.end, evs = ev.End, evs[:i]
		case ev.Started != nil:
			p.started = true
		case ev.Output != nil:
			p.offset = ev.Output.Offset + int64(len(ev.Output.Data))
		case ev.Lost != nil:
			p.offset = ev.Lost.To
		}
	}
	if len(evs) > 0 {
		// With an end in hand the stream is about to finish, which flushes.
		p.sendErr = p.sink(evs, p.end == nil)
	}
}

// finish sends the end. The stream's own end follows in the same write.
func (p *pump) finish(end sandbox.ProcessEnd) error {
	return p.sink([]sandbox.ProcessEvent{{End: &end}}, false)
}
