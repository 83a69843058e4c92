package recording

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// site answers differently each time, so that a replay cannot be right by luck.
func site(t *testing.T) *httptest.Server {
	var mu sync.Mutex
	calls := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		calls++
		n := calls
		mu.Unlock()
		w.Header().Set("X-Call", fmt.Sprint(n))
		switch r.URL.Path {
		case "/echo":
			io.Copy(w, r.Body)
		case "/chunks":
			w.Header().Set("Trailer", "X-Sum")
			for i := range 5 {
				fmt.Fprintf(w, "chunk %d of call %d\n", i, n)
				w.(http.Flusher).Flush()
			}
			w.Header().Set("X-Sum", fmt.Sprint(n*7))
		case "/large":
			b := make([]byte, 64<<10)
			for i := range 80 {
				if i%2 == 0 {
					rand.Read(b)
				}
				w.Write(b)
			}
		case "/cut":
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, "only this")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/early":
			w.WriteHeader(http.StatusUnauthorized)
		case "/odd":
			w.Header()["X-Odd"] = []string{"caf\xe9 \xff", "second"}
			w.WriteHeader(http.StatusTeapot)
		case "/none":
			w.WriteHeader(http.StatusNoContent)
		case "/moved":
			http.Redirect(w, r, "/echo", http.StatusFound)
		default:
			fmt.Fprintf(w, "call %d: %s %s", n, r.Method, r.URL)
		}
	}))
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	t.Cleanup(s.Close)
	return s
}

// said is an answer as a test compares it.
type said struct {
	status  int
	header  string
	trailer string
	body    string
	failed  string
}

func do(t *testing.T, rt http.RoundTripper, method, url string, body io.Reader) said {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		return said{failed: err.Error()}
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	s := said{status: res.StatusCode, header: fmt.Sprint(res.Header), trailer: fmt.Sprint(res.Trailer), body: string(b)}
	if err != nil {
		s.failed = "broke off"
	}
	return s
}

type call struct{ method, path, body string }

var calls = []call{
	{"GET", "/", ""}, {"GET", "/", ""}, {"GET", "/?a=1&b=2", ""}, {"POST", "/echo", "hello"}, {"POST", "/echo", "other"},
	{"GET", "/chunks", ""}, {"GET", "/large", ""}, {"HEAD", "/", ""}, {"GET", "/odd", ""}, {"GET", "/none", ""}, {"GET", "/moved", ""}, {"GET", "/cut", ""},
	{"PUT", "/echo", strings.Repeat("0123456789", 50_000)},
}

