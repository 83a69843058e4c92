package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const recordVersion = 1

// record is what is on disk of a volume beside its content.
type record struct {
	Version int       `json:"version"`
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Size    int64     `json:"size"`
	Made    int64     `json:"made"` // what its file system was brought to; less than Size while a resize is under way
	Created time.Time `json:"created"`
	From    string    `json:"from,omitempty"`

	Labels map[string]string `json:"labels,omitempty"`
}

func (s *Set) recordPath(id string) string { return filepath.Join(s.dir, "v", id+".json") }

// write makes a record durable.
func (s *Set) write(rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	if err := s.at("record"); err != nil {
		return err
	}
	return writeFile(s.temp(rec.ID+".json"), s.recordPath(rec.ID), append(b, '\n'))
}

func readRecord(path string) (rec record, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return rec, err
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return rec, sandbox.Errorf(sandbox.Corrupt, "", "%s: %w", path, err)
	}
	switch {
	case rec.Version != recordVersion:
		return rec, sandbox.Errorf(sandbox.Unsupported, "", "%s is of version %d", path, rec.Version).WithHint("use the cove that wrote it, or a newer one")
	case rec.ID != strings.TrimSuffix(filepath.Base(path), ".json") || !validID.MatchString(rec.ID) || !validName.MatchString(rec.Name) || sandbox.ValidateVolumeSize("size", rec.Size) != nil:
		return rec, sandbox.Errorf(sandbox.Corrupt, "", "%s does not check", path)
	}
	return rec, nil
}

// writeFile makes a file durable under its name, or leaves what was there.
func writeFile(tmp, path string, content []byte) (err error) {
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	if _, err = f.Write(content); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return publish(tmp, path)
}

// publish gives a file that is synced its name, durably.
func publish(tmp, path string) error {
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("syncing %s: %w", dir, err)
	}
	return nil
}
