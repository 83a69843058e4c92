package e2b

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
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
	// holders says who could have been given the token of a sandbox, or of any that
	// lives where id is "": what a signed URL is tried with. nil: none is signed.
	holders func(ctx context.Context, id string) ([]server.Holder, error)
	given   given
}

// given are the tokens of sandboxes that live. A signed URL of plain mode names no
// sandbox, only a hash with a token in it, so all of these are tried; where the host or a
// header names the sandbox nothing of it is asked.
type given struct {
	byToken  sync.Map // of grantedAt
	count    atomic.Int64
	sweepAt  atomic.Int64  // as many, and those whose sandboxes ended are dropped
	sweeping atomic.Bool   // one at a time
	turn     chan struct{} // one search at a time: whoever sends signatures has no more than a core of ours
	loaded   bool          // what this process was not asked for is known too; by who has the turn
}

// grant is what a token stands for.
type grant struct{ sandbox, key string }

type grantedAt struct {
	grant
	at time.Time
}

const (
	leastSweep = 4096
	// mostLoaded bounds what a start is told of: each costs a hash of some hundred bytes
	// for every search.
	mostLoaded = 1 << 16
)

// newTokens makes those of a purpose: one for another opens nothing.
func newTokens(secret []byte, purpose string) *tokens {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("cove e2b " + purpose + " token"))
	t := &tokens{key: h.Sum(nil)}
	t.given.turn = make(chan struct{}, 1)
	t.given.sweepAt.Store(leastSweep)
	return t
}

func (t *tokens) mac(g grant) string {
	h := hmac.New(sha256.New, t.key)
	h.Write([]byte(g.sandbox + " " + g.key))
	return hex.EncodeToString(h.Sum(nil))
}

// mint makes the token of a sandbox for the API key with that id.
func (t *tokens) mint(g grant) string {
	token := t.of(g)
	if t.holders != nil && t.keep(token, g) >= t.given.sweepAt.Load() && t.given.sweeping.CompareAndSwap(false, true) {
		go t.sweep()
	}
	return token
}

func (t *tokens) of(g grant) string { return g.sandbox + "." + g.key + "." + t.mac(g) }

func (t *tokens) keep(token string, g grant) int64 {
	if _, was := t.given.byToken.Swap(token, grantedAt{g, time.Now()}); was {
		return t.given.count.Load()
	}
	return t.given.count.Add(1)
}

// sweep drops the tokens of sandboxes that have ended.
func (t *tokens) sweep() {
	defer t.given.sweeping.Store(false)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	began := time.Now()
	holders, err := t.holders(ctx, "")
	live := map[string]bool{}
	for _, h := range holders {
		live[h.Sandbox] = true
	}
	if err == nil {
		t.given.byToken.Range(func(token, g any) bool {
			if g := g.(grantedAt); !live[g.sandbox] && g.at.Before(began) {
				if _, was := t.given.byToken.LoadAndDelete(token); was {
					t.given.count.Add(-1)
				}
			}
			return true
		})
	}
	t.given.sweepAt.Store(max(leastSweep, 2*t.given.count.Load()))
}

// load keeps the tokens that were given before this process began.
func (t *tokens) load(ctx context.Context) error {
	holders, err := t.holders(ctx, "")
	if err != nil {
		return err
	}
	for _, h := range holders {
		for _, key := range h.Keys {
			if t.given.count.Load() < mostLoaded {
				g := grant{h.Sandbox, key}
				t.keep(t.of(g), g)
			}
		}
	}
	t.given.loaded = true
	return nil
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

// signature is what the query of a signed URL says. expires is "" or unix seconds.
type signature struct{ value, path, operation, user, expires string }

// by says whether it was made with a token.
func (s signature) by(token string) bool {
	raw := s.path + ":" + s.operation + ":" + s.user + ":" + token
	if s.expires != "" {
		raw += ":" + s.expires
	}
	sum := sha256.Sum256([]byte(raw))
	return hmac.Equal([]byte(strings.TrimRight(s.value, "=")), []byte("v1_"+base64.RawStdEncoding.EncodeToString(sum[:])))
}

// signed finds the token that a URL was signed with, of the sandbox id, if it names one.
func (t *tokens) signed(ctx context.Context, id string, s signature, now time.Time) (grant, error) {
	if s.expires != "" {
		at, err := strconv.ParseInt(s.expires, 10, 64)
		if err != nil {
			return grant{}, unauthenticated("invalid signature expiration")
		}
		if now.Unix() > at {
			return grant{}, unauthenticated("signature is already expired")
		}
	}
	if id == "" {
		return t.search(ctx, s)
	}
	holders, err := t.holders(ctx, id)
	if err != nil {
		return grant{}, err
	}
	for _, h := range holders {
		for _, key := range h.Keys {
			if g := (grant{h.Sandbox, key}); s.by(t.of(g)) {
				return g, nil
			}
		}
	}
	return grant{}, unauthenticated("invalid signature")
}

// search tries all tokens.
func (t *tokens) search(ctx context.Context, s signature) (found grant, err error) {
	select {
	case t.given.turn <- struct{}{}:
	case <-ctx.Done():
		return found, ctx.Err()
	}
	defer func() { <-t.given.turn }()
	if !t.given.loaded {
		if err := t.load(ctx); err != nil {
			return found, err
		}
	}
	err = unauthenticated("invalid signature")
	t.given.byToken.Range(func(token, g any) bool {
		if s.by(token.(string)) {
			found, err = g.(grantedAt).grant, nil
		}
		return err != nil
	})
	return found, err
}
