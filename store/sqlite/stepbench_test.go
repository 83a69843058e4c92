package sqlite

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// BenchmarkStepRows is what steps as rows of the store would cost, by 4 callers at
// once: why they are files (package steplog, BenchmarkAppend).
func BenchmarkStepRows(b *testing.B) {
	s, err := Open(everywhere(), filepath.Join(b.TempDir(), "cove.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	if err := s.write(everywhere(), "bench", func(t *tx) error {
		_, err := t.exec(`CREATE TABLE bench_steps (run TEXT NOT NULL, seq BIGINT NOT NULL, record TEXT NOT NULL, PRIMARY KEY (run, seq))`)
		return err
	}); err != nil {
		b.Fatal(err)
	}
	record := strings.Repeat("x", 700)
	var seq atomic.Int64
	b.SetParallelism(2)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			n := seq.Add(1)
			if err := s.write(everywhere(), "bench", func(t *tx) error {
				_, err := t.exec(`INSERT INTO bench_steps (run, seq, record) VALUES (?, ?, ?)`, "run", n, record)
				return err
			}); err != nil {
				b.Error(fmt.Errorf("step %d: %w", n, err))
				return
			}
		}
	})
}
