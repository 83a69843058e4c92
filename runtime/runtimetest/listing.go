package runtimetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Types of files, as in st_mode.
const (
	typeMask = 0o170000
	typeFile = 0o100000
	typeDir  = 0o040000
	typeLink = 0o120000
)

// lacks ends a test of what a driver says it has not: its kernels must not offer it.
func lacks[T any](t *testing.T, s *suite, d runtime.Driver, what string, has bool) {
	t.Helper()
	if has {
		return
	}
	if _, ok := s.boot(t, d).(T); ok {
		t.Errorf("driver %s says it is not %s, and its kernels are", d.Name(), what)
	}
	t.Skipf("driver %s is not %s", d.Name(), what)
}

func (s *suite) layer(t *testing.T, k runtime.Kernel, q runtime.LayerQuery) (map[string]sandbox.LayerEntry, bool) {
	t.Helper()
	l, err := k.(runtime.LayerLister).ListLayer(deadline(t), q)
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	got := map[string]sandbox.LayerEntry{}
	for _, e := range l.Entries {
		if _, twice := got[e.Name]; twice {
			t.Errorf("%q is listed twice", e.Name)
		}
		if i := strings.LastIndexByte(e.Name, '/'); i > 0 {
			if _, ok := got[e.Name[:i]]; !ok {
				t.Errorf("%q is listed before its directory", e.Name)
			}
		}
		got[e.Name] = e
	}
	return got, l.Truncated
}

// The writable layer as it is: what was made, changed and removed, with nothing of the
// image that was not touched.
func (s *suite) testListLayer(t *testing.T) {
	d := s.open(t)
	lacks[runtime.LayerLister](t, s, d, "able to list a layer", d.Capabilities().Layer)
	k := s.boot(t, d)
	lister := k.(runtime.LayerLister)
	if _, err := lister.ListLayer(deadline(t), runtime.LayerQuery{Most: 10}); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("a kernel without a container: %v", err)
	}
	if err := k.Attach(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, `umask 022; mkdir -p /new/deep; printf made > /new/deep/file; chown 7:8 /new/deep/file; chmod 4640 /new/deep/file
		printf hard > /new/one; ln /new/one /new/two; ln -s deep/file /new/link; touch -d @1000 /new/one
		printf x > "$(printf '/new/a\377\nb')"
		rm /etc/debian_version; rm -r /etc/apt; mkdir /etc/apt; printf mine > /etc/apt/own
		printf gone > /new/gone; rm /new/gone; chmod 600 /etc/passwd`)
	all := runtime.LayerQuery{Most: 10_000, Hash: true, HashMost: 1 << 20}
	got, truncated := s.layer(t, k, all)
	if truncated {
		t.Error("a short listing is truncated")
	}
	file := got["/new/deep/file"]
	if file.Mode != typeFile|0o4640 || file.UID != 7 || file.GID != 8 || file.Size != 4 || file.Ctime == 0 || file.Ino == 0 {
		t.Errorf("a file: %+v", file)
	}
	if sum := sha256.Sum256([]byte("made")); string(file.Hash) != string(sum[:]) {
		t.Errorf("its hash: %x", file.Hash)
	}
	one, two := got["/new/one"], got["/new/two"]
	if one.Ino == 0 || one.Ino != two.Ino || one.Mtime != 1000e9 || one.Ctime < time.Now().Add(-time.Hour).UnixNano() {
		t.Errorf("hard links, with a time that was put back: %+v %+v", one, two)
	}
	if l := got["/new/link"]; l.Mode&typeMask != typeLink || l.Target != "deep/file" {
		t.Errorf("a link: %+v", l)
	}
	if !got["/etc/debian_version"].Whiteout || got["/etc/debian_version"].Opaque {
		t.Errorf("what was removed: %+v", got["/etc/debian_version"])
	}
	if apt := got["/etc/apt"]; !apt.Opaque || apt.Whiteout || apt.Mode != typeDir|0o755 || got["/etc/apt/own"].Size != 4 {
		t.Errorf("a directory that was made anew: %+v", apt)
	}
	if p := got["/etc/passwd"]; p.Mode != typeFile|0o600 {
		t.Errorf("a file of the image whose mode changed: %+v", p)
	}
	if _, ok := got["/new/a\xff\nb"]; !ok {
		t.Error("a name that is not text is missing")
	}
	for _, p := range []string{"/new/gone", "/etc/group", "/usr"} {
		if e, ok := got[p]; ok {
			t.Errorf("%s is no part of the layer: %+v", p, e)
		}
	}
	// Its bounds.
	if got, truncated := s.layer(t, k, runtime.LayerQuery{Most: 3}); len(got) != 3 || !truncated {
		t.Errorf("three at most: %d, truncated %v", len(got), truncated)
	}
	if got, truncated := s.layer(t, k, runtime.LayerQuery{Most: 10_000, Until: time.Now().Add(-time.Second)}); !truncated {
		t.Errorf("no time: %d, truncated %v", len(got), truncated)
	}
	got, _ = s.layer(t, k, runtime.LayerQuery{Most: 10_000, Hash: true, HashMost: 1 << 20, Only: []string{"/new/one"}})
	if got["/new/one"].Hash == nil || got["/new/deep/file"].Hash != nil {
		t.Error("other files than those that were named have a hash")
	}
	s.sh(t, k, "truncate -s 2M /new/large")
	if got, _ = s.layer(t, k, all); got["/new/large"].Hash != nil || got["/new/large"].Size != 2<<20 {
		t.Errorf("a file that is more than may be read: %+v", got["/new/large"])
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lister.ListLayer(ctx, all); err == nil {
		t.Error("a caller who has left is answered")
	}
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	if got, _ := s.layer(t, k, all); got["/new"].Mode != 0 || got["/etc/debian_version"].Whiteout {
		t.Errorf("after a reset: %v", got)
	}
}

