package volume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/mountinfo"
)

// loopTries bounds how often a loop device is lost to another process between
// asking for a free one and taking it.
const loopTries = 64

// openLoop gives the loop device of an image, open. It lives while it is open
// or mounted: autoclear is set in the same call that makes it, so that no death
// of ours leaves one behind.
//
// If the image has one already it is that one, always: unmounted here, its file
// system may live on for a moment in the mount namespace of a process being
// started, and a second device would be a second ext4 over the same blocks.
// Through the same device the kernel finds the file system it has.
func openLoop(image string) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil {
		return nil, err
	}
	backing, err := os.OpenFile(image, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range loopTries {
		dev, err := findLoop(image, &st)
		if dev != nil || err != nil {
			return dev, err
		}
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("asking for a loop device: %w", err)
		}
		if dev, err = openLoopNumber(n); err != nil {
			return nil, err
		}
		// Direct I/O: the file system inside caches already, and the image's own
		// pages would be a second copy.
		for _, flags := range []uint32{unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO, unix.LO_FLAGS_AUTOCLEAR} {
			conf := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 4096, Info: unix.LoopInfo64{Flags: flags}}
			copy(conf.Info.File_name[:len(conf.Info.File_name)-1], filepath.Base(image))
			if err = unix.IoctlLoopConfigure(int(dev.Fd()), &conf); err == nil {
				return dev, nil
			}
			if errors.Is(err, unix.EBUSY) {
				break
			}
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("configuring /dev/loop%d: %w", n, err)
		}
	}
	return nil, fmt.Errorf("no loop device to be had in %d tries", loopTries)
}

// findLoop gives the device an image has, open, or nil.
func findLoop(image string, st *unix.Stat_t) (*os.File, error) {
	all, err := loops()
	if err != nil {
		return nil, err
	}
	for n, backing := range all {
		if backing != image {
			continue
		}
		dev, err := openLoopNumber(n)
		if err != nil {
			return nil, err
		}
		// While it is open it stays; but it may have gone before.
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Device == st.Dev && info.Inode == st.Ino {
			return dev, nil
		}
		dev.Close()
	}
	return nil, nil
}

// openLoopNumber opens /dev/loopN, which in a container may have to be made.
func openLoopNumber(n int) (*os.File, error) {
	path := "/dev/loop" + strconv.Itoa(n)
	dev, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if !errors.Is(err, os.ErrNotExist) {
		return dev, err
	}
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n)))); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("making %s: %w", path, err)
	}
	return os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
}

// loops lists the loop devices of the host: number → backing file. A backing
// file that was removed has " (deleted)" after its name.
func loops() (map[int]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	out := map[int]string{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // cleared meanwhile
		}
		n, err := strconv.Atoi(strings.TrimPrefix(strings.Split(f, "/")[3], "loop"))
		if err == nil {
			out[n] = strings.TrimSuffix(string(b), "\n")
		}
	}
	return out, nil
}

// mountPoints lists the mounts below a directory, the newest first.
func mountPoints(dir string) (out []string, err error) {
	all, err := mountinfo.Own()
	if err != nil {
		return nil, err
	}
	for _, m := range slices.Backward(all) {
		if strings.HasPrefix(m.At, dir+"/") {
			out = append(out, m.At)
		}
	}
	return out, nil
}
