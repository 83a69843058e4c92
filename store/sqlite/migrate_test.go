package sqlite

import (
	"context"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// What a file from before there were tenants holds is the default tenant's, as
// it was, and its keys are the installation's.
func TestUpgradeToTenants(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "cove.db")
	db, err := openDB(path, "_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	do := func(query string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(ctx, query, args...); err != nil {
			t.Fatal(query, err)
		}
	}
	do(`CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY)`)
	for i, name := range []string{"0001_init.sql", "0002_state.sql"} {
		text, err := fs.ReadFile(migrations, "migrations/"+name)
		if err != nil {
			t.Fatal(err)
		}
		do(string(text))
		do(`INSERT INTO schema_version (version) VALUES (?)`, i+1)
	}
	do(`INSERT INTO sandboxes VALUES ('box', 0, 'running', 'sha256:1', 5, 0, 1, '{"id":"box","state":"running","image_id":"sha256:1","created_at":"2026-01-01T00:00:00Z"}')`)
	do(`INSERT INTO sandbox_labels VALUES ('box', 'run', 'r1', 0, 5)`)
	do(`INSERT INTO idempotency_keys VALUES ('once', 'h', 'box')`)
	for _, name := range []string{"base", "mine"} {
		do(`INSERT INTO images VALUES (?, 1, ?)`, "sha256:"+name, `{"id":"sha256:`+name+`"}`)
		do(`INSERT INTO image_names VALUES (?, ?)`, name, "sha256:"+name)
	}
	do(`INSERT INTO api_keys VALUES ('k', '0102', 'first', 1, 0)`)
	for _, s := range [][2]string{{"snap", "best"}, {"tplsnap", ""}} {
		var name any
		if s[1] != "" {
			name = s[1]
		}
		do(`INSERT INTO snapshots VALUES (?, ?, 'memory', 'box', 'm', 0, 5, ?)`, s[0], name, `{"id":"`+s[0]+`","kind":"memory","sandbox":"box","content":{"manifest":"m","stored":70}}`)
		do(`INSERT INTO snapshot_labels VALUES (?, 'a', 'b')`, s[0])
	}
	do(`INSERT INTO template_names VALUES ('py', 4)`)
	do(`INSERT INTO templates VALUES ('py', 4, 'tplsnap', 5, '{"name":"py","snapshot":"tplsnap"}')`)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	st, err := Open(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	own := store.In(ctx, sandbox.DefaultTenant)
	if sb, err := st.SandboxByKey(own, store.Idempotency{Key: "once", Hash: "h"}); err != nil || sb.ID != "box" || sb.Tenant != sandbox.DefaultTenant {
		t.Error(sb, err)
	}
	if sbs, _, err := st.ListSandboxes(own, store.Filter{Labels: map[string]string{"run": "r1"}}); err != nil || len(sbs) != 1 {
		t.Error(sbs, err)
	}
	if snap, err := st.GetSnapshot(own, "best"); err != nil || snap.ID != "snap" || snap.Name != "best" {
		t.Error(snap, err)
	}
	if snaps, _, err := st.ListSnapshots(own, store.SnapshotFilter{Labels: map[string]string{"a": "b"}}); err != nil || len(snaps) != 2 {
		t.Error("labels went with the upgrade:", snaps, err)
	}
	if c, err := st.SnapshotContents(own); err != nil || len(c) != 1 || c["m"] != 70 {
		t.Error(c, err)
	}
	if tpl, err := st.GetTemplate(own, "py", 0); err != nil || tpl.Version != 4 || tpl.Snapshot != "tplsnap" {
		t.Error(tpl, err)
	}
	if tpl, err := st.CreateTemplateVersion(own, sandbox.Template{Name: "py"}, sandbox.Snapshot{ID: "next", Kind: sandbox.MemorySnapshot, Content: sandbox.Content{Manifest: "m"}}); err != nil || tpl.Version != 5 {
		t.Error(tpl, err)
	}
	all := store.Installation(ctx)
	if k, err := st.KeyByHash(all, []byte{1, 2}); err != nil || k.Role != sandbox.RootRole || k.Tenant != sandbox.DefaultTenant || !k.ExpiresAt.IsZero() {
		t.Error(k, err)
	}
	if err := st.CreateTenant(all, sandbox.Tenant{ID: "red", Name: "red", CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	red := store.In(ctx, "red")
	if img, err := st.GetImage(red, "base"); err != nil || img.ID != "sha256:base" {
		t.Error("the base image is everybody's:", err)
	}
	if img, err := st.GetImage(red, "mine"); err == nil {
		t.Error("the default tenant's image is everybody's:", img)
	}
	if _, err := st.GetImage(own, "mine"); err != nil {
		t.Error(err)
	}
}
