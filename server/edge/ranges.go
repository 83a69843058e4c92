package edge

import (
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/server"
)

// parseRange reads "bytes=a-b", "bytes=a-" and "bytes=-n". Anything else,
// more than one range among it, is ignored as RFC 9110 allows: the whole file is a
// right answer to any range request.
func parseRange(header string) (none server.FileRange) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	if !ok {
		return none
	}
	from, to, ok := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok {
		return none
	}
	if from == "" {
		n, ok := parseOffset(to)
		if !ok {
			return none
		}
		return server.FileRange{Length: n, Suffix: true, Asked: true}
	}
	start, ok := parseOffset(from)
	if !ok {
		return none
	}
	r := server.FileRange{Start: start, Asked: true}
	if to == "" {
		return r
	}
	end, ok := parseOffset(to)
	if !ok || end < start {
		return none
	}
	r.Length = end - start + 1
	return r
}

// parseOffset takes digits only: ParseInt would take a sign.
func parseOffset(s string) (int64, bool) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && n < 1<<62 // far from overflow in what follows
}
