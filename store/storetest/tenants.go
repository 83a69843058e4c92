package storetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// tenantCases are about who sees what. They give scopes themselves.
func tenantCases(t *testing.T, open func(t *testing.T) store.Store) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, st store.Store, red, blue context.Context)
	}{
		{"without a scope nothing is seen or changed", noScope},
		{"one tenant's things are not there for another", foreignThings},
		{"nor are its leases", foreignLeases},
		{"names and idempotency keys are a tenant's own", ownNames},
		{"an image is seen by name or by use", imageSight},
		{"a tenant goes when it is empty", tenantLife},
		{"a rotated key has two secrets", rotation},
		{"keys are a tenant's own", ownKeys},
		{"the audit log is a chain", auditChain},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := open(t)
			defer st.Close()
			for _, id := range []string{"red", "blue"} {
				if err := st.CreateTenant(all(t.Context()), sandbox.Tenant{ID: id, Name: "team-" + id, CreatedAt: at(0)}); err != nil {
					t.Fatal(err)
				}
			}
			c.run(t, st, store.In(t.Context(), "red"), store.In(t.Context(), "blue"))
		})
	}
}

func tenantSnapshot(id, name string) sandbox.Snapshot {
	return sandbox.Snapshot{ID: id, Name: name, Kind: sandbox.MemorySnapshot, Sandbox: "sb" + id, ImageID: "sha256:i" + id, CreatedAt: at(1),
		Labels: map[string]string{"run": "r1"}, Content: sandbox.Content{Manifest: "m" + id, Stored: 100}}
}

