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
// its sandbox and port and says until when; the MAC over them is all there is to
// it, so nothing is stored and a restart forgets none.
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

// Mint makes a token for one port of a sandbox.
func (t *Tokens) Mint(id string, port int, until time.Time) string {
	p := payload(id, port, until.Unix())
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(p, t.mac(p)...))
}

// payload is: version, expiry, port, id.
func payload(id string, port int, until int64) []byte {
	p := []byte{1}
	p = binary.BigEndian.AppendUint64(p, uint64(until))
	p = binary.BigEndian.AppendUint16(p, uint16(port))
	return append(p, id...)
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

func (t *Tokens) check(token string, to Target) (until time.Time, s tokenState) {
	body, ok := strings.CutPrefix(token, tokenPrefix)
	if !ok || len(body) > 256 {
		return until, tokenWrong
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil || len(b) < 11+macSize || b[0] != 1 {
		return until, tokenWrong
	}
	p, mac := b[:len(b)-macSize], b[len(b)-macSize:]
	if !hmac.Equal(mac, t.mac(p)) {
		return until, tokenWrong
	}
	if string(p[11:]) != to.Sandbox || int(binary.BigEndian.Uint16(p[9:])) != to.Port {
		return until, tokenWrong
	}
	until = time.Unix(int64(binary.BigEndian.Uint64(p[1:])), 0)
	if !t.now().Before(until) {
		return until, tokenExpired
	}
	return until, tokenGood
}
