package sandbox

import (
	"time"
)

// Resources are what a sandbox may use. Memory is two numbers: the size that
// was asked for, and the limit above which its largest process ends with OOM.
// What a node keeps free for it is a third, and mostly far less: most sandboxes
// wait most of the time, and a node gives out what is not used.
type Resources struct {
	MilliCPU    int64 `json:"milli_cpu"`    // 1000 = one core; enforced as a quota
	Memory      int64 `json:"memory"`       // bytes asked for; quotas count them
	MemoryLimit int64 `json:"memory_limit"` // bytes above which its largest process ends; >= Memory
	Disk        int64 `json:"disk"`         // bytes of the writable layer
	Pids        int64 `json:"pids"`         // processes and threads inside
	// Reserve is the part of Memory that the node keeps free for it, whatever
	// others use. 0 is all of it: what is on record from before there was one.
	Reserve int64 `json:"reserve,omitempty"`
}

// Reserved is the memory that admission counts.
func (r Resources) Reserved() int64 {
	if r.Reserve > 0 {
		return min(r.Reserve, r.Memory)
	}
	return r.Memory
}

// Spec is what a user asks for. The zero value of a field means its default.
type Spec struct {
	Image       string            `json:"image"`
	Resources   Resources         `json:"resources"`
	Env         map[string]string `json:"env,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Timeout     time.Duration     `json:"timeout,omitempty"`      // ends with TTL this long after creation or SetTimeout; 0 = never
	NoTimeout   bool              `json:"no_timeout,omitempty"`   // never was asked for: the server's default does not fill it
	IdleTimeout time.Duration     `json:"idle_timeout,omitempty"` // OnIdle after this long with no call and no process; 0 = never
	OnIdle      IdleAction        `json:"on_idle,omitempty"`      // "" = kill, which ends it with Idle
	OnTimeout   IdleAction        `json:"on_timeout,omitempty"`   // "" = kill, which ends it with TTL; pause leaves it on standby, without a timeout
	Snapshot    string            `json:"snapshot,omitempty"`     // name or id of what to start from; Image is then the snapshot's
	Template    string            `json:"template,omitempty"`     // "name" or "name@version" of what to start from
	Volumes     []VolumeMount     `json:"volumes,omitempty"`
	Mounts      []DirectoryMount  `json:"mounts,omitempty"` // the server's to set
	Network     Network           `json:"network,omitzero"`
	Ingress     Ingress           `json:"ingress,omitzero"`
	Secrets     []string          `json:"secrets,omitempty"` // names of those its requests leave with
	// Authority that it trusts, so that requests can be looked into: the id of
	// the first of its ancestors that had one, or its own. The server's to set.
	Authority string `json:"authority,omitempty"`
	Lease     string `json:"lease,omitempty"` // id of the lease it ends with
	// Reuse is the trust group whose sandboxes may have one kernel one after
	// another; "" = it has a kernel of its own.
	Reuse string `json:"reuse,omitempty"`
	// Rollout is what it is part of.
	Rollout Rollout `json:"rollout,omitzero"`
	// Deterministic is set of one that is to see the same each time.
	Deterministic *Deterministic `json:"deterministic,omitempty"`
	// KernelClass is the kind of kernel it has; "" = the node's default. Not part
	// of the API yet.
	KernelClass string `json:"kernel_class,omitempty"`
}

// DirectoryMount is the content of a directory snapshot, there read-only from the
// start.
type DirectoryMount struct {
	Manifest string `json:"manifest"`
	Path     string `json:"path"`
}

// State of a sandbox. Transitions only go down the list.
type State string

const (
	Creating   State = "creating" // id is durable, the container is being attached
	Running    State = "running"
	Ending     State = "ending" // kill accepted, teardown under way
	EndedState State = "ended"
)

// Sandbox is what a user holds: a kernel plus the user's container.
type Sandbox struct {
	ID        string    `json:"id"`
	Tenant    string    `json:"tenant,omitempty"`
	Spec      Spec      `json:"spec"`
	ImageID   string    `json:"image_id"` // content digest the reference resolved to at creation
	Node      string    `json:"node"`
	State     State     `json:"state"`
	Episode   int64     `json:"episode"` // 1 after creation, +1 per reset
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // zero = never
	End       *End      `json:"end,omitempty"`       // set once, when State is ended
	Lineage   Lineage   `json:"lineage,omitzero"`    // what it came from, or the snapshot last taken of it
	Standby   Standby   `json:"standby,omitempty"`   // as the node says now

	PublicPorts []int `json:"public_ports,omitempty"` // sorted; what the gateway shows to anyone
	// NetworkGeneration counts the policies of Spec.Network: 1 after creation.
	NetworkGeneration int64 `json:"network_generation,omitempty"`
	// Origin is what its present episode began with.
	Origin Origin `json:"origin,omitzero"`
	// Unclaimed is a child of a fork with an idempotency key that was not answered
	// yet: nobody knows its id, and it goes if nobody asks for it.
	Unclaimed bool `json:"unclaimed,omitempty"`
}

// Origin is what an episode of a sandbox began with, beside the image that it has. The
// zero value is the image alone.
type Origin struct {
	Snapshot string       `json:"snapshot,omitempty"` // id
	Kind     SnapshotKind `json:"kind,omitempty"`     // of Snapshot
	Fork     string       `json:"fork,omitempty"`     // id of the running sandbox that it is a copy of: nothing is kept of that
}

// Stats is what a sandbox uses now, seen from the host: code inside cannot
// falsify it.
type Stats struct {
	CPUTime    time.Duration `json:"cpu_time"`
	Memory     int64         `json:"memory"`      // bytes that cannot be reclaimed: anonymous and shared memory of the kernel process
	MemoryPeak int64         `json:"memory_peak"` // 0 where the host does not count it
	DiskUsed   int64         `json:"disk_used"`   // bytes allocated to the writable layer
	Processes  int64         `json:"processes"`
	// Bytes that left it and came to it by its network, by its present kernel.
	EgressSent     int64 `json:"egress_sent,omitempty"`
	EgressReceived int64 `json:"egress_received,omitempty"`
	OOMKills       int64 `json:"oom_kills"` // processes that ended over the memory limit; a snapshot has the number of its sandbox
}
