package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/volume"
)

// openState opens where the state of sandboxes is kept. With a key all of it is
// encrypted, and checkpoints in the form a kernel reads are in memory only.
func openState(c cli.ServeConfig, at places) (*agent.StateConfig, *local.Store, error) {
	keys, err := stateKeys(c, at)
	if err != nil {
		return nil, nil, err
	}
	st, err := local.Open(at.state(), local.Options{Keys: keys})
	// As for listen: a child that a killed server was forking holds its lock.
	for until := time.Now().Add(listenPatience); sandbox.ClassOf(err) == sandbox.Precondition && at.crashed() && time.Now().Before(until); {
		time.Sleep(5 * time.Millisecond)
		st, err = local.Open(at.state(), local.Options{Keys: keys})
	}
	if sandbox.ClassOf(err) == sandbox.Precondition {
		who := "another server" // one that is only starting has not said who it is
		if pid, ok := at.server(); ok {
			who = fmt.Sprint("process ", pid)
		}
		return nil, nil, sandbox.Errorf(sandbox.Precondition, "serve", "%s is in use by %s: %w", at.dir, who, err).
			WithHint("stop that server first, or give this one a --data of its own")
	}
	if err != nil {
		return nil, nil, err
	}
	cfg := &agent.StateConfig{Store: st, Plain: at.plain()}
	// The node empties the place it uses. The other one may hold what a server
	// left that was killed before keys were given or taken away.
	other := at.plainInMemory()
	if keys != nil {
		other = at.plain()
	}
	if err := os.RemoveAll(other); err != nil {
		return nil, nil, errors.Join(err, st.Close())
	}
	if keys != nil {
		cfg.Plain, cfg.KeepPlain, cfg.Sealed = at.plainInMemory(), -1, true
		if err := ownDirectory(cfg.Plain); err != nil {
			return nil, nil, errors.Join(err, st.Close())
		}
		var fsInfo unix.Statfs_t
		if err := unix.Statfs("/dev/shm", &fsInfo); err != nil || fsInfo.Type != unix.TMPFS_MAGIC {
			return nil, nil, errors.Join(sandbox.Errorf(sandbox.Precondition, "serve", "/dev/shm is not in memory: encrypted state needs it").
				WithHint("mount a tmpfs on /dev/shm"), st.Close())
		}
	}
	return cfg, st, nil
}

// stateKeys are those of the flag, or of the data directory if it has some; nil
// for none.
func stateKeys(c cli.ServeConfig, at places) (*seal.Keyring, error) {
	path := c.StateKeys
	if path == "" {
		path = at.stateKeys()
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
	}
	return seal.LoadKeyring(path)
}

func (p places) state() string     { return filepath.Join(p.dir, "state") }
func (p places) plain() string     { return filepath.Join(p.dir, "checkpoints") }
func (p places) stateKeys() string { return filepath.Join(p.dir, "state.keys") }
func (p places) volumes() string   { return filepath.Join(p.dir, "volumes") }

// plainInMemory is named after the data directory, so that the next server
// finds and empties it.
func (p places) plainInMemory() string {
	dir, err := filepath.Abs(p.dir)
	if err != nil {
		dir = p.dir
	}
	sum := sha256.Sum256([]byte(dir))
	return "/dev/shm/cove-" + hex.EncodeToString(sum[:8])
}

// ownDirectory makes a directory in a place where anybody may make one, and
// takes one that is there only if it is ours alone: plain state is written there,
// and whoever made it could read it or lead it elsewhere by a link.
func ownDirectory(dir string) error {
	if err := os.Mkdir(dir, 0o700); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || !st.IsDir() || int(sys.Uid) != os.Geteuid() || st.Mode().Perm()&0o022 != 0 {
		return sandbox.Errorf(sandbox.Precondition, "serve", "%s, where state is kept in plain while it is used, was made by somebody else: %s", dir, st.Mode()).
			WithHint("look what it is and remove it")
	}
	return nil
}

// unmount leaves no volume mounted and no state in memory, once nothing runs.
func (p places) unmount(ctx context.Context) error {
	err := os.RemoveAll(p.plainInMemory())
	if _, serr := os.Stat(p.volumes()); serr != nil {
		return err
	}
	set, verr := volume.Open(ctx, p.volumes(), volume.Options{})
	if sandbox.ClassOf(verr) == sandbox.Unsupported {
		return err // so none is mounted
	}
	if verr == nil {
		verr = set.Close()
	}
	return errors.Join(err, verr)
}
