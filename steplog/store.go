package steplog

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// syncEvery is how much a machine that dies may lose at most. Synced by itself
// each append would wait for the disk, milliseconds on many.
const syncEvery = 100 * time.Millisecond

// Store is the logs of all runs, below one directory: TENANT/RUN/. Safe for
// concurrent use.
type Store struct {
	dir      string
	appended func(tenant, run string, end int64) // told of each append; nil = nobody is

	mu struct {
		sync.Mutex
		logs  map[string]*Log  // by run
		bytes map[string]int64 // of tenants that were asked for
	}
}

// NewStore keeps logs below a directory. appended, if there is one, is told where a
// log ends after each append; it must not ask the log anything.
func NewStore(dir string, appended func(tenant, run string, end int64)) *Store {
	s := &Store{dir: dir, appended: appended}
	s.mu.logs, s.mu.bytes = map[string]*Log{}, map[string]int64{}
	return s
}

// Open is the log of a run, empty if it has none.
func (s *Store) Open(tenant, run string) (*Log, error) {
	if !sandbox.ValidID(tenant) || !sandbox.ValidID(run) {
		return nil, &sandbox.Error{Class: sandbox.Internal, Op: "steplog.open", Msg: "no run has such an id"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.mu.logs[run]; l != nil {
		return l, nil
	}
	l, err := open(filepath.Join(s.dir, tenant, run), segmentBytes, func(n int, end int64) {
		s.mu.Lock()
		if had, known := s.mu.bytes[tenant]; known {
			s.mu.bytes[tenant] = had + int64(n)
		}
		s.mu.Unlock()
		if s.appended != nil {
			s.appended(tenant, run, end)
		}
	})
	if err != nil {
		return nil, err
	}
	s.mu.logs[run] = l
	return l, nil
}

// Bytes is what the logs of a tenant take.
func (s *Store) Bytes(tenant string) (int64, error) {
	s.mu.Lock()
	n, known := s.mu.bytes[tenant]
	s.mu.Unlock()
	if known {
		return n, nil
	}
	err := filepath.WalkDir(filepath.Join(s.dir, tenant), func(_ string, e fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	if err != nil {
		return 0, wrap("size", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.bytes[tenant] = n
	return n, nil
}

// PutAway closes a run's log, which Open finds again.
func (s *Store) PutAway(run string) error {
	s.mu.Lock()
	l := s.mu.logs[run]
	delete(s.mu.logs, run)
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	return l.close()
}

// End is where the log of a run ends, without opening it: what a crash left half
// written at its end counts until it is opened.
func (s *Store) End(tenant, run string) (int64, error) {
	if !sandbox.ValidID(tenant) || !sandbox.ValidID(run) {
		return 0, nil
	}
	s.mu.Lock()
	l := s.mu.logs[run]
	s.mu.Unlock()
	if l != nil {
		end, _ := l.End()
		return end, nil
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, tenant, run))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, wrap("size", err)
	}
	var end int64
	for _, e := range entries {
		start, ok := startOf(e.Name())
		if !ok {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return 0, wrap("size", err)
		}
		end = max(end, start+info.Size())
	}
	return end, nil
}

// Delete removes a run's log.
func (s *Store) Delete(tenant, run string) error {
	if !sandbox.ValidID(tenant) || !sandbox.ValidID(run) {
		return nil
	}
	err := s.PutAway(run)
	s.mu.Lock()
	delete(s.mu.bytes, tenant) // counted anew
	s.mu.Unlock()
	if rerr := os.RemoveAll(filepath.Join(s.dir, tenant, run)); rerr != nil {
		return wrap("delete", cmp.Or(rerr, err))
	}
	return nil
}

// Run syncs what is appended until ctx ends, and once more then.
func (s *Store) Run(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.sync(log)
		case <-ctx.Done():
			s.sync(log)
			return
		}
	}
}

func (s *Store) sync(log *slog.Logger) {
	for _, l := range s.open() {
		if err := l.Sync(); err != nil {
			log.Warn("cannot sync a log of steps; it will be tried again", "dir", l.dir, "err", err)
		}
	}
}

func (s *Store) open() (logs []*Log) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.mu.logs {
		logs = append(logs, l)
	}
	return logs
}

// Close closes all logs.
func (s *Store) Close() error {
	var err error
	for _, l := range s.open() {
		err = cmp.Or(err, l.close())
	}
	return err
}
