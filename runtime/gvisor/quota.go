package gvisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
)

// quotaFile is where a kernel's share of the CPU is kept while it is lifted. A
// process that dies in between leaves it, and who adopts the kernel puts the
// share back.
func (k *Kernel) quotaFile() string { return filepath.Join(k.dir(), "quota") }

// unlimited lets the sentry use every core until the returned function is
// called: it saves itself inside the share of the CPU that the code in it was
// given, and that code stands still meanwhile. Without room for the mark, or
// anything else that is amiss, the share stays: to save is then as slow as it
// would have been.
func (k *Kernel) unlimited() (limited func()) {
	g, id := k.d.groups, k.id
	var was string
	err := k.requota() // one that is still lifted is not what to come back to
	if err == nil {
		was, err = g.quota(id)
	}
	if err == nil {
		err = os.WriteFile(k.quotaFile(), []byte(was), 0o600)
	}
	if err == nil {
		err = g.setQuota(id, g.allCores())
	}
	if err != nil {
		k.d.log.Debug("saving within the share of the CPU", "kernel", id, "err", err)
	}
	return func() {
		if err := k.requota(); err != nil && !isClosed(k.done) {
			k.d.log.Error("a kernel keeps the whole CPU", "kernel", id, "err", err)
		}
	}
}

// requota puts back the share that is written down, if one is. What fails is
// tried again by the next checkpoint, or who adopts the kernel.
func (k *Kernel) requota() error {
	was, err := os.ReadFile(k.quotaFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// An empty one is of a mark that was never finished, before anything was lifted.
	if len(was) > 0 {
		if err := k.d.groups.setQuota(k.id, string(was)); err != nil {
			return err
		}
	}
	return os.Remove(k.quotaFile())
}

// quota is a kernel's share of the CPU in the words of its cgroup.
func (g cgroups) quota(id string) (string, error) {
	b, err := os.ReadFile(g.quotaPath(id))
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b)), nil
}

func (g cgroups) setQuota(id, quota string) error {
	if err := os.WriteFile(g.quotaPath(id), []byte(quota), 0); err != nil {
		return fmt.Errorf("setting the share of the CPU: %w", err)
	}
	return nil
}

// allCores is a share that is no limit but still one: taking the limit off and
// putting it on again is a path of the host's scheduler that nothing else here
// walks (a restore sets a wide one too).
func (g cgroups) allCores() string {
	quota := strconv.Itoa(goruntime.NumCPU() * cpuPeriod)
	if g.v2 {
		return quota + " " + strconv.Itoa(cpuPeriod)
	}
	return quota
}

func (g cgroups) quotaPath(id string) string {
	if g.v2 {
		return g.path("", id, "cpu.max")
	}
	return g.path("cpu", id, "cpu.cfs_quota_us")
}
