package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
)

// The journal is the node's memory across restarts: an append-only file of
// framed JSON records. A record is durable when append returns nil.
//
//	header  "covejrnl" u32 version
//	frame   u32 length, u32 CRC-32C of (length, payload), payload
//
// Integers are little-endian. A frame that does not check ends the log:
// everything before it is the recovered history, everything from it on is
// dropped. That is right for the torn tail of a crash, the only damage our own
// writes can leave; damage further up loses newer records, loudly.
const (
	journalMagic   = "covejrnl"
	journalVersion = 1
	headerSize     = len(journalMagic) + 4
	frameHead      = 8
	maxRecord      = 16 << 20

	// The file is rewritten when it is this large and four times what the
	// live state needs: with 1 KiB per sandbox about every thousand creates,
	// a few milliseconds each.
	compactFloor = 1 << 20
	compactRatio = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// journal serialises appends through one writer goroutine. All that wait
// while a sync is under way share the next one (group commit).
type journal struct {
	fsys fsys
	path string
	log  *slog.Logger
	wake chan struct{} // capacity 1
	done chan struct{}

	mu struct {
		sync.Mutex
		queue  []*pending
		closed bool
	}

	// Below: the writer goroutine's alone, after openJournal.
	file   logFile
	size   int64
	live   int64 // size right after the last rewrite
	state  *state
	broken error // the file's end is not known; a rewrite must come first
}

// pending is one append on its way.
type pending struct {
	rec   record
	frame []byte
	must  bool // the fact holds whether or not it can be written now
	err   chan error
}

// openJournal reads the history at path (none is fine), starts the writer and
// returns a copy of the recovered state for the caller to keep.
//
// The file is rewritten at once, which drops a torn tail and what is no longer
// needed. Where that fails (a full disk), the old file stays as it is and the
// journal opens broken: a node must be able to start on a full disk, if only
// to kill what fills it.
func openJournal(fsys fsys, path string, log *slog.Logger) (*journal, *state, error) {
	data, err := fsys.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "read the journal: %w", err)
	}
	st, good, err := replay(data)
	if err != nil {
		var e *sandbox.Error
		if errors.As(err, &e) {
			e.Msg = path + " " + e.Msg
		}
		return nil, nil, err
	}
	if lost := int64(len(data)) - good; lost > 0 {
		log.Warn("journal: the end of the file does not check and is dropped", "path", path, "kept_bytes", good, "dropped_bytes", lost)
	}
	j := &journal{fsys: fsys, path: path, log: log, wake: make(chan struct{}, 1), done: make(chan struct{}), state: st}
	if err := j.rewrite(); err != nil {
		log.Error("journal: cannot be written; creates will fail until it can", "path", path, "err", err)
	}
	mine := st.clone()
	go j.write()
	return j, mine, nil
}

// append makes rec durable. On error it is not part of the history.
func (j *journal) append(rec record) error { return <-j.submit(rec, false) }

// appendFact is append for what is true whether or not it can be written: an
// end, an acknowledgement. On error it is held and written as soon as the
// disk takes it.
func (j *journal) appendFact(rec record) error { return <-j.submit(rec, true) }

func (j *journal) submit(rec record, must bool) <-chan error {
	p := &pending{rec: rec, must: must, err: make(chan error, 1)}
	frame, err := encodeFrame(rec)
	if err != nil {
		p.err <- err
		return p.err
	}
	p.frame = frame
	j.mu.Lock()
	closed := j.mu.closed
	if !closed {
		j.mu.queue = append(j.mu.queue, p)
	}
	j.mu.Unlock()
	if closed {
		p.err <- sandbox.Errorf(sandbox.Unavailable, "node.journal", "the journal is closed")
		return p.err
	}
	select {
	case j.wake <- struct{}{}:
	default:
	}
	return p.err
}

// close writes what is queued and ends the writer.
func (j *journal) close() error {
	j.mu.Lock()
	if !j.mu.closed {
		j.mu.closed = true
		close(j.wake)
	}
	j.mu.Unlock()
	<-j.done
	if j.file != nil {
		f := j.file
		j.file = nil
		return f.Close()
	}
	return nil
}

func (j *journal) write() {
	defer close(j.done)
	for range j.wake {
		j.commit()
	}
	j.commit() // what came between the last wake and close
}

// commit writes everything queued with one write and one sync.
func (j *journal) commit() {
	j.mu.Lock()
	batch := j.mu.queue
	j.mu.queue = nil
	j.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	err := j.writeBatch(batch)
	for _, p := range batch {
		if err == nil || p.must {
			j.state.apply(p.rec)
		}
		p.err <- err
	}
	if err == nil && j.size > compactFloor && j.size > compactRatio*j.live {
		if err := j.rewrite(); err != nil {
			j.log.Warn("journal: compaction failed; the old file goes on", "err", err)
		}
	}
}

