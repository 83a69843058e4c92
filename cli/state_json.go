package cli

import (
	"fmt"
	"time"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

type mountJSON struct {
	Volume string `json:"volume"`
	Path   string `json:"path"`
	Mode   string `json:"mode,omitempty"`
}

func toMountsJSON(ms []*covev1.VolumeMount) (out []mountJSON) {
	for _, m := range ms {
		out = append(out, mountJSON{m.GetVolume(), m.GetPath(), m.GetMode()})
	}
	return out
}

type errorJSON struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

type forkJSON struct {
	Sandbox *sandboxJSON `json:"sandbox,omitempty"`
	Error   *errorJSON   `json:"error,omitempty"`
}

func toForkJSON(r *covev1.ForkResult) forkJSON {
	if r.GetSandbox() == nil {
		return forkJSON{Error: &errorJSON{Code: r.GetError().GetCode(), Message: r.GetMessage(), Hint: r.GetError().GetHint()}}
	}
	j := toSandboxJSON(r.GetSandbox())
	return forkJSON{Sandbox: &j}
}

type snapshotJSON struct {
	ID        string            `json:"id"`
	Name      string            `json:"name,omitempty"`
	Kind      string            `json:"kind"`
	Labels    map[string]string `json:"labels,omitempty"`
	Sandbox   string            `json:"sandbox"`
	Parent    string            `json:"parent,omitempty"`
	Ancestors []string          `json:"ancestors,omitempty"`
	Image     string            `json:"image,omitempty"`
	ImageID   string            `json:"image_id,omitempty"`
	Path      string            `json:"path,omitempty"`
	Node      string            `json:"node,omitempty"`
	CreatedAt time.Time         `json:"created_at,omitzero"`
	ExpiresAt time.Time         `json:"expires_at,omitzero"`
	Size      int64             `json:"size"`
	Stored    int64             `json:"stored"`
	Build     string            `json:"build,omitempty"`

	// Of the call that returned it.
	Unchanged bool    `json:"unchanged,omitempty"`
	PausedS   float64 `json:"paused_s,omitempty"`
}

func toSnapshotJSON(s *covev1.Snapshot) snapshotJSON {
	return snapshotJSON{
		ID: s.GetId(), Name: s.GetName(), Kind: s.GetKind(), Labels: s.GetLabels(), Sandbox: s.GetSandbox(), Parent: s.GetParent(), Ancestors: s.GetAncestors(),
		Image: s.GetSpec().GetImage(), ImageID: s.GetImageId(), Path: s.GetPath(), Node: s.GetNode(), CreatedAt: timeOf(s.GetCreatedAt()),
		ExpiresAt: timeOf(s.GetExpiresAt()), Size: s.GetSize(), Stored: s.GetStored(), Build: s.GetBuild(),
	}
}

type prunedJSON struct {
	Removed []prunedSnapshotJSON `json:"removed"`
	Bytes   int64                `json:"bytes"`
	DryRun  bool                 `json:"dry_run"`
}

type prunedSnapshotJSON struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
	Stored int64  `json:"stored"`
}

type deletedJSON struct {
	ID    string `json:"id"`
	Freed int64  `json:"freed"`
}

type verifiedJSON struct {
	ID    string `json:"id"`
	Bytes int64  `json:"bytes"`
}

type treeJSON struct {
	ID        string    `json:"id"`
	Parent    string    `json:"parent,omitempty"`
	Kind      string    `json:"kind"`
	Name      string    `json:"name,omitempty"`
	State     string    `json:"state,omitempty"`
	CreatedAt time.Time `json:"created_at,omitzero"`
}

func toTreeJSON(n *covev1.TreeNode) treeJSON {
	return treeJSON{ID: n.GetId(), Parent: n.GetParent(), Kind: n.GetKind(), Name: n.GetName(), State: n.GetState(), CreatedAt: timeOf(n.GetCreatedAt())}
}

