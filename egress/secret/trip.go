package secret

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// buffered is how long a body may be to be read ahead, so that the other side
	// is told its new length. Longer ones go on without one.
	buffered = 64 << 10
	// maxHeaders of a request with values in it: a placeholder is shorter than
	// what it may stand for, and can be written many times.
	maxHeaders = 512 << 10
)

// trip is a Set before the next piece of a chain.
type trip struct {
	set  *Set
	next http.RoundTripper
}

// RoundTrip sends a request with values in it and returns the answer without.
// The request that was given is not changed.
func (t *trip) RoundTrip(r *http.Request) (*http.Response, error) {
	name := r.URL.Hostname()
	if !t.set.Covers(name) {
		return t.next.RoundTrip(r)
	}
	var use []*bound
	for _, b := range t.set.secrets {
		// Over plain HTTP nothing says who answers, and anybody may listen. What
		// comes back is searched all the same: the server may have kept a value that
		// it got by TLS.
		if b.covers(name) && (r.URL.Scheme == "https" || b.is.AllowHTTP) {
			use = append(use, b)
		}
	}
	hide := t.set.hide()
	// Answers before the answer (103 and others) are handed on by a trace that is
	// in the context already; ours is called before it.
	trace := &httptrace.ClientTrace{Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
		hideHeader(hide, http.Header(h))
		return nil
	}}
	out := r.Clone(httptrace.WithClientTrace(r.Context(), trace))
	if err := putHeaders(out.Header, use); err != nil {
		return nil, err
	}
	if err := putURL(out.URL, use); err != nil {
		return nil, err
	}
	if err := putBody(out, use); err != nil {
		return nil, err
	}
	out.Header.Set("Accept-Encoding", "identity")
	for _, h := range []string{"Sec-Websocket-Extensions", "Grpc-Accept-Encoding", "Connect-Accept-Encoding"} {
		out.Header.Del(h) // compression
	}
	// Of a part of an answer nobody knows whether it is part of a value.
	out.Header.Del("Range")
	out.Header.Del("If-Range")
	res, err := t.next.RoundTrip(out)
	if err != nil {
		return nil, hideError(hide, err)
	}
	res.Request = r
	if err := takeOut(res, hide); err != nil {
		res.Body.Close()
		return nil, err
	}
	return res, nil
}

func putHeaders(h http.Header, use []*bound) error {
	size := 0
	for _, b := range use {
		if b.is.Header != "" {
			format := b.is.Format
			if format == "" {
				format = "{}"
			}
			h.Set(b.is.Header, strings.Replace(format, "{}", b.value, 1))
		}
	}
	for name, values := range h {
		for i, v := range values {
			for _, b := range use {
				if b.is.Header != "" {
					continue
				}
				// Before it is made: a value may hold another's placeholder.
				if size+grown(v, b) > maxHeaders {
					return errTooLong
				}
				v = strings.ReplaceAll(v, b.is.Placeholder, b.value)
				v = putBasic(v, b)
			}
			values[i] = v
			if size += len(name) + len(v); size > maxHeaders {
				return errTooLong
			}
		}
	}
	return nil
}

var errTooLong = sandbox.Errorf(sandbox.Denied, "egress.secret", "with its secrets in place the head of this request is longer than %d bytes", maxHeaders)

// grown is how long a text is with a value in place, escaped at worst.
func grown(s string, b *bound) int {
	return len(s) + strings.Count(s, b.is.Placeholder)*3*len(b.value)
}

// putBasic puts a value into "Basic base64(user:placeholder)".
func putBasic(v string, b *bound) string {
	kind, cred, ok := strings.Cut(v, " ")
	if !ok || !strings.EqualFold(kind, "Basic") {
		return v
	}
	plain, err := base64.StdEncoding.DecodeString(strings.TrimSpace(cred))
	if err != nil || !bytes.Contains(plain, []byte(b.is.Placeholder)) || grown(string(plain), b) > maxHeaders {
		return v
	}
	return kind + " " + base64.StdEncoding.EncodeToString(bytes.ReplaceAll(plain, []byte(b.is.Placeholder), []byte(b.value)))
}

func putURL(u *url.URL, use []*bound) error {
	for _, b := range use {
		if !b.is.URL {
			continue
		}
		if grown(u.RawQuery, b)+grown(u.EscapedPath(), b) > maxHeaders {
			return errTooLong
		}
		u.RawQuery = strings.ReplaceAll(u.RawQuery, b.is.Placeholder, url.QueryEscape(b.value))
		if escaped := u.EscapedPath(); strings.Contains(escaped, b.is.Placeholder) {
			u.RawPath = strings.ReplaceAll(escaped, b.is.Placeholder, url.PathEscape(b.value))
			u.Path = strings.ReplaceAll(u.Path, b.is.Placeholder, b.value)
		}
	}
	return nil
}

