package gvisor

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

const checkpointVersion = 1

// checkpointed is the driver's part of a checkpoint.
type checkpointed struct {
	Secret  string  `json:"secret"` // the guest has when it wakes, hex
	InitPID int     `json:"init_pid"`
	Image   string  `json:"image"` // its superblockID; "" where that was not known
	Mounts  []mount `json:"mounts,omitempty"`
	// Held must be on the volumes when it wakes; nil where that was not noted.
	Held []heldFile `json:"held,omitempty"`
}

var (
	_ runtime.Checkpointer = (*Kernel)(nil)
	_ runtime.Restorer     = (*blank)(nil)
)

// Checkpoint writes the kernel's state. See runtime.Checkpointer.
//
// Nothing is compressed, and nothing is synced to disk here: who keeps a
// checkpoint does that, without the kernel waiting for it.
func (k *Kernel) Checkpoint(ctx context.Context, dir string, opt runtime.CheckpointOptions) (cp runtime.Checkpoint, err error) {
	const op = "gvisor.checkpoint"
	k.mu.Lock()
	container, init, image, paused := k.mu.container, k.mu.initPID, k.mu.image, k.mu.paused
	k.mu.Unlock()
	if container == "" || init == 0 {
		return cp, sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) > 0 {
		return cp, sandbox.InvalidField("dir", "%s must be an empty directory (%d entries, %v)", dir, len(ents), err)
	}
	if err := k.keep(); err != nil {
		return cp, k.asKeepError(op, err)
	}
	volumes, err := k.volumesOf(container)
	if err != nil {
		return cp, sandbox.WithOp(op, err)
	}
	var imageID string
	if image != "" {
		if imageID, err = superblockID(image); err != nil {
			return cp, k.explain(op, err)
		}
	}
	if err := k.bulks.shut(ctx); err != nil {
		return cp, sandbox.Errorf(sandbox.Canceled, op, "waiting for transfers to end: %w", err)
	}
	defer k.bulks.open()
	defer k.withoutSpare()()

	// Resume always: without it gVisor kills the kernel even if it could not
	// save it. To stop, it is paused first and killed after. With volumes too: what
	// it holds of them must be what it holds when it is saved.
	switch {
	case paused:
	case opt.Stop || len(volumes) > 0:
		if err := k.Pause(ctx); err != nil {
			return cp, sandbox.WithOp(op, err)
		}
		defer func() {
			if err != nil || !opt.Stop {
				err = errors.Join(err, k.Resume(context.WithoutCancel(ctx)))
			}
		}()
	default:
		if err := k.freeze(ctx); err != nil {
			return cp, k.explain(op, err)
		}
		defer k.wake()
	}
	if err := k.guest.Park(ctx); err != nil {
		return cp, k.explain(op, err)
	}
	defer k.unlimited()()
	var files []string
	for try := 1; ; try++ {
		if files, err = k.save(ctx, dir, opt); err == nil {
			break
		}
		err = k.failedCheckpoint(op, dir, err)
		// The sentry cannot save what forwards a connection, nor beside the
		// file system of a container that was, and lets go of either a moment
		// after we did: on a machine with 17 waiting, 50 ms were not enough.
		if try >= saves*briefRuns || sandbox.ClassOf(err) != sandbox.Unavailable || isClosed(k.done) {
			return cp, err
		}
		if try%saves != 0 {
			time.Sleep(time.Duration(try%saves) * 10 * time.Millisecond)
		} else if berr := k.runBriefly(); berr != nil {
			return cp, errors.Join(err, k.explain(op, berr))
		}
	}
	held, err := k.held(container, volumes)
	if err != nil { // its volumes give I/O errors; all else can be saved
		k.d.log.Warn("a checkpoint does not know which files of volumes it needs", "kernel", k.id, "err", err)
	}
	data, err := json.Marshal(checkpointed{Secret: k.saved.Secret, InitPID: init, Image: imageID, Mounts: k.mounts(container), Held: held})
	if err != nil {
		return cp, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	if opt.Stop {
		k.finish(sandbox.KilledByUser, "stopped with a checkpoint")
		if err := killAndWait(k.saved.PID, time.Now().Add(10*time.Second)); err != nil {
			return cp, k.explain(op, err)
		}
	}
	pages, err := pagesOf(dir, opt.Since)
	if err != nil {
		return cp, k.explain(op, err)
	}
	return runtime.Checkpoint{Version: checkpointVersion, Driver: driverName, Build: k.build().String(), Files: files, Data: data, Pages: pages}, nil
}

// saves is how often a checkpoint is tried, within half a second, and briefRuns how
// often that is done, with the kernel running briefly in between.
const saves, briefRuns = 10, 3

// briefly is how long a paused kernel runs that could not be saved.
const briefly = 100 * time.Millisecond

// runBriefly lets a paused kernel run for a moment. What it must let go of to be
// saved its tasks may hold, on their way out, and standing still they do not
// come to it: seen once in some thousand cold pauses right after a reset, for
// the half second in which it was tried. Requests and deadlines stay held.
func (k *Kernel) runBriefly() error {
	if !k.Paused() {
		return nil
	}
	if err := os.Rename(k.pauseFile(), k.unsettledFile()); err != nil {
		return err
	}
	if err := k.sb.Resume(k.id); err != nil {
		return err
	}
	time.Sleep(briefly)
	if err := k.sb.Pause(k.id); err != nil {
		return err
	}
	return k.settlePause()
}

// Metadata that a sentry of ours knows: see cmd/runsc/edits/add/since_pgalloc.go.in.
const (
	pagesKey     = "cove-pages"
	sinceKey     = "cove-since"
	sinceSizeKey = "cove-since-bytes"
	pagesID      = 32 // bytes of a name of pages
)

// save is one try.
func (k *Kernel) save(ctx context.Context, dir string, opt runtime.CheckpointOptions) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, sandbox.Errorf(sandbox.Canceled, "", "%w", err)
	}
	// Nothing is compressed, and pages go into a file of their own: a restore maps it.
	save := control.SaveOpts{Resume: true, AppMFExcludeCommittedZeroPages: true, HavePagesFile: true, Metadata: statefile.CompressionLevelNone.ToMetadata()}
	if opt.Follow {
		since := cmp.Or(opt.Since, &runtime.Pages{})
		id := make([]byte, pagesID/2)
		_, _ = rand.Read(id) // never fails
		save.Metadata[pagesKey] = hex.EncodeToString(id)
		save.Metadata[sinceKey] = since.ID
		save.Metadata[sinceSizeKey] = strconv.FormatInt(since.Size, 10)
	}
	defer func() {
		for _, f := range save.Files {
			f.Close()
		}
	}()
	for _, name := range []string{checkpointfiles.StateFileName, checkpointfiles.PagesMetadataFileName, runtime.PagesFile} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		save.Files = append(save.Files, f)
	}
	conn, err := client.ConnectTo(k.sb.ControlSocketPath)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.Call(boot.ContMgrCheckpoint, &save, nil); err != nil {
		return nil, err
	}
	for _, f := range save.Files { // or it is we who can still write them
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	save.Files = nil
	names, err := ownFiles(dir)
	if err != nil {
		return nil, err
	}
	if err := readOnly(filepath.Join(dir, runtime.PagesFile), time.Second); err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "", "pages that can still be written: %w", err)
	}
	return names, nil
}

