package agent

import (
	"sync"
	"sync/atomic"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	logCap = 4 << 20 // held per process
	// logCapTight is what a process may hold while all of them together are
	// over the budget: one pipe's worth, so that it can still run.
	logCapTight = 64 << 10
	// segMax is how much one segment of a log holds. Dropping is by segment.
	segMax = 64 << 10
)

// outlog holds the latest output of one process, addressed by one offset over
// all its streams. While readers are attached nothing they have not taken is
// dropped: the writer waits. With no reader the oldest bytes go.
type outlog struct {
	budget *budget

	mu struct {
		sync.Mutex
		segs    []segment
		start   int64 // offset of the first byte held
		end     int64 // offset behind the last byte produced
		closed  bool  // no output will follow
		readers map[*logReader]struct{}
		changed notify.Change

		forgotten bool // nothing but an attached reader needs it any more
	}
}

// segment is a run of one stream. Bytes below len(data) never change, so a
// reader may hold data after the lock is gone and even after it was dropped.
type segment struct {
	stream sandbox.Stream
	offset int64
	data   []byte
}

func (s segment) end() int64 { return s.offset + int64(len(s.data)) }

// append adds a copy of p and drops what the cap asks for and no attached
// reader still needs.
func (l *outlog) append(s sandbox.Stream, p []byte) {
	if len(p) == 0 {
		return
	}
	l.mu.Lock()
	grown := int64(0)
	for rest := p; len(rest) > 0; {
		last := len(l.mu.segs) - 1
		if last < 0 || l.mu.segs[last].stream != s || len(l.mu.segs[last].data) == cap(l.mu.segs[last].data) {
			// Double what is held, so that ten bytes cost hundreds and not
			// tens of thousands, and a megabyte costs few segments.
			size := min(max(256, len(rest), int(l.mu.end-l.mu.start)), segMax)
			l.mu.segs = append(l.mu.segs, segment{stream: s, offset: l.mu.end, data: make([]byte, 0, size)})
			grown += int64(size)
			last++
		}
		seg := &l.mu.segs[last]
		n := min(len(rest), cap(seg.data)-len(seg.data))
		seg.data = append(seg.data, rest[:n]...)
		l.mu.end += int64(n)
		rest = rest[n:]
	}
	dropped := l.trimLocked(l.budget.logCap())
	l.mu.changed.Tell()
	l.mu.Unlock()
	l.budget.add(grown - dropped)
}

// trimLocked drops whole segments from the front until at most limit bytes are
// held, but none that an attached reader has yet to take.
func (l *outlog) trimLocked(limit int64) (freed int64) {
	need := l.needLocked()
	n := 0
	for n < len(l.mu.segs) && l.mu.end-l.mu.start > limit && l.mu.segs[n].end() <= need {
		freed += int64(cap(l.mu.segs[n].data))
		l.mu.start = l.mu.segs[n].end()
		n++
	}
	if n > 0 {
		l.mu.segs = append([]segment(nil), l.mu.segs[n:]...)
	}
	return freed
}

// needLocked is the lowest offset an attached reader still needs.
func (l *outlog) needLocked() int64 {
	need := l.mu.end
	for r := range l.mu.readers {
		need = min(need, r.off)
	}
	return need
}

// waitSpace returns when a byte may be added without an attached reader losing
// one, or when stop is closed.
func (l *outlog) waitSpace(stop <-chan struct{}) {
	for {
		l.mu.Lock()
		if len(l.mu.readers) == 0 || l.mu.end-l.needLocked() < l.budget.logCap() {
			l.mu.Unlock()
			return
		}
		ch := l.mu.changed.Next()
		l.mu.Unlock()
		select {
		case <-ch:
		case <-stop:
			return
		}
	}
}

// close says that no output follows.
func (l *outlog) close() {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.changed.Tell()
	l.mu.Unlock()
}

// total is how many bytes were produced.
func (l *outlog) total() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.end
}

