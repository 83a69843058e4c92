package ship

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// NewDirectory is a sink of files below a directory, which is made.
func NewDirectory(dir string, format sandbox.ShipFormat) (Sink, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, diskError(err)
	}
	if format == sandbox.Parquet {
		return parquetDirectory{dir}, nil
	}
	return openLines(dir, rotateAt)
}

// parquetDirectory writes each batch as one file, whole or not at all:
// run=RUN/FROM-TO.parquet. A batch that comes again replaces itself.
type parquetDirectory struct{ dir string }

func (d parquetDirectory) Deliver(_ context.Context, b Batch) error {
	content, err := encodeParquet(b.Records)
	if err != nil {
		return err
	}
	of := filepath.Join(d.dir, "run="+b.Run)
	if err := os.MkdirAll(of, 0o755); err != nil {
		return diskError(err)
	}
	to := filepath.Join(of, b.Name()+".parquet")
	staged := filepath.Join(of, ".next") // of a crash, too: the next batch replaces it
	if err := durable.Stage(staged, bytes.NewReader(content), 0o644); err != nil {
		return diskError(err)
	}
	if err := durable.Rename(staged, to); err != nil {
		return diskError(err)
	}
	return asDiskError(durable.Sync(d.dir))
}

func (parquetDirectory) Close() error { return nil }

// rotateAt is the size after which another file of lines is begun.
const rotateAt = 256 << 20

// lines appends to records-NNNNNN.jsonl. Each batch is synced; what a crash left half
// written is cut off, so that every line is whole.
type lines struct {
	dir    string
	rotate int64

	file   *os.File
	number int
	size   int64
}

func openLines(dir string, rotate int64) (*lines, error) {
	l := &lines{dir: dir, rotate: rotate}
	names, err := filepath.Glob(filepath.Join(dir, "records-??????*.jsonl"))
	if err != nil {
		return nil, diskError(err)
	}
	for _, n := range names {
		var number int
		if _, err := fmt.Sscanf(filepath.Base(n), "records-%d.jsonl", &number); err == nil {
			l.number = max(l.number, number)
		}
	}
	if l.number == 0 {
		return l, nil
	}
	f, err := os.OpenFile(l.path(), os.O_RDWR, 0)
	if err != nil {
		return nil, diskError(err)
	}
	if l.size, err = wholeLines(f); err == nil {
		err = f.Truncate(l.size)
	}
	if err == nil {
		_, err = f.Seek(l.size, io.SeekStart)
	}
	if err != nil {
		return nil, diskError(errors.Join(err, f.Close()))
	}
	l.file = f
	return l, nil
}

// wholeLines is how much of a file ends with a line.
func wholeLines(f *os.File) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 64<<10)
	for at := info.Size(); at > 0; {
		n := min(int64(len(buf)), at)
		if _, err := f.ReadAt(buf[:n], at-n); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			return at - n + int64(i) + 1, nil
		}
		at -= n
	}
	return 0, nil
}

func (l *lines) path() string {
	return filepath.Join(l.dir, fmt.Sprintf("records-%06d.jsonl", l.number))
}

func (l *lines) Deliver(_ context.Context, b Batch) error {
	content, err := encodeLines(b.Records)
	if err != nil {
		return err
	}
	if l.file == nil || l.size >= l.rotate {
		if err := l.next(); err != nil {
			return diskError(err)
		}
	}
	_, err = l.file.Write(content)
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil { // nothing of it stays, or it would be there once more with each try
		terr := l.file.Truncate(l.size)
		_, serr := l.file.Seek(l.size, io.SeekStart)
		return diskError(errors.Join(err, terr, serr))
	}
	l.size += int64(len(content))
	return nil
}

func (l *lines) next() error {
	l.number++
	f, err := os.OpenFile(l.path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		l.number--
		return err
	}
	old := l.file
	l.file, l.size = f, 0
	if old != nil {
		err = old.Close()
	}
	return errors.Join(err, durable.Sync(l.dir))
}

func (l *lines) Close() error {
	if l.file == nil {
		return nil
	}
	return asDiskError(l.file.Close())
}

func asDiskError(err error) error {
	if err == nil {
		return nil
	}
	return diskError(err)
}

func diskError(err error) error {
	class, hint := sandbox.Unavailable, ""
	if sandbox.NoSpace(err) {
		class, hint = sandbox.DiskFull, "make room where the shipment goes to"
	}
	return &sandbox.Error{Class: class, Op: "ship.directory", Msg: "the directory does not take the records", Err: err, Hint: hint}
}
