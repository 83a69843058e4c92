package recording

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// A recorder that was killed: the next goes on behind what was whole, and if
// nobody does the recording ends as interrupted.
func TestARecordingOutlivesItsWriter(t *testing.T) {
	srv := site(t)
	dir := t.TempDir()
	l := library(t, dir, testSealer, Limits{})
	rt := begin(t, l, "abc").Over(http.DefaultTransport)
	first := do(t, rt, "GET", srv.URL+"/", nil)
	path := filepath.Join(dir, "abc.tape")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("half a frame of a killed writer")) // the library is not closed either
	f.Close()
	os.WriteFile(filepath.Join(dir, importMark+"1"), []byte("x"), 0o600)
	os.WriteFile(filepath.Join(dir, "empty.tape"), nil, 0o600)

	l = library(t, dir, testSealer, Limits{})
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left in the directory: %v", left)
	}
	if is, _ := statusOf(t, l, "abc"); is.State != sandbox.RecordingOpen || is.Exchanges != 1 {
		t.Errorf("%+v", is)
	}
	rec := begin(t, l, "abc")
	rec.Unfound("nowhere.test")
	second := do(t, rec.Over(http.DefaultTransport), "GET", srv.URL+"/", nil)

	l = library(t, dir, testSealer, Limits{}) // killed again
	if err := l.Settle(nil, nil); err != nil {
		t.Fatal(err)
	}
	is, _ := statusOf(t, l, "abc")
	if is.State != sandbox.RecordingInterrupted || is.Exchanges != 2 || is.FinishedAt.IsZero() {
		t.Errorf("%+v", is)
	}
	if _, err := l.Record(Header{ID: "abc"}); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("a finished recording is written on: %v", err)
	}
	p := play(t, l, "box", "abc", sandbox.NetworkReplay{})
	if got := do(t, p, "GET", srv.URL+"/", nil); got != first {
		t.Errorf("%v, want %v", got, first)
	}
	if p.MissName("nowhere.test") || !p.MissName("new.test") {
		t.Error("which names were not there is not known")
	}
	// So is the replay: it goes on with the second.
	l = library(t, dir, testSealer, Limits{})
	if err := l.Settle(nil, map[string]bool{ReplayOf("box", "abc"): true}); err != nil {
		t.Fatal(err)
	}
	p = play(t, l, "box", "abc", sandbox.NetworkReplay{})
	if got := do(t, p, "GET", srv.URL+"/", nil); got != second {
		t.Errorf("after a restart %v, want %v", got, second)
	}
	if used := p.Used(); len(used) != 2 {
		t.Errorf("used %v", used)
	}
	if err := p.Rewind(); err != nil {
		t.Fatal(err)
	}
	if got := do(t, p, "GET", srv.URL+"/", nil); got != first {
		t.Errorf("rewound %v, want %v", got, first)
	}
	// Another begins where this one is.
	at := p.Position()
	child, err := l.Play(t.Context(), "child", "abc", RulesOf(sandbox.NetworkReplay{}), UsedAt(at, "abc"))
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	if got := do(t, child, "GET", srv.URL+"/", nil); got != second {
		t.Errorf("the child got %v, want %v", got, second)
	}
	if err := child.SeekTo(at); err != nil {
		t.Fatal(err)
	}
	if got := child.Position(); got != at || at != "abc:1" {
		t.Errorf("at %q, want %q", got, at)
	}
	for position, n := range map[string]int{"abc:1-3,7": 4, "other:1": 0, "abc:": 0, "abc:9-1": 0, "abc:x": 0, "abc:1-99999999999": 0, "": 0} {
		if used := UsedAt(position, "abc"); len(used) != n {
			t.Errorf("%q is %v", position, used)
		}
	}
	l.Forget("box", "abc")
	if err := l.Settle(nil, nil); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*"+suffixAt)); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestUse(t *testing.T) {
	srv := site(t)
	dir := t.TempDir()
	l := library(t, dir, nil, Limits{})
	rec := begin(t, l, "abc")
	do(t, rec.Over(http.DefaultTransport), "GET", srv.URL+"/", nil)
	if _, err := l.Record(Header{ID: "abc"}); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("the id twice: %v", err)
	}
	if _, err := l.Record(Header{ID: "abe"}); err != nil {
		t.Errorf("another: %v", err)
	}
	if err := l.Delete(t.Context(), "abc"); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("deleted while it is written: %v", err)
	}
	l.Finish("abc")
	p := play(t, l, "box", "abc", sandbox.NetworkReplay{})
	if err := l.Delete(t.Context(), "abc"); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("deleted while it is played: %v", err)
	}
	p.Close()
	if err := l.Delete(t.Context(), "abc"); err != nil {
		t.Fatal(err)
	}
	if err := l.Delete(t.Context(), "abc"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := l.Play(t.Context(), "box", "abc", Rules{}, nil); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := l.Record(Header{ID: "abf"}); err != nil {
		t.Error(err)
	}
	if err := l.Discard("abf"); err != nil {
		t.Fatal(err)
	}
	if all, _ := l.List(t.Context()); len(all) != 1 {
		t.Errorf("%d recordings", len(all))
	}
}

