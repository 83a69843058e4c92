package sandbox

import "time"

// SnapshotKind is what of a sandbox a snapshot holds.
type SnapshotKind string

const (
	MemorySnapshot     SnapshotKind = "memory"     // processes, memory, open files, terminals and the file system
	FilesystemSnapshot SnapshotKind = "filesystem" // what the sandbox changed against what it started from
	DirectorySnapshot  SnapshotKind = "directory"  // one directory, for any other sandbox
)

// Snapshot is frozen state with a parent. It does not change, and expires only if
// its maker said so. Snapshots and sandboxes form a tree.
type Snapshot struct {
	ID        string            `json:"id"`
	Tenant    string            `json:"tenant,omitempty"`
	Name      string            `json:"name,omitempty"` // unique among those that have one; moves to the newest
	Kind      SnapshotKind      `json:"kind"`
	Labels    map[string]string `json:"labels,omitempty"`
	Sandbox   string            `json:"sandbox"` // it was taken of
	Lineage   Lineage           `json:"lineage"`
	Spec      Spec              `json:"spec"` // of that sandbox
	ImageID   string            `json:"image_id"`
	Path      string            `json:"path,omitempty"` // of a directory snapshot
	Node      string            `json:"node"`
	CreatedAt time.Time         `json:"created_at"`
	ExpiresAt time.Time         `json:"expires_at,omitzero"` // zero = never
	Content   Content           `json:"content"`
	// Hidden ones belong to something else, a template's version, and are
	// neither listed nor pruned.
	Hidden bool `json:"hidden,omitempty"`
}

// Lineage is where in the tree a sandbox or snapshot stands. The chain is
// copied, not followed: a deleted node in the middle leaves its descendants
// where they are.
type Lineage struct {
	Parent    string   `json:"parent,omitempty"`    // a snapshot, or the sandbox a live fork was made of; "" = a root
	Ancestors []string `json:"ancestors,omitempty"` // Parent first; at most MaxAncestors
}

// MaxAncestors bounds the chain a node carries.
const MaxAncestors = 256

// Below is the lineage of a child of parent, whose own lineage is l.
func (l Lineage) Below(parent string) Lineage {
	chain := append([]string{parent}, l.Ancestors...)
	return Lineage{Parent: parent, Ancestors: chain[:min(len(chain), MaxAncestors)]}
}

// Content is where a node keeps the state a snapshot holds, and what it needs
// to use it. Opaque to everyone but nodes, except for its sizes.
type Content struct {
	Manifest string `json:"manifest,omitempty"` // in the content store; "" for content that is not kept (a live fork's)
	Size     int64  `json:"size"`               // bytes of state
	Stored   int64  `json:"stored"`             // bytes it added to the store: what was there already costs nothing
	// Same is the manifest of an earlier snapshot that nothing happened since:
	// no new content was made.
	Same string `json:"same,omitempty"`
	// Base is the image the state is over: of a filesystem snapshot the one the
	// changes apply to.
	Base string `json:"base,omitempty"`
	// Image is the image of a filesystem snapshot once a node has prepared it.
	Image string `json:"image,omitempty"`
	// Plain names content that is not in the store.
	Plain string `json:"plain,omitempty"`
	// Needs are manifests that must be kept with this one: of directories that
	// were mounted.
	Needs []string `json:"needs,omitempty"`
	// Build names what a memory snapshot can be restored with.
	Build string `json:"build,omitempty"`
	// KernelClass is that of the kernel a memory snapshot was taken of, and of
	// those it can be restored into; "" = the node's default.
	KernelClass string `json:"kernel_class,omitempty"`
	// Replay is where the replay of the sandbox was.
	Replay string `json:"replay,omitempty"`
	// Clock is what the clock of a deterministic sandbox read.
	Clock time.Time `json:"clock,omitzero"`
}

// Standby of a sandbox that is not to be woken by looking at it.
type Standby string

const (
	Awake Standby = ""
	Hot   Standby = "hot"  // frozen in memory
	Cold  Standby = "cold" // on disk: no process, no memory
)