// The clock of day can be set; what measures time does not notice. It outlives a reset and
// the driver, is no part of a checkpoint, and can be the host's again.
func (s *suite) testClock(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	lacks[runtime.Clocked](t, s, d, "able to set a clock", d.Capabilities().Clock)
	start := time.Date(2001, 2, 3, 4, 5, 0, 0, time.UTC)
	read := func(k runtime.Kernel) (day, mono time.Time) {
		t.Helper()
		f := strings.Fields(s.sh(t, k, "date +%s; cut -d' ' -f1 /proc/uptime"))
		sec, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		up, err := strconv.ParseFloat(f[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Unix(sec, 0).UTC(), time.Unix(0, int64(up*1e9))
	}
	near := func(what string, k runtime.Kernel, want time.Time) (mono time.Time) {
		t.Helper()
		day, mono := read(k)
		if late := day.Sub(want); late < -time.Second || late > patience {
			t.Errorf("%s it is %s inside, want %s", what, day, want)
		}
		return mono
	}
	k := s.mortal(t, d)
	h := journaled(t, k)
	if err := k.Attach(deadline(t), s.container(t, func(c *runtime.Container) { c.Clock = start })); err != nil {
		t.Fatal(err)
	}
	before := near("at the start", k, start)
	later := start.Add(1000 * time.Hour)
	if err := k.(runtime.Clocked).SetClock(deadline(t), later); err != nil {
		t.Fatal(err)
	}
	if after := near("once it is set", k, later); after.Before(before) || after.Sub(before) > patience {
		t.Errorf("what measures time went from %v to %v", before, after)
	}
	if err := k.Reset(deadline(t), s.container(t, func(c *runtime.Container) { c.Clock = later })); err != nil {
		t.Fatal(err)
	}
	near("after a reset", k, later)
	if d.Capabilities().Adopt {
		d = s.restart(t, d, dir)
		var err error
		if k, err = d.Adopt(deadline(t), h); err != nil {
			t.Fatal(err)
		}
		near("after a restart", k, later)
	}
	destroyAtEnd(t, k)
	if d.Capabilities().Checkpoint {
		at, cp := s.checkpoint(t, k)
		near("of a child", s.restore(t, d, at, cp, func(c *runtime.Container) { c.Clock = start }), start)
		near("of a child that has the host's", s.restore(t, d, at, cp), time.Now())
	}
	if err := k.(runtime.Clocked).SetClock(deadline(t), time.Time{}); err != nil {
		t.Fatal(err)
	}
	near("as the host's", k, time.Now())
}
