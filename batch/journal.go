package batch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// Journal is a file of results. What is in it when it is opened has been done.
//
// A result is written before the next begins, and on disk within syncEvery: what a
// machine that loses power forgets is done again.
type Journal struct {
	path string
	keys map[int]string // of the inputs that are done; not changed after Open

	mu struct {
		sync.Mutex
		f      *os.File
		synced time.Time
	}
}

const syncEvery = time.Second

// OpenJournal opens or makes a journal. What follows its last whole line, of a
// process that died while it wrote, is cut off. Results with the status Error are
// not counted as done: they are tried again.
func OpenJournal(path string) (*Journal, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	j := &Journal{path: path, keys: map[int]string{}}
	whole, err := j.read(f)
	if err == nil {
		err = f.Truncate(whole)
	}
	if err == nil {
		_, err = f.Seek(whole, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	j.mu.f = f
	return j, nil
}

// read notes what is done and says how long the whole lines are.
func (j *Journal) read(f *os.File) (whole int64, err error) {
	r := bufio.NewReaderSize(f, 1<<20)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, nil
		}
		if err != nil {
			return 0, err
		}
		var res struct {
			Index  int    `json:"index"`
			Key    string `json:"key"`
			Status Status `json:"status"`
		}
		if err := json.Unmarshal(line, &res); err != nil || res.Key == "" {
			return 0, sandbox.Errorf(sandbox.Precondition, "batch", "line %d of %s is no result", n, j.path).
				WithHint("name a file that a batch wrote, or one that is not there")
		}
		if delete(j.keys, res.Index); res.Status != Error {
			j.keys[res.Index] = res.Key
		}
		whole += int64(len(line))
	}
}

// Len is how many inputs are done.
func (j *Journal) Len() int { return len(j.keys) }

// Has says whether an input is done. A result of another input at its place is an
// error: the inputs are not those of before.
func (j *Journal) Has(in Input) (bool, error) {
	key, ok := j.keys[in.Index]
	if ok && key != in.Key() {
		return false, sandbox.Errorf(sandbox.Precondition, "batch", "input %d is not the one that %s has a result of", in.Index, j.path).
			WithHint("give the inputs of before, or another --out")
	}
	return ok, nil
}

// Add appends a result.
func (j *Journal) Add(res Result) error {
	line, err := json.Marshal(res)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, err := j.mu.f.Write(append(line, '\n')); err != nil {
		return err
	}
	if now := time.Now(); now.Sub(j.mu.synced) > syncEvery {
		j.mu.synced = now
		return j.mu.f.Sync()
	}
	return nil
}

// Close puts all of it on disk.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return errors.Join(j.mu.f.Sync(), j.mu.f.Close())
}

// Sort puts the last result of each input in the order of the inputs, in place of
// the journal. Results stay on disk meanwhile: only their places are held.
func Sort(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	type place struct {
		index    int
		at, size int64
	}
	var places []place
	r, at := bufio.NewReaderSize(f, 1<<20), int64(0)
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		var res struct {
			Index int `json:"index"`
		}
		if err := json.Unmarshal(line, &res); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		places = append(places, place{res.Index, at, int64(len(line))})
		at += int64(len(line))
	}
	slices.SortStableFunc(places, func(a, b place) int { return a.index - b.index })
	return durable.Fill(path, 0o644, func(to io.Writer) error {
		w := bufio.NewWriterSize(to, 1<<20)
		for i, p := range places {
			if i+1 < len(places) && places[i+1].index == p.index {
				continue // it was tried again later
			}
			if _, err := io.Copy(w, io.NewSectionReader(f, p.at, p.size)); err != nil {
				return err
			}
		}
		return w.Flush()
	})
}

// Lines are the inputs in a reader, one a line; blank lines are none.
func Lines(r io.Reader) iter.Seq2[Input, error] {
	return func(yield func(Input, error) bool) {
		s := bufio.NewScanner(r)
		s.Buffer(make([]byte, 0, 1<<16), maxLine)
		index := 0
		for s.Scan() {
			line := bytes.TrimSuffix(s.Bytes(), []byte("\r"))
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
			if !yield(Input{Index: index, Text: string(line)}, nil) {
				return
			}
			index++
		}
		if err := s.Err(); err != nil {
			yield(Input{Index: index}, sandbox.InvalidField("inputs", "line of input %d: %v", index, err))
		}
	}
}

// maxLine bounds an input: what is larger belongs into a file.
const maxLine = 16 << 20