// IdleAction is what an idle timeout does, or a timeout.
type IdleAction string

const (
	IdleKill  IdleAction = "kill" // the default
	IdlePause IdleAction = "pause"
)

// Template is a named, versioned thing to start from. A version never changes.
type Template struct {
	Tenant    string        `json:"tenant,omitempty"`
	Name      string        `json:"name"`
	Version   int64         `json:"version"` // 1, 2, …; a build makes the next
	Spec      Spec          `json:"spec"`    // image, resources, env of what is started
	Start     string        `json:"start,omitempty"`
	Ready     Readiness     `json:"ready"`
	Snapshot  string        `json:"snapshot"` // hidden, memory
	CreatedAt time.Time     `json:"created_at"`
	BuildTime time.Duration `json:"build_time"`
	Tags      []string      `json:"tags,omitempty"` // sorted; each is of one version of a name at a time
}

// TemplateRef is how a version of a template is named: "name" is the newest,
// "name@version", or "name:tag".
type TemplateRef struct {
	Name    string
	Version int64  // 0 = the newest, or what has the tag
	Tag     string // "" = none
}

// Readiness is how a template's build knows that its start command is up.
// Exactly one of Command and Port is set, or neither: ready once started.
type Readiness struct {
	Command string        `json:"command,omitempty"` // run until it succeeds
	Port    int           `json:"port,omitempty"`    // until something listens on it
	Timeout time.Duration `json:"timeout,omitempty"` // 0 = one minute
}

// VolumeMode is how a sandbox holds a volume.
type VolumeMode string

const (
	VolumeReadWrite VolumeMode = "rw"     // alone
	VolumeReadOnly  VolumeMode = "ro"     // with other readers, or beside a writer
	VolumeShared    VolumeMode = "shared" // read-write with others
)

// VolumeMount puts a volume into a sandbox.
type VolumeMount struct {
	Volume string     `json:"volume"` // name or id
	Path   string     `json:"path"`
	Mode   VolumeMode `json:"mode,omitempty"` // "" = rw
}

// Volume is storage that outlives sandboxes. The record is the store's; Used and
// Holders are what its node says of the content, which it knows by the id.
type Volume struct {
	ID        string            `json:"id"`
	Tenant    string            `json:"tenant,omitempty"`
	Name      string            `json:"name"` // unique within the tenant
	Size      int64             `json:"size"` // bytes it may hold
	State     VolumeState       `json:"state"`
	Labels    map[string]string `json:"labels,omitempty"`
	Node      string            `json:"node"`
	CreatedAt time.Time         `json:"created_at"`
	From      string            `json:"from,omitempty"` // volume it was cloned from
	Used      int64             `json:"-"`
	Holders   []VolumeHolder    `json:"-"`
}

// VolumeState says how far a record and its content are together. Only what is
// ready is there for users.
type VolumeState string

const (
	VolumeMaking   VolumeState = "making"   // the content may be there or not
	VolumeReady    VolumeState = "ready"    // the content is there
	VolumeDeleting VolumeState = "deleting" // the content may be gone
)

// VolumeContent is what a node knows of a volume.
type VolumeContent struct {
	ID      string
	Size    int64
	Used    int64 // bytes on the node's disk
	Holders []VolumeHolder
	// Old is the record of a volume from when nodes kept them: its name, labels,
	// origin and time. The name of one that is not the default tenant's ends in
	// ".TENANT_".
	Old *Volume
}

// VolumeHolder is a sandbox that has a volume mounted.
type VolumeHolder struct {
	Sandbox string     `json:"sandbox"`
	Mode    VolumeMode `json:"mode"`
}

// VolumeFile says whose a file or directory of a volume is to be, and its mode. nil
// leaves what is there; what is made is root's, 0644 or 0755.
type VolumeFile struct {
	Mode *uint32 `json:"mode,omitempty"`
	UID  *uint32 `json:"uid,omitempty"`
	GID  *uint32 `json:"gid,omitempty"`
}
