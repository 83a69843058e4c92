package volume

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

const recordVersion = 2

// record is what is on disk of a volume beside its content.
type record struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	Size    int64  `json:"size"`
	Made    int64  `json:"made"` // what its file system was brought to; less than Size while a resize is under way

	oldRecord
}

// oldRecord is what records of version 1 have besides: until then the set kept
// the names too. It stays in them as it is.
type oldRecord struct {
	Name    string            `json:"name,omitempty"`
	Created time.Time         `json:"created,omitzero"`
	From    string            `json:"from,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
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
	return durable.WriteVia(s.temp(rec.ID+".json"), s.recordPath(rec.ID), append(b, '\n'), 0o600)
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
	case rec.Version < 1 || rec.Version > recordVersion:
		return rec, sandbox.Errorf(sandbox.Unsupported, "", "%s is of version %d", path, rec.Version).WithHint("use the cove that wrote it, or a newer one")
	case rec.ID != strings.TrimSuffix(filepath.Base(path), ".json") || !validID.MatchString(rec.ID) || (rec.Version == 1) != validName.MatchString(rec.Name) || sandbox.ValidateVolumeSize("size", rec.Size) != nil:
		return rec, sandbox.Errorf(sandbox.Corrupt, "", "%s does not check", path)
	}
	return rec, nil
}
