package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// smallUpload goes through the guest's connection: one round trip, where a
	// bulk transfer starts a process first.
	smallUpload = 1 << 20
	// firstRead is read that way of every download, for the size and the
	// errors; a file not larger is done with it.
	firstRead = 64 << 10
	// stallGrace is how long after a failure a client may go on without sending
	// anything: whoever sends finds out by itself, and its connection stays good.
	stallGrace = 500 * time.Millisecond
	// copyBuffer and the pipe's size: what the kernel allows an unprivileged pipe.
	copyBuffer = 1 << 20
)

// getFile is GET /v1/sandboxes/{id}/files?path=P, with Range, and HEAD.
func (s *Server) getFile(w http.ResponseWriter, r *http.Request) error {
	id, path := r.PathValue("id"), r.URL.Query().Get("path")
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	ctx := r.Context()
	return s.withGuest(ctx, id, func(g Guest) (err error) {
		if path, err = absolute(ctx, g, path); err != nil {
			return err
		}
		rng, ranged := parseRange(r.Header.Get("Range"))
		probe := int64(firstRead)
		if r.Method == http.MethodHead || rng.suffix {
			probe = 1 // the size only; a suffix begins somewhere we do not know yet
		} else if rng.length > 0 {
			probe = min(probe, rng.length)
		}
		data, info, err := g.ReadFile(ctx, path, rng.start, probe)
		if err != nil {
			return err
		}
		h := w.Header()
		h.Set("Content-Type", "application/octet-stream")
		if !info.ModTime.IsZero() {
			h.Set("Last-Modified", info.ModTime.UTC().Format(http.TimeFormat))
		}
		if info.Type != sandbox.Regular || len(data) > 0 && info.Size < rng.start+int64(len(data)) {
			// A device, or a file of /proc that says it is empty: nobody knows
			// how long it is, so it comes as it comes, from the start.
			if r.Method == http.MethodHead {
				return nil
			}
			return s.download(ctx, w, id, guest.BulkOp{Kind: "read", Path: path}, nil, -1, http.StatusOK)
		}
		h.Set("Accept-Ranges", "bytes")
		start, length, status := int64(0), info.Size, http.StatusOK
		if ranged {
			var ok bool
			if start, length, ok = rng.within(info.Size); !ok {
				h.Set("Content-Range", fmt.Sprintf("bytes */%d", info.Size))
				h.Del("Content-Type")
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return nil
			}
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", start, start+length-1, info.Size))
			status = http.StatusPartialContent
		}
		if r.Method == http.MethodHead {
			h.Set("Content-Length", strconv.FormatInt(length, 10))
			w.WriteHeader(status)
			return nil
		}
		if rng.suffix {
			if data, _, err = g.ReadFile(ctx, path, start, min(length, firstRead)); err != nil {
				return err
			}
		}
		if rest := length - int64(len(data)); rest > 0 {
			op := guest.BulkOp{Kind: "read", Path: path, Offset: start + int64(len(data)), Length: rest}
			return s.download(ctx, w, id, op, data, length, status)
		}
		h.Set("Content-Length", strconv.FormatInt(length, 10))
		w.WriteHeader(status)
		_, _ = w.Write(data[:length]) // an error means that the client left
		return nil
	})
}

// getTar is GET /v1/sandboxes/{id}/tar?path=DIR.
func (s *Server) getTar(w http.ResponseWriter, r *http.Request) error {
	id, path := r.PathValue("id"), r.URL.Query().Get("path")
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	return s.withGuest(r.Context(), id, func(g Guest) error {
		w.Header().Set("Content-Type", "application/x-tar")
		path, err := absolute(r.Context(), g, path)
		if err != nil {
			return err
		}
		if r.Method == http.MethodHead {
			_, err := g.Stat(r.Context(), path)
			return err
		}
		return s.download(r.Context(), w, id, guest.BulkOp{Kind: "tar", Path: path}, nil, -1, http.StatusOK)
	})
}

