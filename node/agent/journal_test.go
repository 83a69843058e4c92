package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var quiet = slog.New(slog.DiscardHandler)

func openTestJournal(t testing.TB, fs fsys) (*journal, *state) {
	t.Helper()
	j, st, err := openJournal(fs, "d/journal", quiet)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { j.close() })
	return j, st
}

func created(id string) record {
	return record{Kind: recCreated, ID: id, Entry: &entry{
		Sandbox: sandbox.Sandbox{ID: id, Episode: 1, Spec: sandbox.Spec{Env: map[string]string{"A": id}}},
		Kernel:  runtime.Handle{Version: 1, Driver: "fake", ID: "k" + id, Data: []byte{1, 2, 3}},
	}}
}

// What a clock was set to is of its episode: a reset forgets it, also where the two meet.
func TestJournalOfAClock(t *testing.T) {
	set := func(minute int) *clockMark { return &clockMark{At: time.Unix(int64(60*minute), 0)} }
	st := newState()
	st.apply(created("a"))
	st.apply(record{Kind: recClock, ID: "a", Episode: 1, Clock: set(1)})
	if got := st.entries["a"].Clock; got == nil || !got.At.Equal(set(1).At) {
		t.Errorf("set: %v", got)
	}
	st.apply(record{Kind: recReset, ID: "a", Episode: 2})
	st.apply(record{Kind: recClock, ID: "a", Episode: 1, Clock: set(2)}) // begun before the reset
	if got := st.entries["a"].Clock; got != nil {
		t.Errorf("after a reset: %v", got)
	}
	st.apply(record{Kind: recClock, ID: "a", Episode: 2, Clock: set(3)})
	again := newState()
	for _, r := range st.records() {
		again.apply(r)
	}
	if got := again.entries["a"].Clock; got == nil || !got.At.Equal(set(3).At) {
		t.Errorf("folded: %v", got)
	}
}

func TestJournalRemembersAcrossARestartOnARealDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(hostFS{}, path, quiet)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(time.Hour).Round(0).UTC()
	end := &sandbox.End{Cause: sandbox.OOM, Detail: "too much"}
	for _, r := range []record{{Kind: recOpened, Boot: "b1"}, created("a"), created("b"), created("c"),
		{Kind: recReset, ID: "a", Episode: 2}, {Kind: recExpiry, ID: "a", Expires: at},
		{Kind: recSecrets, ID: "a", Secrets: []string{"api"}, Authority: "old"}, {Kind: recSecrets, ID: "a", Secrets: []string{"api", "git"}, Authority: "a"},
		{Kind: recEnded, ID: "b", End: end}, {Kind: recForgot, ID: "c"}} {
		if err := j.append(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	if err := j.append(created("late")); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("append after close: %v", err)
	}

	j, st, err := openJournal(hostFS{}, path, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	if st.boot != "b1" || len(st.entries) != 2 {
		t.Fatalf("boot %q, entries %v", st.boot, st.entries)
	}
	a, b := st.entries["a"], st.entries["b"]
	if a.Sandbox.Episode != 2 || !a.Sandbox.ExpiresAt.Equal(at) || a.Kernel.ID != "ka" || a.End != nil ||
		!slices.Equal(a.Sandbox.Spec.Secrets, []string{"api", "git"}) || a.Sandbox.Spec.Authority != "a" {
		t.Errorf("a: %+v", a)
	}
	if b.End == nil || b.End.Cause != sandbox.OOM {
		t.Errorf("b: %+v", b)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the journal holds guest secrets; mode %v, err %v", info.Mode(), err)
	}
}

// Whatever a crash or a bad disk leaves of the file, what is read back is
// exactly the records before the damage.
func TestJournalRecoversTheRecordsBeforeAnyDamage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		recs := drawRecords(t)
		file := header()
		ends := []int{len(file)}
		for _, r := range recs {
			frame, err := encodeFrame(r)
			if err != nil {
				t.Fatal(err)
			}
			file = append(file, frame...)
			ends = append(ends, len(file))
		}
		damaged := append([]byte(nil), file...)
		at := rapid.IntRange(0, len(file)).Draw(t, "at")
		switch rapid.SampledFrom([]string{"cut", "flip", "zero"}).Draw(t, "damage") {
		case "cut":
			damaged = damaged[:at]
		case "flip":
			if at == len(file) {
				return
			}
			damaged[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		case "zero": // a hole the file system left
			at = min(at, len(file)-1)
			n := min(rapid.IntRange(1, 64).Draw(t, "n"), len(file)-at)
			clear(damaged[at : at+n])
			for at < len(file) && damaged[at] == file[at] {
				at++
			}
		}
		st, good, err := replay(damaged)
		if at < headerSize {
			if len(damaged) == 0 {
				if err != nil || len(st.entries) != 0 {
					t.Fatalf("an empty file: %v", err)
				}
			} else if !errors.Is(err, sandbox.ErrCorrupt) && !errors.Is(err, sandbox.ErrUnsupported) {
				t.Fatalf("a damaged header was read as a journal: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		whole := 0
		for whole+1 < len(ends) && ends[whole+1] <= at {
			whole++
		}
		want := newState()
		for _, r := range recs[:whole] {
			want.apply(roundTrip(t, r))
		}
		if int(good) != ends[whole] || !reflect.DeepEqual(st, want) {
			t.Fatalf("damage at %d: kept %d bytes, want %d (%d records)\n got %v\nwant %v", at, good, ends[whole], whole, st.entries, want.entries)
		}
	})
}

// The shortest history folds to the same state as the long one.
func TestCompactionKeepsTheState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		long := newState()
		for _, r := range drawRecords(t) {
			long.apply(roundTrip(t, r))
		}
		short := newState()
		for _, r := range long.records() {
			short.apply(roundTrip(t, r))
		}
		if !reflect.DeepEqual(long, short) {
			t.Fatalf("\n long %v\nshort %v", long.entries, short.entries)
		}
	})
}

