package volume

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	dataDir    = "data"    // what sandboxes and clients see
	stagingDir = "staging" // files on their way into data, invisible to both
)

// e2fs finds a program of e2fsprogs; /usr/sbin is not in everybody's path.
func e2fs(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if p := filepath.Join(dir, name); exec.Command(p, "-V").Run() == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// newID is 16 characters of [a-z2-7], for a temporary name.
func newID() string { return strings.ToLower(rand.Text()[:16]) }

// Create makes an empty volume under an id that the caller chose. Its root belongs to root and is everybody's to
// write: who is in a sandbox that has it for writing may.
func (s *Set) Create(ctx context.Context, id string, size int64) (Volume, error) {
	const op = "volume.create"
	v, err := s.make(ctx, op, id, size, func(tmp string, size int64) error { return s.newImage(ctx, tmp, size) })
	if err != nil {
		return Volume{}, fail(op, err)
	}
	return v, nil
}

// make makes a volume with an image that fill leaves, synced, at tmp.
func (s *Set) make(ctx context.Context, op, id string, size int64, fill func(tmp string, size int64) error) (_ Volume, err error) {
	if !validID.MatchString(id) {
		return Volume{}, sandbox.InvalidField("id", "%q must match %s", id, validID)
	}
	if err := sandbox.ValidateVolumeSize("size", size); err != nil {
		return Volume{}, err
	}
	size = sandbox.RoundVolumeSize(size)
	rec := record{Version: recordVersion, ID: id, Size: size, Made: size}
	if err := s.claim(op, rec); err != nil {
		return Volume{}, err
	}
	tmp := s.temp(rec.ID + ".img")
	defer func() {
		if err == nil {
			return
		}
		// The record is not there, so neither is the volume.
		err = errors.Join(err, remove(tmp), remove(s.image(rec.ID)))
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.mu.volumes, rec.ID)
	}()
	if err := fill(tmp, size); err != nil {
		return Volume{}, err
	}
	if err := ctx.Err(); err != nil {
		return Volume{}, err
	}
	if err := s.at("publish"); err != nil {
		return Volume{}, err
	}
	if err := durable.Rename(tmp, s.image(rec.ID)); err != nil {
		return Volume{}, err
	}
	if err := s.write(rec); err != nil {
		// Renamed but not synced, it might be there after all. Nothing was
		// acknowledged: take it back.
		return Volume{}, errors.Join(err, remove(s.recordPath(rec.ID)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.mu.volumes[rec.ID]
	v.dead = false
	return s.describeLocked(v), nil
}

// claim takes the id and the room. The volume is there but dead until made.
func (s *Set) claim(op string, rec record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return sandbox.Errorf(sandbox.Unavailable, op, "the volumes are closed")
	}
	if s.mu.volumes[rec.ID] != nil {
		return sandbox.Errorf(sandbox.AlreadyExists, op, "there is a volume %q already", rec.ID)
	}
	if err := s.checkCapacityLocked(op, rec.Size); err != nil {
		return err
	}
	v := newVolume(rec)
	v.dead = true
	s.mu.volumes[rec.ID] = v
	return nil
}

// checkCapacityLocked says whether more bytes can be promised.
func (s *Set) checkCapacityLocked(op string, more int64) error {
	var promised, used int64
	for id, v := range s.mu.volumes {
		promised += v.rec.Size
		var st unix.Stat_t
		if unix.Stat(s.image(id), &st) == nil {
			used += st.Blocks * 512
		}
	}
	capacity := s.opts.Capacity
	if capacity == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(s.dir, &fs); err != nil {
			return err
		}
		capacity = int64(fs.Bavail)*fs.Bsize + used
	}
	if promised+more > capacity {
		return sandbox.Errorf(sandbox.NoCapacity, op, "%d bytes of volumes are promised of %d; %d more do not fit", promised, capacity, more).
			WithHint("delete volumes, or ask for a smaller one")
	}
	return nil
}

// newImage makes an empty file system, durably.
func (s *Set) newImage(ctx context.Context, path string, size int64) (err error) {
	if err := s.at("image"); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(size); err != nil {
		return err
	}
	// What mkfs puts into the new root, so that making a volume mounts nothing.
	root := path + ".root"
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	for dir, mode := range map[string]os.FileMode{root: 0o755, root + "/" + dataDir: 0o777, root + "/" + stagingDir: 0o700} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, mode); err != nil {
			return err
		}
	}
	bin, err := e2fs("mkfs.ext4")
	if err != nil {
		return err
	}
	if err := s.at("mkfs"); err != nil {
		return err
	}
	// -m 0: no blocks kept for root, who is inside. Tables are written when
	// first used: the file stays sparse, and a terabyte takes as long as a
	// megabyte.
	cmd := exec.CommandContext(ctx, bin, "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-d", root,
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", path)
	cmd.Cancel = func() error { return cmd.Process.Kill() }
	// With our death its own: nothing may write the file after Open removed it.
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if out, err := runLocked(cmd); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("mkfs.ext4: %w: %s", err, strings.TrimSpace(string(out)))
	}
	if err := s.at("sync"); err != nil {
		return err
	}
	return f.Sync()
}