// readOnly is an error if somebody may still write the pages of a checkpoint. Children
// map them for as long as they live: a sentry that kept the file open could
// change memory that is no longer its own. A lease to read is given only where no
// descriptor and no mapping is for writing. The sentry closes its own a moment after it
// has answered, and a process that is being started here may have ours.
func readOnly(path string, within time.Duration) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close() // and with it the lease
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		if err == nil || time.Since(begun) > within {
			return err
		}
	}
}

// pagesOf reads what the sentry says of the pages it wrote: their name, and where they
// begin. One of before says nothing; nil too if none is to follow.
func pagesOf(dir string, since *runtime.Pages) (*runtime.Pages, error) {
	f, err := os.Open(filepath.Join(dir, checkpointfiles.PagesMetadataFileName))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := os.Stat(filepath.Join(dir, runtime.PagesFile))
	if err != nil {
		return nil, err
	}
	var head struct {
		Length uint64
		ID     [pagesID]byte
		Offset uint64
	}
	if err := binary.Read(f, binary.LittleEndian, &head); err != nil {
		return nil, err
	}
	if head.Length>>63 == 0 || head.ID == [pagesID]byte{} {
		return nil, nil
	}
	p := &runtime.Pages{ID: string(head.ID[:]), Offset: int64(head.Offset), Size: int64(head.Offset) + st.Size(), Whole: st.Size()}
	if p.Offset > 0 {
		if since == nil || since.Size != p.Offset {
			return nil, fmt.Errorf("pages begin at %d, which nobody asked for", p.Offset)
		}
		p.Whole = since.Whole
	}
	return p, nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// failedCheckpoint empties dir and finds the class of the failure. The error of
// the sentry is text, so whether its disk is full is asked of the disk.
func (k *Kernel) failedCheckpoint(op, dir string, err error) error {
	full := probeSpace(dir)
	ents, _ := os.ReadDir(dir)
	for _, e := range ents {
		name := filepath.Join(dir, e.Name())
		// A sentry keeps open what it failed to write: the name alone would not
		// free the space.
		_ = os.Truncate(name, 0)
		if rerr := os.RemoveAll(name); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}
	if full != nil {
		return sandbox.Errorf(sandbox.DiskFull, op, "kernel %s: %w", k.id, errors.Join(full, err)).WithHint("make room and try again; the sandbox goes on")
	}
	return k.explain(op, err)
}

// probeSize of room a disk has that is not full. The sentry writes pages in
// pieces of some MiB, and one of those is what did not fit.
const probeSize = 16 << 20

// probeSpace is the error a disk gives that has no room.
func probeSpace(dir string) error {
	f, err := os.CreateTemp(dir, "probe-*")
	if err == nil {
		defer os.Remove(f.Name())
		defer f.Close()
		err = unix.Fallocate(int(f.Fd()), 0, 0, probeSize)
	}
	if sandbox.NoSpace(err) {
		return err
	}
	return nil
}

// ownFiles lists what the sentry wrote and takes it away from others: memory
// and the guest's secret are in it.
func ownFiles(dir string) ([]string, error) {
	ents, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range ents {
		if err := os.Chmod(filepath.Join(dir, e.Name()), 0o600); err != nil {
			return nil, err
		}
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names, nil
}

// withoutSpare destroys the spare container and keeps the next from being made
// until the returned function is called: a checkpoint counts containers.
func (k *Kernel) withoutSpare() (again func()) {
	k.mu.Lock()
	if k.mu.spareTimer != nil {
		k.mu.spareTimer.Stop()
	}
	s := k.mu.spare
	none := &spare{ready: make(chan struct{}), err: errors.New("no spare during a checkpoint")}
	close(none.ready)
	k.mu.spare = none
	cleaned := k.mu.cleaned
	k.mu.Unlock()
	<-cleaned
	was := s != nil && s.cid != "" // another checkpoint's mark has none
	if was {
		<-s.ready
	}
	// By their layers, not by s: an adopted kernel may have the spare of the
	// process before. One that is paused has none any more, and could not
	// destroy it.
	k.mu.Lock()
	if others := slices.DeleteFunc(k.containers(), func(cid string) bool { return cid == k.mu.container }); len(others) > 0 && !k.mu.paused {
		k.cleanLocked(others)
	}
	cleaned = k.mu.cleaned
	k.mu.Unlock()
	<-cleaned
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.mu.spare != none {
			return
		}
		k.mu.spare = nil
		switch {
		case was && !k.mu.destroyed:
			k.spareSoonLocked(s.c)
		case !was:
			k.mu.spare = s
		}
	}
}

// superblockID is the hash of an EROFS superblock, which has a checksum or a
// UUID of the content in it. gVisor compares the same block when it restores,
// and panics.
func superblockID(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", sandbox.Errorf(sandbox.ImageNotFound, "", "image content: %w", err)
	}
	defer f.Close()
	const offset, size = 1024, 128
	b := make([]byte, size)
	if _, err := f.ReadAt(b, offset); err != nil {
		return "", fmt.Errorf("superblock: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16]), nil
}
