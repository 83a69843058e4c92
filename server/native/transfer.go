package native

import (
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
)

// getFile is GET /v1/sandboxes/{id}/files?path=P, with Range and conditions, and
// HEAD.
func (d *dialect) getFile(w http.ResponseWriter, r *http.Request) error {
	return edge.SendFile(w, r, func(server.FileContent) {}, func(want server.FileRange, headOnly bool, to server.Sending) error {
		return d.server.DownloadFile(r.Context(), r.PathValue("id"), r.URL.Query().Get("path"), want, headOnly, to)
	})
}

// getTar is GET /v1/sandboxes/{id}/tar?path=DIR.
func (d *dialect) getTar(w http.ResponseWriter, r *http.Request) error {
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.DownloadTar(r.Context(), r.PathValue("id"), r.URL.Query().Get("path"), r.Method == http.MethodHead, begun)
	}, tarHeader(w))
}

func tarHeader(w http.ResponseWriter) func(server.FileContent) {
	return func(server.FileContent) { w.Header().Set("Content-Type", "application/x-tar") }
}

// putFile is PUT /v1/sandboxes/{id}/files?path=P&mode=0644&user=U&atomic=true&append=true&parents=true.
func (d *dialect) putFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	opt := sandbox.WriteOptions{User: q.Get("user")}
	for _, err := range []error{queryMode(q, &opt.Mode), queryBool(q, "atomic", &opt.Atomic), queryBool(q, "append", &opt.Append), queryBool(q, "parents", &opt.Parents)} {
		if err != nil {
			return err
		}
	}
	if err := d.server.UploadFile(r.Context(), r.PathValue("id"), q.Get("path"), opt, content(w, r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// putTar is PUT /v1/sandboxes/{id}/tar?path=DIR&user=U.
func (d *dialect) putTar(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if err := d.server.UploadTar(r.Context(), r.PathValue("id"), q.Get("path"), q.Get("user"), content(w, r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// content is the body of a request.
func content(w http.ResponseWriter, r *http.Request) server.Upload {
	return server.Upload{Reader: r.Body, Size: r.ContentLength, Unblock: unblock(w, r)}
}

// unblock ends a read of the request's body that waits for the client. The
// connection must not outlive the answer: net/http takes a broken read for the
// client's leaving, and would cancel whatever comes on it later.
func unblock(w http.ResponseWriter, r *http.Request) func() {
	rc := http.NewResponseController(w)
	return func() {
		if r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close") // the handler waits for us and touches no header
		}
		_ = rc.SetReadDeadline(time.Unix(1, 0))
	}
}

func queryBool(q url.Values, field string, to *bool) error {
	v := q.Get(field)
	if v == "" {
		return nil
	}
	b, err := strconv.ParseBool(v)
	if err != nil {
		return sandbox.InvalidField(field, "%.20q is not accepted; true or false is", v)
	}
	*to = b
	return nil
}

func queryMode(q url.Values, to *uint32) error {
	v := q.Get("mode")
	if v == "" {
		return nil
	}
	m, err := strconv.ParseUint(v, 8, 32)
	if err != nil || m > 0o7777 {
		return sandbox.InvalidField("mode", "%.20q is not accepted; octal permission bits like 0644 are", v)
	}
	*to = uint32(m)
	return nil
}
