package native

import (
	"context"
	"net/http"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

// batchWriter lets a handler send more than one message and flush once: Connect
// flushes each, which over HTTP/2 is a frame, two goroutine switches and a
// system call. Used by one goroutine. A nil one does nothing.
type batchWriter struct {
	http.ResponseWriter
	flusher http.Flusher
	held    bool
}

func (w *batchWriter) Flush() {
	if !w.held {
		w.flusher.Flush()
	}
}

func (w *batchWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *batchWriter) hold() {
	if w != nil {
		w.held = true
	}
}

func (w *batchWriter) release() {
	if w != nil {
		w.held = false
		w.flusher.Flush()
	}
}

type batchContext struct{}

func batchFrom(ctx context.Context) *batchWriter {
	w, _ := ctx.Value(batchContext{}).(*batchWriter)
	return w
}

// batched gives the handlers of process streams their batchWriter.
func batched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f, ok := w.(http.Flusher); ok && (r.URL.Path == covev1.ProcessesStartProcedure || r.URL.Path == covev1.ProcessesAttachProcedure) {
			bw := &batchWriter{ResponseWriter: w, flusher: f}
			w, r = bw, r.WithContext(context.WithValue(r.Context(), batchContext{}, bw))
		}
		next.ServeHTTP(w, r)
	})
}