func putBody(r *http.Request, use []*bound) error {
	var put []pair
	for _, b := range use {
		if b.is.Body {
			put = append(put, pair{[]byte(b.is.Placeholder), []byte(b.value)})
		}
	}
	if len(put) == 0 || r.Body == nil || r.Body == http.NoBody || r.Header.Get("Content-Encoding") != "" {
		return nil
	}
	r.GetBody = nil
	r.Header.Del("Content-Length")
	places := replacer{search: search{a: newAutomaton(put, false)}}
	if n := r.ContentLength; n >= 0 && n <= buffered {
		b, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil {
			return sandbox.Errorf(sandbox.Canceled, "egress.secret", "the body of the request: %w", err)
		}
		b = places.feed(nil, b, true)
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
		return nil
	}
	// Who says how much comes sends it all, whatever the answer.
	r.Body, r.ContentLength = &body{ReadCloser: r.Body, r: places, live: r.ContentLength < 0, quiet: quietRequest}, -1
	return nil
}

// takeOut replaces values in an answer.
func takeOut(res *http.Response, hide hiding) error {
	if res.StatusCode == http.StatusPartialContent {
		return sandbox.Errorf(sandbox.Unsupported, "egress.secret", "the server answers with a part, in which secrets cannot be looked for").
			WithHint("it was asked for the whole")
	}
	hideHeader(hide, res.Header)
	res.Status = hide.all(res.Status)
	if res.StatusCode == http.StatusSwitchingProtocols {
		rw, ok := res.Body.(io.ReadWriteCloser)
		if !ok {
			return sandbox.Errorf(sandbox.Internal, "egress.secret", "an upgraded connection that cannot be written to")
		}
		masked := &body{ReadCloser: rw, r: hide.replacer(), live: true, quiet: quiet}
		masked.r.mask, masked.r.messages = true, messagesOf(res)
		res.Body = upgraded{rw, masked}
		return nil
	}
	if res.Body == nil || res.Body == http.NoBody || res.Request.Method == http.MethodHead {
		return nil
	}
	for _, h := range []string{"Grpc-Encoding", "Connect-Content-Encoding"} { // of messages
		if coding := res.Header.Get(h); coding != "" && coding != "identity" {
			return unreadable(coding)
		}
	}
	trailer := func() { hideHeader(hide, res.Trailer) }
	// Nobody waits for what is held back of a length that is known: they wait for
	// the whole.
	live := res.ContentLength < 0
	switch coding := strings.ToLower(strings.TrimSpace(res.Header.Get("Content-Encoding"))); {
	case len(res.Header["Content-Encoding"]) > 1:
		return unreadable("more than one coding")
	case coding == "" || coding == "identity":
	case coding == "gzip" || coding == "x-gzip":
		res.Body = &unzipped{under: res.Body}
		res.Header.Del("Content-Encoding")
		res.ContentLength = -1
	default:
		return unreadable(coding)
	}
	if n := res.ContentLength; n >= 0 && n <= buffered {
		b, err := io.ReadAll(res.Body)
		if err == nil {
			res.Body.Close()
			r := hide.replacer()
			b = r.feed(nil, b, true)
			trailer()
			res.Body, res.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
			if res.Header.Get("Content-Length") != "" {
				res.Header["Content-Length"] = []string{strconv.Itoa(len(b))}
			}
			return nil
		}
		// It breaks off where it did.
		res.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(b), broken{err}), res.Body}
	}
	res.ContentLength = -1
	res.Header.Del("Content-Length")
	res.Body = &body{ReadCloser: res.Body, r: hide.replacer(), live: live, quiet: quiet, atEnd: trailer}
	return nil
}

func unreadable(coding string) error {
	return sandbox.Errorf(sandbox.Unsupported, "egress.secret", "the server answers in %q, in which secrets cannot be looked for", coding).
		WithHint("it was asked for no coding at all; only gzip can be undone")
}

func hideHeader(hide hiding, h http.Header) {
	for name, values := range h {
		for i, v := range values {
			values[i] = hide.all(v)
		}
		if clean := hide.all(name); clean != name {
			delete(h, name)
			h[http.CanonicalHeaderKey(clean)] = values
		}
	}
}

// hideError keeps what a server sent out of messages: net/http quotes lines
// that are no HTTP.
func hideError(hide hiding, err error) error {
	text := err.Error()
	clean := hide.all(text)
	if clean == text {
		return err
	}
	return sandbox.Errorf(sandbox.ClassOf(err), "egress.secret", "%s", clean)
}

// broken is where a body broke off.
type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

// unzipped undoes gzip as it is read, and not before: its first bytes may come
// long after the headers.
type unzipped struct {
	under io.ReadCloser
	z     *gzip.Reader
}

func (u *unzipped) Read(p []byte) (n int, err error) {
	if u.z == nil {
		if u.z, err = gzip.NewReader(u.under); err != nil {
			if errors.Is(err, io.EOF) {
				return 0, io.EOF // nothing at all is an empty body
			}
			return 0, err
		}
	}
	return u.z.Read(p)
}

func (u *unzipped) Close() error { return u.under.Close() }
