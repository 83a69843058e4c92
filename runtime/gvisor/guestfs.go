package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/cove-sandbox/cove/sandbox"
)

// guestBinary is where the guest lies on its EROFS. The same file system is
// the kernel's root and is mounted read-only at guestMount in the user's
// container, for its init.
const (
	guestBinary = "/cove-guest"
	initBinary  = "/init"
	sftpBinary  = "/cove-sftp"
	// Below /dev, a file system that is fresh with every container: a mount
	// point there leaves no trace in the writable layer.
	guestMount = "/dev/.cove"
)

// initArgs is what process 1 of the user's container runs.
func initArgs() []string {
	if initELF() == nil {
		return []string{guestMount + guestBinary, "init"}
	}
	return []string{guestMount + initBinary, "init"}
}

// buildGuestFS makes the EROFS with the guest binary, once per content. What lies
// beside that as cove-sftp goes with it, for SSH.
func buildGuestFS(ctx context.Context, dir, guest string) (string, error) {
	const op = "gvisor.guestfs"
	f, err := os.Open(guest)
	if err != nil {
		return "", sandbox.Errorf(sandbox.Precondition, op, "%w", err)
	}
	defer f.Close()
	h := sha256.New()
	initProgram := initELF()
	h.Write(initProgram)
	if _, err := io.Copy(h, f); err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	sftp, err := readSFTP(guest)
	if err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	h.Write(sftp)
	sum := hex.EncodeToString(h.Sum(nil))
	out := filepath.Join(dir, "guest-"+sum[:16]+".erofs")
	if _, err := os.Stat(out); err == nil {
		return out, nil
	}
	tmp, err := os.MkdirTemp(dir, "guestfs-*")
	if err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	defer os.RemoveAll(tmp)
	root := filepath.Join(tmp, "root")
	for _, d := range []string{"proc", "dev", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
		}
	}
	// MkdirTemp makes 0700, which would become the mode of the root directory.
	if err := os.Chmod(root, 0o755); err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	dst, err := os.OpenFile(filepath.Join(root, guestBinary), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	_, err = io.Copy(dst, f)
	if cerr := dst.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	if initProgram != nil {
		if err := os.WriteFile(filepath.Join(root, initBinary), initProgram, 0o755); err != nil {
			return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
		}
	}
	if sftp != nil {
		if err := os.WriteFile(filepath.Join(root, sftpBinary), sftp, 0o755); err != nil {
			return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
		}
	}
	img := filepath.Join(tmp, "guest.erofs")
	// noinline_data: with inlined tails execve fails in gVisor ("bad address").
	// The UUID is of what is in it: gVisor restores a checkpoint over the superblock it
	// was made with only, and another node, or this one with another data directory, makes the same.
	uuid := fmt.Sprintf("%s-%s-8%s-8%s-%s", sum[:8], sum[8:12], sum[13:16], sum[17:20], sum[20:32])
	cmd := exec.CommandContext(ctx, "mkfs.erofs", "-E", "noinline_data", "-T", "0", "-U", uuid, img, root)
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", sandbox.Errorf(sandbox.Precondition, op, "mkfs.erofs: %w: %s", err, b).WithHint("apt-get install -y erofs-utils")
	}
	if err := os.Rename(img, out); err != nil {
		return "", sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	return out, nil
}

// readSFTP is the program beside the guest; nil where there is none.
func readSFTP(guest string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(filepath.Dir(guest), sftpBinary))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}
