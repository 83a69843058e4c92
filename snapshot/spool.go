package snapshot

import (
	"io"
	"os"

	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// spoolMemory is how much of the small files of a tree is kept in memory while
// the rest of its tar is read. A tree of 2,000 source files is some 10 MiB.
const spoolMemory = 64 << 20

// spool keeps contents until their order is known. Beyond spoolMemory they go
// to a file without a name, sealed under a key that is nowhere else: a store
// that seals must not leave its plaintext in a temporary file.
type spool struct {
	dir    string
	limit  int
	memory []byte
	file   *os.File
	end    int64
	frames *seal.Frames
	count  uint64
}

// spooled is a content in the spool.
type spooled struct {
	at     int64 // in memory, or in the file
	size   int
	number uint64 // 0: in memory; else of its frame
}

func (s *spool) put(p []byte) (spooled, error) {
	if len(s.memory)+len(p) <= s.limit {
		at := int64(len(s.memory))
		s.memory = append(s.memory, p...)
		return spooled{at: at, size: len(p)}, nil
	}
	if s.file == nil {
		if err := s.openFile(); err != nil {
			return spooled{}, err
		}
	}
	s.count++
	sealed := s.frames.Seal(nil, s.count, false, p, nil)
	if _, err := s.file.WriteAt(sealed, s.end); err != nil {
		return spooled{}, err
	}
	c := spooled{at: s.end, size: len(p), number: s.count}
	s.end += int64(len(sealed))
	return c, nil
}

func (s *spool) openFile() error {
	s.frames = seal.NewFrames(seal.NewKey(), nil, "cove spool")
	f, err := os.CreateTemp(s.dir, "cove-spool-")
	if err != nil {
		return err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return err
	}
	s.file = f
	return nil
}

func (s *spool) get(c spooled) ([]byte, error) {
	if c.number == 0 {
		return s.memory[c.at:][:c.size], nil
	}
	sealed := make([]byte, c.size+seal.TagSize)
	if _, err := s.file.ReadAt(sealed, c.at); err != nil {
		return nil, err
	}
	p, ok := s.frames.Open(sealed[:0], c.number, false, sealed, nil)
	if !ok {
		return nil, sandbox.Errorf(sandbox.Corrupt, "", "a temporary file in %s was changed", s.dir)
	}
	return p, nil
}

func (s *spool) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// spoolReader gives out contents one behind the other.
type spoolReader struct {
	s     *spool
	queue []spooled
	left  []byte
}

func (r *spoolReader) Read(p []byte) (int, error) {
	for len(r.left) == 0 {
		if len(r.queue) == 0 {
			return 0, io.EOF
		}
		var err error
		if r.left, err = r.s.get(r.queue[0]); err != nil {
			return 0, err
		}
		r.queue = r.queue[1:]
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}
