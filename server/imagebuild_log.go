package server

import (
	"bytes"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

// Kinds of events of a build.
const (
	BuildStepBegun  = "step"
	BuildStepCached = "cached"
	BuildStepDone   = "done"
	BuildOutput     = "output"
	BuildWarning    = "warning"
	BuildProgress   = "progress"
)

// ImageBuildEvent is something that happened in a build of an image.
type ImageBuildEvent struct {
	At     time.Time
	Kind   string
	Step   int // 1, 2, … over all stages; 0 = about the build
	Total  int
	Stage  string
	Line   int // of the Dockerfile
	Text   string
	Stream sandbox.Stream // of output
	Took   time.Duration  // of a step that is done
}

// logBytes of a build's events are kept; then the oldest go.
const logBytes = 4 << 20

// buildLog is what a build tells, for those who follow it and who ask later.
type buildLog struct {
	clock  func() time.Time
	hidden []string // values of secrets, which are shown to nobody

	mu struct {
		sync.Mutex
		evs   []ImageBuildEvent
		first int // offset of the first that is kept
		bytes int
		more  notify.Change
	}
}

func (l *buildLog) init(clock func() time.Time, secrets map[string][]byte) {
	l.clock = clock
	for _, v := range secrets {
		whole := strings.TrimSpace(string(v))
		if len(whole) >= 4 { // shorter ones would make holes in any text
			l.hidden = append(l.hidden, whole)
		}
		for line := range strings.Lines(whole) { // of a key, each line tells enough
			if line = strings.TrimSpace(line); len(line) >= 8 && line != whole {
				l.hidden = append(l.hidden, line)
			}
		}
	}
}

func (l *buildLog) hide(s string) string {
	for _, h := range l.hidden {
		s = strings.ReplaceAll(s, h, "***")
	}
	return s
}

func (l *buildLog) add(ev ImageBuildEvent) {
	ev.At = l.clock().UTC()
	ev.Text = l.hide(strings.ToValidUTF8(ev.Text, "\uFFFD"))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.evs = append(l.mu.evs, ev)
	l.mu.bytes += len(ev.Text) + 100
	for l.mu.bytes > logBytes {
		l.mu.bytes -= len(l.mu.evs[0].Text) + 100
		l.mu.evs = l.mu.evs[1:]
		l.mu.first++
	}
	l.mu.more.Tell()
}

// from are events from an offset on, where to go on, and what is closed when there
// are more.
func (l *buildLog) from(offset, limit int) (evs []ImageBuildEvent, next int, more <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	more = l.mu.more.Next()
	end := l.mu.first + len(l.mu.evs)
	offset = max(0, min(offset, end))
	if offset < l.mu.first {
		evs = append(evs, ImageBuildEvent{At: l.mu.evs[0].At, Kind: BuildWarning, Text: "what was printed before this is not kept any more"})
		offset = l.mu.first
	}
	n := min(limit, end-offset)
	evs = append(evs, l.mu.evs[offset-l.mu.first:offset-l.mu.first+n]...)
	return evs, offset + n, more
}

// printed turns what a command prints into events of whole lines, so that a secret
// is not missed for coming in two pieces.
type printed struct {
	log  *buildLog
	ev   ImageBuildEvent
	rest map[sandbox.Stream][]byte
	tail []byte // last of all, for the error
}

// longestLine is what a line may grow to before it is told unended.
const longestLine = 32 << 10

func (p *printed) write(stream sandbox.Stream, data []byte) {
	buf := append(p.rest[stream], data...)
	if i := bytes.LastIndexAny(buf, "\n\r"); i >= 0 {
		p.tell(stream, buf[:i+1])
		buf = buf[i+1:]
	}
	if len(buf) > longestLine {
		p.tell(stream, buf)
		buf = nil
	}
	p.rest[stream] = bytes.Clone(buf)
}

func (p *printed) close() {
	for stream, buf := range p.rest {
		p.tell(stream, buf)
		delete(p.rest, stream)
	}
}

func (p *printed) tell(stream sandbox.Stream, data []byte) {
	if len(data) == 0 {
		return
	}
	ev := p.ev
	ev.Kind, ev.Stream, ev.Text = BuildOutput, stream, string(data)
	p.log.add(ev)
	p.tail = append(p.tail, p.log.hide(string(data))...)
	if over := len(p.tail) - tailBytes; over > 0 {
		p.tail = bytes.Clone(p.tail[over:])
	}
}
