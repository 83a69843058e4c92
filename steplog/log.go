// Package steplog keeps the steps of runs: for each run an append-only log of
// checksummed records in segment files.
//
// Not rows of the store: an append is one write of a few hundred bytes to a file
// of the run's own, while a row waits in line for the one writer of the database,
// with the creates (BenchmarkAppend; BenchmarkStepRows of store/sqlite).
//
// An append that returned is in the kernel's hands: it survives kill -9 of this
// process. The files are synced some times a second for a machine that dies.
package steplog

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	segmentBytes = 16 << 20
	headerBytes  = 8       // length and CRC-32C of what follows, little endian
	maxRecord    = 8 << 20 // a step with 1 MiB of both streams, as base64 in JSON, has less than 3
	suffix       = ".steps"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Log is one run's. A position is a byte offset into all of it. Safe for
// concurrent use.
type Log struct {
	dir      string
	segment  int64                  // size after which another file is begun
	appended func(n int, end int64) // told of each append, and where the log then ends

	mu struct {
		sync.Mutex
		starts  []int64 // of segments, ascending; their files are named so
		file    *os.File
		end     int64
		dirty   bool
		broken  error // what the last append failed with, until one succeeds
		closed  bool
		changed notify.Change
	}
}

// open finds the log of a directory, which is made with the first append. What a
// crash left half written at its end is cut off.
func open(dir string, segment int64, appended func(n int, end int64)) (*Log, error) {
	l := &Log{dir: dir, segment: segment, appended: appended}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, wrap("open", err)
	}
	for _, e := range entries {
		if n, ok := startOf(e.Name()); ok {
			l.mu.starts = append(l.mu.starts, n)
		}
	}
	slices.Sort(l.mu.starts)
	if len(l.mu.starts) == 0 {
		return l, nil
	}
	last := l.mu.starts[len(l.mu.starts)-1]
	f, err := os.OpenFile(l.path(last), os.O_RDWR, 0)
	if err != nil {
		return nil, wrap("open", err)
	}
	good, err := whole(f)
	if err == nil {
		var info os.FileInfo
		if info, err = f.Stat(); err == nil && info.Size() > good {
			err = cmp.Or(f.Truncate(good), f.Sync())
		}
	}
	// Not kept open: most logs are only read, of runs that are over, and there may be
	// thousands of them.
	if err := cmp.Or(err, f.Close()); err != nil {
		return nil, wrap("open", err)
	}
	l.mu.end = last + good
	return l, nil
}

// startOf is where a segment begins, by the name of its file.
func startOf(name string) (int64, bool) {
	name, ok := strings.CutSuffix(name, suffix)
	n, err := strconv.ParseInt(name, 10, 64)
	return n, ok && err == nil
}

func (l *Log) path(start int64) string {
	return filepath.Join(l.dir, fmt.Sprintf("%016d%s", start, suffix))
}

// whole is how many bytes of a file are records.
func whole(f *os.File) (good int64, err error) {
	r := bufio.NewReaderSize(f, 1<<20)
	var buf []byte
	for {
		b, err := next(r, &buf)
		if err != nil {
			if errors.Is(err, errTorn) || errors.Is(err, io.EOF) {
				return good, nil
			}
			return good, err
		}
		good += headerBytes + int64(len(b))
	}
}

var errTorn = errors.New("no record")

// next reads a record into buf; io.EOF at the end, errTorn where there is none.
func next(r io.Reader, buf *[]byte) ([]byte, error) {
	var head [headerBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errTorn
		}
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > maxRecord {
		return nil, errTorn
	}
	*buf = slices.Grow((*buf)[:0], int(n))[:n]
	if _, err := io.ReadFull(r, *buf); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errTorn
		}
		return nil, err
	}
	if crc32.Checksum(*buf, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, errTorn
	}
	return *buf, nil
}

// Append adds a record and returns the position after it. If it fails, nothing of
// it is there.
func (l *Log) Append(record []byte) (int64, error) {
	frame := make([]byte, headerBytes, headerBytes+len(record))
	binary.LittleEndian.PutUint32(frame, uint32(len(record)))
	binary.LittleEndian.PutUint32(frame[4:], crc32.Checksum(record, castagnoli))
	frame = append(frame, record...)
	if len(record) == 0 || len(record) > maxRecord {
		return 0, &sandbox.Error{Class: sandbox.TooLarge, Op: "steplog.append", Msg: "a record of " + sandbox.FormatSize(int64(len(record)))}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.appendLocked(frame)
	if l.mu.broken = err; err != nil {
		return l.mu.end, err
	}
	return l.mu.end, nil
}

func (l *Log) appendLocked(frame []byte) error {
	if l.mu.closed {
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "steplog.append", Msg: "the log is closed"}
	}
	if err := l.prepareFileLocked(); err != nil {
		return wrap("append", err)
	}
	n, err := l.mu.file.Write(frame)
	if err != nil {
		// What was written of it is cut off, and if that fails written over.
		at := l.mu.end - l.mu.starts[len(l.mu.starts)-1]
		_ = l.mu.file.Truncate(at)
		if _, serr := l.mu.file.Seek(at, io.SeekStart); serr != nil {
			err = serr
		}
		return wrap("append", err)
	}
	l.mu.end += int64(n)
	l.mu.dirty = true
	l.mu.changed.Tell()
	l.appended(n, l.mu.end)
	return nil
}

