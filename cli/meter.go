package cli

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// meter shows how far a copy is, on one line that is rewritten at most five
// times a second and removed at the end.
type meter struct {
	w     io.Writer
	what  string
	total int64 // -1 = unknown
	r     io.Reader

	n       int64
	started time.Time
	shown   time.Time
}

func (m *meter) Read(p []byte) (int, error) {
	now := time.Now()
	if m.started.IsZero() {
		m.started, m.shown = now, now
	}
	n, err := m.r.Read(p)
	m.n += int64(n)
	if now = time.Now(); now.Sub(m.shown) > 200*time.Millisecond {
		m.shown = now
		m.show(now)
	}
	if err != nil && !m.shown.Equal(m.started) {
		fmt.Fprint(m.w, "\r\x1b[K")
		if errors.Is(err, io.EOF) {
			fmt.Fprintf(m.w, "%s: %s in %s\n", m.what, formatSize(m.n), formatDuration(time.Since(m.started)))
		}
		m.shown = m.started // once
	}
	return n, err
}

func (m *meter) show(now time.Time) {
	rate := int64(float64(m.n) / max(now.Sub(m.started).Seconds(), 0.001))
	of := ""
	if m.total > 0 {
		of = fmt.Sprintf(" of %s (%d%%)", formatSize(m.total), 100*m.n/m.total)
	}
	fmt.Fprintf(m.w, "\r\x1b[K%s: %s%s, %s/s", m.what, formatSize(m.n), of, formatSize(rate))
}
