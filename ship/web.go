package ship

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/sandbox"
)

// deliverTime bounds one delivery over a network.
const deliverTime = 2 * time.Minute

// web POSTs batches as JSON lines.
type web struct {
	url    string
	header func() (name, value string, err error) // that opens the way; "" = none. Asked each time: a secret changes
	client *http.Client
	close  func()
}

// NewWeb is a sink that POSTs to a URL. Redirects are not followed: what was allowed
// is this URL.
func NewWeb(url string, transport *http.Transport, header func() (name, value string, err error)) Sink {
	return &web{url: url, header: header, close: transport.CloseIdleConnections, client: &http.Client{Transport: transport, Timeout: deliverTime,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

func (w *web) Deliver(ctx context.Context, b Batch) error {
	content, err := encodeLines(b.Records)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(content))
	if err != nil {
		return &sandbox.Error{Class: sandbox.Invalid, Op: "ship.http", Field: "sink.url", Err: err}
	}
	h := req.Header
	h.Set("Content-Type", "application/x-ndjson")
	h.Set("User-Agent", "cove")
	h.Set("Cove-Schema", strconv.Itoa(Schema))
	h.Set("Cove-Run", b.Run)
	h.Set("Cove-Records", strconv.Itoa(len(b.Records)))
	// By the ids of its ends, and not by the batch alone: a half of one is another request.
	first, last := b.Records[0].ID, b.Records[len(b.Records)-1].ID
	h.Set("Cove-First-Id", first)
	h.Set("Cove-Last-Id", last)
	h.Set("Idempotency-Key", first+"/"+last)
	name, value, err := w.header()
	if err != nil {
		return err
	}
	if name != "" {
		h.Set(name, value)
	}
	resp, err := w.client.Do(req)
	switch {
	case errors.Is(err, inward.ErrInward):
		return inwardError(req.URL.Host)
	case err != nil:
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "ship.http", Msg: req.URL.Host + " cannot be reached", Err: err}
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	resp.Body.Close()
	return webError(resp)
}

func inwardError(host string) error {
	return &sandbox.Error{Class: sandbox.Denied, Op: "ship", Field: "sink.url", Msg: host + " is in this server's own network",
		Hint: "the operator allows it with --ship-allow " + host}
}

// webError says what an answer means. What is in it is not told: whoever chose the
// URL may not be who may read what is there.
func webError(resp *http.Response) error {
	e := &sandbox.Error{Class: sandbox.Unavailable, Op: "ship.http", Msg: resp.Request.URL.Host + " answered " + strconv.Itoa(resp.StatusCode)}
	switch c := resp.StatusCode; {
	case c >= 200 && c < 300:
		return nil
	case c == http.StatusTooManyRequests || c == http.StatusServiceUnavailable:
		e.Class = sandbox.NoCapacity
		e.RetryAfter = retryAfter(resp.Header.Get("Retry-After"), time.Now())
	case c == http.StatusRequestEntityTooLarge:
		e.Class = sandbox.TooLarge
	case c >= 300 && c < 400:
		e.Msg += ", a redirect"
		e.Hint = "make a shipment to where it leads"
	case c == http.StatusUnauthorized || c == http.StatusForbidden:
		e.Class, e.Hint = sandbox.Denied, "name a secret that opens it: sink.secret"
	}
	return e
}

// retryAfter reads seconds or a date.
func retryAfter(v string, now time.Time) time.Duration {
	if n, err := strconv.Atoi(v); err == nil && n > 0 {
		return min(time.Duration(n)*time.Second, time.Hour)
	}
	if at, err := http.ParseTime(v); err == nil && at.After(now) {
		return min(at.Sub(now), time.Hour)
	}
	return 0
}

func (w *web) Close() error {
	w.close()
	return nil
}
