package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// recover reads the records, undoes what is half made, and keeps or remakes the
// mounts of holders. Nothing else runs yet.
func (s *Set) recover(ctx context.Context) error {
	if err := s.readRecords(); err != nil {
		return err
	}
	for id, hs := range s.opts.Holders {
		v := s.mu.volumes[id]
		if v == nil {
			s.log.Error("a sandbox holds a volume that is not there", "volume", id, "holders", holders(hs))
			continue
		}
		for _, h := range hs {
			if err := v.admitLocked("volume.open", h.Holder, h.Mode); err != nil {
				return err
			}
			v.holders[h.Holder] = h.Mode
		}
	}
	if err := s.sweepMounts(); err != nil {
		return err
	}
	if err := s.sweepFiles(); err != nil {
		return err
	}
	if err := s.sweepLoops(); err != nil {
		return err
	}
	for _, v := range s.mu.volumes {
		if len(v.holders) == 0 {
			continue
		}
		// One that cannot be mounted must not keep the node from starting.
		if err := s.ensureMounted(ctx, v); err != nil {
			s.log.Error("a volume that is held cannot be mounted", "volume", v.id, "holders", v.holdersLocked(), "err", err)
		}
	}
	return nil
}

func (s *Set) readRecords() error {
	paths, err := filepath.Glob(filepath.Join(s.dir, "v", "*.json"))
	if err != nil {
		return err
	}
	for _, p := range paths {
		rec, err := readRecord(p)
		if err == nil {
			_, err = os.Stat(s.image(rec.ID))
		}
		if err != nil {
			class := sandbox.Corrupt
			if e := (*sandbox.Error)(nil); errors.As(err, &e) {
				class = e.Class
			}
			// Not to be guessed at: it may be somebody's only copy.
			return sandbox.Errorf(class, "", "volume %s: %w", strings.TrimSuffix(filepath.Base(p), ".json"), err).
				WithHint("restore the file, or move the volume's .json and .img out of %s", filepath.Dir(p))
		}
		s.mu.volumes[rec.ID] = newVolume(rec)
	}
	return nil
}

// sweepMounts unmounts what no holder needs. What stays is thawed: a copy that
// was cut off may have left it frozen, with its sandboxes waiting.
func (s *Set) sweepMounts() error {
	points, err := mountPoints(filepath.Join(s.dir, "mnt"))
	if err != nil {
		return err
	}
	for _, p := range points {
		if err := thaw(p); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("thawing %s: %w", p, err)
		}
		if v := s.mu.volumes[filepath.Base(p)]; v != nil && len(v.holders) > 0 && !v.mounted {
			if err := s.clearStaging(v.id); err != nil {
				return err
			}
			v.mounted = true
			continue
		}
		if err := drop(p); err != nil {
			return err
		}
	}
	ents, err := os.ReadDir(filepath.Join(s.dir, "mnt"))
	if err != nil {
		return err
	}
	for _, e := range ents {
		if v := s.mu.volumes[e.Name()]; v != nil && v.mounted {
			continue
		}
		if err := os.Remove(s.point(e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// sweepFiles removes what no record refers to.
func (s *Set) sweepFiles() error {
	tmp, err := os.ReadDir(filepath.Join(s.dir, "tmp"))
	if err != nil {
		return err
	}
	for _, e := range tmp {
		if err := os.RemoveAll(s.temp(e.Name())); err != nil {
			return err
		}
	}
	ents, err := os.ReadDir(filepath.Join(s.dir, "v"))
	if err != nil {
		return err
	}
	for _, e := range ents {
		id, isImage := strings.CutSuffix(e.Name(), ".img")
		if !isImage || s.mu.volumes[id] != nil {
			continue
		}
		s.log.Info("removing the image of a volume that was not finished, or deleted", "volume", id)
		if err := os.Remove(s.image(id)); err != nil {
			return err
		}
	}
	return nil
}

// sweepLoops lets go of loop devices over our files that nothing has mounted.
// They clear themselves, so there is mostly none; one whose file system lives
// on in a sandbox that was not named is only marked to go with it.
func (s *Set) sweepLoops() error {
	all, err := loops()
	if err != nil {
		return err
	}
	for n, backing := range all {
		backing = strings.TrimSuffix(backing, " (deleted)")
		if !strings.HasPrefix(backing, s.dir+"/") {
			continue
		}
		id := strings.TrimSuffix(filepath.Base(backing), ".img")
		if v := s.mu.volumes[id]; v != nil && v.mounted {
			continue
		}
		dev, err := openLoopNumber(n)
		if err != nil {
			return err
		}
		err = unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0)
		dev.Close()
		if err != nil && !errors.Is(err, unix.ENXIO) {
			return fmt.Errorf("clearing /dev/loop%d: %w", n, err)
		}
	}
	return nil
}
