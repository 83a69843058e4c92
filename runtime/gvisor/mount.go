package gvisor

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// mount is one EROFS file mounted into a running container.
type mount struct {
	Source string `json:"source"` // the file
	ID     string `json:"id"`     // its superblockID
	Path   string `json:"path"`   // where it is
	Key    string `json:"key"`    // what the sentry knows it by
}

// spec says to a restore where the file of Key is.
func (m mount) spec() specs.Mount {
	return specs.Mount{Destination: m.Key, Type: "erofs", Source: m.Source, Options: []string{"ro"}}
}

func (k *Kernel) mountsFile(cid string) string { return filepath.Join(k.dir(), cid+".mounts") }

// mounts are those of a container. They are kept in a file for the process
// that adopts the kernel.
func (k *Kernel) mounts(cid string) []mount {
	var ms []mount
	b, err := os.ReadFile(k.mountsFile(cid))
	if err == nil {
		err = json.Unmarshal(b, &ms)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		k.d.log.Error("mounts of a kernel", "kernel", k.id, "err", err)
	}
	return ms
}

func (k *Kernel) keepMounts(cid string, ms []mount) error {
	if len(ms) == 0 {
		return nil
	}
	b, err := json.Marshal(ms)
	if err != nil {
		return err
	}
	tmp := k.mountsFile(cid) + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, k.mountsFile(cid))
}
