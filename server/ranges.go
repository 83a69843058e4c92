package server

import (
	"strconv"
	"strings"
)

// byteRange is one range of a file as a client asks for it.
type byteRange struct {
	start  int64
	length int64 // 0 = to the end; of a suffix, how much of it
	suffix bool  // the last length bytes
}

// parseRange reads "bytes=a-b", "bytes=a-" and "bytes=-n". Anything else,
// several ranges among it, is ignored as RFC 9110 allows: the whole file is a
// right answer to any range request.
func parseRange(header string) (r byteRange, ok bool) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	if !ok {
		return r, false
	}
	from, to, ok := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok {
		return r, false
	}
	if from == "" {
		n, ok := parseOffset(to)
		if !ok {
			return r, false
		}
		return byteRange{length: n, suffix: true}, true
	}
	if r.start, ok = parseOffset(from); !ok {
		return byteRange{}, false
	}
	if to == "" {
		return r, true
	}
	end, ok := parseOffset(to)
	if !ok || end < r.start {
		return byteRange{}, false
	}
	r.length = end - r.start + 1
	return r, true
}

// parseOffset takes digits only: ParseInt would take a sign.
func parseOffset(s string) (int64, bool) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && n < 1<<62 // far from overflow in what follows
}

// within is the part of the range a file of that size has; ok is false if
// there is none.
func (r byteRange) within(size int64) (start, length int64, ok bool) {
	if r.suffix {
		n := min(r.length, size)
		return size - n, n, n > 0
	}
	if r.start >= size {
		return 0, 0, false
	}
	length = size - r.start
	if r.length > 0 {
		length = min(length, r.length)
	}
	return r.start, length, true
}
