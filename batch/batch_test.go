package batch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// machines do what run says, and know which of them there are.
type machines struct {
	run    func(id string, in Input, try int) (Outcome, error)
	create func(n int) error
	reset  func(id string) error

	mu struct {
		sync.Mutex
		made, most int
		live       map[string]bool
		tries      map[int]int
		execs      map[string]int
		resets     int
	}
}

func newMachines() *machines {
	m := &machines{run: func(_ string, in Input, _ int) (Outcome, error) {
		return Outcome{Cause: sandbox.Exited, Stdout: []byte(strings.ToUpper(in.Text)), Duration: time.Millisecond}, nil
	}}
	m.mu.live, m.mu.tries, m.mu.execs = map[string]bool{}, map[int]int{}, map[string]int{}
	return m
}

func (m *machines) Create(ctx context.Context) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return "", err
	}
	m.mu.made++
	if m.create != nil {
		if err := m.create(m.mu.made); err != nil {
			return "", err
		}
	}
	id := fmt.Sprint("m", m.mu.made)
	m.mu.live[id] = true
	m.mu.most = max(m.mu.most, len(m.mu.live))
	return id, nil
}

func (m *machines) Reset(_ context.Context, id string) error {
	m.mu.Lock()
	m.mu.resets++
	m.mu.Unlock()
	if m.reset != nil {
		return m.reset(id)
	}
	return nil
}

func (m *machines) Remove(ctx context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.mu.live, id)
	return ctx.Err()
}

func (m *machines) Run(_ context.Context, id, exec string, in Input) (Outcome, error) {
	m.mu.Lock()
	try := m.mu.tries[in.Index]
	m.mu.tries[in.Index]++
	m.mu.execs[exec]++
	m.mu.Unlock()
	return m.run(id, in, try)
}

func (m *machines) check(t *testing.T) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.mu.live) > 0 {
		t.Errorf("machines are left: %v", m.mu.live)
	}
	for exec, n := range m.mu.execs {
		if n > 1 {
			t.Errorf("exec %s was used %d times", exec, n)
		}
	}
}

func numbers(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "in%d\n", i)
	}
	return b.String()
}

func (m *machines) batch(t *testing.T, ctx context.Context, cfg Config, text string) (map[int]Result, Progress, error) {
	t.Helper()
	if cfg.Parallel == 0 {
		cfg.Parallel = 4
	}
	if cfg.Wait == nil {
		cfg.Wait = func(ctx context.Context, _ time.Duration) error { return ctx.Err() }
	}
	got := map[int]Result{}
	none := func(Input) (bool, error) { return false, nil }
	p, err := Run(ctx, cfg, m, Lines(strings.NewReader(text)), none, func(r Result) error { got[r.Index] = r; return nil }, func(Progress) {})
	m.check(t)
	return got, p, err
}

func TestEveryInputHasItsResult(t *testing.T) {
	for _, reuse := range []bool{false, true} {
		m := newMachines()
		got, p, err := m.batch(t, t.Context(), Config{Reuse: reuse}, numbers(200)+"\n  \n")
		if err != nil || len(got) != 200 || p.Done != 200 || p.Machines != 0 {
			t.Fatalf("reuse %v: %d results, %+v, %v", reuse, len(got), p, err)
		}
		for i, r := range got {
			if want := fmt.Sprintf("IN%d", i); r.Stdout != want || r.Status != OK || r.Attempts != 1 {
				t.Errorf("%d: %+v", i, r)
			}
		}
		if m.mu.most > 4 || reuse != (m.mu.made <= 4) {
			t.Errorf("reuse %v: %d machines, at most %d at a time", reuse, m.mu.made, m.mu.most)
		}
	}
}

