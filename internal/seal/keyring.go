package seal

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// KeySize is the length of a key in bytes: AES-256.
const KeySize = 32

// KeyID tells keys apart without telling them: the first 8 bytes of the key's
// SHA-256. It is written in clear into each blob.
type KeyID [8]byte

func (id KeyID) String() string { return hex.EncodeToString(id[:]) }

// Keyring holds the key that new blobs are sealed with and the older ones that
// are still needed to read. A nil Keyring holds none: nothing is encrypted.
type Keyring struct {
	active KeyID
	keys   map[KeyID][KeySize]byte
}

// NewKeyring makes a keyring; the first key is the active one.
func NewKeyring(active [KeySize]byte, older ...[KeySize]byte) *Keyring {
	k := &Keyring{active: keyID(active), keys: map[KeyID][KeySize]byte{keyID(active): active}}
	for _, key := range older {
		k.keys[keyID(key)] = key
	}
	return k
}

func keyID(key [KeySize]byte) (id KeyID) {
	sum := sha256.Sum256(key[:])
	copy(id[:], sum[:])
	return id
}

// With is k with the keys of another, all of them older.
func (k *Keyring) With(other *Keyring) *Keyring {
	out := &Keyring{active: k.active, keys: maps.Clone(other.keys)}
	maps.Copy(out.keys, k.keys)
	return out
}

// Active is the key to seal with; ok is false when there is none.
func (k *Keyring) Active() (id KeyID, key [KeySize]byte, ok bool) {
	if k == nil {
		return KeyID{}, key, false
	}
	return k.active, k.keys[k.active], true
}

// Key is the key of that id, if it is here.
func (k *Keyring) Key(id KeyID) (key [KeySize]byte, ok bool) {
	if k == nil {
		return key, false
	}
	key, ok = k.keys[id]
	return key, ok
}

// String keeps keys out of logs.
func (k *Keyring) String() string {
	if k == nil {
		return "no keys"
	}
	return fmt.Sprintf("%d keys, active %s", len(k.keys), k.active)
}

// GoString keeps keys out of %#v.
func (k *Keyring) GoString() string { return k.String() }

const (
	keyFileMax = 64 << 10 // some 1,000 keys: a file above that is not one of keys
	keyHint    = "a key is 64 hex digits or 44 characters of base64 on a line of its own; make one with: openssl rand -hex 32"
)

// LoadKeyring reads a file of keys, one on a line, in hex or base64. The first
// is the active one: a new key is put on top. Empty lines and those that start
// with # are skipped. Only the owner may have any right to the file. Errors
// name the line and never quote it.
func LoadKeyring(path string) (*Keyring, error) {
	const op = "seal.keyring"
	f, err := os.Open(path)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%w", err).
			WithHint("make it with: (umask 077; openssl rand -hex 32 > %s)", path)
	}
	defer f.Close()
	// The rights of the file that is read, not of what the path names by now.
	st, err := f.Stat()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%s is not a regular file", path)
	}
	if perm := st.Mode().Perm(); perm&0o077 != 0 {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%s has mode %04o: others than its owner can reach the keys", path, perm).
			WithHint("chmod 0600 %s, and change the key if others may have read it", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, keyFileMax+1))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	if len(data) > keyFileMax {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%s is larger than %d bytes: not a file of keys", path, keyFileMax)
	}
	var keys [][KeySize]byte
	lines := bufio.NewScanner(bytes.NewReader(data))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, ok := parseKey(line)
		if !ok {
			return nil, sandbox.Errorf(sandbox.Precondition, op, "%s:%d: not a key of 32 bytes", path, n).WithHint(keyHint)
		}
		keys = append(keys, key)
	}
	if err := lines.Err(); err != nil { // a line above 64 KiB
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%s: %w", path, err).WithHint(keyHint)
	}
	if len(keys) == 0 {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%s holds no key", path).WithHint(keyHint)
	}
	return NewKeyring(keys[0], keys[1:]...), nil
}

func parseKey(line string) (key [KeySize]byte, ok bool) {
	raw, err := hex.DecodeString(line)
	if err != nil || len(raw) != KeySize {
		raw, err = base64.StdEncoding.DecodeString(line)
	}
	if err != nil || len(raw) != KeySize || bytes.Equal(raw, key[:]) {
		return key, false // all zeros is a placeholder, not a key
	}
	copy(key[:], raw)
	return key, true
}

// NewKey makes a random key.
func NewKey() (key [KeySize]byte) {
	rand.Read(key[:]) // never fails: crypto/rand ends the process instead
	return key
}