// download sends head and then what op writes. Nothing is sent before the
// first byte or the end of the transfer is there, so that a failure up to then
// is an error and not a broken body; after it, the connection is broken, which
// no client takes for a whole file. length -1 is unknown.
func (s *Server) download(ctx context.Context, w http.ResponseWriter, id string, op guest.BulkOp, head []byte, length int64, status int) error {
	pr, pw, err := bulkPipe()
	if err != nil {
		return err
	}
	defer pr.Close()
	ctx, cancel := context.WithCancel(ctx)
	bulk := make(chan error, 1)
	go func() {
		err := s.node.Bulk(ctx, id, op, nil, pw)
		pw.Close() // ours was the last writing end: the reader sees the end
		bulk <- err
	}()
	waited := false
	wait := func() error { waited = true; return <-bulk }
	defer func() {
		if !waited {
			cancel()
			_ = wait()
		}
		cancel()
	}()

	buf := make([]byte, copyBuffer)
	n, rerr := pr.Read(buf)
	if n == 0 {
		err := wait()
		if err == nil && rerr != nil && !errors.Is(rerr, io.EOF) {
			err = rerr
		}
		if err != nil {
			return err
		}
	}
	if length >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	}
	w.WriteHeader(status)
	sent := int64(len(head) + n)
	if _, err := w.Write(head); err != nil {
		panic(http.ErrAbortHandler)
	}
	if _, err := w.Write(buf[:n]); err != nil {
		panic(http.ErrAbortHandler)
	}
	if n > 0 {
		// Without the wrapping, net/http would copy with 32 KiB of its own.
		m, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{pr}, buf)
		sent += m
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		if err := wait(); err != nil {
			s.log.Warn("a download broke off", "sandbox", id, "path", op.Path, "sent", sent, "err", err)
			panic(http.ErrAbortHandler)
		}
	}
	if length >= 0 && sent != length { // the file shrank meanwhile
		panic(http.ErrAbortHandler)
	}
	return nil
}

