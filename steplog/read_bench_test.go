package steplog

import (
	"bytes"
	"testing"
)

// BenchmarkRead reads a log of 100,000 records of 700 bytes.
func BenchmarkRead(b *testing.B) {
	l := mustOpen(b, b.TempDir(), segmentBytes)
	record := bytes.Repeat([]byte("x"), 700)
	for range 100_000 {
		if _, err := l.Append(record); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		n := 0
		if _, err := l.Read(0, func([]byte, int64) bool { n++; return true }); err != nil || n != 100_000 {
			b.Fatal(n, err)
		}
	}
}
