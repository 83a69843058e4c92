package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateSnapshot implements store.Snapshots.
func (s *Store) CreateSnapshot(ctx context.Context, snap sandbox.Snapshot) (sandbox.Snapshot, error) {
	if _, err := whose(ctx); err != nil {
		return sandbox.Snapshot{}, err
	}
	snap.Tenant = store.ScopeOf(ctx).Owner(snap.Tenant)
	record, err := encodeSnapshot(snap)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	err = s.write(ctx, "create_snapshot", func(t *tx) error {
		if err := t.insertSnapshot(snap, record); err != nil || snap.Kind == sandbox.DirectorySnapshot {
			return err
		}
		return t.moveBelow(snap)
	})
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	return decodeSnapshot(snap.ID, snap.Name, record)
}

// insertSnapshot writes nothing where it returns a refusal.
func (t *tx) insertSnapshot(snap sandbox.Snapshot, record string) error {
	var taken int
	if err := t.row(`SELECT count(*) FROM snapshots WHERE id = ?`, []any{snap.ID}, &taken); err != nil {
		return err
	}
	if taken > 0 {
		return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a snapshot " + snap.ID + " already"}
	}
	hidden := 0
	if snap.Hidden {
		hidden = 1
	}
	if _, err := t.exec(`INSERT INTO snapshots (id, tenant, stored, kind, sandbox_id, manifest, hidden, created_at, expires_at, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		snap.ID, snap.Tenant, snap.Content.Stored, string(snap.Kind), snap.Sandbox, snap.Content.Manifest, hidden, nanos(snap.CreatedAt), nanos(snap.ExpiresAt), record); err != nil {
		return err
	}
	if snap.Name != "" {
		if _, err := t.exec(`INSERT INTO snapshot_names (tenant, name, snapshot_id) VALUES (?, ?, ?)
			ON CONFLICT (tenant, name) DO UPDATE SET snapshot_id = excluded.snapshot_id`, snap.Tenant, snap.Name, snap.ID); err != nil {
			return err
		}
	}
	for label, value := range snap.Labels {
		if _, err := t.exec(`INSERT INTO snapshot_labels (snapshot_id, name, value) VALUES (?, ?, ?)`, snap.ID, label, value); err != nil {
			return err
		}
	}
	for _, m := range snap.Content.Needs {
		if _, err := t.exec(`INSERT INTO snapshot_needs (snapshot_id, manifest) VALUES (?, ?)`, snap.ID, m); err != nil {
			return err
		}
	}
	for _, img := range store.ImagesOf(snap) {
		if _, err := t.exec(`INSERT INTO snapshot_images (snapshot_id, image_id) VALUES (?, ?)`, snap.ID, img); err != nil {
			return err
		}
	}
	return t.insertLineage(snap.ID, snap.Lineage)
}

// moveBelow hangs the sandbox that a snapshot was taken of below it.
func (t *tx) moveBelow(snap sandbox.Snapshot) error {
	var record string
	err := t.row(`SELECT record FROM sandboxes WHERE id = ? AND tenant = ? AND ended = 0`, []any{snap.Sandbox, snap.Tenant}, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	sb, err := decodeSandbox(snap.Sandbox, record)
	if err != nil {
		return err
	}
	sb.Lineage = snap.Lineage.Below(snap.ID)
	if record, err = encodeSandbox(sb); err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE sandboxes SET record = ?, version = version + 1 WHERE id = ?`, record, sb.ID); err != nil {
		return err
	}
	return t.moveLineage(sb.ID, sb.Lineage)
}

const snapshotRow = `SELECT s.id, coalesce(n.name, ''), s.record FROM snapshots s LEFT JOIN snapshot_names n ON n.snapshot_id = s.id`

// GetSnapshot implements store.Snapshots. An id is looked for first: a name
// made to look like the id of another snapshot cannot stand in for it.
func (s *Store) GetSnapshot(ctx context.Context, nameOrID string) (sandbox.Snapshot, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	tenant, err := names(ctx)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	var id, name, record string
	err = s.readRow(ctx, snapshotRow+` WHERE s.id = coalesce((SELECT id FROM snapshots WHERE id = ? AND ? IN (tenant, '*')),
		(SELECT snapshot_id FROM snapshot_names WHERE tenant = ? AND name = ?))`,
		[]any{nameOrID, who, tenant, nameOrID}, &id, &name, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Snapshot{}, noSnapshot(nameOrID)
	}
	if err != nil {
		return sandbox.Snapshot{}, s.fault(ctx, "get_snapshot", err)
	}
	return decodeSnapshot(id, name, record)
}

