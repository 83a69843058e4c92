package gateway_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/internal/strangers"
)

// Who asks for a public port without end and reads no answer is cut: a public port
// makes nobody known, and visits are bounded.
func TestAPublicPortPinsNoHandlers(t *testing.T) {
	w := newWorldFor(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "look") }),
		gateway.Config{}, strangers.Limits{PerConn: 20, VisitsPerAddress: 20})
	w.public[w.port] = true
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(25 * time.Second)) // answers would have ended by themselves after 30
	f := http2.NewFramer(c, c)
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
		t.Fatal(err)
	}
	// begun waits until an answer has: its header comes, whatever the window.
	begun := func(id uint32) error {
		for {
			fr, err := f.ReadFrame()
			if err != nil {
				return err
			}
			if h := fr.Header(); h.Type == http2.FrameHeaders && h.StreamID == id {
				return nil
			}
		}
	}
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	for id := uint32(1); id < 1000; id += 2 {
		head.Reset()
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", w.host()}, {":path", "/"}} {
			_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true})
		if err == nil {
			err = begun(id)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("not answered, and not cut")
		}
		if err != nil {
			return // cut
		}
	}
	t.Error("500 requests are under way for somebody who reads no answer")
}

// A stream of a public port that is read goes on, however long it is silent.
func TestAPublicStreamGoesOn(t *testing.T) {
	const write = 20 * time.Millisecond
	w := newWorldFor(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			_, _ = io.WriteString(w, strconv.Itoa(i))
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(10 * write):
			}
		}
	}), gateway.Config{}, strangers.Limits{Write: write})
	w.public[w.port] = true
	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(context.Background(), "GET", "http://"+w.host()+"/", nil)
		res, err := w.client(h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if b, err := io.ReadAll(res.Body); err != nil || string(b) != "012" {
			t.Errorf("HTTP/2 %v: %q, %v", h2, b, err)
		}
	}
}