func drawRecords(t *rapid.T) []record {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) record {
		id := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "id")
		switch rapid.IntRange(0, 5).Draw(t, "kind") {
		case 0:
			return record{Kind: recOpened, Boot: id}
		case 1:
			return created(id)
		case 2:
			return record{Kind: recReset, ID: id, Episode: rapid.Int64Range(2, 9).Draw(t, "episode")}
		case 3:
			return record{Kind: recExpiry, ID: id, Expires: time.Unix(rapid.Int64Range(0, 1e9).Draw(t, "unix"), 0).UTC()}
		case 4:
			return record{Kind: recEnded, ID: id, End: &sandbox.End{Cause: sandbox.TTL}}
		}
		return record{Kind: recForgot, ID: id}
	}), 0, 12).Draw(t, "records")
}

func roundTrip(t *rapid.T, r record) record {
	frame, err := encodeFrame(r)
	if err != nil {
		t.Fatal(err)
	}
	st, _, err := replay(append(header(), frame...))
	if err != nil {
		t.Fatal(err)
	}
	if r.Entry != nil {
		r.Entry = st.entries[r.ID]
	}
	return r
}

func TestAppendsThatWaitTogetherShareOneSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := newMemFS()
		j, _ := openTestJournal(t, fs)
		block := make(chan struct{})
		fs.mu.Lock()
		fs.block, fs.syncs = block, 0
		fs.mu.Unlock()
		const n = 100
		errs := make(chan error, n)
		for i := range n {
			go func() { errs <- j.append(created(fmt.Sprint("s", i))) }()
		}
		synctest.Wait() // one is in the sync, the others queue behind it
		close(block)
		for range n {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if fs.syncs > 2 {
			t.Errorf("%d appends cost %d syncs", n, fs.syncs)
		}
	})
}

