package sandbox

import (
	"fmt"
	"io"
)

// idAlphabet is lower-case base32: 32 letters, so that five bits are one
// character without bias, and none that a host name, a path or a shell minds.
const idAlphabet = "abcdefghijklmnopqrstuvwxyz234567"

const (
	idLen    = 16 // 80 bits: a million sandboxes a day for a century collide with odds of 1 in 1,800
	maxIDLen = 64 // ids are path and cgroup components; longer ones are not ours
)

// NewID draws a fresh id from a source of randomness, crypto/rand.Reader in
// production (which never fails). It holds no time, so ids say nothing about
// when or in which order things were made.
//
// It panics when the source fails: an id with less randomness than promised
// must not exist.
func NewID(rand io.Reader) string {
	var b [idLen]byte
	if _, err := io.ReadFull(rand, b[:]); err != nil {
		panic(fmt.Sprintf("sandbox: no randomness for an id: %v", err))
	}
	for i, c := range b {
		b[i] = idAlphabet[c&31]
	}
	return string(b[:])
}

// ValidID says whether s has the form of an id: 1 to 64 of a-z and 0-9. Ids
// become parts of paths, so anything from outside is checked with it first.
func ValidID(s string) bool {
	if s == "" || len(s) > maxIDLen {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}
