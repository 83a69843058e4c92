package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// PutImage implements store.Images.
func (s *Store) PutImage(ctx context.Context, img sandbox.Image, name string) error {
	return s.PutImageWithin(ctx, img, name, 0)
}

// PutImageWithin implements store.Images.
func (s *Store) PutImageWithin(ctx context.Context, img sandbox.Image, name string, most int64) error {
	if img.ID == "" {
		return sandbox.InvalidField("image.id", "an image has an id")
	}
	if _, err := whose(ctx); err != nil {
		return err
	}
	img.CreatedAt = img.CreatedAt.UTC()
	img.Names = nil // they are rows of their own
	tenant := store.ScopeOf(ctx).Tenant()
	return s.write(ctx, "put_image", func(t *tx) error {
		if most > 0 && name != "" {
			if err := t.checkImageQuota(tenant, img, name, most); err != nil {
				return err
			}
		}
		record, err := t.imageRecord(img, tenant)
		if err != nil {
			return err
		}
		if _, err := t.exec(`INSERT INTO images (id, created_at, size, record) VALUES (?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, size = excluded.size, record = excluded.record`,
			img.ID, nanos(img.CreatedAt), img.Size, record); err != nil {
			return err
		}
		if name == "" {
			return nil
		}
		_, err = t.exec(`INSERT INTO image_names (tenant, name, image_id) VALUES (?, ?, ?)
			ON CONFLICT (tenant, name) DO UPDATE SET image_id = excluded.image_id`, tenant, name, img.ID)
		return err
	})
}

// imageRecord is an image as it is kept: content is everybody's, and where it came
// from and when is told to who brought it. Another tenant's registry is nobody
// else's business, nor that another tenant has the same content.
type imageRecord struct {
	sandbox.Image
	By map[string]imageOrigin `json:"by,omitempty"` // by tenant; "" is the installation
}

type imageOrigin struct {
	Source    string    `json:"source"`
	CreatedAt time.Time `json:"created_at"`
}

// imageRecord is the record of an image that a tenant brings, perhaps again.
func (t *tx) imageRecord(img sandbox.Image, tenant string) (string, error) {
	r := imageRecord{By: map[string]imageOrigin{}}
	var old string
	err := t.row(`SELECT record FROM images WHERE id = ?`, []any{img.ID}, &old)
	switch {
	case errors.Is(err, sql.ErrNoRows):
	case err != nil:
		return "", err
	default:
		if err := json.Unmarshal([]byte(old), &r); err != nil {
			r = imageRecord{By: map[string]imageOrigin{}} // damaged: this one mends it
		} else if len(r.By) == 0 { // of a release that kept one for all
			r.By = map[string]imageOrigin{"": {r.Source, r.CreatedAt}}
		}
	}
	r.Image = img
	r.By[tenant] = imageOrigin{img.Source, img.CreatedAt}
	record, err := json.Marshal(r)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the image cannot be recorded", Err: err}
	}
	return string(record), nil
}

// seenBy is the image as a tenant, or everybody, knows it.
func (r imageRecord) seenBy(who string) sandbox.Image {
	if who == everybody || len(r.By) == 0 {
		return r.Image
	}
	from, ok := r.By[who]
	if !ok {
		from = r.By[""]
	}
	r.Source, r.CreatedAt = from.Source, from.CreatedAt
	return r.Image
}

// checkImageQuota refuses a name that would have a tenant hold more than most. What
// the name stood for until now goes, unless another name or a use keeps it.
func (t *tx) checkImageQuota(tenant string, img sandbox.Image, name string, most int64) error {
	var have, without int64
	var held int
	if err := t.row(imageBytes, []any{tenant, tenant, tenant}, &have); err != nil {
		return err
	}
	if err := t.row(`SELECT coalesce(sum(size), 0), coalesce(sum(id = ?), 0) FROM images WHERE id IN
		(SELECT image_id FROM image_names WHERE tenant = ? AND name <> ? UNION `+usedImages+`)`,
		[]any{img.ID, tenant, name, tenant, tenant}, &without, &held); err != nil {
		return err
	}
	if held == 0 {
		without += img.Size
	}
	return quota.Image(sandbox.Quota{ImageBytes: most}, quota.Usage{ImageBytes: have}, without-have)
}

