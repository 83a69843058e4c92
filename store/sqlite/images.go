package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
)

// PutImage implements store.Images.
func (s *Store) PutImage(ctx context.Context, img sandbox.Image, name string) error {
	if img.ID == "" {
		return sandbox.InvalidField("image.id", "an image has an id")
	}
	img.CreatedAt = img.CreatedAt.UTC()
	img.Names = nil // they are rows of their own
	record, err := json.Marshal(img)
	if err != nil {
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the image cannot be recorded", Err: err}
	}
	return s.write(ctx, "put_image", func(t *tx) error {
		if _, err := t.exec(`INSERT INTO images (id, created_at, record) VALUES (?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, record = excluded.record`,
			img.ID, nanos(img.CreatedAt), string(record)); err != nil {
			return err
		}
		if name == "" {
			return nil
		}
		_, err := t.exec(`INSERT INTO image_names (name, image_id) VALUES (?, ?)
			ON CONFLICT (name) DO UPDATE SET image_id = excluded.image_id`, name, img.ID)
		return err
	})
}

// imageRows reads images with their names in one statement, so that the names
// are those of one moment.
const imageRows = `SELECT i.id, i.record, coalesce(n.name, '') FROM images i LEFT JOIN image_names n ON n.image_id = i.id`

// GetImage implements store.Images. An id is looked for first: a name made to
// look like the id of another image cannot stand in for it.
func (s *Store) GetImage(ctx context.Context, nameOrID string) (sandbox.Image, error) {
	st, err := s.stmt(ctx, imageRows+` WHERE i.id = coalesce((SELECT id FROM images WHERE id = ?), (SELECT image_id FROM image_names WHERE name = ?)) ORDER BY n.name`)
	if err != nil {
		return sandbox.Image{}, s.fault(ctx, "get_image", err)
	}
	rows, err := st.QueryContext(ctx, nameOrID, nameOrID)
	if err != nil {
		return sandbox.Image{}, s.fault(ctx, "get_image", err)
	}
	imgs, err := scanImages(rows)
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
	st, err := s.stmt(ctx, imageRows+` ORDER BY i.created_at DESC, i.id DESC, n.name`)
	if err != nil {
		return nil, s.fault(ctx, "list_images", err)
	}
	rows, err := st.QueryContext(ctx)
	if err != nil {
		return nil, s.fault(ctx, "list_images", err)
	}
	imgs, err := scanImages(rows)
	return imgs, s.fault(ctx, "list_images", err)
}

// RemoveImageName implements store.Images.
func (s *Store) RemoveImageName(ctx context.Context, name string) (img sandbox.Image, err error) {
	err = s.write(ctx, "remove_image_name", func(t *tx) error {
		st, err := t.stmt(imageRows + ` WHERE i.id = (SELECT image_id FROM image_names WHERE name = ?) ORDER BY n.name`)
		if err != nil {
			return err
		}
		rows, err := st.Query(name)
		if err != nil {
			return err
		}
		imgs, err := scanImages(rows) // before the change: a damaged record refuses it
		if err != nil {
			return err
		}
		if len(imgs) == 0 {
			return noImage(name)
		}
		img = imgs[0]
		img.Names = slices.DeleteFunc(img.Names, func(n string) bool { return n == name })
		_, err = t.exec(`DELETE FROM image_names WHERE name = ?`, name)
		return err
	})
	if err != nil {
		return sandbox.Image{}, err
	}
	return img, nil
}

// RemoveImage implements store.Images.
func (s *Store) RemoveImage(ctx context.Context, id string) error {
	return s.write(ctx, "remove_image", func(t *tx) error {
		var names, users, snaps int
		err := t.row(`SELECT (SELECT count(*) FROM image_names WHERE image_id = i.id),
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
		case snaps > 0:
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("image %s is used by %d snapshots", id, snaps), Hint: "delete them or their templates first"}
		}
		_, err = t.exec(`DELETE FROM images WHERE id = ?`, id)
		return err
	})
}

// scanImages reads rows of imageRows, in which an image's rows are neighbours,
// and closes them.
func scanImages(rows *sql.Rows) ([]sandbox.Image, error) {
	defer rows.Close()
	var imgs []sandbox.Image
	for rows.Next() {
		var id, record, name string
		if err := rows.Scan(&id, &record, &name); err != nil {
			return nil, err
		}
		if len(imgs) == 0 || imgs[len(imgs)-1].ID != id {
			var img sandbox.Image
			if err := json.Unmarshal([]byte(record), &img); err != nil {
				return nil, damaged("image", id, err)
			}
			imgs = append(imgs, img)
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
