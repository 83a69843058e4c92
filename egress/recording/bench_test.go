package recording

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// served answers without a network, so that what is measured is the recording.
func served(body []byte) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			io.Copy(io.Discard, r.Body)
		}
		return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), Request: r}, nil
	})
}

// go test ./egress/recording -run xxx -bench . -benchtime 1s
func BenchmarkRecording(b *testing.B) {
	text := []byte(strings.Repeat(`{"role":"assistant","content":"a line of an answer as models give them, number 17"},`, 1<<20/84))
	for _, size := range []int{1 << 10, 1 << 20} {
		for _, sealed := range []bool{false, true} {
			name := fmt.Sprintf("%dKiB/sealed=%v", size>>10, sealed)
			var s func(string) Sealer
			if sealed {
				s = testSealer
			}
			l, err := OpenLibrary(Config{Dir: b.TempDir(), Sealer: s, Limits: Limits{Recording: 1 << 40}})
			if err != nil {
				b.Fatal(err)
			}
			ask := func(b *testing.B, rt http.RoundTripper, i int) {
				req, _ := http.NewRequest("POST", fmt.Sprintf("https://a.test/v1/messages?n=%d", i%1000), strings.NewReader("a question"))
				res, err := rt.RoundTrip(req)
				if err == nil {
					_, err = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			rec, err := l.Record(Header{ID: "abc"})
			if err != nil {
				b.Fatal(err)
			}
			rt := rec.Over(served(text[:size]))
			b.Run("record/"+name, func(b *testing.B) {
				b.SetBytes(int64(size))
				for i := range b.N {
					ask(b, rt, i)
				}
			})
			for i := range 1000 { // one of each, however many were made
				ask(b, rt, i)
			}
			if err := l.Finish("abc"); err != nil {
				b.Fatal(err)
			}
			p, err := l.Play(b.Context(), "box", "abc", RulesOf(sandbox.NetworkReplay{RepeatLast: true}), nil)
			if err != nil {
				b.Fatal(err)
			}
			b.Run("replay/"+name, func(b *testing.B) {
				b.SetBytes(int64(size))
				for i := range b.N {
					ask(b, p, i)
				}
			})
			p.Close()
			l.Close()
		}
	}
}
