package recording

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Limits of what is recorded. Traffic itself goes on beyond them.
type Limits struct {
	Body      int64 // of one body, uncompressed; longer ones are cut on the recording and marked
	Recording int64 // on disk; once full, exchanges to come are dropped and counted
}

// DefaultLimits hold a day of an agent's calls of a model, or a small dataset.
var DefaultLimits = Limits{Body: 256 << 20, Recording: 2 << 30}

// Recorder writes a recording. Safe for concurrent use.
type Recorder struct {
	f      *os.File
	sealer Sealer
	limits Limits
	log    *slog.Logger
	now    func() time.Time

	mu struct {
		sync.Mutex
		is     sandbox.Recording
		size   int64
		last   uint32
		full   bool  // nothing more is begun
		failed error // nothing more is written
		closed bool

		unfound map[string]bool // names on the recording that were looked up in vain
	}
}

// Over records what passes on to next. Requests have their URL and Host set, as
// net/http/httputil's ReverseProxy sends them.
func (r *Recorder) Over(next http.RoundTripper) http.RoundTripper { return recording{r, next} }

// Unfound notes a name that was looked up in vain.
func (r *Recorder) Unfound(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.full || len(name) > maxName || len(r.mu.unfound) >= maxUnfound || r.mu.unfound[name] {
		return
	}
	if r.write(kindUnfound, 0, []byte(name)) {
		if r.mu.unfound == nil {
			r.mu.unfound = map[string]bool{}
		}
		r.mu.unfound[name] = true
	}
}

// Status is what is on the recording by now.
func (r *Recorder) Status() sandbox.Recording {
	r.mu.Lock()
	defer r.mu.Unlock()
	is := r.mu.is
	is.Bytes = r.mu.size
	return is
}

// write appends a frame. Callers hold mu.
func (r *Recorder) write(k kind, exchange uint32, v any) bool {
	if r.mu.failed != nil || r.mu.closed {
		return false
	}
	payload, ok := v.([]byte)
	if !ok {
		var err error
		if payload, err = json.Marshal(v); err != nil {
			return r.fail(err)
		}
	}
	b := appendFrame(nil, r.sealer, r.mu.size, k, exchange, payload)
	if _, err := r.f.WriteAt(b, r.mu.size); err != nil {
		return r.fail(err)
	}
	r.mu.size += int64(len(b))
	if r.mu.size >= r.limits.Recording {
		r.mu.full = true
	}
	return true
}

// fail gives the recording up. What is whole on it stays; the sandbox goes on, and
// what it does now is counted as dropped.
func (r *Recorder) fail(err error) bool {
	r.mu.failed = err
	r.log.Error("a recording cannot be written; it ends here", "recording", r.mu.is.ID, "err", err)
	if err := r.f.Truncate(r.mu.size); err != nil {
		r.log.Warn("the torn end of a recording stays; readers stop before it", "recording", r.mu.is.ID, "err", err)
	}
	return false
}

// finish ends the recording and makes it durable. Exchanges under way are not on it.
func (r *Recorder) finish(interrupted bool) (sandbox.Recording, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return r.mu.is, nil
	}
	f := finish{At: r.now().UTC(), Interrupted: interrupted, Dropped: r.mu.is.Dropped}
	r.write(kindFinish, 0, f)
	r.mu.closed = true
	r.mu.is.State, r.mu.is.FinishedAt, r.mu.is.Bytes = sandbox.RecordingFinished, f.At, r.mu.size
	if interrupted {
		r.mu.is.State = sandbox.RecordingInterrupted
	}
	return r.mu.is, errors.Join(r.f.Sync(), r.f.Close())
}

// abandon closes the file as it is: the next process goes on with it.
func (r *Recorder) abandon() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil
	}
	r.mu.closed = true
	return r.f.Close()
}

// begin gives a request its number; nil: it is not recorded.
func (r *Recorder) begin(req *http.Request) *exchange {
	head := requestHead{At: r.now().UTC(), Method: text(req.Method), URL: text(requestURL(req)), Proto: req.Proto, Header: headerOf(req.Header)}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil
	}
	if r.mu.full || r.mu.last >= maxExchanges || r.mu.failed != nil || !r.write(kindRequest, r.mu.last+1, head) {
		r.mu.is.Dropped++
		return nil
	}
	r.mu.last++
	e := &exchange{r: r, number: r.mu.last, length: req.ContentLength}
	e.mu.sent, e.mu.got = body{kind: kindRequestBody, hash: sha256.New()}, body{kind: kindAnswerBody, hash: sha256.New()}
	return e
}

// requestURL is where a request goes: whom it asks for, at the port that the
// connection is to.
func requestURL(req *http.Request) string {
	host := req.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if host == "" {
		host = req.URL.Hostname()
	}
	u := *req.URL
	u.User, u.Fragment = nil, ""
	port := u.Port()
	if host = trimBrackets(host); port != "" && port != map[string]string{"http": "80", "https": "443"}[u.Scheme] {
		u.Host = net.JoinHostPort(host, port)
	} else if u.Host = host; isV6(host) {
		u.Host = "[" + host + "]"
	}
	return u.String()
}

// askedIn is a request as it is matched; its body is not read yet.
func askedIn(req *http.Request) (Asked, error) {
	u, err := url.Parse(requestURL(req))
	if err != nil {
		return Asked{}, err
	}
	return askedFor(req.Method, u, req.Header), nil
}