// noScope calls everything with a bare context.
func noScope(t *testing.T, st store.Store, _, _ context.Context) {
	ctx := t.Context()
	sb := newSandbox("abc", 0)
	if _, _, err := st.CreateSandbox(all(ctx), sb, store.Idempotency{}); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"CreateSandbox": func() error {
			_, _, err := st.CreateSandbox(ctx, newSandbox("def", 0), store.Idempotency{})
			return err
		},
		"SandboxByKey":  func() error { _, err := st.SandboxByKey(ctx, store.Idempotency{Key: "k"}); return err },
		"GetSandbox":    func() error { _, err := st.GetSandbox(ctx, "abc"); return err },
		"ListSandboxes": func() error { _, _, err := st.ListSandboxes(ctx, store.Filter{}); return err },
		"UpdateSandbox": func() error {
			_, err := st.UpdateSandbox(ctx, "abc", func(*sandbox.Sandbox) error { return nil })
			return err
		},
		"EndSandbox":     func() error { _, err := st.EndSandbox(ctx, "abc", sandbox.End{Cause: sandbox.TTL}); return err },
		"ForgetSandbox":  func() error { return st.ForgetSandbox(ctx, "abc") },
		"ForgetEnded":    func() error { _, err := st.ForgetEnded(ctx, at(99), 1); return err },
		"PutImage":       func() error { return st.PutImage(ctx, newImage("sha256:x", 0), "x") },
		"GetImage":       func() error { _, err := st.GetImage(ctx, "x"); return err },
		"ListImages":     func() error { _, err := st.ListImages(ctx); return err },
		"RemoveName":     func() error { _, err := st.RemoveImageName(ctx, "x"); return err },
		"RemoveImage":    func() error { return st.RemoveImage(ctx, "sha256:x") },
		"RemovePrepared": func() error { return st.RemovePreparedImage(ctx, "sha256:x") },
		"CreateKey":      func() error { return st.CreateKey(ctx, newKey("k", 0)) },
		"KeyByHash":      func() error { _, err := st.KeyByHash(ctx, []byte("x")); return err },
		"ListKeys":       func() error { _, err := st.ListKeys(ctx); return err },
		"RevokeKey":      func() error { return st.RevokeKey(ctx, "k") },
		"RotateKey":      func() error { _, err := st.RotateKey(ctx, "k", []byte("x"), at(0)); return err },
		"TouchKey":       func() error { return st.TouchKey(ctx, "k", at(0)) },
		"CreateSnapshot": func() error { _, err := st.CreateSnapshot(ctx, tenantSnapshot("s", "")); return err },
		"GetSnapshot":    func() error { _, err := st.GetSnapshot(ctx, "s"); return err },
		"ListSnapshots":  func() error { _, _, err := st.ListSnapshots(ctx, store.SnapshotFilter{}); return err },
		"SetImage":       func() error { return st.SetSnapshotImage(ctx, "s", "sha256:x") },
		"DeleteSnapshot": func() error { _, err := st.DeleteSnapshot(ctx, "s"); return err },
		"Manifests":      func() error { _, err := st.Manifests(ctx); return err },
		"SnapshotImages": func() error { _, err := st.SnapshotImages(ctx); return err },
		"Tree":           func() error { _, err := st.Tree(ctx, "abc"); return err },
		"CreateTemplate": func() error {
			_, err := st.CreateTemplateVersion(ctx, sandbox.Template{Name: "t"}, tenantSnapshot("s", ""))
			return err
		},
		"GetTemplate":      func() error { _, err := st.GetTemplate(ctx, "t", 0); return err },
		"ListTemplates":    func() error { _, err := st.ListTemplates(ctx, ""); return err },
		"DeleteTemplate":   func() error { _, err := st.DeleteTemplate(ctx, "t", 0); return err },
		"CreateTenant":     func() error { return st.CreateTenant(ctx, sandbox.Tenant{ID: "x", Name: "x"}) },
		"GetTenant":        func() error { _, err := st.GetTenant(ctx, "red"); return err },
		"ListTenants":      func() error { _, err := st.ListTenants(ctx); return err },
		"SetQuota":         func() error { _, err := st.SetQuota(ctx, "red", sandbox.Quota{}); return err },
		"DeleteTenant":     func() error { return st.DeleteTenant(ctx, "red") },
		"SnapshotAges":     func() error { _, err := st.SnapshotAges(ctx, at(0)); return err },
		"SnapshotContents": func() error { _, err := st.SnapshotContents(ctx); return err },
		"AppendAudit":      func() error { return st.AppendAudit(ctx, []sandbox.AuditEntry{{}}) },
		"ListAudit":        func() error { _, err := st.ListAudit(ctx, 0, time.Time{}, 1); return err },
		"ForgetAudit":      func() error { _, err := st.ForgetAudit(ctx, at(99), 1); return err },
		"PutLogin":         func() error { return st.PutLogin(ctx, newLogin("r", "me", 0)) },
		"GetLogin":         func() error { _, err := st.GetLogin(ctx, "r"); return err },
		"ListLogins":       func() error { _, err := st.ListLogins(ctx); return err },
		"DeleteLogin":      func() error { return st.DeleteLogin(ctx, "r") },
		"CreateSecret":     func() error { return st.CreateSecret(ctx, newSecret("s", 0)) },
		"GetSecret":        func() error { _, err := st.GetSecret(ctx, "s"); return err },
		"ListSecrets":      func() error { _, err := st.ListSecrets(ctx); return err },
		"ReplaceSecret":    func() error { return st.ReplaceSecret(ctx, newSecret("s", 1), at(0)) },
		"DeleteSecret":     func() error { return st.DeleteSecret(ctx, "s") },
		"CreateLease":      func() error { return st.CreateLease(ctx, newLease("l", 0)) },
		"ListLeases":       func() error { _, err := st.ListLeases(ctx); return err },
		"DeleteLease":      func() error { return st.DeleteLease(ctx, "l") },
	} {
		fails(t, name, call(), sandbox.ErrInternal)
	}
	got, err := st.GetSandbox(all(ctx), "abc")
	if err != nil {
		t.Fatal(err)
	}
	same(t, "afterwards", got, sb)
}

