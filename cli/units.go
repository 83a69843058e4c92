package cli

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// size is a flag of bytes: "512MiB", "2G", "1.5GiB" or a plain number. Units
// without an i are binary too: nobody who types --memory 2G wants 1.86 GiB.
type size int64

var sizeUnits = map[string]float64{
	"": 1, "b": 1,
	"k": 1 << 10, "kb": 1 << 10, "kib": 1 << 10, "ki": 1 << 10,
	"m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20, "mi": 1 << 20,
	"g": 1 << 30, "gb": 1 << 30, "gib": 1 << 30, "gi": 1 << 30,
	"t": 1 << 40, "tb": 1 << 40, "tib": 1 << 40, "ti": 1 << 40,
}

func parseSize(s string) (int64, error) {
	t := strings.ToLower(strings.TrimSpace(s))
	i := strings.IndexFunc(t, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if i < 0 {
		i = len(t)
	}
	n, err := strconv.ParseFloat(t[:i], 64)
	unit, ok := sizeUnits[strings.TrimSpace(t[i:])]
	if err != nil || !ok || n < 0 {
		return 0, fmt.Errorf("%q is not a size; write it like 512MiB or 2GiB", s)
	}
	if v := n * unit; v < math.MaxInt64 {
		return int64(v), nil
	}
	return 0, fmt.Errorf("%q is too large", s)
}

func (s *size) Set(v string) error {
	n, err := parseSize(v)
	*s = size(n)
	return err
}
func (s *size) Type() string { return "size" }
func (s *size) String() string {
	if *s == 0 {
		return ""
	}
	return formatSize(int64(*s))
}

// formatSize is short and exact to three digits: "512MiB", "1.5GiB", "0B".
func formatSize(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	v, unit := float64(n), ""
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"} {
		if v < 1023.5 {
			break
		}
		v, unit = v/1024, u
	}
	if v >= 99.95 {
		return fmt.Sprintf("%.0f%s", v, unit)
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + unit
}

// duration is a flag of time: Go's "1h30m", or with days "7d", or plain
// seconds "90".
type duration time.Duration

func parseDuration(s string) (time.Duration, error) {
	t := strings.TrimSpace(s)
	if n, err := strconv.ParseFloat(t, 64); err == nil && n >= 0 && n < math.MaxInt64/1e9 {
		return time.Duration(n * float64(time.Second)), nil
	}
	var days time.Duration
	if d, rest, ok := strings.Cut(t, "d"); ok {
		n, err := strconv.ParseInt(d, 10, 32)
		if err != nil || n < 0 || n > 36500 {
			return 0, fmt.Errorf("%q is not a duration; write it like 90s, 1h30m or 7d", s)
		}
		days, t = time.Duration(n)*24*time.Hour, rest
		if t == "" {
			return days, nil
		}
	}
	v, err := time.ParseDuration(t)
	if err != nil || v < 0 {
		return 0, fmt.Errorf("%q is not a duration; write it like 90s, 1h30m or 7d", s)
	}
	return days + v, nil
}

func (d *duration) Set(v string) error {
	n, err := parseDuration(v)
	*d = duration(n)
	return err
}
func (d *duration) Type() string { return "duration" }
func (d *duration) String() string {
	if *d == 0 {
		return ""
	}
	return formatDuration(time.Duration(*d))
}

// lifetime is a flag of time that may also be "none" or 0: said, and for ever.
type lifetime struct {
	duration
	said bool
}

func (l *lifetime) Set(v string) error {
	l.said = true
	if strings.EqualFold(strings.TrimSpace(v), "none") {
		l.duration = 0
		return nil
	}
	return l.duration.Set(v)
}

func (l *lifetime) String() string {
	if l.said && l.duration == 0 {
		return "none"
	}
	return l.duration.String()
}

// proto is nil where nothing was said, and 0 for none.
func (l lifetime) proto() *durationpb.Duration {
	if !l.said {
		return nil
	}
	return durationpb.New(time.Duration(l.duration))
}

// proto is nil for zero, which the API reads as "not set".
func (d duration) proto() *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(time.Duration(d))
}

// formatDuration keeps the two largest units: "3d4h", "1h30m", "4.2s", "12ms".
func formatDuration(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + formatDuration(-d)
	case d == 0:
		return "0s"
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return fmt.Sprintf("%.3gms", float64(d)/1e6)
	case d < 10*time.Second && d%time.Second != 0:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	}
	d = d.Round(time.Second)
	type unit struct {
		n int64
		s string
	}
	units := []unit{{int64(d / (24 * time.Hour)), "d"}, {int64(d/time.Hour) % 24, "h"}, {int64(d/time.Minute) % 60, "m"}, {int64(d/time.Second) % 60, "s"}}
	for units[0].n == 0 {
		units = units[1:]
	}
	out := fmt.Sprintf("%d%s", units[0].n, units[0].s)
	if len(units) > 1 && units[1].n != 0 {
		out += fmt.Sprintf("%d%s", units[1].n, units[1].s)
	}
	return out
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// keyValues is a repeated flag of KEY=VALUE.
type keyValues struct {
	m map[string]string
	// bare says what KEY alone means: the caller's own variable for --env.
	bare func(key string) (string, bool)
}

func (k *keyValues) Set(s string) error {
	key, val, ok := strings.Cut(s, "=")
	if !ok && k.bare != nil {
		if val, ok = k.bare(key); !ok {
			return fmt.Errorf("%s is not set here; write %s=value", key, key)
		}
	}
	if !ok || key == "" {
		return fmt.Errorf("%q is not KEY=VALUE", s)
	}
	if k.m == nil {
		k.m = map[string]string{}
	}
	k.m[key] = val
	return nil
}
func (k *keyValues) Type() string { return "KEY=VALUE" }
func (k *keyValues) String() string {
	return formatLabels(k.m)
}

func formatLabels(m map[string]string) string {
	pairs := make([]string, 0, len(m))
	for k, v := range m {
		pairs = append(pairs, k+"="+v)
	}
	sort.Strings(pairs)
	return strings.Join(pairs, ",")
}