func TestWhatIsTriedAgain(t *testing.T) {
	broke := sandbox.Errorf(sandbox.Unavailable, "exec", "the server went away")
	for _, c := range []struct {
		name     string
		cfg      Config
		run      func(try int) (Outcome, error)
		status   Status
		attempts int
	}{
		{"an exit code is a result", Config{Retries: 3}, func(int) (Outcome, error) { return Outcome{Cause: sandbox.Exited, ExitCode: 2}, nil }, Failed, 1},
		{"so are memory and time", Config{Retries: 3}, func(int) (Outcome, error) { return Outcome{Cause: sandbox.OOM}, nil }, Failed, 1},
		{"unless asked for", Config{OnExit: 2}, func(try int) (Outcome, error) {
			return Outcome{Cause: sandbox.Exited, ExitCode: 1 - try}, nil
		}, OK, 2},
		{"a lost sandbox is not the input's fault", Config{Retries: 3}, func(try int) (Outcome, error) {
			if try < 3 {
				return Outcome{Cause: sandbox.NodeLost}, nil
			}
			return Outcome{Cause: sandbox.Exited}, nil
		}, OK, 4},
		{"nor is a call that failed", Config{Retries: 1}, func(int) (Outcome, error) { return Outcome{}, broke }, Error, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachines()
			m.run = func(_ string, _ Input, try int) (Outcome, error) { return c.run(try) }
			got, _, err := m.batch(t, t.Context(), c.cfg, "x")
			if r := got[0]; err != nil || r.Status != c.status || r.Attempts != c.attempts {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
}

func TestAFullNodeIsWaitedFor(t *testing.T) {
	m := newMachines()
	m.create = func(n int) error {
		if n < 3 {
			return &sandbox.Error{Class: sandbox.NoCapacity, RetryAfter: 7 * time.Second}
		}
		return nil
	}
	var waited []time.Duration
	cfg := Config{Parallel: 1, Wait: func(_ context.Context, d time.Duration) error { waited = append(waited, d); return nil }}
	got, _, err := m.batch(t, t.Context(), cfg, "x")
	if err != nil || got[0].Attempts != 1 || fmt.Sprint(waited) != "[7s 7s]" {
		t.Errorf("%+v, %v, waited %v", got[0], err, waited)
	}
}

func TestAnImageThatIsNotThereEndsTheBatch(t *testing.T) {
	m := newMachines()
	m.create = func(int) error { return sandbox.Errorf(sandbox.ImageNotFound, "create", "no image x") }
	got, _, err := m.batch(t, t.Context(), Config{Retries: 5}, numbers(100))
	if !errors.Is(err, sandbox.ErrImageNotFound) || len(got) > 0 || m.mu.made > 4 {
		t.Errorf("%d results, %d tries, %v", len(got), m.mu.made, err)
	}
}

func TestAResetThatFailsCostsNoTry(t *testing.T) {
	m := newMachines()
	m.reset = func(string) error { return sandbox.Errorf(sandbox.Ended, "reset", "it has ended") }
	got, _, err := m.batch(t, t.Context(), Config{Reuse: true, Parallel: 1}, numbers(3))
	if err != nil || len(got) != 3 || got[2].Attempts != 1 || m.mu.made != 3 {
		t.Errorf("%+v, %d made, %v", got, m.mu.made, err)
	}
}

func TestWhoStopsGoesOnLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.jsonl")
	inputs := numbers(50)
	ctx, stop := context.WithCancel(t.Context())
	j, err := OpenJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	m := newMachines()
	n := 0
	_, err = Run(ctx, Config{Parallel: 3}, m, Lines(strings.NewReader(inputs)), j.Has, func(r Result) error {
		if n++; n == 20 {
			stop()
		}
		if n == 7 {
			r.Status = Error // it is tried again
		}
		return j.Add(r)
	}, func(Progress) {})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	m.check(t)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	// It died in the middle of a line.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"index":49,"key":"00`); err != nil {
		t.Fatal(err)
	}
	f.Close()

	if j, err = OpenJournal(path); err != nil {
		t.Fatal(err)
	}
	had := j.Len()
	if had < 19 || had > 25 {
		t.Fatalf("%d are done", had)
	}
	m = newMachines()
	p, err := Run(t.Context(), Config{Parallel: 3}, m, Lines(strings.NewReader(inputs)), j.Has, j.Add, func(Progress) {})
	if err != nil || p.Skipped != had || p.Done != 50-had {
		t.Fatalf("%+v, %v", p, err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Sort(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	if len(lines) != 50 {
		t.Fatalf("%d lines", len(lines))
	}
	for i, line := range lines {
		if !strings.HasPrefix(line, fmt.Sprintf(`{"index":%d,`, i)) || !strings.Contains(line, `"status":"ok"`) {
			t.Errorf("line %d: %s", i, line)
		}
	}

	if j, err = OpenJournal(path); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	_, err = Run(t.Context(), Config{Parallel: 3}, m, Lines(strings.NewReader("other\n")), j.Has, j.Add, func(Progress) {})
	if !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("other inputs: %v", err)
	}
}

func TestAFileOfOthersIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notes.txt")
	if err := os.WriteFile(path, []byte("my notes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenJournal(path); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "my notes\n" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestAFullDiskEndsTheBatch(t *testing.T) {
	m := newMachines()
	full := sandbox.Errorf(sandbox.DiskFull, "write", "no space left")
	_, err := Run(t.Context(), Config{Parallel: 2}, m, Lines(strings.NewReader(numbers(10))), func(Input) (bool, error) { return false, nil },
		func(Result) error { return full }, func(Progress) {})
	if !errors.Is(err, sandbox.ErrDiskFull) {
		t.Error(err)
	}
	m.check(t)
}
