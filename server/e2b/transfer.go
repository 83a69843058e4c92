package e2b

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
)

// getFile is GET /files?path=P. It is compressed for who takes nothing else: an SDK
// that was told to. Most clients take it among others, and would only wait.
func (d *dialect) getFile(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	p, err := d.resolve(ctx, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	finish := func() error { return nil }
	err = edge.SendFile(w, r, func(server.FileContent) {
		w.Header().Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(p)}))
	}, func(want server.FileRange, headOnly bool, to server.Sending) error {
		if r.Header.Get("Accept-Encoding") == "gzip" && !want.Asked && !headOnly {
			to, finish = packing(w, to)
		}
		return d.server.DownloadFile(ctx, meant(ctx).sandbox.ID, p, want, headOnly, to)
	})
	if err == nil && finish() != nil {
		panic(http.ErrAbortHandler) // the client left
	}
	if errors.Is(err, sandbox.ErrNotFound) && !gone(err) {
		return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("path '%s' does not exist", p)}
	}
	if errors.Is(err, sandbox.ErrPrecondition) && !gone(err) {
		if info, serr := d.server.StatFile(ctx, meant(ctx).sandbox.ID, p); serr == nil && info.Type == sandbox.Directory {
			return sandbox.InvalidField("path", "path '%.200s' is a directory", p)
		}
	}
	return err
}

// packing sends what is sent compressed, until finish. Nobody knows how long that
// is; of nothing the SDKs want to be told that it is nothing.
func packing(w http.ResponseWriter, to server.Sending) (packed server.Sending, finish func() error) {
	z, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // a level that there is
	return func(c server.FileContent) io.Writer {
		if c.Length == 0 {
			return to(c)
		}
		w.Header().Set("Content-Encoding", "gzip")
		c.Length = -1
		z.Reset(to(c))
		return z
	}, z.Close
}

// written is one file of an upload, in its answer.
type written struct {
	Path string `json:"path"`
	Name string `json:"name"`
	Type string `json:"type"`

	Metadata map[string]string `json:"metadata,omitempty"`
}

const (
	metadataPrefix = "X-Metadata-"
	// maxParts bounds the files of one upload.
	maxParts = 10_000
)

// postFiles is POST /files, a form of many files or the bytes of one.
func (d *dialect) postFiles(w http.ResponseWriter, r *http.Request) error {
	body := io.Reader(r.Body)
	size := r.ContentLength
	switch enc := r.Header.Get("Content-Encoding"); enc {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body is not compressed with gzip", Err: err}
		}
		body, size = z, -1
	default:
		return sandbox.InvalidField("Content-Encoding", "%.20q is not accepted; gzip is", enc)
	}
	kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	var out []written
	var err error
	if kind == "multipart/form-data" {
		out, err = d.putForm(w, r, body, params["boundary"])
	} else {
		var one written
		one, err = d.putFile(w, r, r.URL.Query().Get("path"), body, size)
		out = []written{one}
	}
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

func (d *dialect) putForm(w http.ResponseWriter, r *http.Request, body io.Reader, boundary string) (out []written, err error) {
	form := multipart.NewReader(body, boundary)
	at := r.URL.Query().Get("path")
	for {
		part, err := form.NextRawPart()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, &sandbox.Error{Class: sandbox.Invalid, Msg: "the form is broken", Err: err}
		}
		if part.FormName() != "file" {
			continue
		}
		if len(out) == maxParts {
			return nil, &sandbox.Error{Class: sandbox.TooLarge, Msg: fmt.Sprintf("more than %d files in one upload", maxParts)}
		}
		// The name may be a whole path, which FileName() would cut to its end.
		p := at
		if p == "" {
			_, params, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			p = params["filename"]
		}
		one, err := d.putFile(w, r, p, part, -1)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
}

// putFile writes one file, which then is the caller's, as with E2B.
func (d *dialect) putFile(w http.ResponseWriter, r *http.Request, at string, body io.Reader, size int64) (one written, err error) {
	ctx := r.Context()
	if at == "" {
		return one, sandbox.InvalidField("path", "is missing; a path is accepted")
	}
	p, err := d.resolve(ctx, at)
	if err != nil {
		return one, err
	}
	id := meant(ctx).sandbox.ID
	metadata := uploaded(r.Header)
	if err := sandbox.ValidateAttributes("metadata", asAttributes(metadata, nil)); err != nil {
		return one, err
	}
	info, err := d.server.StatFile(ctx, id, p)
	switch {
	case err == nil && info.Type == sandbox.Directory:
		return one, sandbox.InvalidField("path", "path is a directory: %.200s", p)
	case err == nil:
	case errors.Is(err, sandbox.ErrNotFound) && !gone(err):
		if err := d.makeDirectories(ctx, path.Dir(p)); err != nil {
			return one, err
		}
	default:
		return one, err
	}
	owner, existed := d.owner(ctx), err == nil
	if err := d.server.UploadFile(ctx, id, p, sandbox.WriteOptions{User: owner}, content(w, r, body, size)); err != nil {
		return one, err
	}
	if existed && info.Owner != owner {
		if err := d.server.ChangeOwner(ctx, id, p, owner, false); err != nil {
			return one, err
		}
	}
	// What was there is gone with the content; most files have none and get none.
	if attrs := asAttributes(metadata, info.Attributes); !maps.Equal(attrs, info.Attributes) {
		if _, err := d.server.SetAttributes(ctx, id, p, attrs); err != nil {
			return one, err
		}
	}
	return written{Path: p, Name: path.Base(p), Type: "file", Metadata: metadata}, nil
}

// content is a body that somebody waits for, until the client leaves.
func content(w http.ResponseWriter, r *http.Request, body io.Reader, size int64) server.Upload {
	return server.Upload{Reader: body, Size: size, Unblock: func() {
		if r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close")
		}
		_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
	}}
}

// Metadata of files are extended attributes user.e2b.NAME, as with E2B: code inside
// sees them, and may set them.
const attributePrefix = "e2b."

// uploaded is the metadata that comes with an upload. Names of headers have no case.
func uploaded(h http.Header) map[string]string {
	var out map[string]string
	for name, values := range h {
		if key, ok := strings.CutPrefix(name, metadataPrefix); ok && key != "" {
			if out == nil {
				out = map[string]string{}
			}
			out[strings.ToLower(key)] = values[0]
		}
	}
	return out
}

// asAttributes is metadata beside those attributes that are none.
func asAttributes(metadata, others map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range others {
		if !strings.HasPrefix(k, attributePrefix) {
			out[k] = v
		}
	}
	for k, v := range metadata {
		out[attributePrefix+k] = v
	}
	return out
}

// metadataOf is a file's.
func metadataOf(info sandbox.FileInfo) map[string]string {
	var out map[string]string
	for k, v := range info.Attributes {
		if key, ok := strings.CutPrefix(k, attributePrefix); ok {
			if out == nil {
				out = map[string]string{}
			}
			out[key] = v
		}
	}
	return out
}
