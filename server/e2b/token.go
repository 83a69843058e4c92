package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	keyPrefix    = "e2b_"
	nativePrefix = "cove_"
)

// nativeSecret is a key of E2B's spelling, e2b_ and hexadecimal digits ("cove e2b
// env" prints it), in Cove's own: the same 256 bits. Cove's own is taken too.
func nativeSecret(key string) string {
	digits, ok := strings.CutPrefix(key, keyPrefix)
	if !ok {
		return key
	}
	b, err := hex.DecodeString(digits)
	if err != nil {
		return key // which opens nothing, and says so better than we could
	}
	return nativePrefix + base64.RawURLEncoding.EncodeToString(b)
}

// tokens are the access tokens of sandboxes. One names its sandbox and the API key
// that asked for it, under a MAC: nothing is stored, a restart forgets none, and it
// ends with that key. The same two give the same token, so that an SDK that asks
// again has what it had.
type tokens struct {
	key []byte

	// given are tokens that were handed out, for signed URLs: those name no
	// sandbox, only a hash with the token in it. After a restart a sandbox's URLs
	// open again when somebody creates, connects to or looks at it.
	mu struct {
		sync.Mutex
		given map[string]grant // by token
	}
}

// grant is what a token stands for.
type grant struct{ sandbox, key string }

// maxGiven bounds the tokens that signed URLs are tried with: each costs a hash of
// some hundred bytes.
const maxGiven = 4096

// newTokens makes those of a purpose: one for another opens nothing.
func newTokens(secret []byte, purpose string) *tokens {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("cove e2b " + purpose + " token"))
	t := &tokens{key: h.Sum(nil)}
	t.mu.given = map[string]grant{}
	return t
}

func (t *tokens) mac(g grant) string {
	h := hmac.New(sha256.New, t.key)
	h.Write([]byte(g.sandbox + " " + g.key))
	return hex.EncodeToString(h.Sum(nil))
}

// mint makes the token of a sandbox for the API key with that id.
func (t *tokens) mint(g grant) string {
	token := g.sandbox + "." + g.key + "." + t.mac(g)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.given) >= maxGiven {
		for old := range t.mu.given { // any: most are of sandboxes that are gone
			delete(t.mu.given, old)
			break
		}
	}
	t.mu.given[token] = g
	return token
}

// check says what a token stands for.
func (t *tokens) check(token string) (grant, bool) {
	id, rest, _ := strings.Cut(token, ".")
	key, mac, ok := strings.Cut(rest, ".")
	g := grant{id, key}
	return g, ok && hmac.Equal([]byte(mac), []byte(t.mac(g)))
}

func unauthenticated(msg string) error {
	return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: msg}
}

const noToken = "unauthorized access, please provide a valid access token or method signing if supported"

// signed finds the token that a URL was signed with, of the sandbox that it names, if
// it does. expires is "" or unix seconds.
func (t *tokens) signed(id, signature, path, operation, user, expires string, now time.Time) (grant, error) {
	if expires != "" {
		at, err := strconv.ParseInt(expires, 10, 64)
		if err != nil {
			return grant{}, unauthenticated("invalid signature expiration")
		}
		if now.Unix() > at {
			return grant{}, unauthenticated("signature is already expired")
		}
	}
	want := []byte(strings.TrimRight(signature, "="))
	t.mu.Lock()
	defer t.mu.Unlock()
	for token, g := range t.mu.given {
		if id != "" && id != g.sandbox {
			continue
		}
		raw := path + ":" + operation + ":" + user + ":" + token
		if expires != "" {
			raw += ":" + expires
		}
		sum := sha256.Sum256([]byte(raw))
		if hmac.Equal(want, []byte("v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))) {
			return g, nil
		}
	}
	return grant{}, unauthenticated("invalid signature")
}