func TestAFailedWriteLeavesNothingAndTheJournalHeals(t *testing.T) {
	for _, op := range []string{"write", "sync"} {
		t.Run(op, func(t *testing.T) {
			fs := newMemFS()
			j, _ := openTestJournal(t, fs)
			if err := j.append(created("before")); err != nil {
				t.Fatal(err)
			}
			fs.setFault(func(o, _ string) error {
				if o == op {
					return syscall.ENOSPC
				}
				return nil
			})
			if err := j.append(created("refused")); !errors.Is(err, sandbox.ErrDiskFull) {
				t.Errorf("append on a full disk: %v", err)
			}
			if err := j.appendFact(record{Kind: recEnded, ID: "before", End: &sandbox.End{Cause: sandbox.TTL}}); !errors.Is(err, sandbox.ErrDiskFull) {
				t.Errorf("fact on a full disk: %v", err)
			}
			fs.setFault(nil)
			if err := j.append(created("after")); err != nil {
				t.Fatalf("the disk has room again: %v", err)
			}
			_, st := openTestJournal(t, fs.crash(nil))
			if st.entries["refused"] != nil {
				t.Error("a refused record is in the history")
			}
			if e := st.entries["before"]; e == nil || e.End == nil {
				t.Errorf("a fact that could not be written in time is lost: %+v", e)
			}
			if st.entries["after"] == nil {
				t.Error("a durable record is lost")
			}
		})
	}
}

func TestCompactionSurvivesAFaultAtEveryStep(t *testing.T) {
	for _, op := range []string{"", "create", "write", "sync", "rename", "syncdir"} {
		t.Run("fault in "+op, func(t *testing.T) {
			fs := newMemFS()
			j, _ := openTestJournal(t, fs)
			big := created("big")
			big.Entry.Sandbox.Spec.Env = map[string]string{"PAD": string(make([]byte, 100<<10))}
			fs.setFault(func(o, name string) error {
				if o == op && (filepath.Base(name) == "journal.new" || o == "syncdir") {
					return syscall.EIO
				}
				return nil
			})
			times := 40 // 24 MiB escaped: past the floor many times
			if testing.Short() {
				times = 12
			}
			for range times {
				_ = j.append(big)
			}
			fs.setFault(nil)
			if err := j.append(created("last")); err != nil {
				t.Fatal(err)
			}
			_, st := openTestJournal(t, fs.crash(nil))
			if st.entries["big"] == nil || st.entries["last"] == nil {
				t.Errorf("lost records: %d left", len(st.entries))
			}
			if op == "" && len(fs.names["d/journal"].data) > 5<<20 {
				t.Errorf("never compacted: %d bytes", len(fs.names["d/journal"].data))
			}
		})
	}
}

func TestAJournalOpensOnAFullDisk(t *testing.T) {
	fs := newMemFS()
	j, _ := openTestJournal(t, fs)
	if err := j.append(created("a")); err != nil {
		t.Fatal(err)
	}
	fs = fs.crash(nil)
	full := func(op, _ string) error {
		if op == "write" {
			return syscall.ENOSPC
		}
		return nil
	}
	fs.setFault(full)
	j2, st := openTestJournal(t, fs)
	if st.entries["a"] == nil {
		t.Error("the history is not readable")
	}
	if err := j2.append(created("b")); !errors.Is(err, sandbox.ErrDiskFull) {
		t.Errorf("append: %v", err)
	}
	fs.setFault(nil)
	if err := j2.append(created("c")); err != nil {
		t.Error(err)
	}
	_, st = openTestJournal(t, fs.crash(nil))
	if st.entries["a"] == nil || st.entries["b"] != nil || st.entries["c"] == nil {
		t.Errorf("after healing: %v", st.entries)
	}
}

func TestAJournalOfANewerCoveIsLeftAlone(t *testing.T) {
	fs := newMemFS()
	f, _ := fs.Create("d/journal")
	newer := append([]byte(journalMagic), 2, 0, 0, 0)
	f.Write(newer)
	_, _, err := openJournal(fs, "d/journal", quiet)
	if !errors.Is(err, sandbox.ErrUnsupported) {
		t.Fatalf("open: %v", err)
	}
	if got, _ := fs.ReadFile("d/journal"); string(got) != string(newer) {
		t.Error("it was changed")
	}
}
