package server

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
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
	// anything.
	stallGrace = 500 * time.Millisecond
	// copyBuffer is how much of a volume's file is copied at a time.
	copyBuffer = 1 << 20
)

// FileRange is a part of a file as a client asks for it; the zero value is all.
type FileRange struct {
	Start  int64
	Length int64 // 0 = to the end; of a suffix, how much of it
	Suffix bool  // the last Length bytes
	Asked  bool  // only a part was asked for
}

// within is the part of the range a file of that size has; ok is false if
// there is none.
func (r FileRange) within(size int64) (start, length int64, ok bool) {
	if r.Suffix {
		n := min(r.Length, size)
		return size - n, n, n > 0
	}
	if r.Start >= size {
		return 0, 0, false
	}
	length = size - r.Start
	if r.Length > 0 {
		length = min(length, r.Length)
	}
	return r.Start, length, true
}

// FileContent is what a download is about to send.
type FileContent struct {
	Info          sandbox.FileInfo
	Start, Length int64 // Length -1: nobody knows
	Nothing       bool  // the file has nothing of the range
}

// Sending is told what is about to be sent, once nothing can be refused any more,
// and says where to. After it an error means a broken transfer: what was sent must
// not pass for a whole file.
type Sending func(FileContent) io.Writer

// DownloadFile sends a file, or a part of it; with headOnly only what it would be.
func (s *Server) DownloadFile(ctx context.Context, id, path string, want FileRange, headOnly bool, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "file.download", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error {
		probe := int64(firstRead)
		if headOnly || want.Suffix {
			probe = 1 // the size only; a suffix begins somewhere we do not know yet
		} else if want.Length > 0 {
			probe = min(probe, want.Length)
		}
		data, info, err := s.node.ReadFile(ctx, id, path, want.Start, probe)
		if err != nil {
			return err
		}
		if info.Type != sandbox.Regular || len(data) > 0 && info.Size < want.Start+int64(len(data)) {
			// A device, or a file of /proc that says it is empty: nobody knows
			// how long it is, so it comes as it comes, from the start.
			unknown := FileContent{Info: info, Length: -1}
			if headOnly {
				to(unknown)
				return nil
			}
			return s.download(ctx, id, node.Download{Path: path}, nil, unknown, to)
		}
		c := FileContent{Info: info, Length: info.Size}
		if want.Asked {
			var ok bool
			if c.Start, c.Length, ok = want.within(info.Size); !ok {
				c.Nothing = true
			}
		}
		if headOnly || c.Nothing {
			to(c)
			return nil
		}
		if want.Suffix {
			if data, _, err = s.node.ReadFile(ctx, id, path, c.Start, min(c.Length, firstRead)); err != nil {
				return err
			}
		}
		if rest := c.Length - int64(len(data)); rest > 0 {
			return s.download(ctx, id, node.Download{Path: path, Offset: c.Start + int64(len(data)), Length: rest}, data, c, to)
		}
		if _, err := to(c).Write(data[:c.Length]); err != nil {
			return readerLeft(err)
		}
		return nil
	})
}

// DownloadTar sends a directory as a tar; with headOnly it only looks whether it is
// there.
func (s *Server) DownloadTar(ctx context.Context, id, path string, headOnly bool, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "file.download_tar", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error {
		if headOnly {
			info, err := s.node.StatFile(ctx, id, path)
			if err == nil {
				to(FileContent{Info: info, Length: -1})
			}
			return err
		}
		return s.download(ctx, id, node.Download{Path: path, Tar: true}, nil, FileContent{Length: -1}, to)
	})
}

// firstWrite begins a transfer with its first byte: up to then an error can be
// answered.
type firstWrite struct {
	to   Sending
	what FileContent
	head []byte // what goes before all else
	w    io.Writer
	sent int64
}

func (f *firstWrite) begin() error {
	if f.w != nil {
		return nil
	}
	f.w = f.to(f.what)
	_, err := f.Write(f.head)
	return err
}

func (f *firstWrite) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := f.begin(); err != nil {
		return 0, err
	}
	n, err := f.w.Write(p)
	if f.sent += int64(n); err != nil {
		err = readerLeft(err)
	}
	return n, err
}

// finish begins what had no content at all.
func (f *firstWrite) finish(err error) error {
	if err == nil {
		err = f.begin()
	}
	return err
}

func readerLeft(err error) error {
	return &sandbox.Error{Class: sandbox.Canceled, Msg: "the reader has left", Err: err}
}

