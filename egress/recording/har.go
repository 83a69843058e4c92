package recording

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"time"
	"unicode/utf8"
)

// harBody is the longest body that goes into a HAR: it is a string in one JSON
// document, which browsers load whole.
const harBody = 16 << 20

type harPair struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type harContent struct {
	Size     int64  `json:"size"`
	MimeType string `json:"mimeType"`
	Text     string `json:"text,omitempty"`
	Encoding string `json:"encoding,omitempty"`
	Comment  string `json:"comment,omitempty"`
}

type harEntry struct {
	Started time.Time `json:"startedDateTime"`
	Time    float64   `json:"time"` // ms
	Request struct {
		Method      string      `json:"method"`
		URL         string      `json:"url"`
		HTTPVersion string      `json:"httpVersion"`
		Cookies     []harPair   `json:"cookies"`
		Headers     []harPair   `json:"headers"`
		Query       []harPair   `json:"queryString"`
		Post        *harContent `json:"postData,omitempty"`
		HeadersSize int         `json:"headersSize"`
		BodySize    int64       `json:"bodySize"`
	} `json:"request"`
	Response struct {
		Status      int        `json:"status"`
		StatusText  string     `json:"statusText"`
		HTTPVersion string     `json:"httpVersion"`
		Cookies     []harPair  `json:"cookies"`
		Headers     []harPair  `json:"headers"`
		Content     harContent `json:"content"`
		RedirectURL string     `json:"redirectURL"`
		HeadersSize int        `json:"headersSize"`
		BodySize    int64      `json:"bodySize"`
		Comment     string     `json:"comment,omitempty"`
	} `json:"response"`
	Cache   struct{} `json:"cache"`
	Timings struct {
		Send    float64 `json:"send"`
		Wait    float64 `json:"wait"`
		Receive float64 `json:"receive"`
	} `json:"timings"`
}

// exportHAR writes a recording as HAR 1.2, for browsers' tools to show. It cannot be
// imported again: what a HAR has no place for is lost.
func (l *Library) exportHAR(ctx context.Context, id string, w io.Writer) error {
	t, release, err := l.Read(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	out := bufio.NewWriterSize(w, 128<<10)
	fmt.Fprint(out, `{"log":{"version":"1.2","creator":{"name":"cove","version":"1"},"entries":[`)
	for i := range t.Exchanges {
		if err := ctx.Err(); err != nil {
			return err
		}
		e, err := t.har(&t.Exchanges[i])
		if err != nil {
			return err
		}
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if i > 0 {
			out.WriteByte(',')
		}
		if _, err := out.Write(b); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "]}}")
	return out.Flush()
}

func (t *Recording) har(e *Exchange) (h harEntry, err error) {
	sc := t.scan
	var q requestHead
	if err := sc.json(e.request, &q); err != nil {
		return h, err
	}
	took := float64(max(0, e.end.At.Sub(q.At)).Microseconds()) / 1000
	h.Started, h.Time = q.At, took
	h.Request.Method, h.Request.URL, h.Request.HTTPVersion = e.Request.Method, e.Request.URL(), q.Proto
	h.Request.Cookies, h.Request.Headers, h.Request.Query = []harPair{}, pairs(q.Header), []harPair{}
	h.Request.HeadersSize, h.Request.BodySize = -1, e.end.Request
	if vs, err := url.ParseQuery(e.Request.Query); err == nil {
		for _, k := range slices.Sorted(maps.Keys(vs)) {
			for _, v := range vs[k] {
				h.Request.Query = append(h.Request.Query, harPair{k, v})
			}
		}
	}
	if e.end.Request > 0 {
		c, err := t.harContent(e.sent, q.Header.http().Get("Content-Type"), e.end.Request, e.end.TruncatedRequest)
		if err != nil {
			return h, err
		}
		h.Request.Post = &c
	}
	r := &h.Response
	r.Cookies, r.Headers, r.HeadersSize, r.BodySize = []harPair{}, []harPair{}, -1, e.end.Answer
	if e.end.Failed != nil {
		r.Comment, r.BodySize = string(e.end.Failed.Msg), -1
		return h, nil
	}
	var a answerHead
	if err := sc.json(e.answer, &a); err != nil {
		return h, err
	}
	r.Status, r.HTTPVersion, r.Headers = a.Status, a.Proto, pairs(a.Header)
	r.RedirectURL = a.Header.http().Get("Location")
	r.Content, err = t.harContent(e.body, a.Header.http().Get("Content-Type"), e.end.Answer, e.end.Truncated)
	h.Timings.Wait = float64(max(0, a.At.Sub(q.At)).Microseconds()) / 1000
	h.Timings.Receive = max(0, took-h.Timings.Wait)
	return h, err
}

func (t *Recording) harContent(frames []frame, mime string, size int64, truncated bool) (c harContent, err error) {
	c = harContent{Size: size, MimeType: mime}
	if truncated || size > harBody {
		c.Comment = "too long"
		return c, nil
	}
	// What the recording says its size is may be wrong; what there is counts.
	b, err := io.ReadAll(io.LimitReader(&bodyReader{scan: t.scan, frames: frames, then: io.EOF}, harBody))
	if err != nil {
		return c, err
	}
	if utf8.Valid(b) {
		c.Text = string(b)
	} else {
		c.Text, c.Encoding = base64.StdEncoding.EncodeToString(b), "base64"
	}
	return c, nil
}

func pairs(h header) []harPair {
	out := []harPair{}
	for _, k := range slices.Sorted(maps.Keys(h)) {
		for _, v := range h[k] {
			name, _ := k.MarshalText() // as ISO 8859-1
			value, _ := v.MarshalText()
			out = append(out, harPair{string(name), string(value)})
		}
	}
	return out
}
