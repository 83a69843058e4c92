package sandbox

import (
	"errors"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "1": 1, "536870912": 512 * MiB, "12B": 12, " 7 ": 7,
		"512MiB": 512 * MiB, "512mib": 512 * MiB, "512 MiB": 512 * MiB,
		"1GB": 1e9, "1.5GiB": 3 * GiB / 2, "1.5kb": 1500, "0.1KiB": 102, "1.1TiB": 1209462790553,
		"2TiB": 2 * TiB, "7EiB": 7 << 60, "9223372036854775807": math.MaxInt64,
	} {
		got, err := ParseSize(in)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", " ", "MiB", "-1", "-1MiB", "+1", "1.5", "1.5B", "1.", ".5GiB", "1e3", "1/2", "0x10", "1_000",
		"512M", "1G", "1Mi", "1 0", "1GiBs", "8EiB", "9223372036854775808", "99999999999999999999",
		"1\x00", "١", "NaN", "Inf", strings.Repeat("9", 100000),
	} {
		got, err := ParseSize(in)
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseSize(%.40q) = %d, %v, want invalid", in, got, err)
			continue
		}
		if len(err.Error()) > 300 {
			t.Errorf("ParseSize of a %d-byte string answers with %d bytes", len(in), len(err.Error()))
		}
	}
	_, err := ParseSize("512M")
	if e := new(Error); !errors.As(err, &e) || !strings.Contains(e.Msg, "1024") || !strings.Contains(e.Hint, "MiB") {
		t.Errorf("the ambiguous 512M is explained by %v", err)
	}
}

func TestFormatSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0B", 900: "900B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 512 * MiB: "512MiB", 3 * GiB / 2: "1.5GiB",
		MiB - 1: "1MiB", GiB - 1: "1GiB", -512 * MiB: "-512MiB", math.MaxInt64: "8EiB", math.MinInt64: "-8EiB",
	} {
		if got := FormatSize(n); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestSizeReadsBackWhatItWrote(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(0, 1<<62).Draw(t, "n")
		back, err := ParseSize(FormatSize(n))
		if err != nil {
			t.Fatalf("%d is written %q: %v", n, FormatSize(n), err)
		}
		if diff := math.Abs(float64(back - n)); diff > float64(n)*0.051 {
			t.Fatalf("%d is written %q and read %d", n, FormatSize(n), back)
		}
	})
}