func foreignThings(t *testing.T, st store.Store, red, blue context.Context) {
	sb := newSandbox("redbox", 0)
	sb.Tenant = "blue" // what a record says is not what it is
	made, _, err := st.CreateSandbox(red, sb, store.Idempotency{})
	if err != nil || made.Tenant != "red" {
		t.Fatalf("made for %q, %v", made.Tenant, err)
	}
	snap, err := st.CreateSnapshot(red, tenantSnapshot("redsnap", "best"))
	if err != nil || snap.Tenant != "red" {
		t.Fatal(snap.Tenant, err)
	}
	if _, err := st.CreateTemplateVersion(red, sandbox.Template{Name: "py"}, tenantSnapshot("redtpl", "")); err != nil {
		t.Fatal(err)
	}
	sec := newSecret("redkey", 0)
	sec.Tenant = "blue"
	if err := st.PutLogin(red, newLogin("ghcr.io", "red", 0)); err != nil {
		t.Fatal(err)
	}
	if err := st.CreateSecret(red, sec); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"get": func() error { _, err := st.GetSandbox(blue, "redbox"); return err },
		"update": func() error {
			_, err := st.UpdateSandbox(blue, "redbox", func(*sandbox.Sandbox) error { return errors.New("called") })
			return err
		},
		"end": func() error {
			_, err := st.EndSandbox(blue, "redbox", sandbox.End{Cause: sandbox.TTL, At: at(1)})
			return err
		},
		"tree":         func() error { _, err := st.Tree(blue, "redbox"); return err },
		"snapshot":     func() error { _, err := st.GetSnapshot(blue, "redsnap"); return err },
		"by name":      func() error { _, err := st.GetSnapshot(blue, "best"); return err },
		"hidden":       func() error { _, err := st.GetSnapshot(blue, "redtpl"); return err },
		"image of":     func() error { return st.SetSnapshotImage(blue, "redsnap", "sha256:evil") },
		"delete":       func() error { _, err := st.DeleteSnapshot(blue, "redsnap"); return err },
		"template":     func() error { _, err := st.GetTemplate(blue, "py", 1); return err },
		"rm template":  func() error { _, err := st.DeleteTemplate(blue, "py", 0); return err },
		"login":        func() error { _, err := st.GetLogin(blue, "ghcr.io"); return err },
		"rm login":     func() error { return st.DeleteLogin(blue, "ghcr.io") },
		"secret":       func() error { _, err := st.GetSecret(blue, "redkey"); return err },
		"set secret":   func() error { return st.ReplaceSecret(blue, newSecret("redkey", 1), at(0)) },
		"rm secret":    func() error { return st.DeleteSecret(blue, "redkey") },
		"other tenant": func() error { _, err := st.GetTenant(blue, "red"); return err },
		"by its name":  func() error { _, err := st.GetTenant(blue, "team-red"); return err },
	} {
		fails(t, name, call(), sandbox.ErrNotFound)
	}
	if err := st.ForgetSandbox(blue, "redbox"); err != nil {
		t.Error(err)
	}
	for name, call := range map[string]func() error{
		"forget ended": func() error { _, err := st.ForgetEnded(blue, at(99), 9); return err },
		"manifests":    func() error { _, err := st.Manifests(blue); return err },
		"tenants":      func() error { _, err := st.ListTenants(blue); return err },
		"new tenant":   func() error { return st.CreateTenant(blue, sandbox.Tenant{ID: "x", Name: "x"}) },
		"quota":        func() error { _, err := st.SetQuota(blue, "blue", sandbox.Quota{}); return err },
		"rm tenant":    func() error { return st.DeleteTenant(blue, "red") },
		"rm image":     func() error { return st.RemoveImage(blue, "sha256:iredsnap") },
		"audit":        func() error { return st.AppendAudit(blue, []sandbox.AuditEntry{{}}) },
	} {
		fails(t, name, call(), sandbox.ErrDenied)
	}
	lists := func(ctx context.Context) (n int) {
		for _, f := range []store.Filter{{}, {Labels: map[string]string{"run": "r1"}}, {States: sandbox.States}} {
			sbs, _, err := st.ListSandboxes(ctx, f)
			if err != nil {
				t.Fatal(err)
			}
			n += len(sbs)
		}
		for _, f := range []store.SnapshotFilter{{}, {Hidden: true}, {Sandbox: "sbredsnap"}, {Labels: map[string]string{"run": "r1"}}} {
			snaps, _, err := st.ListSnapshots(ctx, f)
			if err != nil {
				t.Fatal(err)
			}
			n += len(snaps)
		}
		tpls, err := st.ListTemplates(ctx, "")
		if err != nil {
			t.Fatal(err)
		}
		secs, err := st.ListSecrets(ctx)
		if err != nil {
			t.Fatal(err)
		}
		logins, err := st.ListLogins(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return n + len(tpls) + len(secs) + len(logins)
	}
	if r, b := lists(red), lists(blue); r != 10 || b != 0 {
		t.Errorf("lists have %d and %d of red's things", r, b)
	}
	alias := tenantSnapshot("redalias", "")
	alias.Content = sandbox.Content{Manifest: "mredsnap", Needs: []string{"mdir", "mredtpl"}}
	if _, err := st.CreateSnapshot(red, alias); err != nil {
		t.Fatal(err)
	}
	if c, err := st.SnapshotContents(red); fmt.Sprint(c) != "map[mdir:0 mredsnap:100 mredtpl:100]" || err != nil {
		t.Error(c, err)
	}
	if a, err := st.SnapshotAges(blue, at(99)); a.Count != 0 || err != nil {
		t.Error("blue sees", a, err)
	}
	if c, err := st.SnapshotContents(blue); len(c) != 0 || err != nil {
		t.Error(c, err)
	}
	if _, err := st.DeleteSnapshot(red, "redalias"); err != nil {
		t.Fatal(err)
	}
	got, err := st.GetSandbox(red, "redbox")
	if err != nil || got.End != nil {
		t.Error("changed by another:", got.End, err)
	}
	// Its own may not move either.
	_, err = st.UpdateSandbox(red, "redbox", func(sb *sandbox.Sandbox) error { sb.Tenant = "blue"; return nil })
	fails(t, "a change of tenant", err, sandbox.ErrInvalid)
}

