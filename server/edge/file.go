package edge

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

// SendFile answers GET and HEAD of a file: whole, a range, or that it has not
// changed. header says what else the answer tells of it.
func SendFile(w http.ResponseWriter, r *http.Request, header func(server.FileContent), download func(want server.FileRange, headOnly bool, to server.Sending) error) error {
	want := parseRange(r.Header.Get("Range"))
	if conditional(r) {
		var info sandbox.FileInfo
		if err := download(server.FileRange{}, true, func(c server.FileContent) io.Writer { info = c.Info; return io.Discard }); err != nil {
			return err
		}
		if unchanged(r, info) {
			validators(w, info)
			w.WriteHeader(http.StatusNotModified)
			return nil
		}
		if v := r.Header.Get("If-Range"); v != "" && v != etag(info) && v != lastModified(info) {
			want = server.FileRange{}
		}
	}
	return Sending(w, func(begun server.Sending) error { return download(want, r.Method == http.MethodHead, begun) },
		func(c server.FileContent) { header(c); FileHeader(w, c, want.Asked) })
}

// Sending runs a download with where it goes. Once something was sent, a failure
// breaks the connection, which no client takes for a whole file.
func Sending(w http.ResponseWriter, download func(server.Sending) error, header func(server.FileContent)) error {
	begun := false
	err := download(func(c server.FileContent) io.Writer {
		begun = true
		header(c)
		return w
	})
	if err != nil && begun {
		panic(http.ErrAbortHandler)
	}
	return err
}

// FileHeader says what comes.
func FileHeader(w http.ResponseWriter, c server.FileContent, ranged bool) {
	h := w.Header()
	validators(w, c.Info)
	if c.Nothing {
		h.Set("Accept-Ranges", "bytes")
		h.Set("Content-Range", fmt.Sprintf("bytes */%d", c.Info.Size))
		w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		return
	}
	h.Set("Content-Type", "application/octet-stream")
	if c.Length < 0 {
		return
	}
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Length", strconv.FormatInt(c.Length, 10))
	if ranged {
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", c.Start, c.Start+c.Length-1, c.Info.Size))
		w.WriteHeader(http.StatusPartialContent)
	}
}

// conditional says that the answer depends on what the client has.
func conditional(r *http.Request) bool {
	h := r.Header
	return h.Get("If-None-Match") != "" || h.Get("If-Modified-Since") != "" || h.Get("If-Range") != ""
}

// unchanged says that the client has the file as it is. A tag counts more than a
// time, which has no parts of a second.
func unchanged(r *http.Request, info sandbox.FileInfo) bool {
	if info.ModTime.IsZero() {
		return false
	}
	if tags := r.Header.Get("If-None-Match"); tags != "" {
		for tag := range strings.SplitSeq(tags, ",") {
			if tag = strings.TrimSpace(tag); tag == "*" || strings.TrimPrefix(tag, "W/") == etag(info) {
				return true
			}
		}
		return false
	}
	since, err := http.ParseTime(r.Header.Get("If-Modified-Since"))
	return err == nil && !info.ModTime.Truncate(time.Second).After(since)
}

// etag changes with every write that the sandbox's kernel gives another time.
func etag(info sandbox.FileInfo) string {
	return fmt.Sprintf(`"%x-%x"`, info.ModTime.UnixNano(), info.Size)
}

func lastModified(info sandbox.FileInfo) string { return info.ModTime.UTC().Format(http.TimeFormat) }

func validators(w http.ResponseWriter, info sandbox.FileInfo) {
	if !info.ModTime.IsZero() {
		w.Header().Set("Last-Modified", lastModified(info))
		w.Header().Set("ETag", etag(info))
	}
}
