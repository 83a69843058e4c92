package server

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A shipment is a place in the log of each of its runs. The logs are the queue: they
// are durable, nothing is copied into another, and nothing of a run is removed before
// it was shipped. What waits is bounded by holding back new steps.
//
// Before a batch is delivered the store knows where it ends, after it that it was. So
// one that was delivered when the server died is delivered again as the same batch, and
// replaces itself where a sink names files by it.

// deliveries at once: a batch of Parquet holds up to 64 MiB of the log in memory.
const deliveries = 2

// shipBook is every shipment there is.
type shipBook struct {
	s     *Server
	count atomic.Int64  // of shipments, so that an append of who has none costs nothing
	turns chan struct{} // capacity deliveries
	ctx   context.Context
	halt  context.CancelFunc
	work  sync.WaitGroup

	mu struct {
		sync.Mutex
		of      map[string]*shipping // by id
		started bool                 // deliveries are made
	}
}

// shipping is one shipment under way.
type shipping struct {
	id, tenant, run string        // as in the record
	wake            chan struct{} // capacity 1: something changed
	cancel          context.CancelFunc
	done            chan struct{} // closed when its goroutine has ended; nil = it has none

	mu struct {
		sync.Mutex
		sandbox.Shipment
		runs     map[string]*shipPlace
		lag      int64 // bytes of all runs that wait
		records  int64 // delivered since it was made
		failed   *sandbox.Error
		failedAt time.Time
		took     time.Time // the last delivery
		flush    bool      // what waits goes at once
		gone     bool
		changed  notify.Change // lag, state, or what was acknowledged
	}
}

// shipPlace is how far it is in one run.
type shipPlace struct {
	at, pending, end int64
	records          int64
}

func (b *shipBook) init(s *Server) {
	b.s, b.turns, b.mu.of = s, make(chan struct{}, deliveries), map[string]*shipping{}
	b.ctx, b.halt = context.WithCancel(asServer(context.Background()))
}

// load reads what shipments there are, and how far each is.
func (b *shipBook) load(ctx context.Context) error {
	if b.s.steps.logs.Load() == nil {
		return nil
	}
	list, err := b.s.store.ListShipments(ctx)
	if err != nil {
		return err
	}
	for _, sh := range list {
		if err := b.add(ctx, sh); err != nil {
			return err
		}
	}
	return nil
}

// add makes a shipment known. Appends that happen meanwhile are seen: it is known
// before the logs are measured.
func (b *shipBook) add(ctx context.Context, sh sandbox.Shipment) error {
	p := &shipping{id: sh.ID, tenant: sh.Tenant, run: sh.Run, wake: make(chan struct{}, 1)}
	p.mu.Shipment, p.mu.runs = sh, map[string]*shipPlace{}
	b.mu.Lock()
	b.mu.of[sh.ID] = p
	b.count.Store(int64(len(b.mu.of)))
	started := b.mu.started
	b.mu.Unlock()
	ctx = store.In(ctx, sh.Tenant)
	if err := b.measure(ctx, p); err != nil {
		b.drop(sh.ID)
		return err
	}
	if started {
		b.begin(p)
	}
	return nil
}

func (b *shipBook) measure(ctx context.Context, p *shipping) error {
	positions, err := b.s.store.ListPositions(ctx, p.id)
	if err != nil {
		return err
	}
	p.mu.Lock()
	for _, pos := range positions {
		place := p.placeLocked(pos.Run)
		place.at, place.pending, place.records = pos.At, pos.Pending, pos.Records
		place.end = max(place.end, pos.At, pos.Pending)
		p.mu.records += pos.Records
	}
	p.countLocked()
	p.mu.Unlock()
	runs := []string{p.run}
	if p.run == "" {
		list, err := b.s.store.ListRuns(ctx, true)
		if err != nil {
			return err
		}
		runs = nil
		for _, r := range list {
			runs = append(runs, r.ID)
		}
	}
	for _, run := range runs {
		end, err := b.s.steps.logs.Load().End(p.tenant, run)
		if err != nil {
			return err
		}
		if end > 0 {
			p.reach(run, end)
		}
	}
	return nil
}

func (p *shipping) placeLocked(run string) *shipPlace {
	place := p.mu.runs[run]
	if place == nil {
		place = &shipPlace{}
		p.mu.runs[run] = place
	}
	return place
}

func (p *shipping) countLocked() {
	p.mu.lag = 0
	for _, place := range p.mu.runs {
		p.mu.lag += place.end - place.at
	}
}

// reach says that a log has come so far.
func (p *shipping) reach(run string, end int64) {
	p.mu.Lock()
	place := p.placeLocked(run)
	if end > place.end {
		p.mu.lag += end - place.end
		place.end = end
		p.mu.changed.Tell()
	}
	p.mu.Unlock()
	p.poke()
}

