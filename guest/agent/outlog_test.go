package agent

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
)

// Whatever the order of writes, reads, readers coming and going and memory
// pressure, a reader sees exactly the bytes that were written, or is told which
// it lost; and it loses none that were written while it was attached.
func TestLogShowsEveryByteOrSaysLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := &budget{max: rapid.SampledFrom([]int64{64 << 10, 1 << 20, 64 << 20}).Draw(t, "budget")}
		l := &outlog{budget: b}
		var want []byte
		var streams []sandbox.Stream
		type reader struct {
			*logReader
			at       int64
			from     int64 // produced when it came: nothing later may be lost
			finished bool
		}
		var readers []*reader
		closed := false
		step := func(r *reader) {
			got, wait := r.next()
			switch {
			case wait != nil:
				if r.at < int64(len(want)) {
					t.Fatalf("waits at %d of %d", r.at, len(want))
				}
			case got.lost != nil:
				if got.lost.From != r.at || got.lost.To <= r.at || got.lost.To > max(r.from, 0) {
					t.Fatalf("lost %+v at %d, attached at %d", *got.lost, r.at, r.from)
				}
				r.at = got.lost.To
			case got.done:
				if !closed || r.at < int64(len(want)) {
					t.Fatalf("done at %d of %d", r.at, len(want))
				}
				r.finished = true
			default:
				end := got.seg.end()
				if got.seg.offset != r.at || end > int64(len(want)) || !bytes.Equal(got.seg.data, want[r.at:end]) {
					t.Fatalf("wrong bytes at %d", r.at)
				}
				for i := r.at; i < end; i++ {
					if streams[i] != got.seg.stream {
						t.Fatalf("wrong stream at %d", i)
					}
				}
				r.at = end
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) {
				if closed {
					t.Skip()
				}
				s := rapid.SampledFrom([]sandbox.Stream{sandbox.Stdout, sandbox.Stderr}).Draw(t, "stream")
				n := rapid.SampledFrom([]int{1, 7, 255, 256, 4096, 65536, 300_000}).Draw(t, "n")
				p := bytes.Repeat([]byte{byte(len(want)), byte(n), byte(s)}, n/3+1)[:n]
				want = append(want, p...)
				for range n {
					streams = append(streams, s)
				}
				l.append(s, p)
				clear(p) // the log has its own copy
			},
			"attach": func(t *rapid.T) {
				off := rapid.Int64Range(0, int64(len(want))).Draw(t, "off")
				readers = append(readers, &reader{logReader: l.attach(off), at: off, from: int64(len(want))})
			},
			"read": func(t *rapid.T) {
				if len(readers) == 0 {
					t.Skip()
				}
				step(rapid.SampledFrom(readers).Draw(t, "reader"))
			},
			"detach": func(t *rapid.T) {
				if len(readers) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(readers)-1).Draw(t, "i")
				readers[i].detach()
				readers = append(readers[:i], readers[i+1:]...)
			},
			"close": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") == 0 {
					closed = true
					l.close()
				}
			},
			"pressure": func(t *rapid.T) { l.drop(false) },
			"": func(t *rapid.T) {
				held := int64(0)
				for _, s := range l.mu.segs {
					held += int64(cap(s.data))
				}
				if b.held.Load() != held {
					t.Fatalf("budget counts %d, log holds %d", b.held.Load(), held)
				}
				if len(readers) == 0 && l.mu.end-l.mu.start > logCap+segMax {
					t.Fatalf("holds %d", l.mu.end-l.mu.start)
				}
			},
		})
		closed = true
		l.close()
		for _, r := range readers {
			for !r.finished {
				step(r)
			}
			r.detach()
		}
		l.drop(true)
		if b.held.Load() != 0 {
			t.Fatalf("%d bytes are never given back", b.held.Load())
		}
	})
}

func TestTheOldestEndedOutputGoesFirst(t *testing.T) {
	b := &budget{max: 1 << 20}
	var logs []*outlog
	for range 4 {
		l := &outlog{budget: b}
		l.append(sandbox.Stdout, make([]byte, 512<<10))
		l.close()
		b.retire(l)
		logs = append(logs, l)
	}
	if logs[0].mu.end-logs[0].mu.start != 0 || logs[3].mu.end-logs[3].mu.start != 512<<10 || b.held.Load() > b.max {
		t.Errorf("oldest holds %d, newest %d, together %d", logs[0].mu.end-logs[0].mu.start, logs[3].mu.end-logs[3].mu.start, b.held.Load())
	}
}

func TestAWriterWaitsForALaggingReaderAndForNobodyElse(t *testing.T) {
	b := &budget{max: totalLogs}
	l := &outlog{budget: b}
	r := l.attach(0)
	l.append(sandbox.Stdout, make([]byte, logCap))
	free := make(chan struct{})
	go func() { l.waitSpace(nil); close(free) }()
	select {
	case <-free:
		t.Fatal("there was no room")
	default:
	}
	r.next()
	<-free

	l.append(sandbox.Stdout, make([]byte, logCap))
	free = make(chan struct{})
	go func() { l.waitSpace(nil); close(free) }()
	r.detach()
	<-free
}