// putFile is PUT /v1/sandboxes/{id}/files?path=P&mode=0644&user=U&atomic=true&append=true&parents=true.
func (s *Server) putFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	opt := sandbox.WriteOptions{User: q.Get("user")}
	if err := firstError(
		queryMode(q, &opt.Mode), queryBool(q, "atomic", &opt.Atomic), queryBool(q, "append", &opt.Append),
		queryBool(q, "parents", &opt.Parents),
	); err != nil {
		return err
	}
	id, path := r.PathValue("id"), q.Get("path")
	if err := validWrite(path, opt); err != nil {
		return err
	}
	body, err := s.body(w, r, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	return s.withGuest(r.Context(), id, func(g Guest) (err error) {
		if path, err = absolute(r.Context(), g, path); err != nil {
			return err
		}
		if r.ContentLength >= 0 && r.ContentLength < smallUpload {
			data := make([]byte, r.ContentLength)
			if _, err := io.ReadFull(body, data); err != nil {
				return body.failure(err)
			}
			if _, err := g.WriteFile(r.Context(), path, data, opt); err != nil {
				return err
			}
		} else if err := s.uploadFile(r.Context(), id, g, path, opt, body, unblock(w, r)); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}

// absolute is where a path leads in a transfer, which runs beside the guest and
// does not know the working directory.
func absolute(ctx context.Context, g Guest, p string) (string, error) {
	if path.IsAbs(p) {
		return p, nil
	}
	here, err := g.Stat(ctx, ".")
	if err != nil {
		return "", err
	}
	return path.Join(here.Path, p), nil
}

// uploadFile writes a large body to a file. An atomic one goes to a file of our
// own beside the target first. The guest could do that itself, but a transfer
// learns that its content is complete from the end of a pipe, and that also
// comes when the client breaks off or the server dies; so the server says when
// the file takes its place, and removes it if it never will.
func (s *Server) uploadFile(ctx context.Context, id string, g Guest, p string, opt sandbox.WriteOptions, body *requestBody, unblock func()) (err error) {
	target := path.Clean(p)
	old, oldErr := g.Stat(ctx, target)
	if oldErr == nil && (old.Type == sandbox.Symlink || old.Type == sandbox.OtherFile) {
		opt.Atomic = false // written through or into, as the guest does it
	}
	if !opt.Atomic || target == "/" {
		return s.upload(ctx, id, guest.BulkOp{Kind: "write", Path: p, Write: opt}, body, unblock)
	}
	// What replaces a file looks like it.
	if oldErr == nil && old.Type == sandbox.Regular {
		if opt.Mode == 0 {
			opt.Mode = old.Mode
		}
		if opt.User == "" {
			opt.User = fmt.Sprintf("%d:%d", old.UID, old.GID)
		}
	}
	opt.Atomic = false
	temp := path.Join(path.Dir(target), ".cove-upload-"+sandbox.NewID(s.cfg.Rand))
	defer func() {
		if err != nil {
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
			defer cancel()
			_ = g.Remove(undo, temp, false) // it may not even have been made, or the sandbox be gone
		}
	}()
	if err := s.upload(ctx, id, guest.BulkOp{Kind: "write", Path: temp, Write: opt}, body, unblock); err != nil {
		return err
	}
	_, err = g.Move(ctx, temp, target)
	return err
}

// putTar is PUT /v1/sandboxes/{id}/tar?path=DIR&user=U. It is not atomic: what
// was unpacked before a failure stays.
func (s *Server) putTar(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	id, path := r.PathValue("id"), q.Get("path")
	opt := sandbox.WriteOptions{User: q.Get("user"), Parents: true}
	if err := validWrite(path, opt); err != nil {
		return err
	}
	body, err := s.body(w, r, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	return s.withGuest(r.Context(), id, func(g Guest) (err error) {
		if path, err = absolute(r.Context(), g, path); err != nil {
			return err
		}
		if err := s.upload(r.Context(), id, guest.BulkOp{Kind: "untar", Path: path, Write: opt}, body, unblock(w, r)); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}

// upload feeds a request's body to op. If the body breaks off, op is cancelled
// before its stdin ends: an end would mean that this was all.
func (s *Server) upload(ctx context.Context, id string, op guest.BulkOp, body *requestBody, unblock func()) error {
	pr, pw, err := bulkPipe()
	if err != nil {
		return err
	}
	defer pw.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bulk := make(chan error, 1)
	copied := make(chan struct{})
	var cutOff atomic.Bool
	go func() {
		err := s.node.Bulk(ctx, id, op, pr, nil)
		pr.Close() // ours was the last reading end: a writer that still writes fails
		if err != nil {
			select {
			case <-copied:
			case <-time.After(stallGrace):
				cutOff.Store(true)
				unblock()
			}
		}
		bulk <- err
	}()

	_, copyErr := io.CopyBuffer(struct{ io.Writer }{pw}, struct{ io.Reader }{body}, make([]byte, copyBuffer))
	close(copied)
	if body.err != nil {
		if cutOff.Load() { // it failed first, and that ended the reading
			return <-bulk
		}
		cancel()
		<-bulk
		return body.err
	}
	pw.Close()
	bulkErr := <-bulk
	if bulkErr == nil && copyErr != nil {
		// It took no more and yet was content, as untar is with padding behind the end of its tar.
		_, _ = io.Copy(io.Discard, body)
		return body.err
	}
	return bulkErr
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

// requestBody remembers how the client's side failed, so that it is not
// mistaken for a failure of what consumes it.
type requestBody struct {
	r    io.Reader
	most int64
	n    int64
	err  error
}

// body refuses at once what is announced too large.
func (s *Server) body(w http.ResponseWriter, r *http.Request, most int64) (*requestBody, error) {
	if r.ContentLength > most {
		return nil, tooLargeBody(most)
	}
	return &requestBody{r: r.Body, most: most}, nil
}

func tooLargeBody(most int64) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Msg: "the content is larger than " + sandbox.FormatSize(most) + ", which is the most accepted",
		Hint: "send it in parts with append=true, or raise the server's limit"}
}

func (b *requestBody) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.r.Read(p)
	b.n += int64(n)
	switch {
	case b.n > b.most:
		b.err = tooLargeBody(b.most)
		return 0, b.err
	case err != nil && err != io.EOF:
		b.err = &sandbox.Error{Class: sandbox.Canceled, Msg: "the content broke off after " + sandbox.FormatSize(b.n), Err: err}
		return n, b.err
	}
	return n, err
}

func (b *requestBody) failure(err error) error {
	if b.err != nil {
		return b.err
	}
	return &sandbox.Error{Class: sandbox.Canceled, Msg: "the content is shorter than announced", Err: err}
}

// bulkPipe is a pipe with room for a whole buffer, so that the two sides
// switch once per MiB.
func bulkPipe() (r, w *os.File, err error) {
	r, w, err = os.Pipe()
	if err != nil {
		return nil, nil, sandbox.Errorf(sandbox.Unavailable, "", "no pipe: %w", err)
	}
	// Not w.Fd(), which would make the descriptor blocking. Smaller is only
	// slower: past the user's quota of pipe pages the kernel refuses.
	if c, err := w.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, copyBuffer) })
	}
	return r, w, nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
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
	if err != nil || m > maxMode {
		return sandbox.InvalidField("mode", "%.20q is not accepted; octal permission bits like 0644 are", v)
	}
	*to = uint32(m)
	return nil
}