// download sends head and then what the node gives. Nothing is sent before the
// first byte or the end of the transfer is there, so that a failure up to then
// is an error and not a broken body.
func (s *Server) download(ctx context.Context, id string, from node.Download, head []byte, what FileContent, to Sending) error {
	w := &firstWrite{to: to, what: what, head: head}
	err := w.finish(s.node.Download(ctx, id, from, w))
	switch {
	case err != nil && w.w != nil && ctx.Err() == nil && sandbox.ClassOf(err) != sandbox.Canceled:
		s.log.Warn("a download broke off", "sandbox", id, "path", from.Path, "sent", w.sent, "err", err)
	case err == nil && what.Length >= 0 && w.sent != what.Length:
		err = &sandbox.Error{Class: sandbox.Unavailable, Msg: "the file changed while it was sent"}
	}
	return err
}

// Upload is content that comes from a client.
type Upload struct {
	io.Reader
	Size int64 // as it was announced; -1 if it was not
	// Unblock ends a Read that waits for the client, for good. It is called where
	// the content has nowhere to go, and the client sends none.
	Unblock func()
}

// UploadFile writes content of any size to a file.
func (s *Server) UploadFile(ctx context.Context, id, path string, opt sandbox.WriteOptions, content Upload) (err error) {
	ctx, call, err := s.begin(ctx, "file.upload", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	call.detail = path
	if err := validWrite(path, opt); err != nil {
		return err
	}
	body, err := boundedUpload(content, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	return s.inside(ctx, id, func() error {
		if content.Size < 0 || content.Size >= smallUpload {
			return s.upload(ctx, id, node.Upload{Path: path, Write: opt}, body)
		}
		data := make([]byte, content.Size)
		if _, err := io.ReadFull(body, data); err != nil {
			return body.failure(err)
		}
		call.changes(fileChange{Path: path, Data: data, Options: opt})
		_, err = s.node.WriteFile(ctx, id, path, data, opt)
		return err
	})
}

// UploadTar unpacks a tar into a directory. It is not atomic: what was unpacked
// before a failure stays.
func (s *Server) UploadTar(ctx context.Context, id, path, user string, content Upload) (err error) {
	ctx, call, err := s.begin(ctx, "file.upload_tar", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	call.detail = path
	opt := sandbox.WriteOptions{User: user, Parents: true}
	if err := validWrite(path, opt); err != nil {
		return err
	}
	body, err := boundedUpload(content, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	return s.inside(ctx, id, func() error { return s.upload(ctx, id, node.Upload{Path: path, Tar: true, Write: opt}, body) })
}

// upload gives content to the node, and does not leave a read of it behind that
// waits for the client: the answer would wait for it too.
func (s *Server) upload(ctx context.Context, id string, to node.Upload, body *boundedBody) error {
	err := s.node.Upload(ctx, id, to, body)
	if err != nil {
		body.stop()
	}
	return err
}

// boundedBody remembers how the client's side failed, so that it is not
// mistaken for a failure of what consumes it.
type boundedBody struct {
	Upload
	most int64

	mu struct { // held while the client is read
		sync.Mutex
		n   int64
		err error
	}
}

// boundedUpload refuses at once what is announced too large.
func boundedUpload(u Upload, most int64) (*boundedBody, error) {
	if u.Size > most {
		return nil, tooLargeBody(most)
	}
	return &boundedBody{Upload: u, most: most}, nil
}

// stop ends the reading. A client that is being waited for may go on for a while
// without sending anything: whoever sends finds out by itself, and its connection
// stays good.
func (b *boundedBody) stop() {
	if !b.mu.TryLock() {
		if b.Unblock != nil {
			defer time.AfterFunc(stallGrace, b.Unblock).Stop()
		}
		b.mu.Lock()
	}
	defer b.mu.Unlock()
	if b.mu.err == nil {
		b.mu.err = &sandbox.Error{Class: sandbox.Canceled, Msg: "the content is not wanted any more"}
	}
}

func tooLargeBody(most int64) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Msg: "the content is larger than " + sandbox.FormatSize(most) + ", which is the most accepted",
		Hint: "send it in parts with append=true, or raise the server's limit"}
}

func (b *boundedBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.err != nil {
		return 0, b.mu.err
	}
	n, err := b.Reader.Read(p)
	b.mu.n += int64(n)
	switch {
	case b.mu.n > b.most:
		b.mu.err = tooLargeBody(b.most)
		return 0, b.mu.err
	case err != nil && err != io.EOF:
		b.mu.err = &sandbox.Error{Class: sandbox.Canceled, Msg: "the content broke off after " + sandbox.FormatSize(b.mu.n), Err: err}
		return n, b.mu.err
	}
	return n, err
}

// or is how the client's side failed, if it did, and otherwise what consumed the
// content says of it: that one saw only that it broke off.
func (b *boundedBody) or(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.err != nil {
		return b.mu.err
	}
	return err
}

func (b *boundedBody) failure(err error) error {
	return b.or(&sandbox.Error{Class: sandbox.Canceled, Msg: "the content is shorter than announced", Err: err})
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
