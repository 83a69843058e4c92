package recording

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Config is what a library is opened with.
type Config struct {
	Dir    string // made if missing
	Node   string
	Limits Limits // what is zero is that of DefaultLimits
	// Sealer makes that of a recording; nil, or nil from it: recordings are not encrypted.
	Sealer func(id string) Sealer
	Logger *slog.Logger
	Now    func() time.Time // time.Now
}

// Library keeps recordings in a directory: ID.recording each, and SANDBOX.ID.at with what a
// replay has used, 4 bytes an exchange. Safe for concurrent use.
type Library struct {
	cfg Config
	log *slog.Logger

	mu struct {
		sync.Mutex
		recordings map[string]*held // by id
		closed     bool
	}
}

// held is a recording that is here.
type held struct {
	is  sandbox.Recording
	rec *Recorder // while it is written

	// Of those who read it. The file is open while users > 0.
	users  int
	loaded *loading
}

// loading is a recording being read, by one for all; fields are set when done is closed.
type loading struct {
	done chan struct{}
	f    *os.File
	rec  *Recording
	err  error
}

const (
	suffix     = ".tape"
	suffixAt   = ".at"
	importMark = ".import-"
)

var validID = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

// OpenLibrary finds the recordings of a directory. Those that were being written are
// open until [Library.Record] goes on with them or [Library.Settle] ends them.
func OpenLibrary(cfg Config) (*Library, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Limits.Body == 0 {
		cfg.Limits.Body = DefaultLimits.Body
	}
	if cfg.Limits.Recording == 0 {
		cfg.Limits.Recording = DefaultLimits.Recording
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Sealer == nil {
		cfg.Sealer = func(string) Sealer { return nil }
	}
	l := &Library{cfg: cfg, log: cfg.Logger}
	l.mu.recordings = map[string]*held{}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, l.broken(err)
	}
	ents, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, l.broken(err)
	}
	for _, e := range ents {
		id, isRecording := strings.CutSuffix(e.Name(), suffix)
		switch {
		case strings.HasPrefix(e.Name(), importMark):
			if err := os.Remove(filepath.Join(cfg.Dir, e.Name())); err != nil {
				return nil, l.broken(err)
			}
		case isRecording && validID.MatchString(id):
			is, err := l.look(id)
			if errors.Is(err, errEmpty) { // its writer was killed before it had said whose it is
				if err := os.Remove(l.path(id)); err != nil {
					return nil, l.broken(err)
				}
				continue
			}
			if err != nil {
				l.log.Error("a recording cannot be read and is left alone", "file", l.path(id), "err", err)
				continue
			}
			l.mu.recordings[id] = &held{is: is}
		}
	}
	return l, nil
}

func (l *Library) broken(err error) error {
	return sandbox.Errorf(sandbox.Unavailable, "recordings.open", "%w", err)
}

func (l *Library) path(id string) string { return filepath.Join(l.cfg.Dir, id+suffix) }

func (l *Library) atPath(box, id string) string {
	return filepath.Join(l.cfg.Dir, ReplayOf(box, id)+suffixAt)
}

// ReplayOf names the replay of a recording in a sandbox.
func ReplayOf(box, recording string) string { return box + "." + recording }

var errEmpty = errors.New("no header")

// look learns of a recording what a list says, from the heads of its frames alone:
// checksums are for whoever plays it.
func (l *Library) look(id string) (is sandbox.Recording, err error) {
	f, err := os.Open(l.path(id))
	if err != nil {
		return is, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return is, err
	}
	if info.Size() < preambleLen {
		return is, errEmpty
	}
	sc, err := openRecording(f, info.Size(), l.cfg.Sealer(id))
	if err != nil {
		return is, err
	}
	var h Header
	first, err := sc.next()
	if errors.Is(err, errTorn) || err == io.EOF {
		return is, errEmpty
	}
	if err := sc.json(first, &h); err != nil {
		return is, err
	}
	is = l.record(h)
	is.ID = id
	for {
		f, err := sc.next()
		if err != nil {
			break
		}
		switch f.kind &^ compressed {
		case kindEnd:
			is.Exchanges++
			var e end
			if err := sc.json(f, &e); err != nil {
				return is, err
			}
			if e.Truncated || e.Upgrade {
				is.Truncated++
			}
		case kindFinish:
			var end finish
			if err := sc.json(f, &end); err != nil {
				return is, err
			}
			is.State, is.FinishedAt, is.Dropped = sandbox.RecordingFinished, end.At, end.Dropped
			if end.Interrupted {
				is.State = sandbox.RecordingInterrupted
			}
		}
	}
	is.Bytes = sc.at
	return is, nil
}

func (l *Library) record(h Header) sandbox.Recording {
	return sandbox.Recording{ID: h.ID, Name: h.Name, Tenant: h.Tenant, Sandbox: h.Sandbox, Node: l.cfg.Node, State: sandbox.RecordingOpen, CreatedAt: h.Created}
}