func ownNames(t *testing.T, st store.Store, red, blue context.Context) {
	for i, ctx := range []context.Context{red, blue} {
		id := []string{"r", "b"}[i]
		idem := store.Idempotency{Key: "same", Hash: "h" + id}
		if _, existed, err := st.CreateSandbox(ctx, newSandbox("box"+id, i), idem); existed || err != nil {
			t.Fatal(existed, err)
		}
		if sb, err := st.SandboxByKey(ctx, idem); err != nil || sb.ID != "box"+id {
			t.Error(sb.ID, err)
		}
		if _, err := st.CreateSnapshot(ctx, tenantSnapshot("snap"+id, "best")); err != nil {
			t.Fatal(err)
		}
		if tpl, err := st.CreateTemplateVersion(ctx, sandbox.Template{Name: "py"}, tenantSnapshot("tpl"+id, "")); err != nil || tpl.Version != 1 {
			t.Fatal(tpl.Version, err)
		}
	}
	for i, ctx := range []context.Context{red, blue} {
		id := []string{"r", "b"}[i]
		if s, err := st.GetSnapshot(ctx, "best"); err != nil || s.ID != "snap"+id || s.Name != "best" {
			t.Error(s.ID, s.Name, err)
		}
		if tpl, err := st.GetTemplate(ctx, "py", 0); err != nil || tpl.Snapshot != "tpl"+id {
			t.Error(tpl.Snapshot, err)
		}
	}
	if _, err := st.DeleteTemplate(blue, "py", 0); err != nil {
		t.Error(err)
	}
	if _, err := st.GetTemplate(red, "py", 1); err != nil {
		t.Error(err)
	}
}