// prepareFileLocked sees to a file that can be appended to.
func (l *Log) prepareFileLocked() error {
	if len(l.mu.starts) > 0 {
		last := l.mu.starts[len(l.mu.starts)-1]
		if at := l.mu.end - last; at < l.segment {
			if l.mu.file != nil {
				return nil
			}
			f, err := os.OpenFile(l.path(last), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			if _, err := f.Seek(at, io.SeekStart); err != nil {
				return cmp.Or(err, f.Close())
			}
			l.mu.file = f
			return nil
		}
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path(l.mu.end), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if l.mu.file != nil {
		err = cmp.Or(l.mu.file.Sync(), l.mu.file.Close())
	}
	err = cmp.Or(err, durable.Sync(l.dir))
	l.mu.file, l.mu.starts = f, append(l.mu.starts, l.mu.end)
	return err
}

// Broken is what the last append failed with; nil if it did not.
func (l *Log) Broken() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.broken
}

// End is the position after the last record, and what is closed when there is
// another.
func (l *Log) End() (int64, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.end, l.mu.changed.Next()
}

// Read calls f with the records from a position on, until it says false or there
// are no more, and returns the position after the last one it was called with. The
// bytes are good until the next call.
func (l *Log) Read(from int64, f func(record []byte, after int64) bool) (int64, error) {
	return l.read(from, 256<<10, f)
}

func (l *Log) read(from int64, ahead int, f func(record []byte, after int64) bool) (int64, error) {
	l.mu.Lock()
	end, starts := l.mu.end, slices.Clone(l.mu.starts)
	l.mu.Unlock()
	if from < 0 || from > end {
		return from, badCursor()
	}
	var buf []byte
	for from < end {
		i, found := slices.BinarySearch(starts, from)
		if !found {
			i--
		}
		if i < 0 {
			return from, badCursor()
		}
		stop := end
		if i+1 < len(starts) {
			stop = starts[i+1]
		}
		file, err := os.Open(l.path(starts[i]))
		if err != nil {
			return from, wrap("read", err)
		}
		r := bufio.NewReaderSize(io.NewSectionReader(file, from-starts[i], stop-from), ahead)
		for from < stop {
			record, err := next(r, &buf)
			if err != nil {
				file.Close()
				if errors.Is(err, errTorn) || errors.Is(err, io.EOF) {
					err = &sandbox.Error{Class: sandbox.Corrupt, Op: "steplog.read", Msg: fmt.Sprintf("no record at %d of %s", from, filepath.Base(l.dir)),
						Hint: "a cursor is one that was given out; otherwise the file is damaged"}
				}
				return from, err
			}
			from += headerBytes + int64(len(record))
			if !f(record, from) {
				file.Close()
				return from, nil
			}
		}
		file.Close()
	}
	return from, nil
}

// ReadAt is the one record at a position.
func (l *Log) ReadAt(at int64) (record []byte, err error) {
	_, err = l.read(at, 4<<10, func(b []byte, _ int64) bool { record = b; return false })
	if err == nil && record == nil {
		err = badCursor()
	}
	return record, err
}

func badCursor() error {
	return sandbox.InvalidField("cursor", "it is not one of this run; the next_cursor of an answer is accepted, or none for the beginning")
}

// Sync makes what was appended durable.
func (l *Log) Sync() error {
	l.mu.Lock()
	f, dirty := l.mu.file, l.mu.dirty
	l.mu.dirty = false
	l.mu.Unlock()
	if !dirty || f == nil {
		return nil
	}
	err := f.Sync()
	if errors.Is(err, os.ErrClosed) {
		return nil // another file was begun, which synced this one
	}
	if err != nil {
		l.mu.Lock()
		l.mu.dirty = true
		l.mu.Unlock()
		return wrap("sync", err)
	}
	return nil
}

func (l *Log) close() error {
	err := l.Sync()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = true
	l.mu.changed.Tell()
	if l.mu.file == nil {
		return err
	}
	err = cmp.Or(err, l.mu.file.Close())
	l.mu.file = nil
	return err
}

func wrap(op string, err error) error {
	class, hint := sandbox.Unavailable, ""
	if sandbox.NoSpace(err) {
		class, hint = sandbox.DiskFull, "make room on the server's disk, or delete runs that are not needed: cove runs rm"
	}
	return &sandbox.Error{Class: class, Op: "steplog." + op, Msg: "the log of steps", Err: err, Hint: hint, RetryAfter: 0}
}
