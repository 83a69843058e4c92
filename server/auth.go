package server

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A secret is "cove_" and 256 random bits. With that much randomness a plain
// SHA-256 is enough (there is nothing to guess), and looking the hash up needs
// no constant time: timing tells about a hash that nobody can aim.
const (
	secretPrefix = "cove_"
	secretBytes  = 32
	secretLen    = len(secretPrefix) + 43 // base64 without padding
)

func newSecret(rand io.Reader) (secret string, hash [sha256.Size]byte, err error) {
	var b [secretBytes]byte
	if _, err := io.ReadFull(rand, b[:]); err != nil {
		return "", hash, fmt.Errorf("no randomness for a key: %w", err)
	}
	secret = secretPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	return secret, sha256.Sum256([]byte(secret)), nil
}

// keyring remembers which secrets are good, so that a call costs a hash and a
// map look-up instead of a query.
type keyring struct {
	store store.Keys

	mu struct {
		sync.RWMutex
		known map[[sha256.Size]byte]*keyUse
		byID  map[string]store.Key // what was asked for by id; without an id of its own: it is gone
		gen   uint64               // counts revocations: a look-up that began before one is not remembered
	}
}

type keyUse struct {
	key     store.Key
	hash    [sha256.Size]byte // of the secret it is known by: its own, or the one before a rotation
	last    atomic.Int64      // unix nanoseconds of the last call
	flushed atomic.Int64      // what the store was told
}

func (k *keyring) init(st store.Keys) {
	k.store, k.mu.known, k.mu.byID = st, map[[sha256.Size]byte]*keyUse{}, map[string]store.Key{}
}

// find returns the key of a secret; sandbox.ErrNotFound if there is none.
func (k *keyring) find(ctx context.Context, secret string) (*keyUse, error) {
	if len(secret) != secretLen || !strings.HasPrefix(secret, secretPrefix) {
		return nil, sandbox.ErrNotFound // not worth a query
	}
	hash := sha256.Sum256([]byte(secret))
	k.mu.RLock()
	use, gen := k.mu.known[hash], k.mu.gen
	k.mu.RUnlock()
	if use != nil {
		return use, nil
	}
	key, err := k.store.KeyByHash(asServer(ctx), hash[:])
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.known[hash] != nil {
		return k.mu.known[hash], nil
	}
	use = &keyUse{key: key, hash: hash}
	if !key.LastUsedAt.IsZero() {
		use.last.Store(key.LastUsedAt.UnixNano())
		use.flushed.Store(key.LastUsedAt.UnixNano())
	}
	if k.mu.gen != gen { // it may be the one that was revoked; the next call asks again
		return use, nil
	}
	k.mu.known[hash] = use
	return use, nil
}

// ofID returns the key with an id that somebody has vouched for, a token or a
// certificate of ours; sandbox.ErrNotFound if it is gone. That is remembered too:
// ids are not used twice, and the gateway asks for every request.
func (k *keyring) ofID(ctx context.Context, id string) (store.Key, error) {
	k.mu.RLock()
	key, known := k.mu.byID[id]
	gen := k.mu.gen
	k.mu.RUnlock()
	if !known {
		keys, err := k.store.ListKeys(asServer(ctx))
		if err != nil {
			return store.Key{}, err
		}
		if i := slices.IndexFunc(keys, func(key store.Key) bool { return key.ID == id }); i >= 0 {
			key = keys[i]
		}
		k.mu.Lock()
		if k.mu.gen == gen {
			k.mu.byID[id] = key
		}
		k.mu.Unlock()
	}
	if key.ID == "" {
		return key, sandbox.ErrNotFound
	}
	return key, nil
}

// forget makes the next call with the key's secret ask the store.
func (k *keyring) forget(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.gen++
	delete(k.mu.byID, id)
	for h, use := range k.mu.known {
		if use.key.ID == id {
			delete(k.mu.known, h)
		}
	}
}

// lastUsed is what this process knows and the store may not yet.
func (k *keyring) lastUsed() map[string]time.Time {
	k.mu.RLock()
	defer k.mu.RUnlock()
	out := make(map[string]time.Time, len(k.mu.known))
	for _, use := range k.mu.known {
		if n := use.last.Load(); n != 0 {
			if at := time.Unix(0, n); at.After(out[use.key.ID]) {
				out[use.key.ID] = at
			}
		}
	}
	return out
}

// flush tells the store when keys were last used. Once a minute: a write per
// call would cost more than the call.
func (k *keyring) flush(ctx context.Context, log *slog.Logger) {
	k.mu.RLock()
	uses := make([]*keyUse, 0, len(k.mu.known))
	for _, use := range k.mu.known {
		uses = append(uses, use)
	}
	k.mu.RUnlock()
	for _, use := range uses {
		last := use.last.Load()
		if last == use.flushed.Load() {
			continue
		}
		if err := k.store.TouchKey(asServer(ctx), use.key.ID, time.Unix(0, last)); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			log.Warn("cannot record the use of a key", "key", use.key.ID, "err", err)
			continue
		}
		use.flushed.Store(last)
	}
}

// forgetTenant forgets all keys of a tenant.
func (k *keyring) forgetTenant(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.gen++
	maps.DeleteFunc(k.mu.byID, func(_ string, key store.Key) bool { return key.Tenant == id })
	for h, use := range k.mu.known {
		if use.key.Tenant == id {
			delete(k.mu.known, h)
		}
	}
}

// KeyHint is how to come by a key.
const KeyHint = `run "cove env" on the server's machine and set COVE_KEY; over HTTP send "Authorization: Bearer $COVE_KEY"`

// Authenticate finds the caller of a secret. What is done with the context it
// returns is done as that caller and sees its tenant alone. remote is the address
// it came from, with or without a port.
func (s *Server) Authenticate(ctx context.Context, secret, remote string) (context.Context, error) {
	if secret == "" {
		return ctx, &sandbox.Error{Class: sandbox.Unauthenticated, Op: "auth", Msg: "no API key", Hint: KeyHint}
	}
	use, err := s.keys.find(ctx, secret)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key is wrong or was revoked", Hint: KeyHint}
	}
	now := s.cfg.Clock()
	if err == nil {
		err = good(use.key, use.hash[:], now)
	}
	if err != nil {
		return ctx, sandbox.WithOp("auth", err)
	}
	use.last.Store(now.UnixNano())
	return withCaller(ctx, caller{key: use.key, remote: hostOf(remote)}), nil
}