func TestExportAndImport(t *testing.T) {
	srv := site(t)
	from, to := library(t, t.TempDir(), testSealer, Limits{}), library(t, t.TempDir(), testSealer, Limits{Body: 10 << 20, Recording: 8 << 20})
	rt := begin(t, from, "abc").Over(http.DefaultTransport)
	var want []said
	for _, c := range calls {
		want = append(want, do(t, rt, c.method, srv.URL+c.path, strings.NewReader(c.body)))
	}
	var out bytes.Buffer
	if err := from.Export(t.Context(), "abc", false, &out); err != nil { // while it is written
		t.Fatal(err)
	}
	if bytes.Contains(out.Bytes(), []byte(`"tenant"`)) || bytes.Contains(out.Bytes(), []byte(`"name"`)) {
		t.Error("the archive says whose it was, or what they called it")
	}
	is, err := to.Import(t.Context(), "xyz", bytes.NewReader(out.Bytes()))
	if err != nil || is.Exchanges != int64(len(calls)) || is.Tenant != "" || is.Name != "" || is.Sandbox != "" {
		t.Fatalf("%+v %v", is, err)
	}
	p := play(t, to, "box", "xyz", sandbox.NetworkReplay{})
	for i, c := range calls {
		if got := do(t, p, c.method, srv.URL+c.path, strings.NewReader(c.body)); got != want[i] {
			t.Errorf("%v: %.200v, want %.200v", c, got, want[i])
		}
	}
	sealed, _ := os.ReadFile(filepath.Join(from.cfg.Dir, "abc.tape"))
	bomb := preamble(false) // 600 frames of a hundred bytes, each of two megabytes
	for range 600 {
		k, head := kindUnfound, make([]byte, maxPayload)
		if len(bomb) == preambleLen {
			k, head = kindHeader, []byte("{}")
		}
		bomb = appendFrame(bomb, nil, int64(len(bomb)), k, 0, head)
	}
	for name, c := range map[string]struct {
		archive []byte
		want    *sandbox.Error
	}{
		"cut":        {out.Bytes()[:out.Len()-10], sandbox.ErrInvalid},
		"not one":    {[]byte("PK\x03\x04 something else entirely"), sandbox.ErrInvalid},
		"nothing":    {nil, sandbox.ErrInvalid},
		"sealed":     {sealed, sandbox.ErrInvalid},
		"with more":  {append(bytes.Clone(out.Bytes()), "more"...), sandbox.ErrInvalid},
		"too long":   {append(bytes.Clone(out.Bytes()), make([]byte, 8<<20)...), sandbox.ErrTooLarge},
		"a bomb":     {bomb, sandbox.ErrTooLarge},
		"the future": {append([]byte("COVETAPE\x02\x00"), make([]byte, 100)...), sandbox.ErrUnsupported},
	} {
		if _, err := to.Import(t.Context(), "bad", bytes.NewReader(c.archive)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := to.Import(gone, "bad", bytes.NewReader(out.Bytes())); !errors.Is(err, context.Canceled) {
		t.Errorf("whoever left still imports: %v", err)
	}
	if _, err := to.Import(t.Context(), "xyz", bytes.NewReader(out.Bytes())); !errors.Is(err, sandbox.ErrAlreadyExists) {
		t.Errorf("an id twice: %v", err)
	}
	ents, _ := os.ReadDir(to.cfg.Dir)
	if len(ents) != 2 { // the recording and box.at
		t.Errorf("left: %v", ents)
	}
}