// runLocked runs a command whose Pdeathsig counts: it is sent when the thread
// that forked ends, which may be before the process does.
func runLocked(cmd *exec.Cmd) ([]byte, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.CombinedOutput()
}

// Resize grows a volume. While it is attached that takes CAP_SYS_RESOURCE,
// which a server in a container may lack: then it is refused with
// sandbox.ErrPrecondition until those who have it ended.
func (s *Set) Resize(ctx context.Context, id string, size int64) (Volume, error) {
	const op = "volume.resize"
	size = sandbox.RoundVolumeSize(size)
	s.mu.Lock()
	v, err := s.findLocked(op, id)
	s.mu.Unlock()
	if err != nil {
		return Volume{}, err
	}
	free, err := v.take(ctx)
	if err != nil {
		return Volume{}, fail(op, err)
	}
	defer free()
	rec, err := s.grow(op, v, size)
	if err != nil {
		return Volume{}, fail(op, err)
	}
	if err := s.finishResize(ctx, v, rec); err != nil {
		// Not promised any more. (After a crash it is, and kept by the next
		// mount: both are fine for a call that has not returned.)
		rec.Size = rec.Made
		s.mu.Lock()
		v.rec.Size = rec.Size
		s.mu.Unlock()
		return Volume{}, fail(op, errors.Join(err, s.write(rec)))
	}
	return s.Get(ctx, v.id)
}

// grow promises the new size. The caller holds v.slow.
func (s *Set) grow(op string, v *volume, size int64) (record, error) {
	s.mu.Lock()
	rec := v.rec
	var err error
	switch {
	case v.dead:
		err = sandbox.Errorf(sandbox.NotFound, op, "no volume %q", v.id)
	case size < rec.Size || size > sandbox.MaxVolume:
		err = sandbox.InvalidField("size", "%s is not accepted: a volume of %s can only grow, up to %s",
			sandbox.FormatSize(size), sandbox.FormatSize(rec.Size), sandbox.FormatSize(sandbox.MaxVolume))
	case size == rec.Size:
		s.mu.Unlock()
		return rec, nil
	default:
		err = s.checkCapacityLocked(op, size-rec.Size)
	}
	if err != nil {
		s.mu.Unlock()
		return rec, err
	}
	rec.Size = size
	v.rec.Size = size // the room is ours before it is durable
	s.mu.Unlock()
	if err := s.write(rec); err != nil {
		// It may be durable after all: growing further than was acknowledged
		// harms nobody, promising less than is on disk would.
		return rec, err
	}
	return rec, nil
}

// Delete removes a volume that nobody holds.
func (s *Set) Delete(ctx context.Context, id string) error {
	const op = "volume.delete"
	s.mu.Lock()
	v, err := s.findLocked(op, id)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	free, err := v.take(ctx)
	if err != nil {
		return fail(op, err)
	}
	defer free()
	s.mu.Lock()
	switch {
	case v.dead:
		err = sandbox.Errorf(sandbox.NotFound, op, "no volume %q", id)
	case len(v.holders) > 0:
		err = sandbox.Errorf(sandbox.Precondition, op, "the volume is attached to %s", v.holdersLocked()).
			WithHint("end those sandboxes first: a volume is theirs until they end")
	case v.users > 0:
		err = sandbox.Errorf(sandbox.Conflict, op, "the volume is in use by %d calls", v.users).WithHint("try again when they are over")
	default:
		v.dead = true
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err = s.unmount(v); err == nil {
		err = s.at("delete")
	}
	if err == nil {
		err = os.Remove(s.recordPath(v.id))
	}
	if err != nil {
		s.mu.Lock()
		v.dead = false
		s.mu.Unlock()
		return fail(op, err)
	}
	s.mu.Lock()
	delete(s.mu.volumes, v.id)
	s.mu.Unlock()
	// The record is gone and so is the volume. What is left is recovery's, at
	// the latest.
	err = errors.Join(durable.Sync(s.dir+"/v"), s.at("delete image"), remove(s.image(v.id)))
	return fail(op, err)
}

// remove removes a file that may not be there.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