// usedImages are those that a tenant's live sandboxes and snapshots keep here. They
// count without a name too: else a small snapshot of each image, and its name
// taken back, would keep any number of images. What is everybody's counts for
// nobody, nor does what was made of a snapshot. Twice the tenant.
const usedImages = `SELECT i.id FROM images i WHERE json_extract(i.record, '$.source') NOT IN ('` + sandbox.ImageDerived + `', '` + sandbox.ImageData + `')
	AND NOT EXISTS (SELECT 1 FROM image_names e WHERE e.image_id = i.id AND e.tenant = '')
	AND (EXISTS (SELECT 1 FROM sandboxes s WHERE s.image_id = i.id AND s.ended = 0 AND s.tenant = ?)
		OR EXISTS (SELECT 1 FROM snapshot_images x JOIN snapshots s ON s.id = x.snapshot_id WHERE x.image_id = i.id AND s.tenant = ?))`

const imageBytes = `SELECT coalesce(sum(size), 0) FROM images WHERE id IN (SELECT image_id FROM image_names WHERE tenant = ? UNION ` + usedImages + `)`

// ImageBytes implements store.Images.
func (s *Store) ImageBytes(ctx context.Context) (n int64, err error) {
	tenant, err := names(ctx)
	if err != nil {
		return 0, err
	}
	return n, s.fault(ctx, "image_bytes", s.readRow(ctx, imageBytes, []any{tenant, tenant, tenant}, &n))
}

// imageRows reads images with the names that are in sight in one statement, so
// that the names are those of one moment. Its parameter is whose sight. A name
// that a tenant has beside everybody's is one name to it, if both mean the same
// image; if not, everybody's is hidden behind its own.
const imageRows = `SELECT DISTINCT i.id, i.record, coalesce(n.name, ''), i.created_at FROM images i LEFT JOIN image_names n ON n.image_id = i.id AND
	(? IN (n.tenant, '*') OR n.tenant = '' AND NOT EXISTS (SELECT 1 FROM image_names o WHERE o.tenant = ? AND o.name = n.name))`

// inSight says whether an image i is in a tenant's sight: by a name, or because
// a live sandbox or a snapshot of the tenant uses it. Four times the tenant.
const inSight = `(? = '*' OR EXISTS (SELECT 1 FROM image_names m WHERE m.image_id = i.id AND m.tenant IN ('', ?)) OR
	EXISTS (SELECT 1 FROM sandboxes s WHERE s.image_id = i.id AND s.ended = 0 AND s.tenant = ?) OR
	EXISTS (SELECT 1 FROM snapshot_images x JOIN snapshots s ON s.id = x.snapshot_id WHERE x.image_id = i.id AND s.tenant = ?))`

// GetImage implements store.Images. An id is looked for first: a name made to
// look like the id of another image cannot stand in for it.
func (s *Store) GetImage(ctx context.Context, nameOrID string) (sandbox.Image, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Image{}, err
	}
	st, err := s.stmt(ctx, imageRows+` WHERE i.id = coalesce((SELECT i.id FROM images i WHERE i.id = ? AND `+inSight+`),
		(SELECT image_id FROM image_names WHERE tenant = ? AND name = ?), (SELECT image_id FROM image_names WHERE tenant = '' AND name = ?)) ORDER BY 3`)
	if err != nil {
		return sandbox.Image{}, s.fault(ctx, "get_image", err)
	}
	own := who
	if who == everybody {
		own = sandbox.DefaultTenant
	}
	rows, err := st.QueryContext(ctx, who, who, nameOrID, who, who, who, who, own, nameOrID, nameOrID)
	if err != nil {
		return sandbox.Image{}, s.fault(ctx, "get_image", err)
	}
	imgs, err := scanImages(rows, who)
	if err != nil {
		return sandbox.Image{}, s.fault(ctx, "get_image", err)
	}
	if len(imgs) == 0 {
		return sandbox.Image{}, noImage(nameOrID)
	}
	return imgs[0], nil
}

// ListImages implements store.Images.
func (s *Store) ListImages(ctx context.Context) ([]sandbox.Image, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, imageRows+` WHERE `+inSight+` ORDER BY 4 DESC, 1 DESC, 3`)
	if err != nil {
		return nil, s.fault(ctx, "list_images", err)
	}
	rows, err := st.QueryContext(ctx, who, who, who, who, who, who)
	if err != nil {
		return nil, s.fault(ctx, "list_images", err)
	}
	imgs, err := scanImages(rows, who)
	slices.SortStableFunc(imgs, func(a, b sandbox.Image) int { return b.CreatedAt.Compare(a.CreatedAt) }) // as it is to this tenant
	return imgs, s.fault(ctx, "list_images", err)
}

