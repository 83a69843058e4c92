package e2b

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
)

// connect is POST …/connect and …/resume: it wakes a paused sandbox, and gives it
// at least so much time.
func (d *dialect) connect(normal time.Duration) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		var req struct {
			Timeout *float64 `json:"timeout"`
			Memory  *bool    `json:"memory"`
		}
		if err := readJSON(r, &req); err != nil {
			return err
		}
		timeout, err := seconds("timeout", req.Timeout, normal)
		if err != nil {
			return err
		}
		sb, err := d.live(r.Context(), r.PathValue("id"))
		if err != nil {
			return err
		}
		status := http.StatusOK
		if sb.Standby != sandbox.Awake {
			status = http.StatusCreated
		}
		drop := sb.Standby != sandbox.Awake && req.Memory != nil && !*req.Memory
		if sb, err = d.wake(r.Context(), sb, timeout); err != nil {
			return err
		}
		if drop {
			if sb, err = d.server.DropMemory(r.Context(), sb.ID); err != nil {
				return err
			}
		}
		return writeJSON(w, status, d.created(r.Context(), sb))
	}
}

// wake has a sandbox awake for at least so long. The time comes first: one whose
// own is over would be paused again. One that was to be paused without its memory
// and whose timeout has done it has it still, and loses it here.
func (d *dialect) wake(ctx context.Context, sb sandbox.Sandbox, timeout time.Duration) (sandbox.Sandbox, error) {
	asleep := sb.Standby != sandbox.Awake
	if asleep {
		sb.ExpiresAt = d.clock() // whatever the record says, that time was spent before the pause
	}
	sb, err := d.extend(ctx, sb, timeout)
	if err == nil && asleep {
		sb, _, err = d.server.ResumeSandbox(ctx, sb.ID)
	}
	if err == nil && asleep && sb.Spec.Labels[forgetLabel] == "true" {
		sb, err = d.server.DropMemory(ctx, sb.ID)
	}
	return sb, err
}

// pause is POST …/pause. A paused sandbox holds no memory and has no timeout: it
// waits for its connect, however long.
func (d *dialect) pause(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Memory *bool `json:"memory"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	if sb.Standby != sandbox.Awake {
		return &sandbox.Error{Class: sandbox.Conflict, Msg: "sandbox " + sb.ID + " is already paused"}
	}
	return d.putToSleep(w, r, sb, req.Memory != nil && !*req.Memory)
}

func (d *dialect) putToSleep(w http.ResponseWriter, r *http.Request, sb sandbox.Sandbox, forget bool) error {
	if _, err := d.server.PauseSandbox(r.Context(), server.PauseRequest{Sandbox: sb.ID, Cold: true, DropMemory: forget}); err != nil {
		return err
	}
	if _, err := d.server.SetTimeout(r.Context(), sb.ID, 0); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// forked is one of the sandboxes that a fork gives, or why it is not there.
type forked struct {
	Sandbox *created `json:"sandbox,omitempty"`
	Error   *refusal `json:"error,omitempty"`
}

const maxForks = 100

func (d *dialect) fork(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Count   *int     `json:"count"`
		Timeout *float64 `json:"timeout"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	count := 1
	if req.Count != nil {
		count = *req.Count
	}
	if count < 1 || count > maxForks {
		return sandbox.InvalidField("count", "%d is not accepted; 1 to %d is", count, maxForks)
	}
	timeout, err := seconds("timeout", req.Timeout, 15*time.Second)
	if err != nil {
		return err
	}
	sb, err := d.awake(r)
	if err != nil {
		return err
	}
	f, err := d.server.Fork(r.Context(), server.ForkRequest{Sandbox: sb.ID, Count: count, MinReady: 1, Timeout: &timeout, Key: r.Header.Get("Idempotency-Key")})
	if err != nil {
		return err
	}
	out := make([]forked, len(f.Children))
	for i, c := range f.Children {
		if c.Err != nil {
			e := sandbox.AsError(c.Err)
			out[i].Error = &refusal{Code: statusOf(e.Class), Message: message(e)}
			continue
		}
		child := d.created(r.Context(), c.Sandbox)
		out[i].Sandbox = &child
	}
	return writeJSON(w, http.StatusCreated, out)
}

// snapshotInfo is a snapshot: its id is a template to create from.
type snapshotInfo struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func infoOf(s sandbox.Snapshot) snapshotInfo {
	info := snapshotInfo{SnapshotID: s.ID, Names: []string{}}
	if s.Name != "" {
		info.Names = append(info.Names, s.Name)
	}
	return info
}

func (d *dialect) snapshot(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name   string `json:"name"`
		Memory *bool  `json:"memory"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	kind := sandbox.MemorySnapshot
	if req.Memory != nil && !*req.Memory {
		kind = sandbox.FilesystemSnapshot
	}
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	taken, err := d.server.CreateSnapshot(r.Context(), server.CreateSnapshotRequest{Sandbox: sb.ID, Kind: kind, Name: strings.TrimSuffix(req.Name, defaultTag)}, func(sandbox.Progress) {})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, infoOf(taken.Snapshot))
}

// defaultTag is what E2B reads into a name without a tag.
const defaultTag = ":default"

func (d *dialect) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	f := store.SnapshotFilter{Sandbox: q.Get("sandboxID"), PageToken: q.Get("nextToken"), PageSize: pageSize}
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > pageSize {
			return sandbox.InvalidField("limit", "%.20q is not accepted; 1 to %d is", s, pageSize)
		}
		f.PageSize = n
	}
	page, next, err := d.server.ListSnapshots(r.Context(), f)
	if err != nil {
		return err
	}
	out := []snapshotInfo{}
	for _, s := range page {
		if name := strings.TrimSuffix(q.Get("name"), defaultTag); name == "" || s.Name == name {
			out = append(out, infoOf(s))
		}
	}
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
	return writeJSON(w, http.StatusOK, out)
}