// ListSnapshots implements store.Snapshots.
func (s *Store) ListSnapshots(ctx context.Context, f store.SnapshotFilter) (snaps []sandbox.Snapshot, next string, err error) {
	size := f.PageSize
	if size == 0 {
		size = store.DefaultPageSize
	}
	if size < 0 {
		return nil, "", sandbox.InvalidField("page_size", "%d is not accepted; 1 and above is, or 0 for %d", size, store.DefaultPageSize)
	}
	who, err := whose(ctx)
	if err != nil {
		return nil, "", err
	}
	query, args := snapshotQuery(who, f)
	if f.PageToken != "" {
		p, err := parseToken(f.PageToken)
		if err != nil {
			return nil, "", err
		}
		query += ` AND (s.created_at, s.id) < (?, ?)`
		args = append(args, p.created, p.id)
	}
	rows, err := s.read.QueryContext(ctx, query+` ORDER BY s.created_at DESC, s.id DESC LIMIT ?`, append(args, size+1)...)
	if err != nil {
		return nil, "", s.fault(ctx, "list_snapshots", err)
	}
	if snaps, err = scanSnapshots(rows); err != nil {
		return nil, "", s.fault(ctx, "list_snapshots", err)
	}
	if len(snaps) > size {
		snaps = snaps[:size]
		last := snaps[size-1]
		next = position{nanos(last.CreatedAt), last.ID}.token()
	}
	return snaps, next, nil
}

func snapshotQuery(who string, f store.SnapshotFilter) (string, []any) {
	var q strings.Builder
	q.WriteString(snapshotRow + ` WHERE s.hidden = ?`)
	args := []any{0}
	if f.Hidden {
		args[0] = 1
	}
	if who != everybody {
		q.WriteString(` AND s.tenant = ?`)
		args = append(args, who)
	}
	if f.Sandbox != "" {
		q.WriteString(` AND s.sandbox_id = ?`)
		args = append(args, f.Sandbox)
	}
	if f.Kind != "" {
		q.WriteString(` AND s.kind = ?`)
		args = append(args, string(f.Kind))
	}
	if !f.ExpiredAt.IsZero() {
		q.WriteString(` AND s.expires_at > 0 AND s.expires_at <= ?`)
		args = append(args, nanos(f.ExpiredAt))
	}
	names := make([]string, 0, len(f.Labels))
	for name := range f.Labels {
		names = append(names, name)
	}
	slices.Sort(names) // the same filter is the same statement
	for _, name := range names {
		q.WriteString(` AND EXISTS (SELECT 1 FROM snapshot_labels l WHERE l.snapshot_id = s.id AND l.name = ? AND l.value = ?)`)
		args = append(args, name, f.Labels[name])
	}
	return q.String(), args
}

// SetSnapshotImage implements store.Snapshots.
func (s *Store) SetSnapshotImage(ctx context.Context, id, image string) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "set_snapshot_image", func(t *tx) error {
		snap, err := t.snapshot(who, id)
		if err != nil || snap.Content.Image == image {
			return err
		}
		return t.setSnapshotImage(snap, image)
	})
}

