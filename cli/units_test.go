package cli

import (
	"testing"
	"time"
)

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "1": 1, "512MiB": 512 << 20, "512m": 512 << 20, "2G": 2 << 30, "2gb": 2 << 30, "1.5GiB": 3 << 29, "10 KiB": 10 << 10, "1t": 1 << 40, "7b": 7,
	} {
		if got, err := parseSize(in); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "MiB", "-1", "5X", "1e3", "9999999T", "0x10", "1..2", "NaN", "1,5G"} {
		if got, err := parseSize(in); err == nil {
			t.Errorf("parseSize(%q) = %d", in, got)
		}
	}
	for in, want := range map[int64]string{
		0: "0B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 512 << 20: "512MiB", 10 << 30: "10GiB", 1<<30 - 1: "1GiB", 1 << 62: "4EiB", 150<<20 + 1<<19: "150MiB",
	} {
		if got := formatSize(in); got != want {
			t.Errorf("formatSize(%d) = %s, want %s", in, got, want)
		}
	}
}

func TestDurations(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"0": 0, "90": 90 * time.Second, "1.5": 1500 * time.Millisecond, "1h30m": 90 * time.Minute, "7d": 168 * time.Hour, "1d12h": 36 * time.Hour, "250ms": 250 * time.Millisecond,
	} {
		if got, err := parseDuration(in); err != nil || got != want {
			t.Errorf("parseDuration(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "soon", "-1h", "-5", "d", "xd", "1dd", "99999999d", "1d-1h", "NaN", "Inf"} {
		if got, err := parseDuration(in); err == nil {
			t.Errorf("parseDuration(%q) = %v", in, got)
		}
	}
	for in, want := range map[time.Duration]string{
		0: "0s", 12 * time.Microsecond: "12µs", 4200 * time.Microsecond: "4.2ms", 250 * time.Millisecond: "250ms", 4200 * time.Millisecond: "4.2s", 59 * time.Second: "59s",
		time.Minute: "1m", 90 * time.Second: "1m30s", time.Hour: "1h", 90*time.Minute + 5*time.Second: "1h30m", 76 * time.Hour: "3d4h", -time.Minute: "-1m",
	} {
		if got := formatDuration(in); got != want {
			t.Errorf("formatDuration(%v) = %s, want %s", in, got, want)
		}
	}
}
