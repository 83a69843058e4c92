package volume

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain is also the process that is killed: see TestKilled.
func TestMain(m *testing.M) {
	if dir := os.Getenv("COVE_VOLUME_CHILD"); dir != "" {
		dieAt, _ := strconv.Atoi(os.Getenv("COVE_VOLUME_DIE_AT")) // "" = never
		n := 0
		s, err := Open(context.Background(), dir, Options{Linger: -1, step: func(string) error {
			if n++; n == dieAt {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
			return nil
		}})
		if err == nil {
			err = life(s, func(done string) { fmt.Println(done) }, nil)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// oldContent and newContent are what a file has before and after it is put
// again: long enough for a kill to fall into the middle.
var (
	oldContent = strings.Repeat("the old content\n", 64<<10)
	newContent = strings.Repeat("the new content!\n", 64<<10)
)

// life is one of everything. Each step that is over is acknowledged. failed
// takes the error of a step and lets the rest go on; nil = the first one ends
// it.
func life(s *Set, ack func(string), failed func(string, error)) error {
	ctx := context.Background()
	var snapshot bytes.Buffer
	put := func(ref, name, content string) func() error {
		return func() error {
			_, err := s.Put(ctx, ref, name, strings.NewReader(content), PutOptions{Parents: true})
			return err
		}
	}
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"create a", func() error { _, err := s.Create(ctx, "a", 24*mib); return err }},
		{"put a", put("a", "d/f", oldContent)},
		{"clone b", func() error { _, err := s.Clone(ctx, "a", "b"); return err }},
		{"attach b", func() error { _, err := s.Attach(ctx, "b", "sb", ReadWrite); return err }},
		{"put b", put("b", "d/f", newContent)},
		{"clone c", func() error { _, err := s.Clone(ctx, "b", "c"); return err }}, // of one that is mounted
		{"snapshot", func() error { return s.Snapshot(ctx, "b", &snapshot) }},
		{"import d", func() error { _, err := s.Import(ctx, "d", 32*mib, &snapshot); return err }},
		{"resize a", func() error { _, err := s.Resize(ctx, "a", 48*mib); return err }},
		{"put again", put("a", "d/f", newContent)},
		{"delete c", func() error { return s.Delete(ctx, "c") }},
		{"detach b", func() error { return s.Detach(ctx, "b", "sb") }},
		{"delete b", func() error { return s.Delete(ctx, "b") }},
		{"close", s.Close},
	} {
		err := c.do()
		switch {
		case err == nil:
			ack(c.name)
		case failed != nil:
			failed(c.name, err)
		default:
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// checkLife opens what a life that ended anywhere has left.
func checkLife(t *testing.T, dir string, acks []string) {
	t.Helper()
	s := open(t, dir, Options{})
	did := func(what string) bool { return slices.Contains(acks, what) }
	vs, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]Volume{}
	for _, v := range vs {
		have[v.ID] = v
		if out, err := exec.Command("e2fsck", "-fn", s.image(v.ID)).CombinedOutput(); err != nil {
			t.Errorf("volume %s: %v\n%s", v.ID, err, out)
		}
		if ents := names(t, filepath.Join(dir, "v")); !slices.Contains(ents, v.ID+".img") {
			t.Errorf("volume %s has no image", v.ID)
		}
	}
	for _, c := range []struct{ made, name, deleted string }{
		{"create a", "a", ""}, {"clone b", "b", "delete b"}, {"clone c", "c", "delete c"}, {"import d", "d", ""},
	} {
		if _, ok := have[c.name]; did(c.made) && !ok && !(c.deleted != "" && deletionBegun(acks, c.deleted)) {
			t.Errorf("volume %s was acknowledged and is gone", c.name)
		} else if ok && c.deleted != "" && did(c.deleted) {
			t.Errorf("volume %s was deleted and is there", c.name)
		}
	}
	for name, v := range have {
		r, info, err := s.GetFile(t.Context(), v.ID, "d/f")
		if err != nil {
			if name == "a" && !did("put a") {
				continue
			}
			t.Errorf("volume %s has no file: %v", name, err)
			continue
		}
		b, err := io.ReadAll(r)
		r.Close()
		old, fresh := string(b) == oldContent, string(b) == newContent
		if err != nil || !old && !fresh {
			t.Errorf("volume %s has a part of a file: %d of %d bytes, %v", name, len(b), info.Size, err)
		}
		if name == "a" && did("put again") && !fresh || (name == "c" || name == "d") && !fresh {
			t.Errorf("volume %s has the old file", name)
		}
		list, _, err := s.ListFiles(t.Context(), v.ID, "/", 100)
		if err != nil || len(list) != 1 {
			t.Errorf("volume %s has %+v, %v", name, list, err)
		}
	}
	if a, ok := have["a"]; ok && did("resize a") && a.Size != 48*mib {
		t.Errorf("a has %d bytes", a.Size)
	}
	for name, v := range have { // all of it still works
		if _, err := s.Attach(t.Context(), v.ID, "later", ReadWrite); err != nil {
			t.Errorf("volume %s: %v", name, err)
			continue
		}
		if left := names(t, filepath.Join(s.point(v.ID), stagingDir)); len(left) > 0 {
			t.Errorf("volume %s has %v left of a put", name, left)
		}
		if err := s.Detach(t.Context(), v.ID, "later"); err != nil {
			t.Error(err)
		}
	}
	checkFiles(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	checkHost(t, dir)
}

// deletionBegun: the step before it was acknowledged, so it may have happened.
func deletionBegun(acks []string, what string) bool {
	before := map[string]string{"delete b": "detach b", "delete c": "put again"}[what]
	return slices.Contains(acks, before)
}

// child runs a life in a process of its own. kill, if not zero, ends it then.
func child(t *testing.T, dir string, dieAt int, kill time.Duration) (acks []string, killed bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), "COVE_VOLUME_CHILD="+dir, "COVE_VOLUME_DIE_AT="+strconv.Itoa(dieAt))
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if kill > 0 {
		timer := time.AfterFunc(kill, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ProcessState.Sys().(interface{ Signaled() bool }).Signaled() {
		killed = true
	} else if err != nil {
		t.Fatalf("the child failed: %v\n%s", err, &errOut)
	}
	for sc := bufio.NewScanner(&out); sc.Scan(); {
		acks = append(acks, sc.Text())
	}
	return acks, killed
}

// steps counts the changes of the disk in a life.
func steps(t *testing.T) int {
	t.Helper()
	needHost(t)
	n := 0
	s, err := Open(t.Context(), tempDir(t), Options{Linger: -1, step: func(string) error { n++; return nil }})
	if err == nil {
		err = life(s, func(string) {}, nil)
	}
	if err != nil || n < 20 {
		t.Fatalf("%d steps, %v", n, err)
	}
	return n
}

// TestKilled kills a process at each of its changes of the disk.
func TestKilled(t *testing.T) {
	for n := range steps(t) {
		t.Run(fmt.Sprint(n+1), func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			acks, killed := child(t, dir, n+1, 0)
			if !killed {
				t.Error("it lived")
			}
			checkLife(t, dir, acks)
			if t.Failed() {
				t.Logf("after %v", acks)
			}
		})
	}
}

// TestKilledAnytime kills it anywhere.
func TestKilledAnytime(t *testing.T) {
	needHost(t)
	start := time.Now()
	if _, killed := child(t, tempDir(t), 0, 0); killed {
		t.Fatal("killed")
	}
	whole := time.Since(start)
	for range 12 {
		dir := tempDir(t)
		after := rand.N(whole) + 1
		acks, _ := child(t, dir, 0, after)
		checkLife(t, dir, acks)
		if t.Failed() {
			t.Fatalf("killed after %v and %v", after, acks)
		}
	}
}

// TestFaults fails each change of the disk in turn.
func TestFaults(t *testing.T) {
	for n := range steps(t) {
		t.Run(fmt.Sprint(n+1), func(t *testing.T) { t.Parallel(); testFault(t, n+1) })
	}
}

func testFault(t *testing.T, n int) {
	errDisk := errors.New("the disk fails here")
	dir, i, at := tempDir(t), 0, ""
	s, err := Open(t.Context(), dir, Options{Linger: -1, step: func(step string) error {
		if i++; i == n {
			at = step
			return errDisk
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	var acks, failures []string
	err = life(s, func(done string) { acks = append(acks, done) }, func(what string, err error) {
		failures = append(failures, what+": "+err.Error())
		// Failed, it left nothing: not only Open removes. But for an image
		// whose record is gone already.
		if errors.Is(err, errDisk) && at != "delete image" {
			checkFiles(t, s)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(failures) == 0 {
		t.Error("it went unnoticed")
	}
	s.Close() // may have been the step that failed
	again := open(t, dir, Options{})
	checkFiles(t, again)
	for _, v := range mustList(t, again) {
		if out, err := exec.Command("e2fsck", "-fn", again.image(v.ID)).CombinedOutput(); err != nil {
			t.Errorf("volume %s: %v\n%s", v.ID, err, out)
		}
	}
	if t.Failed() {
		t.Logf("fault at %q: acknowledged %v, failed %v", at, acks, failures)
	}
}

func mustList(t *testing.T, s *Set) []Volume {
	t.Helper()
	vs, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return vs
}

// A process that dies amid a copy leaves the file system frozen, with the
// sandboxes that hold it waiting; the next one thaws it and keeps it mounted.
func TestRecoverHeld(t *testing.T) {
	dir := tempDir(t)
	s := open(t, dir, Options{})
	held, other := create(t, s, "held", 16*mib), create(t, s, "other", 16*mib)
	host, err := s.Attach(t.Context(), held.ID, "sb1", Shared)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(t.Context(), other.ID, "gone", ReadWrite); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(host, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := freeze(s.point(held.ID)); err != nil {
		t.Fatal(err)
	}
	s.lock.Close() // as dead as it gets in this process

	s2 := open(t, dir, Options{Holders: map[string][]Holder{held.ID: {{"sb1", Shared}}, "nosuchvolume": {{"sb2", ReadWrite}}}})
	if _, err := f.WriteString("goes on"); err != nil {
		t.Error(err)
	}
	if points, _ := mountPoints(dir); !slices.Equal(points, []string{s2.point(held.ID)}) {
		t.Errorf("mounts: %v", points)
	}
	if hs, err := s2.Holders(t.Context(), "held"); err != nil || len(hs) != 1 || hs[0] != (Holder{"sb1", Shared}) {
		t.Errorf("%v %v", hs, err)
	}
	_, err = s2.Attach(t.Context(), "held", "sb3", ReadWrite)
	expectClass(t, "beside a holder of before", err, "failed_precondition")
	if got := get(t, s2, "held", "log"); got != "goes on" {
		t.Errorf("%q", got)
	}
	f.Close()
	if err := s2.Detach(t.Context(), "held", "sb1"); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, s2)
	if err := s2.Close(); err != nil {
		t.Fatal(err)
	}

	// After a reboot there is no mount to keep: it is made.
	s3 := open(t, dir, Options{Holders: map[string][]Holder{held.ID: {{"sb1", Shared}}}})
	if got, err := os.ReadFile(filepath.Join(s3.hostdir(held.ID), "log")); err != nil || string(got) != "goes on" {
		t.Errorf("%q %v", got, err)
	}
	if err := s3.Detach(t.Context(), "held", "sb1"); err != nil {
		t.Fatal(err)
	}
}

// A record that does not check stops the start: it may be the only copy.
func TestCorruptRecord(t *testing.T) {
	dir := tempDir(t)
	s := open(t, dir, Options{})
	v := create(t, s, "v1", 16*mib)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "v", v.ID+".json")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", "{", `{"version":1}`, strings.Replace(string(good), `"version":2`, `"version":1`, 1), strings.Replace(string(good), v.ID, "other", 1)} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(t.Context(), dir, Options{})
		expectClass(t, bad, err, "corrupt")
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(good), `"version":2`, `"version":3`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), dir, Options{})
	expectClass(t, "a record of the future", err, "unsupported")
	if _, err := os.Stat(s.image(v.ID)); err != nil {
		t.Errorf("its image is gone: %v", err)
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	open(t, dir, Options{})
}
