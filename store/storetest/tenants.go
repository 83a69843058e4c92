package storetest

import (
	"context"
	"errors"
	"fmt"
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
		{"nor are its runs", foreignRuns},
		{"nor are its shipments", foreignShipments},
		{"nor are its grades", foreignGrades},
		{"nor are its volumes and recordings", ownVolumes},
		{"names and idempotency keys are a tenant's own", ownNames},
		{"an image is seen by name or by use", imageSight},
		{"where an image came from is told to who brought it", imageOrigin},
		{"images count once for each tenant that names them", imageBytes},
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
		"EndSandbox":    func() error { _, err := st.EndSandbox(ctx, "abc", sandbox.End{Cause: sandbox.TTL}); return err },
		"ForgetSandbox": func() error { return st.ForgetSandbox(ctx, "abc") },
		"ForgetEnded":   func() error { _, err := st.ForgetEnded(ctx, at(99), 1); return err },
		"CreateGrade":   func() error { return st.CreateGrade(ctx, newGrade("g", "abc", 0)) },
		"UpdateGrade": func() error {
			_, err := st.UpdateGrade(ctx, "g", func(*sandbox.Grade) error { return nil })
			return err
		},
		"GetGrade":       func() error { _, err := st.GetGrade(ctx, "g"); return err },
		"ListGrades":     func() error { _, _, err := st.ListGrades(ctx, store.GradeFilter{}); return err },
		"ForgetGrades":   func() error { _, err := st.ForgetGrades(ctx, at(9), 1); return err },
		"PutImage":       func() error { return st.PutImage(ctx, newImage("sha256:x", 0), "x") },
		"PutImageWithin": func() error { return st.PutImageWithin(ctx, newImage("sha256:x", 0), "x", 1) },
		"ImageBytes":     func() error { _, err := st.ImageBytes(ctx); return err },
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
		"CreateVolume":     func() error { return st.CreateVolume(ctx, newVolume("v", "v", 0)) },
		"GetVolume":        func() error { _, err := st.GetVolume(ctx, "v"); return err },
		"ListVolumes":      func() error { _, err := st.ListVolumes(ctx); return err },
		"MoveVolume":       func() error { return st.MoveVolume(ctx, "v", sandbox.VolumeMaking, sandbox.VolumeReady) },
		"ResizeVolume":     func() error { return st.ResizeVolume(ctx, "v", 1) },
		"DeleteVolume":     func() error { return st.DeleteVolume(ctx, "v") },
		"CreateRecording":  func() error { return st.CreateRecording(ctx, newRecording("r", "r", 0)) },
		"GetRecording":     func() error { _, err := st.GetRecording(ctx, "r"); return err },
		"ListRecordings":   func() error { _, err := st.ListRecordings(ctx); return err },
		"FinishRecording":  func() error { return st.FinishRecording(ctx, sandbox.Recording{ID: "r"}) },
		"MoveRecording":    func() error { return st.MoveRecording(ctx, "r", sandbox.RecordingOpen, sandbox.RecordingDeleting) },
		"DeleteRecording":  func() error { return st.DeleteRecording(ctx, "r") },
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