func library(t *testing.T, dir string, s func(string) Sealer, limits Limits) *Library {
	t.Helper()
	l, err := OpenLibrary(Config{Dir: dir, Sealer: s, Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func statusOf(t *testing.T, l *Library, id string) (sandbox.Recording, error) {
	t.Helper()
	all, err := l.Status(t.Context(), []string{id, "nosuch"})
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("of %s and one that is not there: %v", id, all)
	}
	return all[id], err
}

// begin records as it was done when recordings said what they are called and whose
// they are.
func begin(t *testing.T, l *Library, id string) *Recorder {
	t.Helper()
	r, err := l.Record(Header{ID: id, Name: "n-" + id, Tenant: "t", Sandbox: "box"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func play(t *testing.T, l *Library, box, id string, rules sandbox.NetworkReplay) *Player {
	t.Helper()
	p, err := l.Play(t.Context(), box, id, RulesOf(rules), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// testSealer is AES-GCM with a key per recording.
func testSealer(id string) Sealer {
	key := make([]byte, 32)
	copy(key, id)
	block, _ := aes.NewCipher(key)
	gcm, _ := cipher.NewGCMWithRandomNonce(block)
	return gcmSealer{gcm}
}

type gcmSealer struct{ cipher.AEAD }

func (g gcmSealer) Seal(plain, place []byte) []byte { return g.AEAD.Seal(nil, nil, plain, place) }
func (g gcmSealer) Open(sealed, place []byte) ([]byte, error) {
	return g.AEAD.Open(nil, nil, sealed, place)
}

func TestAReplayAnswersByteForByte(t *testing.T) {
	for name, s := range map[string]func(string) Sealer{"plain": nil, "sealed": testSealer} {
		t.Run(name, func(t *testing.T) {
			srv := site(t)
			dir := t.TempDir()
			l := library(t, dir, s, Limits{})
			rec := begin(t, l, "abc")
			rt := rec.Over(http.DefaultTransport)
			var want []said
			for _, c := range calls {
				want = append(want, do(t, rt, c.method, srv.URL+c.path, strings.NewReader(c.body)))
			}
			srv.Close()
			http.DefaultTransport.(*http.Transport).CloseIdleConnections()
			gone := do(t, rt, "GET", srv.URL+"/gone", nil)
			if gone.failed == "" {
				t.Fatal("a server that is gone answers")
			}
			if err := l.Finish("abc"); err != nil {
				t.Fatal(err)
			}
			is, err := statusOf(t, l, "abc")
			if err != nil || is.Exchanges != int64(len(calls)+1) || is.State != sandbox.RecordingFinished || is.Truncated != 0 || is.Dropped != 0 || is.Name != "n-abc" || is.Tenant != "t" {
				t.Errorf("%+v %v", is, err)
			}
			raw, err := os.ReadFile(filepath.Join(dir, "abc.tape"))
			if err != nil || int64(len(raw)) != is.Bytes {
				t.Errorf("%d bytes, the record says %d, %v", len(raw), is.Bytes, err)
			}
			if sealed := !bytes.Contains(raw, []byte("n-abc")); sealed != (s != nil) {
				t.Errorf("sealed: %v", sealed)
			}
			// Another process, from the file alone.
			l = library(t, dir, s, Limits{})
			if again, err := statusOf(t, l, "abc"); err != nil || again != is {
				t.Errorf("found again as %+v %v, was %+v", again, err, is)
			}
			p := play(t, l, "box", "abc", sandbox.NetworkReplay{})
			for i, c := range calls {
				if got := do(t, p, c.method, srv.URL+c.path, strings.NewReader(c.body)); got != want[i] {
					t.Errorf("%v:\n got %.300v\nwant %.300v", c, got, want[i])
				}
			}
			if got := do(t, p, "GET", srv.URL+"/gone", nil); got != gone {
				t.Errorf("a failure: got %v, want %v", got, gone)
			}
			if st := p.Status(); st.Missed != 0 || st.Unused != 0 || st.Answered != is.Exchanges {
				t.Errorf("%+v", st)
			}
			// What it all was, to be read by others.
			var out bytes.Buffer
			if err := l.Export(t.Context(), "abc", true, &out); err != nil {
				t.Fatal(err)
			}
			var har struct {
				Log struct{ Entries []harEntry }
			}
			if err := json.Unmarshal(out.Bytes(), &har); err != nil || len(har.Log.Entries) != len(calls)+1 || har.Log.Entries[3].Response.Content.Text != "hello" {
				t.Errorf("HAR: %v, %d entries", err, len(har.Log.Entries))
			}
			tp, release, err := l.Read(t.Context(), "abc")
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			list, err := tp.list(2, 3)
			if err != nil || len(list) != 3 || list[0].Number != 3 || list[1].Sent != 5 || list[1].Status != 200 {
				t.Errorf("%+v %v", list, err)
			}
		})
	}
}

func TestMissesAreTyped(t *testing.T) {
	srv := site(t)
	l := library(t, t.TempDir(), nil, Limits{Body: 100_000})
	rt := begin(t, l, "abc").Over(http.DefaultTransport)
	first, second := do(t, rt, "GET", srv.URL+"/", nil), do(t, rt, "GET", srv.URL+"/", nil)
	do(t, rt, "GET", srv.URL+"/large", nil)
	if err := l.Finish("abc"); err != nil {
		t.Fatal(err)
	}
	if is, _ := statusOf(t, l, "abc"); is.Truncated != 1 {
		t.Errorf("%+v", is)
	}
	p := play(t, l, "box", "abc", sandbox.NetworkReplay{})
	get := func(p *Player, path string) error {
		req, _ := http.NewRequest("GET", srv.URL+path, nil)
		res, err := p.RoundTrip(req)
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	for i, want := range []said{first, second} {
		if got := do(t, p, "GET", srv.URL+"/", nil); got != want {
			t.Errorf("the same for the %d. time: %v, want %v", i+1, got, want)
		}
	}
	for path, want := range map[string]*sandbox.Error{"/": sandbox.ErrReplayMissed, "/new": sandbox.ErrReplayMissed, "/large": sandbox.ErrReplayTruncated} {
		if err := get(p, path); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	st := p.Status()
	if st.Missed != 3 || st.Answered != 2 || len(st.Misses) != 3 {
		t.Errorf("%+v", st)
	}
	for range missesKept + 10 {
		get(p, "/new")
	}
	if st := p.Status(); len(st.Misses) != missesKept || st.Missed != missesKept+13 {
		t.Errorf("%d misses, %d listed", st.Missed, len(st.Misses))
	}
	last := play(t, l, "box2", "abc", sandbox.NetworkReplay{RepeatLast: true})
	for i, want := range []said{first, second, second, second} {
		if got := do(t, last, "GET", srv.URL+"/", nil); got != want {
			t.Errorf("repeating the last, %d: %v, want %v", i, got, want)
		}
	}
}

// A server that answers without reading: what the body was is not known, so
// any is good.
func TestABodyThatNobodyReadMatchesAny(t *testing.T) {
	l := library(t, t.TempDir(), nil, Limits{})
	rec := begin(t, l, "abc")
	early := roundTripper(func(r *http.Request) (*http.Response, error) {
		r.Body.Read(make([]byte, 3))
		return &http.Response{StatusCode: 401, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("no")), ContentLength: 2, Request: r}, nil
	})
	do(t, rec.Over(early), "POST", "http://a.test/", io.MultiReader(strings.NewReader("hello there")))
	l.Finish("abc")
	p := play(t, l, "box", "abc", sandbox.NetworkReplay{})
	if got := do(t, p, "POST", "http://a.test/", strings.NewReader("whatever")); got.status != 401 || got.body != "no" {
		t.Errorf("%+v", got)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestAFullRecordingDropsAndCounts(t *testing.T) {
	srv := site(t)
	l := library(t, t.TempDir(), nil, Limits{Body: 10 << 20, Recording: 300_000})
	rt := begin(t, l, "abc").Over(http.DefaultTransport)
	if got := do(t, rt, "GET", srv.URL+"/large", nil); len(got.body) != 80*64<<10 {
		t.Errorf("the sandbox got %d bytes", len(got.body))
	}
	do(t, rt, "GET", srv.URL+"/", nil)
	do(t, rt, "GET", srv.URL+"/", nil)
	l.Finish("abc")
	is, _ := statusOf(t, l, "abc")
	if is.Truncated != 1 || is.Dropped != 2 || is.Bytes > 500_000 {
		t.Errorf("%+v", is)
	}
}

func TestConcurrentRequestsAreAllRecordedAndReplayed(t *testing.T) {
	srv := site(t)
	l := library(t, t.TempDir(), nil, Limits{})
	rt := begin(t, l, "abc").Over(http.DefaultTransport)
	const n = 64
	ask := func(rt http.RoundTripper) map[string]string {
		var wg sync.WaitGroup
		var mu sync.Mutex
		out := map[string]string{}
		for i := range n {
			wg.Go(func() {
				path := fmt.Sprintf("/?i=%d", i)
				got := do(t, rt, "GET", srv.URL+path, nil)
				mu.Lock()
				out[path] = fmt.Sprint(got)
				mu.Unlock()
			})
		}
		// And some that are equal: each gets an answer of its own.
		for i := range n {
			wg.Go(func() {
				got := do(t, rt, "POST", srv.URL+"/equal", strings.NewReader("x"))
				mu.Lock()
				out["equal "+got.body] += "x"
				mu.Unlock()
				_ = i
			})
		}
		wg.Wait()
		return out
	}
	want := ask(rt)
	l.Finish("abc")
	for range 3 {
		p := NewPlayer(mustRead(t, l, "abc"), RulesOf(sandbox.NetworkReplay{}))
		if got := ask(p); !maps.Equal(got, want) || len(got) != 2*n {
			t.Errorf("%d answers, want %d; equal %v", len(got), len(want), maps.Equal(got, want))
		}
	}
}

func mustRead(t *testing.T, l *Library, id string) *Recording {
	t.Helper()
	tp, release, err := l.Read(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return tp
}

// small makes a recording of a few exchanges and returns its bytes.
func small(t testing.TB, s func(string) Sealer) []byte {
	dir := t.TempDir()
	l, err := OpenLibrary(Config{Dir: dir, Sealer: s})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rec, err := l.Record(Header{ID: "abc", Tenant: "t"})
	if err != nil {
		t.Fatal(err)
	}
	rt := rec.Over(roundTripper(func(r *http.Request) (*http.Response, error) {
		io.Copy(io.Discard, r.Body)
		return &http.Response{StatusCode: 200, Header: http.Header{"A": {"b"}}, Body: io.NopCloser(strings.NewReader(strings.Repeat("answer ", 100))), ContentLength: -1, Request: r}, nil
	}))
	for i := range 4 {
		req, _ := http.NewRequest("POST", fmt.Sprintf("https://a.test/%d", i), strings.NewReader("body"))
		res, err := rt.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	if err := l.Finish("abc"); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "abc.tape"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Cut anywhere, a recording is what was complete by then.
func TestARecordingIsReadableUpToWhereItWasCut(t *testing.T) {
	for name, s := range map[string]func(string) Sealer{"plain": nil, "sealed": testSealer} {
		var sealer Sealer
		if s != nil {
			sealer = s("abc")
		}
		whole := small(t, s)
		last, first := 0, -1
		for n := preambleLen; n <= len(whole); n++ {
			tp, err := Read(bytes.NewReader(whole[:n]), int64(n), sealer)
			if err != nil {
				if first >= 0 || sandbox.ClassOf(err) != sandbox.Corrupt {
					t.Fatalf("%s: cut at %d of %d: %v", name, n, len(whole), err)
				}
				continue // within the header
			}
			if first < 0 {
				first = n
			}
			if len(tp.Exchanges) < last || tp.whole > int64(n) {
				t.Fatalf("%s: cut at %d: %d exchanges, %d before", name, n, len(tp.Exchanges), last)
			}
			last = len(tp.Exchanges)
		}
		if last != 4 || first < 0 {
			t.Errorf("%s: %d exchanges at the end", name, last)
		}
	}
}

// A changed byte never gives other content than was recorded.
func TestAChangedByteIsNoticed(t *testing.T) {
	for name, s := range map[string]func(string) Sealer{"plain": nil, "sealed": testSealer} {
		var sealer Sealer
		if s != nil {
			sealer = s("abc")
		}
		whole := small(t, s)
		for i := preambleLen; i < len(whole); i++ {
			b := slices.Clone(whole)
			b[i] ^= 0x10
			tp, err := Read(bytes.NewReader(b), int64(len(b)), sealer)
			if err != nil {
				continue
			}
			if len(tp.Exchanges) == 4 && tp.finished != nil {
				t.Fatalf("%s: byte %d of %d changed, and nobody noticed", name, i, len(whole))
			}
		}
	}
	// Frames of a sealed recording cannot be put into another one.
	other, mine := small(t, testSealer), testSealer("xyz")
	if _, err := Read(bytes.NewReader(other), int64(len(other)), mine); err == nil {
		t.Error("a recording opens with another's key")
	}
}

// A small frame does not become a large one.
func TestAFrameThatUnpacksToTooMuchIsRefused(t *testing.T) {
	b := appendFrame(preamble(false), nil, 0, kindHeader, 0, []byte(`{}`))
	b = appendFrame(b, nil, 0, kindRequest, 1, []byte(`{"method":"GET","url":"https://a.test/"}`))
	b = appendFrame(b, nil, 0, kindRequestBody, 1, make([]byte, 64<<20))
	if len(b) > 100_000 {
		t.Fatalf("%d bytes", len(b))
	}
	if _, err := Read(bytes.NewReader(b), int64(len(b)), nil); !errors.Is(err, sandbox.ErrCorrupt) {
		t.Errorf("%v", err)
	}
}

func FuzzRead(f *testing.F) {
	whole := small(f, nil)
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add(preamble(false))
	add := func(frames ...func(at int64) []byte) {
		b := preamble(false)
		b = appendFrame(b, nil, 0, kindHeader, 0, []byte(`{}`))
		for _, fr := range frames {
			b = append(b, fr(int64(len(b)))...)
		}
		f.Add(b)
	}
	raw := func(k kind, n uint32, payload string) func(int64) []byte {
		return func(at int64) []byte { return appendFrame(nil, nil, at, k, n, []byte(payload)) }
	}
	add(raw(kindEnd, 1, `{}`))
	add(raw(kindUnfound, 0, "nowhere.test"))
	add(raw(kindRequest, 1, `{"method":"GET","url":"https://a.test/"}`), raw(kindEnd, 1, `{"failed":{"class":"x","msg":"ÿ"}}`))
	add(raw(kindRequest, 1, `{"method":"GET","url":"https://a.test/"}`), raw(kindAnswer, 1, `{"status":200,"length":-5,"trailer":["a"]}`), raw(kindAnswerBody, 1, "x"), raw(kindEnd, 1, `{"trailer":{"a":["b"]}}`))
	add(raw(kindRequest, 1, `{"method":"G","url":"https://a.test/"}`), raw(kindAnswer|compressed, 1, "\x28\xb5\x2f\xfd\xa4\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		tp, err := Read(bytes.NewReader(b), int64(len(b)), nil)
		if err != nil {
			if c := sandbox.ClassOf(err); c != sandbox.Corrupt && c != sandbox.Unsupported && c != sandbox.Precondition {
				t.Errorf("%v is of class %s", err, c)
			}
			return
		}
		p := NewPlayer(tp, RulesOf(sandbox.NetworkReplay{}))
		for i := range tp.Exchanges {
			e := &tp.Exchanges[i]
			req, err := http.NewRequest(e.Request.Method, e.Request.URL(), nil)
			if err != nil {
				continue
			}
			res, err := p.RoundTrip(req)
			if err != nil {
				continue
			}
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		if _, err := tp.list(0, 100); err != nil {
			t.Error(err)
		}
		for i := range tp.Exchanges {
			if _, err := tp.har(&tp.Exchanges[i]); err != nil {
				t.Error(err)
			}
		}
		if err := (&copier{w: io.Discard}).frames(context.Background(), tp); err != nil {
			t.Error(err)
		}
	})
}