type templateJSON struct {
	Ref           string            `json:"ref"`
	Name          string            `json:"name"`
	Version       int64             `json:"version"`
	Tags          []string          `json:"tags,omitempty"`
	Image         string            `json:"image,omitempty"`
	CPU           float64           `json:"cpu"`
	Memory        int64             `json:"memory"`
	MemoryLimit   int64             `json:"memory_limit"`
	Disk          int64             `json:"disk"`
	Pids          int64             `json:"pids"`
	Env           map[string]string `json:"env,omitempty"`
	Labels        map[string]string `json:"labels,omitempty"`
	Start         string            `json:"start,omitempty"`
	ReadyCommand  string            `json:"ready_command,omitempty"`
	ReadyPort     int32             `json:"ready_port,omitempty"`
	ReadyTimeoutS float64           `json:"ready_timeout_s,omitempty"`
	Snapshot      string            `json:"snapshot"`
	CreatedAt     time.Time         `json:"created_at,omitzero"`
	BuildTimeS    float64           `json:"build_time_s"`
	Size          int64             `json:"size"`
}

func templateRef(t *covev1.Template) string { return fmt.Sprintf("%s@%d", t.GetName(), t.GetVersion()) }

func toTemplateJSON(t *covev1.Template) templateJSON {
	r := t.GetSpec().GetResources()
	return templateJSON{
		Ref: templateRef(t), Name: t.GetName(), Version: t.GetVersion(), Tags: t.GetTags(), Image: t.GetSpec().GetImage(),
		CPU: r.GetCpu(), Memory: r.GetMemory(), MemoryLimit: r.GetMemoryLimit(), Disk: r.GetDisk(), Pids: r.GetPids(),
		Env: t.GetSpec().GetEnv(), Labels: t.GetSpec().GetLabels(),
		Start: t.GetStart(), ReadyCommand: t.GetReadyCommand(), ReadyPort: t.GetReadyPort(), ReadyTimeoutS: t.GetReadyTimeout().AsDuration().Seconds(),
		Snapshot: t.GetSnapshot(), CreatedAt: timeOf(t.GetCreatedAt()), BuildTimeS: t.GetBuildTime().AsDuration().Seconds(), Size: t.GetSize(),
	}
}

type volumeJSON struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Size      int64             `json:"size"`
	Used      int64             `json:"used"`
	Labels    map[string]string `json:"labels,omitempty"`
	Node      string            `json:"node,omitempty"`
	CreatedAt time.Time         `json:"created_at,omitzero"`
	From      string            `json:"from,omitempty"`
	Holders   []holderJSON      `json:"holders"`
}

type holderJSON struct {
	Sandbox string `json:"sandbox"`
	Mode    string `json:"mode"`
}

func toVolumeJSON(v *covev1.Volume) volumeJSON {
	return volumeJSON{
		ID: v.GetId(), Name: v.GetName(), Size: v.GetSize(), Used: v.GetUsed(), Labels: v.GetLabels(), Node: v.GetNode(),
		CreatedAt: timeOf(v.GetCreatedAt()), From: v.GetFrom(),
		Holders: each(v.GetHolders(), func(h *covev1.VolumeHolder) holderJSON { return holderJSON{h.GetSandbox(), h.GetMode()} }),
	}
}

type fileJSON struct {
	Path    string    `json:"path"`
	Type    string    `json:"type"`
	Size    int64     `json:"size"`
	Mode    string    `json:"mode"`
	UID     uint32    `json:"uid"`
	GID     uint32    `json:"gid"`
	ModTime time.Time `json:"mod_time,omitzero"`
	Target  string    `json:"target,omitempty"`
}

func toFileJSON(f *covev1.FileInfo) fileJSON {
	return fileJSON{Path: f.GetPath(), Type: f.GetType(), Size: f.GetSize(), Mode: fmt.Sprintf("%04o", f.GetMode()), UID: f.GetUid(), GID: f.GetGid(),
		ModTime: timeOf(f.GetModTime()), Target: f.GetTarget()}
}
