package steplog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func mustOpen(t testing.TB, dir string, segment int64) *Log {
	t.Helper()
	l, err := open(dir, segment, func(int, int64) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.close() })
	return l
}

func mustAppend(t testing.TB, l *Log, record string) int64 {
	t.Helper()
	at, err := l.Append([]byte(record))
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func all(t testing.TB, l *Log, from int64) (out []string) {
	t.Helper()
	if _, err := l.Read(from, func(b []byte, _ int64) bool { out = append(out, string(b)); return true }); err != nil {
		t.Fatal(err)
	}
	return out
}

// What is appended is read in order, over segments, from any position that was
// given out, also by the next process.
func TestAppendAndRead(t *testing.T) {
	dir := t.TempDir()
	l := mustOpen(t, dir, 300)
	var at []int64
	var want []string
	for i := range 100 {
		want = append(want, fmt.Sprintf("record %d %s", i, strings.Repeat("x", i)))
		at = append(at, mustAppend(t, l, want[i]))
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*"+suffix)); len(files) < 10 {
		t.Fatalf("%d segments", len(files))
	}
	for range 2 {
		for i := range want {
			if got := all(t, l, at[i]); len(got) != len(want)-i-1 || len(got) > 0 && got[0] != want[i+1] {
				t.Fatalf("after %d: %d records", i, len(got))
			}
		}
		if got := all(t, l, 0); strings.Join(got, "|") != strings.Join(want, "|") {
			t.Fatal("not what was written")
		}
		if err := l.close(); err != nil {
			t.Fatal(err)
		}
		l = mustOpen(t, dir, 300)
	}
	for _, from := range []int64{-1, at[99] + 1, 3} {
		_, err := l.Read(from, func([]byte, int64) bool { return true })
		if c := sandbox.ClassOf(err); c != sandbox.Invalid && c != sandbox.Corrupt {
			t.Errorf("from %d: %v", from, err)
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, maxRecord+1)} {
		if _, err := l.Append(bad); !errors.Is(err, sandbox.ErrTooLarge) {
			t.Errorf("%d bytes: %v", len(bad), err)
		}
	}
}

// Whatever a crash leaves at the end of the file, the records before it are there
// and the next goes behind them.
func TestTornTail(t *testing.T) {
	dir := t.TempDir()
	l := mustOpen(t, dir, 1<<20)
	mustAppend(t, l, "one")
	end := mustAppend(t, l, "two")
	path := l.path(0)
	if err := l.close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, tail := range map[string][]byte{"half a header": {9, 0}, "a header alone": {9, 0, 0, 0, 1, 2, 3, 4}, "half a record": append([]byte{9, 0, 0, 0, 1, 2, 3, 4}, "abc"...),
		"a wrong sum": append([]byte{3, 0, 0, 0, 1, 2, 3, 4}, "abc"...), "zeros": make([]byte, 4096), "a length from nowhere": bytes.Repeat([]byte{0xff}, 64)} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, append(bytes.Clone(whole), tail...), 0o600); err != nil {
				t.Fatal(err)
			}
			l := mustOpen(t, dir, 1<<20)
			if at, _ := l.End(); at != end {
				t.Errorf("ends at %d, want %d", at, end)
			}
			mustAppend(t, l, "three")
			if got := all(t, l, 0); strings.Join(got, ",") != "one,two,three" {
				t.Errorf("%q", got)
			}
			_ = l.close()
		})
	}
	// Damage amid the file is told, and not taken for the end.
	l = mustOpen(t, dir, 1<<20)
	mustAppend(t, l, "four")
	damaged, _ := os.ReadFile(path)
	damaged[headerBytes] ^= 1
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Read(0, func([]byte, int64) bool { return true }); !errors.Is(err, sandbox.ErrCorrupt) {
		t.Error(err)
	}
}

// A full disk refuses an append whole, and takes the next when there is room.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("cove-test", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	l := mustOpen(t, filepath.Join(dir, "run"), 100<<10)
	n := 0
	var err error
	for ; err == nil && n < 1000; n++ {
		_, err = l.Append(bytes.Repeat([]byte{byte('a' + n%26)}, 5000))
	}
	if !errors.Is(err, sandbox.ErrDiskFull) || l.Broken() == nil {
		t.Fatalf("after %d: %v", n, err)
	}
	n-- // the last was refused
	if got := all(t, l, 0); len(got) != n {
		t.Errorf("%d records, %d were taken", len(got), n)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, l, "after")
	if got := all(t, l, 0); len(got) != n+1 || got[n] != "after" || l.Broken() != nil {
		t.Errorf("%d records, %v", len(got), l.Broken())
	}
}

const killedEnv = "COVE_STEPLOG_KILLED"

// kill -9 at any moment loses no append that had returned.
func TestKilled(t *testing.T) {
	if dir := os.Getenv(killedEnv); dir != "" {
		l := mustOpen(t, dir, 4<<10)
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Go(func() {
				for i := 0; ; i++ {
					r := fmt.Sprintf("%d-%d-%d %s", os.Getpid(), w, i, strings.Repeat("y", i%700))
					mustAppend(t, l, r)
					fmt.Println("\nacked", strings.Fields(r)[0])
				}
			})
		}
		wg.Wait()
	}
	dir := t.TempDir()
	acked := map[string]bool{}
	for range 5 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), killedEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		most := 50 + rand.IntN(500)
		lines := bufio.NewScanner(out)
		for n := 0; n < most && lines.Scan(); {
			if id, ok := strings.CutPrefix(lines.Text(), "acked "); ok {
				acked[id] = true
				n++
			}
		}
		_ = cmd.Process.Kill()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		l := mustOpen(t, dir, 4<<10)
		have := map[string]bool{}
		for _, r := range all(t, l, 0) {
			have[strings.Fields(r)[0]] = true
		}
		for id := range acked {
			if !have[id] {
				t.Errorf("%s was acknowledged and is gone", id)
			}
		}
		if len(acked) == 0 {
			t.Fatal("nothing was acknowledged: the test proves nothing")
		}
		_ = l.close()
	}
}

func TestStore(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, nil)
	l, err := s.Open("tenant", "run1")
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := s.Open("tenant", "run1"); again != l {
		t.Error("two logs of one run")
	}
	if n, err := s.Bytes("tenant"); n != 0 || err != nil {
		t.Error(n, err)
	}
	mustAppend(t, l, "hello")
	s.sync(slog.New(slog.DiscardHandler))
	if n, err := s.Bytes("tenant"); n != headerBytes+5 || err != nil {
		t.Error(n, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append([]byte("x")); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Error(err)
	}
	s = NewStore(dir, nil)
	if n, err := s.Bytes("tenant"); n != headerBytes+5 || err != nil {
		t.Error("counted by another process:", n, err)
	}
	for range 2 {
		if err := s.Delete("tenant", "run1"); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := s.Bytes("tenant"); n != 0 {
		t.Error(n)
	}
	if _, err := s.Open("tenant", "../run"); err == nil {
		t.Error("a path is no run")
	}
}

func BenchmarkAppend(b *testing.B) {
	l := mustOpen(b, b.TempDir(), segmentBytes)
	record := bytes.Repeat([]byte("x"), 700)
	b.SetBytes(int64(len(record)))
	for b.Loop() {
		if _, err := l.Append(record); err != nil {
			b.Fatal(err)
		}
	}
}
