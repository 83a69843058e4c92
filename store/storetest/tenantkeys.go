package storetest

import (
	"context"
	"crypto/sha256"
	"slices"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func rotation(t *testing.T, st store.Store, red, blue context.Context) {
	k := newKey("k1", 0)
	k.Role, k.Scopes, k.ExpiresAt = sandbox.AdminRole, []string{"sandboxes", "images:read"}, at(99)
	if err := st.CreateKey(red, k); err != nil {
		t.Fatal(err)
	}
	next := sha256.Sum256([]byte("next"))
	_, err := st.RotateKey(blue, "k1", next[:], at(5))
	fails(t, "another's", err, sandbox.ErrNotFound)
	got, err := st.RotateKey(red, "k1", next[:], at(5))
	if err != nil || !got.OldUntil.Equal(at(5)) || string(got.OldHash) != string(k.Hash) || string(got.Hash) != string(next[:]) {
		t.Fatal(got, err)
	}
	for _, h := range [][]byte{k.Hash, next[:]} {
		got, err := st.KeyByHash(all(red), h)
		if err != nil || got.ID != "k1" || got.Tenant != "red" || got.Role != k.Role || !slices.Equal(got.Scopes, k.Scopes) || !got.ExpiresAt.Equal(k.ExpiresAt) {
			t.Error(got, err)
		}
	}
	_, err = st.RotateKey(red, "k1", k.Hash, at(5))
	fails(t, "a secret again", err, sandbox.ErrAlreadyExists)
	third := sha256.Sum256([]byte("third"))
	if _, err := st.RotateKey(red, "k1", third[:], at(6)); err != nil {
		t.Fatal(err)
	}
	// Each secret has its own grace, also when it is not the last but one.
	old, err := st.KeyByHash(all(red), k.Hash)
	if err != nil || old.ID != "k1" || string(old.OldHash) != string(k.Hash) || !old.OldUntil.Equal(at(5)) {
		t.Error("the secret before the last:", old, err)
	}
	_, err = st.RotateKey(red, "k1", next[:], at(7))
	fails(t, "an older secret again", err, sandbox.ErrAlreadyExists)
	fourth := sha256.Sum256([]byte("fourth"))
	if _, err := st.RotateKey(red, "k1", fourth[:], at(2)); err != nil {
		t.Fatal(err)
	}
	for _, h := range [][]byte{k.Hash, next[:], third[:]} { // a shorter grace ends them all
		if got, err := st.KeyByHash(all(red), h); err != nil || got.OldUntil.After(at(2)) {
			t.Error(got, err)
		}
	}
	if err := st.RevokeKey(red, "k1"); err != nil {
		t.Fatal(err)
	}
	_, err = st.KeyByHash(all(red), k.Hash)
	fails(t, "an old secret of a key that is gone", err, sandbox.ErrNotFound)
}

func ownKeys(t *testing.T, st store.Store, red, blue context.Context) {
	if err := st.CreateKey(red, newKey("k1", 0)); err != nil {
		t.Fatal(err)
	}
	if keys, err := st.ListKeys(blue); err != nil || len(keys) != 0 {
		t.Error(keys, err)
	}
	fails(t, "revoke", st.RevokeKey(blue, "k1"), sandbox.ErrNotFound)
	fails(t, "touch", st.TouchKey(blue, "k1", at(1)), sandbox.ErrNotFound)
	if keys, err := st.ListKeys(red); err != nil || len(keys) != 1 || keys[0].Tenant != "red" {
		t.Error(keys, err)
	}
}

func auditChain(t *testing.T, st store.Store, red, blue context.Context) {
	ctx := all(t.Context())
	for i := range 10 {
		e := sandbox.AuditEntry{At: at(i), Tenant: []string{"red", "blue"}[i%2], Key: "k", Op: "sandbox.kill", Things: []string{"sandbox:abc"}, Outcome: "ok"}
		if err := st.AppendAudit(ctx, []sandbox.AuditEntry{e}); err != nil {
			t.Fatal(err)
		}
	}
	list := func(ctx context.Context, after int64, since time.Time) []sandbox.AuditEntry {
		t.Helper()
		es, err := st.ListAudit(ctx, after, since, 100)
		if err != nil {
			t.Fatal(err)
		}
		return es
	}
	es := list(ctx, 0, time.Time{})
	if len(es) != 10 || es[0].Seq != 1 || es[9].Seq != 10 {
		t.Fatal(es)
	}
	if err := store.CheckAudit(es); err != nil {
		t.Error(err)
	}
	if r := list(red, 0, time.Time{}); len(r) != 5 || r[0].Tenant != "red" {
		t.Error(r)
	}
	if got := list(ctx, 3, at(7)); len(got) != 3 || got[0].Seq != 8 {
		t.Error(got)
	}
	if n, err := st.ForgetAudit(ctx, at(4), 3); n != 3 || err != nil {
		t.Error(n, err)
	}
	if n, err := st.ForgetAudit(ctx, at(4), 30); n != 1 || err != nil {
		t.Error(n, err)
	}
	if err := st.AppendAudit(ctx, []sandbox.AuditEntry{{At: at(20), Tenant: "red", Op: "x", Outcome: "ok"}}); err != nil {
		t.Fatal(err)
	}
	left := list(ctx, 0, time.Time{})
	if err := store.CheckAudit(left); err != nil || len(left) != 7 || left[0].Seq != 5 || left[6].Seq != 11 {
		t.Error(len(left), err)
	}
	for name, harm := range map[string]func([]sandbox.AuditEntry) []sandbox.AuditEntry{
		"a changed entry": func(es []sandbox.AuditEntry) []sandbox.AuditEntry { es[2].Op = "nothing"; return es },
		"a rewritten entry": func(es []sandbox.AuditEntry) []sandbox.AuditEntry {
			es[2].Op = "nothing"
			es[2].Hash = store.AuditHash(es[2])
			return es
		},
		"a missing entry":    func(es []sandbox.AuditEntry) []sandbox.AuditEntry { return slices.Delete(es, 2, 3) },
		"two that swapped":   func(es []sandbox.AuditEntry) []sandbox.AuditEntry { es[2], es[3] = es[3], es[2]; return es },
		"a time moved ahead": func(es []sandbox.AuditEntry) []sandbox.AuditEntry { es[4].At = es[4].At.Add(1); return es },
	} {
		fails(t, name, store.CheckAudit(harm(slices.Clone(left))), sandbox.ErrCorrupt)
	}
}
