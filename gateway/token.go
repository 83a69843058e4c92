package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"time"
)

// Tokens makes and checks what opens a private port for a while. A token names
// its sandbox and port and the API key it was made with, and says until when; the
// MAC over them is all there is to it, so nothing is stored and a restart forgets
// none. Whether that key is still good is the backend's word.
type Tokens struct {
	key []byte
	now func() time.Time
}

// TokenKeySize is how long a key must be.
const TokenKeySize = 32

const (
	tokenPrefix = "covep_" // told apart from API keys, which are cove_…
	macSize     = sha256.Size
)

// NewTokens takes the key; now nil is time.Now.
func NewTokens(key []byte, now func() time.Time) *Tokens {
	if len(key) < TokenKeySize {
		panic("gateway: a token key has 32 bytes")
	}
	if now == nil {
		now = time.Now
	}
	return &Tokens{key: key, now: now}
}

// Mint makes a token for one port of a sandbox, for the API key with that id.
func (t *Tokens) Mint(to Target, key string, until time.Time) string {
	p := payload(to, key, until.Unix())
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(p, t.mac(p)...))
}

// tokenVersion 1 named no key. Such a token outlived the key it was made with, so
// it opens nothing any more; none was good for longer than a day.
const tokenVersion = 2

// payload is: version, expiry, port, length of the sandbox's id, that id, the
// key's.
func payload(to Target, key string, until int64) []byte {
	p := []byte{tokenVersion}
	p = binary.BigEndian.AppendUint64(p, uint64(until))
	p = binary.BigEndian.AppendUint16(p, uint16(to.Port))
	p = append(p, byte(len(to.Sandbox)))
	p = append(p, to.Sandbox...)
	return append(p, key...)
}

func (t *Tokens) mac(p []byte) []byte {
	h := hmac.New(sha256.New, t.key)
	h.Write([]byte("cove gateway token "))
	h.Write(p)
	return h.Sum(nil)
}

// tokenState is what Check says.
type tokenState int

const (
	tokenWrong   tokenState = iota // not ours, or for another port
	tokenExpired                   // was right
	tokenGood
)

// token is what one says, once its MAC was right.
type token struct {
	key   string // id of the API key
	until time.Time
}

func (t *Tokens) check(s string, to Target) (tok token, state tokenState) {
	const head = 12
	body, ok := strings.CutPrefix(s, tokenPrefix)
	if !ok || len(body) > 256 {
		return tok, tokenWrong
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil || len(b) < head+macSize || b[0] != tokenVersion {
		return tok, tokenWrong
	}
	p, mac := b[:len(b)-macSize], b[len(b)-macSize:]
	if !hmac.Equal(mac, t.mac(p)) {
		return tok, tokenWrong
	}
	id, ok := strings.CutPrefix(string(p[head:]), to.Sandbox)
	if !ok || int(p[head-1]) != len(to.Sandbox) || int(binary.BigEndian.Uint16(p[9:])) != to.Port {
		return tok, tokenWrong
	}
	tok = token{key: id, until: time.Unix(int64(binary.BigEndian.Uint64(p[1:])), 0)}
	if !t.now().Before(tok.until) {
		return tok, tokenExpired
	}
	return tok, tokenGood
}