// Record begins a recording, or goes on with one that an earlier process wrote.
func (l *Library) Record(h Header) (*Recorder, error) {
	const op = "recordings.record"
	if !validID.MatchString(h.ID) {
		return nil, sandbox.InvalidField("recording.id", "%q", h.ID)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return nil, errClosed
	}
	if t := l.mu.recordings[h.ID]; t != nil {
		if t.rec != nil || t.is.State != sandbox.RecordingOpen {
			return nil, sandbox.Errorf(sandbox.Precondition, op, "recording %s is %s", h.ID, t.is.State)
		}
		rec, err := l.resume(h.ID)
		if err != nil {
			return nil, sandbox.WithOp(op, err)
		}
		t.rec = rec
		return rec, nil
	}
	f, err := os.OpenFile(l.path(h.ID), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	rec, err := l.start(f, h)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "%w", errors.Join(err, f.Close(), os.Remove(f.Name())))
	}
	l.mu.recordings[h.ID] = &held{is: rec.mu.is, rec: rec}
	return rec, nil
}

// start writes the beginning of a recording into an empty file.
func (l *Library) start(f *os.File, h Header) (*Recorder, error) {
	s := l.cfg.Sealer(h.ID)
	if _, err := f.WriteAt(preamble(s != nil), 0); err != nil {
		return nil, err
	}
	r := &Recorder{f: f, sealer: s, limits: l.cfg.Limits, log: l.log, now: l.cfg.Now}
	r.mu.is, r.mu.size = l.record(h), preambleLen
	r.write(kindHeader, 0, h) // nobody else has it yet
	return r, r.mu.failed
}

// resume cuts off what is not whole and goes on behind it.
func (l *Library) resume(id string) (*Recorder, error) {
	f, err := os.OpenFile(l.path(id), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		var t *Recording
		s := l.cfg.Sealer(id)
		if t, err = Read(f, info.Size(), s); err == nil {
			if err = f.Truncate(t.whole); err == nil {
				r := &Recorder{f: f, sealer: t.scan.sealer, limits: l.cfg.Limits, log: l.log, now: l.cfg.Now}
				r.mu.is, r.mu.size, r.mu.last = l.record(t.Header), t.whole, t.last
				r.mu.is.ID = id
				t.count(&r.mu.is)
				r.mu.full, r.mu.unfound = r.mu.size >= r.limits.Recording, t.unfound
				return r, nil
			}
		}
	}
	return nil, errors.Join(err, f.Close())
}

var errClosed = &sandbox.Error{Class: sandbox.Unavailable, Op: "recordings", Msg: "the server is stopping"}

// Finish ends a recording. One that is over, or not there, is left as it is.
func (l *Library) Finish(id string) error { return l.finish(id, false) }

func (l *Library) finish(id string, interrupted bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.mu.recordings[id]
	if t == nil || t.is.State != sandbox.RecordingOpen {
		return nil
	}
	rec := t.rec
	if rec == nil {
		var err error
		if rec, err = l.resume(id); err != nil {
			return sandbox.WithOp("recordings.finish", err)
		}
	}
	is, err := rec.finish(interrupted)
	t.is, t.rec = is, nil
	return err
}

// Discard removes a recording of a sandbox that never was.
func (l *Library) Discard(id string) error {
	if err := l.Finish(id); err != nil {
		return err
	}
	return l.Delete(context.Background(), id)
}

// Settle ends the recordings that nobody goes on with, and forgets the replays
// that are in none, as ReplayOf names them.
func (l *Library) Settle(recording, replays map[string]bool) error {
	l.mu.Lock()
	var open []string
	for id, t := range l.mu.recordings {
		if t.is.State == sandbox.RecordingOpen && t.rec == nil && !recording[id] {
			open = append(open, id)
		}
	}
	l.mu.Unlock()
	var errs []error
	for _, id := range open {
		errs = append(errs, l.finish(id, true))
	}
	left, err := filepath.Glob(filepath.Join(l.cfg.Dir, "*"+suffixAt))
	errs = append(errs, err)
	for _, p := range left {
		if !replays[strings.TrimSuffix(filepath.Base(p), suffixAt)] {
			errs = append(errs, os.Remove(p))
		}
	}
	return errors.Join(errs...)
}

// Status describes recordings as they are now; one that is not here is left out.
func (l *Library) Status(_ context.Context, ids []string) (map[string]sandbox.Recording, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string]sandbox.Recording, len(ids))
	for _, id := range ids {
		if t := l.mu.recordings[id]; t != nil {
			out[id] = t.status()
		}
	}
	return out, nil
}

func (t *held) status() sandbox.Recording {
	if t.rec != nil {
		return t.rec.Status()
	}
	return t.is
}

func noRecording(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "no recording '" + id + "'"}
}

