package sandbox

import (
	"math/big"
	"strconv"
	"strings"
)

// Binary sizes in bytes.
const (
	KiB int64 = 1 << 10
	MiB int64 = 1 << 20
	GiB int64 = 1 << 30
	TiB int64 = 1 << 40
)

var sizePattern = pattern(`^([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)$`)

// sizeUnits in lower case. "512M" is left out on purpose: it is 2^20 to Docker
// and 10^6 to Kubernetes, and a guess would be wrong for half the readers.
var sizeUnits = map[string]int64{
	"": 1, "b": 1,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15, "eb": 1e18,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50, "eib": 1 << 60,
}

// ParseSize reads "512MiB", "1GB", "1.5GiB" or plain bytes. Case does not
// matter; a part of a byte is dropped. Errors are Invalid without a field,
// which the caller knows.
func ParseSize(s string) (int64, error) {
	invalid := func(why string) error {
		return (&Error{Class: Invalid, Msg: strconv.Quote(clip(s)) + " is not a size: " + why}).
			WithHint(`write bytes (536870912), powers of 1024 ("512MiB", "1.5GiB") or of 1000 ("512MB", "1GB")`)
	}
	m := sizePattern().FindStringSubmatch(strings.TrimSpace(s))
	if m == nil {
		return 0, invalid("want a number and a unit")
	}
	number, unit := m[1], strings.ToLower(m[2])
	factor, ok := sizeUnits[unit]
	if !ok {
		if _, known := sizeUnits[unit+"b"]; known && unit != "" {
			return 0, invalid("the unit " + m[2] + " could be of 1000 or of 1024")
		}
		return 0, invalid("unknown unit " + clip(m[2]))
	}
	if factor == 1 && strings.Contains(number, ".") {
		return 0, invalid("bytes come whole")
	}
	// Rationals, because 1.1 in a float times 2^40 is off by bytes.
	r, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, invalid("want a number and a unit")
	}
	r.Mul(r, new(big.Rat).SetInt64(factor))
	n := new(big.Int).Quo(r.Num(), r.Denom())
	if !n.IsInt64() {
		return 0, invalid("above 8 EiB")
	}
	return n.Int64(), nil
}

// FormatSize writes n for people, in powers of 1024 with at most one decimal:
// "512MiB", "1.5GiB", "900B". ParseSize reads it back, to that precision.
func FormatSize(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, i := float64(n), 0
	// 1023.95 would print as 1024.0: move on to the next unit before that.
	for i < len(units)-1 && (v >= 1023.95 || v <= -1023.95) {
		v /= 1024
		i++
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + units[i]
}

// bytesText is a size in an error: exact, with the readable form beside it.
func bytesText(n int64) string {
	s := strconv.FormatInt(n, 10)
	if n < KiB {
		return s + " bytes"
	}
	return s + " bytes (" + FormatSize(n) + ")"
}

// clip keeps a hostile value from filling a log through an error message.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