// exchange is one under way.
type exchange struct {
	r      *Recorder
	number uint32
	length int64 // of the request's body as announced; -1 = not

	mu struct {
		sync.Mutex
		sent body // the request's
		got  body
		over bool
	}
}

// body is one as it passes.
type body struct {
	kind      kind
	hash      hash.Hash
	n         int64
	pending   []byte // less than a chunk
	ended     bool
	truncated bool
}

// pass notes bytes. Callers hold the exchange's mu.
func (e *exchange) pass(b *body, p []byte) {
	b.hash.Write(p)
	b.n += int64(len(p))
	if e.mu.over || b.truncated {
		return
	}
	if b.n > e.r.limits.Body {
		b.truncated, b.pending = true, nil
		return
	}
	for len(p) > 0 {
		n := min(len(p), chunk-len(b.pending))
		b.pending = append(b.pending, p[:n]...)
		if p = p[n:]; len(b.pending) == chunk {
			e.flush(b)
		}
	}
}

func (e *exchange) flush(b *body) {
	if len(b.pending) == 0 || b.truncated {
		return
	}
	e.r.mu.Lock()
	if e.r.mu.full {
		b.truncated = true
	} else {
		e.r.write(b.kind, e.number, b.pending)
	}
	e.r.mu.Unlock()
	b.pending = b.pending[:0]
}

// finish writes the end, once.
func (e *exchange) finish(is end) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.over {
		return
	}
	e.flush(&e.mu.sent)
	e.flush(&e.mu.got)
	e.mu.over = true
	is.At, is.Request, is.Answer = e.r.now().UTC(), e.mu.sent.n, e.mu.got.n
	is.Hash = hex.EncodeToString(e.mu.sent.hash.Sum(nil))
	is.Partial = !e.mu.sent.ended && e.mu.sent.n != e.length
	is.Truncated, is.TruncatedRequest = e.mu.got.truncated, e.mu.sent.truncated
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	if e.r.write(kindEnd, e.number, is) {
		e.r.mu.is.Exchanges++
		if is.Truncated || is.Upgrade {
			e.r.mu.is.Truncated++
		}
	}
}

type recording struct {
	r    *Recorder
	next http.RoundTripper
}

func (t recording) RoundTrip(req *http.Request) (*http.Response, error) {
	e := t.r.begin(req)
	if e == nil {
		return t.next.RoundTrip(req)
	}
	if req.Body == nil || req.Body == http.NoBody {
		e.mu.sent.ended = true
	} else {
		req = req.Clone(req.Context())
		req.Body, req.GetBody = &sentBody{ReadCloser: req.Body, e: e}, nil // sent again it would be on the recording twice
	}
	res, err := t.next.RoundTrip(req)
	if err != nil {
		if req.Context().Err() == nil { // else nobody knows what the answer would have been
			e.finish(end{Failed: &fault{Class: sandbox.ClassOf(err), Msg: text(sandbox.Plain(err))}})
		}
		return nil, err
	}
	head := answerHead{At: t.r.now().UTC(), Status: res.StatusCode, Proto: res.Proto, Header: headerOf(res.Header), Length: res.ContentLength}
	for k := range res.Trailer {
		head.Trailer = append(head.Trailer, text(k))
	}
	t.r.mu.Lock()
	t.r.write(kindAnswer, e.number, head)
	t.r.mu.Unlock()
	if res.StatusCode == http.StatusSwitchingProtocols {
		e.finish(end{Upgrade: true})
		return res, nil
	}
	res.Body = &gotBody{ReadCloser: res.Body, e: e, res: res}
	return res, nil
}

// sentBody is a request's body on its way out.
type sentBody struct {
	io.ReadCloser
	e *exchange
}

func (b *sentBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.e.mu.Lock()
	defer b.e.mu.Unlock()
	if !b.e.mu.over {
		b.e.pass(&b.e.mu.sent, p[:n])
		b.e.mu.sent.ended = b.e.mu.sent.ended || err == io.EOF
	}
	return n, err
}

// gotBody is an answer's body on its way in.
type gotBody struct {
	io.ReadCloser
	e   *exchange
	res *http.Response
}

func (b *gotBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.e.mu.Lock()
	if !b.e.mu.over {
		b.e.pass(&b.e.mu.got, p[:n])
		b.e.mu.got.ended = b.e.mu.got.ended || err == io.EOF
	}
	b.e.mu.Unlock()
	switch {
	case err == io.EOF:
		b.e.finish(end{Trailer: headerOf(b.res.Trailer)}) // filled in by now
	case err != nil:
		b.e.finish(end{Cut: true})
	}
	return n, err
}

// Close ends an answer that was not read to its end: whoever asked has left, or
// there was no body to read.
func (b *gotBody) Close() error {
	err := b.ReadCloser.Close()
	b.e.mu.Lock()
	whole := b.e.mu.got.ended || b.e.mu.got.n == b.res.ContentLength || b.res.Request != nil && b.res.Request.Method == http.MethodHead ||
		b.res.StatusCode == http.StatusNoContent || b.res.StatusCode == http.StatusNotModified
	b.e.mu.Unlock()
	b.e.finish(end{Cut: !whole})
	return err
}