func (p *shipping) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// appended is told by the logs. It must not ask them anything.
func (b *shipBook) appended(tenant, run string, end int64) {
	if b.count.Load() == 0 {
		return
	}
	for _, p := range b.carrying(tenant, run) {
		p.reach(run, end)
	}
}

// carrying is the shipments that a run's records go with.
func (b *shipBook) carrying(tenant, run string) (out []*shipping) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.mu.of {
		if p.tenant == tenant && (p.run == "" || p.run == run) {
			out = append(out, p)
		}
	}
	return out
}

func (b *shipBook) get(id string) *shipping {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.of[id]
}

// drop ends a shipment, and returns when nothing of it is under way.
func (b *shipBook) drop(id string) {
	b.mu.Lock()
	p := b.mu.of[id]
	delete(b.mu.of, id)
	b.count.Store(int64(len(b.mu.of)))
	b.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	p.mu.gone = true
	p.mu.changed.Tell()
	p.mu.Unlock()
	if p.cancel != nil {
		p.cancel()
		<-p.done
	}
}

// forget is of a run that is deleted.
func (b *shipBook) forget(run sandbox.Run) {
	for _, p := range b.carrying(run.Tenant, run.ID) {
		p.mu.Lock()
		delete(p.mu.runs, run.ID)
		p.countLocked()
		p.mu.changed.Tell()
		p.mu.Unlock()
	}
}

// start begins to deliver.
func (b *shipBook) start() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.started = true
	for _, p := range b.mu.of {
		b.begin(p)
	}
}

func (b *shipBook) stop() {
	b.halt()
	b.work.Wait()
}

func (b *shipBook) begin(p *shipping) {
	if p.kind() == sandbox.PullSink {
		return
	}
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(b.ctx)
	p.done = make(chan struct{})
	b.work.Go(func() {
		defer close(p.done)
		b.deliverAll(store.In(ctx, p.tenant), p)
	})
}

func (p *shipping) kind() sandbox.SinkKind {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.Sink.Kind
}

// admit has a new step wait while a shipment of its run is behind, and refuses it if
// that lasts.
func (b *shipBook) admit(ctx context.Context, tenant, run string, most time.Duration) error {
	if b.count.Load() == 0 {
		return nil
	}
	for _, p := range b.carrying(tenant, run) {
		if err := p.admit(ctx, most); err != nil {
			return err
		}
	}
	return nil
}

func (p *shipping) admit(ctx context.Context, most time.Duration) error {
	var over <-chan time.Time
	for {
		p.mu.Lock()
		behind, err := p.mu.lag > p.mu.MaxLag && !p.mu.gone, sandbox.ShipmentIsBehind(p.mu.Shipment, p.mu.lag)
		changed := p.mu.changed.Next()
		p.mu.Unlock()
		if !behind {
			return nil
		}
		if over == nil {
			timer := time.NewTimer(most)
			defer timer.Stop()
			over = timer.C
		}
		select {
		case <-changed:
		case <-over:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// unshipped says whether a run has records that a shipment has not delivered. What is
// not shipped of a log does not count.
func (b *shipBook) unshipped(p *shipping, run sandbox.Run) (bool, error) {
	p.mu.Lock()
	place := shipPlace{}
	if have := p.mu.runs[run.ID]; have != nil {
		place = *have
	}
	p.mu.Unlock()
	if place.at >= place.end {
		return false, nil
	}
	log, err := b.s.steps.logs.Load().Open(run.Tenant, run.ID)
	if err != nil {
		return false, err
	}
	found, bad := false, error(nil)
	_, err = log.Read(place.at, func(raw []byte, _ int64) bool {
		var kind byte
		kind, _, _, _, bad = decodeRecord(raw)
		found = bad == nil && isShipped(kind)
		return bad == nil && !found
	})
	return found, errors.Join(err, bad)
}

// settle has all that waits of a run delivered before it is deleted, and refuses if
// that does not come to pass.
func (b *shipBook) settle(ctx context.Context, run sandbox.Run, most time.Duration) error {
	if b.s.steps.logs.Load() == nil {
		return nil
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	for _, p := range b.carrying(run.Tenant, run.ID) {
		for {
			p.mu.Lock()
			changed, sh, failed := p.mu.changed.Next(), p.mu.Shipment, p.mu.failed
			p.mu.flush = true
			p.mu.Unlock()
			p.poke()
			waits, err := b.unshipped(p, run)
			if err != nil {
				return err
			}
			if !waits {
				break
			}
			refusal := &sandbox.Error{Class: sandbox.Precondition, Msg: "run '" + run.Name + "' has records that shipment '" + sh.Name + "' has not delivered",
				Hint: "\"cove ship show " + sh.Name + "\" says why; resume it, acknowledge them, or delete it: cove ship rm " + sh.Name}
			if sh.Paused || sh.Sink.Kind == sandbox.PullSink || failed != nil {
				return refusal
			}
			select {
			case <-changed:
			case <-timer.C:
				return refusal
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}