// drop gives back all memory that no attached reader waits for; what readers
// that come later ask for is then lost. With forget set the log is given up:
// the rest follows when the last reader leaves.
func (l *outlog) drop(forget bool) {
	l.mu.Lock()
	l.mu.forgotten = l.mu.forgotten || forget
	freed := l.trimLocked(0)
	l.mu.Unlock()
	l.budget.add(-freed)
}

// logReader is one attached reader. Not safe for concurrent use.
type logReader struct {
	log *outlog
	off int64
}

// attach adds a reader that wants the bytes from offset on. An offset beyond
// what was produced waits there.
func (l *outlog) attach(offset int64) *logReader {
	r := &logReader{log: l, off: max(offset, 0)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.readers == nil {
		l.mu.readers = map[*logReader]struct{}{}
	}
	l.mu.readers[r] = struct{}{}
	return r
}

// detach takes the reader away; nothing is kept for it any more.
func (r *logReader) detach() {
	l := r.log
	l.mu.Lock()
	delete(l.mu.readers, r)
	limit := l.budget.logCap()
	if l.mu.forgotten {
		limit = 0
	}
	freed := l.trimLocked(limit)
	l.mu.changed.Tell()
	l.mu.Unlock()
	l.budget.add(-freed)
}

// logRead is one step of a reader: exactly one of data, lost and done is set,
// or none when there is nothing yet.
type logRead struct {
	seg  segment
	lost *sandbox.Lost
	done bool
}

// next takes what is there without waiting. wait is the channel to wait on
// when there was nothing.
func (r *logReader) next() (got logRead, wait <-chan struct{}) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.off < l.mu.start {
		got.lost = &sandbox.Lost{From: r.off, To: l.mu.start}
		r.off = l.mu.start
		return got, nil
	}
	if r.off >= l.mu.end {
		if l.mu.closed {
			return logRead{done: true}, nil
		}
		return got, l.mu.changed.Next()
	}
	lo, hi := 0, len(l.mu.segs) // the segment that holds r.off
	for lo+1 < hi {
		if m := (lo + hi) / 2; l.mu.segs[m].offset <= r.off {
			lo = m
		} else {
			hi = m
		}
	}
	seg := l.mu.segs[lo]
	got.seg = segment{stream: seg.stream, offset: r.off, data: seg.data[r.off-seg.offset : len(seg.data) : len(seg.data)]}
	r.off = seg.end()
	l.mu.changed.Tell() // room for the writer
	return got, nil
}

// budget bounds the memory of all logs of an agent together. Over it, the logs
// of processes that ended longest ago are dropped, then running ones are held
// to logCapTight each.
type budget struct {
	max  int64
	held atomic.Int64

	mu struct {
		sync.Mutex
		ended []*outlog // oldest first
	}
}

func (b *budget) logCap() int64 {
	if b.held.Load() > b.max {
		return logCapTight
	}
	return logCap
}

// add counts memory and reclaims where it is over. It must be called without
// the lock of a log.
func (b *budget) add(n int64) {
	if b.held.Add(n) > b.max && n > 0 {
		b.reclaim()
	}
}

func (b *budget) reclaim() {
	b.mu.Lock()
	ended := append([]*outlog(nil), b.mu.ended...)
	b.mu.Unlock()
	for _, l := range ended {
		if b.held.Load() <= b.max {
			return
		}
		l.drop(false)
	}
}

// retire says that the process of a log has ended: its output may go first.
func (b *budget) retire(l *outlog) {
	b.mu.Lock()
	b.mu.ended = append(b.mu.ended, l)
	b.mu.Unlock()
	if b.held.Load() > b.max {
		b.reclaim()
	}
}

// forget gives up a log whose record is gone.
func (b *budget) forget(l *outlog) {
	b.mu.Lock()
	for i, e := range b.mu.ended {
		if e == l {
			b.mu.ended = append(b.mu.ended[:i], b.mu.ended[i+1:]...)
			break
		}
	}
	b.mu.Unlock()
	l.drop(true)
}