func (j *journal) writeBatch(batch []*pending) error {
	if j.broken != nil {
		if err := j.rewrite(); err != nil {
			return journalError(err)
		}
	}
	var buf bytes.Buffer
	for _, p := range batch {
		buf.Write(p.frame)
	}
	n, err := j.file.Write(buf.Bytes())
	if err == nil {
		err = j.file.Sync()
	}
	if err != nil {
		// After a failed write or sync nobody knows what the disk holds, and a
		// second fsync may lie. Only a whole new file is trusted again.
		j.broken = err
		_ = j.file.Close()
		j.file = nil
		return journalError(err)
	}
	j.size += int64(n)
	return nil
}

// rewrite puts the shortest history of the current state into a new file and
// makes it the journal. Until the rename the old file is untouched.
func (j *journal) rewrite() (err error) {
	tmp := j.path + ".new"
	renamed := false
	f, err := j.fsys.Create(tmp)
	if err != nil {
		return j.rewriteFailed(err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			if !renamed {
				_ = j.fsys.Remove(tmp)
			}
			err = j.rewriteFailed(err)
			if renamed { // a crash now may bring back either file: trust neither
				j.broken = err
			}
		}
	}()
	buf := header()
	for _, rec := range j.state.records() {
		frame, err := encodeFrame(rec)
		if err != nil {
			return err
		}
		buf = append(buf, frame...)
	}
	if _, err := f.Write(buf); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := j.fsys.Rename(tmp, j.path); err != nil {
		return err
	}
	renamed = true
	if err := j.fsys.SyncDir(filepath.Dir(j.path)); err != nil {
		return err
	}
	if j.file != nil {
		_ = j.file.Close()
	}
	j.file, j.size, j.live, j.broken = f, int64(len(buf)), int64(len(buf)), nil
	return nil
}

func (j *journal) rewriteFailed(err error) error {
	if j.file == nil {
		j.broken = err
	}
	return err
}

func header() []byte {
	return binary.LittleEndian.AppendUint32([]byte(journalMagic), journalVersion)
}

func encodeFrame(rec record) ([]byte, error) {
	payload, err := json.Marshal(rec)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "node.journal", "encode: %w", err)
	}
	if len(payload) > maxRecord {
		return nil, sandbox.Errorf(sandbox.TooLarge, "node.journal", "a record of %d bytes is above %d", len(payload), maxRecord)
	}
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, frameHead+len(payload)), uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, checksum(b[:4], payload))
	return append(b, payload...), nil
}

func checksum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(length, castagnoli), castagnoli, payload)
}

// replay folds a journal's bytes and says how many of them checked. It fails
// only where starting empty would be wrong: a file that is not a journal, or
// one of a newer Cove. An empty node would destroy every running sandbox.
func replay(data []byte) (*state, int64, error) {
	st := newState()
	if len(data) == 0 {
		return st, 0, nil
	}
	if len(data) < headerSize || string(data[:len(journalMagic)]) != journalMagic {
		return nil, 0, &sandbox.Error{Class: sandbox.Corrupt, Op: "node.open", Msg: "is not a node journal",
			Hint: "move it away to start empty; every sandbox still running here is then removed"}
	}
	if v := binary.LittleEndian.Uint32(data[len(journalMagic):]); v != journalVersion {
		return nil, 0, &sandbox.Error{Class: sandbox.Unsupported, Op: "node.open",
			Msg:  fmt.Sprintf("has journal version %d, this Cove reads %d", v, journalVersion),
			Hint: "start the Cove that wrote it, end its sandboxes, then upgrade"}
	}
	good := int64(headerSize)
	for rest := data[headerSize:]; len(rest) >= frameHead; {
		n := int(binary.LittleEndian.Uint32(rest))
		if n == 0 || n > maxRecord || n > len(rest)-frameHead {
			break
		}
		payload := rest[frameHead : frameHead+n]
		if checksum(rest[:4], payload) != binary.LittleEndian.Uint32(rest[4:]) {
			break
		}
		var rec record
		if json.Unmarshal(payload, &rec) != nil {
			break
		}
		st.apply(rec)
		good += int64(frameHead + n)
		rest = rest[frameHead+n:]
	}
	return st, good, nil
}

// journalError gives a failed write its class: the host's full disk is the
// caller's to know, anything else is ours and worth a retry.
func journalError(err error) error {
	if sandbox.NoSpace(err) {
		return sandbox.Errorf(sandbox.DiskFull, "node.journal", "%w", err).
			WithHint("free disk space on the host; killing sandboxes frees theirs")
	}
	return sandbox.Errorf(sandbox.Unavailable, "node.journal", "%w", err)
}