func (t *tx) setSnapshotImage(snap sandbox.Snapshot, image string) error {
	snap.Content.Image = image
	record, err := encodeSnapshot(snap)
	if err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE snapshots SET record = ? WHERE id = ?`, record, snap.ID); err != nil {
		return err
	}
	if _, err := t.exec(`DELETE FROM snapshot_images WHERE snapshot_id = ?`, snap.ID); err != nil {
		return err
	}
	for _, img := range store.ImagesOf(snap) {
		if _, err := t.exec(`INSERT INTO snapshot_images (snapshot_id, image_id) VALUES (?, ?)`, snap.ID, img); err != nil {
			return err
		}
	}
	return nil
}

// preparedAs lists the snapshots that an image was prepared of and that do not
// need it otherwise.
func (t *tx) preparedAs(image string) ([]sandbox.Snapshot, error) {
	st, err := t.stmt(snapshotRow + ` JOIN snapshot_images x ON x.snapshot_id = s.id WHERE x.image_id = ?`)
	if err != nil {
		return nil, err
	}
	rows, err := st.Query(image)
	if err != nil {
		return nil, err
	}
	snaps, err := scanSnapshots(rows)
	return slices.DeleteFunc(snaps, func(snap sandbox.Snapshot) bool {
		snap.Content.Image = ""
		return slices.Contains(store.ImagesOf(snap), image)
	}), err
}

// DeleteSnapshot implements store.Snapshots.
func (s *Store) DeleteSnapshot(ctx context.Context, id string) (snap sandbox.Snapshot, err error) {
	who, err := whose(ctx)
	if err != nil {
		return snap, err
	}
	err = s.write(ctx, "delete_snapshot", func(t *tx) error {
		if snap, err = t.snapshot(who, id); err != nil {
			return err
		}
		var name string
		var version int64
		err := t.row(`SELECT name, version FROM templates WHERE snapshot_id = ? ORDER BY name, version LIMIT 1`, []any{id}, &name, &version)
		if err == nil {
			ref := sandbox.Template{Name: name, Version: version}.Ref()
			return &sandbox.Error{Class: sandbox.Precondition, Msg: "snapshot " + id + " is what template " + ref + " starts from",
				Hint: "delete the template's version instead: cove template rm " + ref}
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		return t.deleteSnapshot(id)
	})
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	return snap, nil
}

func (t *tx) deleteSnapshot(id string) error {
	if _, err := t.exec(`DELETE FROM lineage WHERE node_id = ?`, id); err != nil {
		return err
	}
	_, err := t.exec(`DELETE FROM snapshots WHERE id = ?`, id)
	return err
}

func (t *tx) snapshot(who, id string) (sandbox.Snapshot, error) {
	var name, record string
	err := t.row(snapshotRow+` WHERE s.id = ? AND ? IN (s.tenant, '*')`, []any{id, who}, &id, &name, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Snapshot{}, noSnapshot(id)
	}
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	return decodeSnapshot(id, name, record)
}

// SnapshotAges implements store.Snapshots. It sums whole seconds: nanoseconds
// overflow with the sixth snapshot.
func (s *Store) SnapshotAges(ctx context.Context, now time.Time) (ages store.SnapshotAges, err error) {
	who, err := whose(ctx)
	if err != nil {
		return ages, err
	}
	var oldest int64
	err = s.readRow(ctx, `SELECT count(*), coalesce(min(created_at), 0), coalesce(sum(max(0, ? - created_at / 1000000000)), 0)
		FROM snapshots WHERE hidden = 0 AND ? IN (tenant, '*')`, []any{now.Unix(), who}, &ages.Count, &oldest, &ages.Seconds)
	if err != nil {
		return ages, s.fault(ctx, "snapshot_ages", err)
	}
	if ages.Count > 0 {
		ages.Oldest = instant(oldest)
	}
	return ages, nil
}

// Manifests implements store.Snapshots.
func (s *Store) Manifests(ctx context.Context) ([]string, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return nil, err
	}
	return s.column(ctx, "manifests", `SELECT manifest FROM snapshots UNION SELECT manifest FROM snapshot_needs
		UNION SELECT manifest FROM build_cache WHERE manifest <> '' ORDER BY manifest`)
}

// SnapshotImages implements store.Snapshots.
func (s *Store) SnapshotImages(ctx context.Context) ([]string, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return nil, err
	}
	return s.column(ctx, "snapshot_images", `SELECT DISTINCT image_id FROM snapshot_images ORDER BY image_id`)
}

// column reads a constant query of one text column.
func (s *Store) column(ctx context.Context, op, query string, args ...any) ([]string, error) {
	st, err := s.stmt(ctx, query)
	if err != nil {
		return nil, s.fault(ctx, op, err)
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return nil, s.fault(ctx, op, err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			return nil, s.fault(ctx, op, err)
		}
		out = append(out, v)
	}
	return out, s.fault(ctx, op, rows.Err())
}

// scanSnapshots reads rows of id, name and record, and closes them.
func scanSnapshots(rows *sql.Rows) (snaps []sandbox.Snapshot, err error) {
	defer rows.Close()
	for rows.Next() {
		var id, name, record string
		if err := rows.Scan(&id, &name, &record); err != nil {
			return nil, err
		}
		snap, err := decodeSnapshot(id, name, record)
		if err != nil {
			return nil, err
		}
		snaps = append(snaps, snap)
	}
	return snaps, rows.Err()
}

func noSnapshot(nameOrID string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no snapshot '%.80s'", nameOrID)}
}

// encodeSnapshot leaves the name out, which is a column.
func encodeSnapshot(snap sandbox.Snapshot) (string, error) {
	if err := store.CheckNewSnapshot(snap); err != nil {
		return "", err
	}
	snap.Name, snap.CreatedAt, snap.ExpiresAt = "", snap.CreatedAt.UTC(), snap.ExpiresAt.UTC()
	b, err := json.Marshal(snap)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the snapshot cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeSnapshot(id, name, record string) (snap sandbox.Snapshot, err error) {
	if err := json.Unmarshal([]byte(record), &snap); err != nil {
		return sandbox.Snapshot{}, damaged("snapshot", id, err)
	}
	snap.Name = name
	snap.Tenant = cmp.Or(snap.Tenant, sandbox.DefaultTenant) // from before there were tenants
	return snap, nil
}