func imageSight(t *testing.T, st store.Store, red, blue context.Context) {
	put := func(ctx context.Context, id, name string) {
		t.Helper()
		if err := st.PutImage(ctx, newImage(id, 0), name); err != nil {
			t.Fatal(err)
		}
	}
	put(all(t.Context()), "sha256:base", "base")
	put(red, "sha256:secret", "mine")
	put(all(t.Context()), "sha256:used", "")
	put(all(t.Context()), "sha256:held", "")
	find := func(ctx context.Context, name string) string {
		img, err := st.GetImage(ctx, name)
		if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
			t.Fatal(err)
		}
		return img.ID
	}
	list := func(ctx context.Context) (ids []string) {
		imgs, err := st.ListImages(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range imgs {
			ids = append(ids, i.ID)
		}
		slices.Sort(ids)
		return ids
	}
	sb := newSandbox("blubox", 0)
	sb.ImageID = "sha256:used"
	if _, _, err := st.CreateSandbox(blue, sb, store.Idempotency{}); err != nil {
		t.Fatal(err)
	}
	snap := tenantSnapshot("blusnap", "")
	snap.ImageID = "sha256:held"
	if _, err := st.CreateSnapshot(blue, snap); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ctx        context.Context
		name, want string
	}{
		{red, "base", "sha256:base"}, {blue, "base", "sha256:base"}, {blue, "sha256:base", "sha256:base"},
		{red, "mine", "sha256:secret"}, {red, "sha256:secret", "sha256:secret"}, {blue, "mine", ""}, {blue, "sha256:secret", ""},
		{blue, "sha256:used", "sha256:used"}, {red, "sha256:used", ""}, {blue, "sha256:held", "sha256:held"}, {red, "sha256:held", ""},
	} {
		if got := find(c.ctx, c.name); got != c.want {
			t.Errorf("%s finds %q by %q, want %q", store.ScopeOf(c.ctx).Tenant(), got, c.name, c.want)
		}
	}
	if got := list(red); !slices.Equal(got, []string{"sha256:base", "sha256:secret"}) {
		t.Error(got)
	}
	if got := list(blue); !slices.Equal(got, []string{"sha256:base", "sha256:held", "sha256:used"}) {
		t.Error(got)
	}
	_, err := st.RemoveImageName(blue, "mine")
	fails(t, "another's name", err, sandbox.ErrImageNotFound)
	_, err = st.RemoveImageName(blue, "base")
	fails(t, "everybody's name", err, sandbox.ErrDenied)

	// A name of its own hides everybody's, and for itself only.
	put(red, "sha256:secret", "base")
	if r, b := find(red, "base"), find(blue, "base"); r != "sha256:secret" || b != "sha256:base" {
		t.Error(r, b)
	}
	if img, _ := st.GetImage(red, "sha256:base"); slices.Contains(img.Names, "base") {
		t.Error("the hidden name is shown:", img.Names)
	}
	if _, err := st.RemoveImageName(red, "base"); err != nil || find(red, "base") != "sha256:base" {
		t.Error(err)
	}
	// Names of all tenants keep content.
	fails(t, "named by red", st.RemoveImage(all(t.Context()), "sha256:secret"), sandbox.ErrPrecondition)
}

func tenantLife(t *testing.T, st store.Store, red, blue context.Context) {
	ctx := all(t.Context())
	fails(t, "a name twice", st.CreateTenant(ctx, sandbox.Tenant{ID: "x", Name: "team-red"}), sandbox.ErrAlreadyExists)
	fails(t, "an id as a name", st.CreateTenant(ctx, sandbox.Tenant{ID: "x", Name: "red"}), sandbox.ErrAlreadyExists)
	q := sandbox.Quota{Sandboxes: 3, CreatesPerSecond: 1.5}
	if tn, err := st.SetQuota(ctx, "red", q); err != nil || tn.Quota != q {
		t.Error(tn, err)
	}
	if tn, err := st.GetTenant(red, "team-red"); err != nil || tn.Quota != q || tn.ID != "red" {
		t.Error(tn, err)
	}
	if _, _, err := st.CreateSandbox(red, newSandbox("redbox", 0), store.Idempotency{Key: "k", Hash: "h"}); err != nil {
		t.Fatal(err)
	}
	if err := st.PutImage(red, newImage("sha256:i", 0), "mine"); err != nil {
		t.Fatal(err)
	}
	k := newKey("k1", 0)
	if err := st.CreateKey(red, k); err != nil {
		t.Fatal(err)
	}
	fails(t, "a live sandbox", st.DeleteTenant(ctx, "red"), sandbox.ErrPrecondition)
	if _, err := st.EndSandbox(red, "redbox", sandbox.End{Cause: sandbox.TTL, At: at(1)}); err != nil {
		t.Fatal(err)
	}
	if err := st.DeleteTenant(ctx, "red"); err != nil {
		t.Fatal(err)
	}
	_, err := st.KeyByHash(ctx, k.Hash)
	fails(t, "its key", err, sandbox.ErrNotFound)
	if err := st.RemoveImage(ctx, "sha256:i"); err != nil {
		t.Error("its names are left:", err)
	}
	fails(t, "again", st.DeleteTenant(ctx, "red"), sandbox.ErrNotFound)
	fails(t, "the default", st.DeleteTenant(ctx, sandbox.DefaultTenant), sandbox.ErrPrecondition)
	fails(t, "a key of nobody", st.CreateKey(red, newKey("k2", 0)), sandbox.ErrNotFound)
	list, err := st.ListTenants(ctx)
	if err != nil || len(list) != 2 || list[0].ID != sandbox.DefaultTenant || list[1].ID != "blue" {
		t.Error(list, err)
	}
}

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