// RemoveImageName implements store.Images.
func (s *Store) RemoveImageName(ctx context.Context, name string) (img sandbox.Image, err error) {
	who, err := whose(ctx)
	if err != nil {
		return img, err
	}
	err = s.write(ctx, "remove_image_name", func(t *tx) error {
		var owner string
		err := t.row(`SELECT tenant FROM image_names WHERE name = ? AND (tenant = ? OR tenant = '' OR ? = '*' AND tenant = 'default') ORDER BY tenant = ? DESC, tenant LIMIT 1`,
			[]any{name, who, who, who}, &owner)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return noImage(name)
		case err != nil:
			return err
		case owner == "" && who != everybody:
			return &sandbox.Error{Class: sandbox.Denied, Msg: "the name '" + name + "' is every tenant's", Hint: "an installation's admin removes it"}
		}
		st, err := t.stmt(imageRows + ` WHERE i.id = (SELECT image_id FROM image_names WHERE tenant = ? AND name = ?) ORDER BY 3`)
		if err != nil {
			return err
		}
		rows, err := st.Query(who, who, owner, name)
		if err != nil {
			return err
		}
		imgs, err := scanImages(rows, who) // before the change: a damaged record refuses it
		if err != nil {
			return err
		}
		if len(imgs) == 0 {
			return noImage(name)
		}
		img = imgs[0]
		img.Names = slices.DeleteFunc(img.Names, func(n string) bool { return n == name })
		_, err = t.exec(`DELETE FROM image_names WHERE tenant = ? AND name = ?`, owner, name)
		return err
	})
	if err != nil {
		return sandbox.Image{}, err
	}
	return img, nil
}

// RemoveImage implements store.Images.
func (s *Store) RemoveImage(ctx context.Context, id string) error {
	return s.removeImage(ctx, "remove_image", id, func(*tx) ([]sandbox.Snapshot, error) { return nil, nil })
}

// RemovePreparedImage implements store.Images.
func (s *Store) RemovePreparedImage(ctx context.Context, id string) error {
	return s.removeImage(ctx, "remove_prepared_image", id, func(t *tx) ([]sandbox.Snapshot, error) { return t.preparedAs(id) })
}

// removeImage does not let those snapshots keep the image that spared lists.
func (s *Store) removeImage(ctx context.Context, op, id string, spared func(*tx) ([]sandbox.Snapshot, error)) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return err
	}
	return s.write(ctx, op, func(t *tx) error {
		without, err := spared(t)
		if err != nil {
			return err
		}
		var names, users, snaps int
		err = t.row(`SELECT (SELECT count(*) FROM image_names WHERE image_id = i.id),
			(SELECT count(*) FROM sandboxes WHERE ended = 0 AND image_id = i.id),
			(SELECT count(*) FROM snapshot_images WHERE image_id = i.id) FROM images i WHERE i.id = ?`, []any{id}, &names, &users, &snaps)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return noImage(id)
		case err != nil:
			return err
		case names > 0:
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("image %s has %d names", id, names), Hint: "remove its names first"}
		case users > 0:
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("image %s is used by %d live sandboxes", id, users), Hint: "kill them first, or wait for their end"}
		case snaps > len(without):
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("image %s is used by %d snapshots", id, snaps), Hint: "delete them or their templates first"}
		}
		for _, snap := range without {
			if err := t.setSnapshotImage(snap, ""); err != nil {
				return err
			}
		}
		_, err = t.exec(`DELETE FROM images WHERE id = ?`, id)
		return err
	})
}

// scanImages reads rows of imageRows, in which an image's rows are neighbours,
// and closes them. The images are as who knows them.
func scanImages(rows *sql.Rows, who string) ([]sandbox.Image, error) {
	defer rows.Close()
	var imgs []sandbox.Image
	for rows.Next() {
		var id, record, name string
		var created int64
		if err := rows.Scan(&id, &record, &name, &created); err != nil {
			return nil, err
		}
		if len(imgs) == 0 || imgs[len(imgs)-1].ID != id {
			var r imageRecord
			if err := json.Unmarshal([]byte(record), &r); err != nil {
				return nil, damaged("image", id, err)
			}
			imgs = append(imgs, r.seenBy(who))
		}
		if name != "" {
			last := &imgs[len(imgs)-1]
			last.Names = append(last.Names, name)
		}
	}
	return imgs, rows.Err()
}

func noImage(nameOrID string) error {
	return &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "no image '" + nameOrID + "'"}
}