// List lists all, newest first.
func (l *Library) List(context.Context) ([]sandbox.Recording, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]sandbox.Recording, 0, len(l.mu.recordings))
	for t := range maps.Values(l.mu.recordings) {
		out = append(out, t.status())
	}
	slices.SortFunc(out, func(a, b sandbox.Recording) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// Delete removes a recording that nobody writes or reads.
func (l *Library) Delete(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.mu.recordings[id]
	switch {
	case t == nil:
		return noRecording(id)
	case t.is.State == sandbox.RecordingOpen:
		return (&sandbox.Error{Class: sandbox.Precondition, Msg: "sandbox " + t.is.Sandbox + " is being recorded into it"}).WithHint("end the sandbox, or set its network without record")
	case t.users > 0:
		return (&sandbox.Error{Class: sandbox.Precondition, Msg: "a sandbox replays it"}).WithHint("end the sandbox first")
	}
	if err := os.Remove(l.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandbox.Errorf(sandbox.Unavailable, "recordings.delete", "%w", err)
	}
	delete(l.mu.recordings, id)
	return nil
}

// Read holds a recording's recording until release. What is being recorded is read
// as far as it is by now.
func (l *Library) Read(ctx context.Context, id string) (t *Recording, release func(), err error) {
	l.mu.Lock()
	h := l.mu.recordings[id]
	if h == nil || l.mu.closed {
		l.mu.Unlock()
		return nil, nil, noRecording(id)
	}
	ld := h.loaded
	h.users++
	shared := h.is.State != sandbox.RecordingOpen
	if ld == nil {
		ld = &loading{done: make(chan struct{})}
		if shared {
			h.loaded = ld
		}
		go func() {
			ld.f, ld.rec, ld.err = l.load(id)
			close(ld.done)
		}()
	}
	l.mu.Unlock()
	var once sync.Once
	release = func() {
		once.Do(func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			h.users--
			if h.users > 0 && shared {
				return
			}
			if h.loaded == ld {
				h.loaded = nil
			}
			go func() { // who left before it was read does not wait for that
				<-ld.done
				if ld.f != nil {
					ld.f.Close()
				}
			}()
		})
	}
	select {
	case <-ld.done:
	case <-ctx.Done():
		release()
		return nil, nil, ctx.Err()
	}
	if ld.err != nil {
		release()
		return nil, nil, sandbox.WithOp("recordings.read", ld.err)
	}
	return ld.rec, release, nil
}

func (l *Library) load(id string) (*os.File, *Recording, error) {
	f, err := os.Open(l.path(id))
	if err != nil {
		return nil, nil, sandbox.Errorf(sandbox.Unavailable, "", "%w", err)
	}
	info, err := f.Stat()
	if err == nil {
		var t *Recording
		if t, err = Read(f, info.Size(), l.cfg.Sealer(id)); err == nil {
			t.Header.ID = id
			return f, t, nil
		}
	}
	return nil, nil, errors.Join(err, f.Close())
}

// Play begins the replay of a sandbox, or goes on where an earlier process or,
// with used, the sandbox that this one is made of left it.
func (l *Library) Play(ctx context.Context, box, id string, rules Rules, used []uint32) (*Player, error) {
	t, release, err := l.Read(ctx, id)
	if err != nil {
		return nil, err
	}
	at, err := os.OpenFile(l.atPath(box, id), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		release()
		return nil, sandbox.Errorf(sandbox.Unavailable, "recordings.play", "%w", err)
	}
	p := NewPlayer(t, rules)
	p.now = l.cfg.Now
	b, err := io.ReadAll(io.LimitReader(at, 4*maxExchanges))
	if err == nil && len(b) == 0 && len(used) > 0 {
		for _, n := range used {
			b = binary.LittleEndian.AppendUint32(b, n)
		}
		_, err = at.WriteAt(b, 0)
	}
	if err != nil {
		release()
		return nil, sandbox.Errorf(sandbox.Unavailable, "recordings.play", "%w", errors.Join(err, at.Close()))
	}
	used = nil
	for ; len(b) >= 4; b = b[4:] {
		used = append(used, binary.LittleEndian.Uint32(b))
	}
	p.seek(used)
	end := int64(4 * len(used))
	p.note = func(exchange uint32) {
		if _, err := at.WriteAt(binary.LittleEndian.AppendUint32(nil, exchange), end); err != nil {
			l.log.Warn("how far a replay is will not be known after a restart", "sandbox", box, "err", err)
			return
		}
		end += 4
	}
	p.back = func() error {
		end = 0
		return at.Truncate(0)
	}
	p.close = func() error {
		release()
		return at.Close()
	}
	return p, nil
}

// Forget removes what is known of the replay of a sandbox that is gone.
func (l *Library) Forget(box, id string) error {
	err := os.Remove(l.atPath(box, id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Close leaves recordings under way open: the next process goes on with them.
func (l *Library) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = true
	var errs []error
	for _, t := range l.mu.recordings {
		if t.rec != nil {
			errs = append(errs, t.rec.abandon())
		}
	}
	return errors.Join(errs...)
}
