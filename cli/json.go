package cli

import (
	"strings"
	"time"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// The shapes of --json, documented in docs/cli-json.md: flat, snake_case,
// bytes and seconds as numbers, times in RFC 3339. protojson of the API's
// messages was the other choice; it writes every int64 as a string, which
// breaks arithmetic in jq. Fields are added, never changed.

type sandboxJSON struct {
	ID            string             `json:"id"`
	State         string             `json:"state"`
	Image         string             `json:"image"`
	ImageID       string             `json:"image_id,omitempty"`
	Node          string             `json:"node,omitempty"`
	Episode       int64              `json:"episode"`
	CPU           float64            `json:"cpu"`
	Memory        int64              `json:"memory"`
	MemoryLimit   int64              `json:"memory_limit"`
	Disk          int64              `json:"disk"`
	Pids          int64              `json:"pids"`
	Env           map[string]string  `json:"env,omitempty"`
	Labels        map[string]string  `json:"labels,omitempty"`
	TimeoutS      float64            `json:"timeout_s,omitempty"`
	IdleS         float64            `json:"idle_timeout_s,omitempty"`
	OnIdle        string             `json:"on_idle,omitempty"`
	Lease         string             `json:"lease,omitempty"`
	Reuse         string             `json:"reuse,omitempty"`
	Run           string             `json:"run,omitempty"`
	Group         string             `json:"group,omitempty"`
	EpisodeName   string             `json:"episode_name,omitempty"`
	Snapshot      string             `json:"snapshot,omitempty"`
	Template      string             `json:"template,omitempty"`
	Volumes       []mountJSON        `json:"volumes,omitempty"`
	Network       *networkJSON       `json:"network,omitempty"`
	Secrets       []string           `json:"secrets,omitempty"`
	Parent        string             `json:"parent,omitempty"`
	Ancestors     []string           `json:"ancestors,omitempty"`
	Deterministic *deterministicJSON `json:"deterministic,omitempty"`
	NotFixed      []string           `json:"not_fixed,omitempty"`
	Standby       string             `json:"standby,omitempty"`
	CreatedAt     time.Time          `json:"created_at,omitzero"`
	ExpiresAt     time.Time          `json:"expires_at,omitzero"`
	End           *endJSON           `json:"end,omitempty"`

	// Of the call that returned it.
	Existed   bool    `json:"existed,omitempty"`     // create: the idempotency key had been used
	NodeTimeS float64 `json:"node_time_s,omitempty"` // create, reset, restore, resume: what the node itself took
}

func toSandboxJSON(s *covev1.Sandbox) sandboxJSON {
	r := s.GetSpec().GetResources()
	var network *networkJSON
	if n := s.GetSpec().GetNetwork(); n != nil {
		j := toNetworkJSON(n, s.GetNetworkGeneration())
		network = &j
	}
	return sandboxJSON{
		Network: network, Secrets: s.GetSpec().GetSecrets(),
		ID: s.GetId(), State: stateName(s.GetState()), Image: s.GetSpec().GetImage(), ImageID: s.GetImageId(),
		Node: s.GetNode(), Episode: s.GetEpisode(),
		CPU: r.GetCpu(), Memory: r.GetMemory(), MemoryLimit: r.GetMemoryLimit(), Disk: r.GetDisk(), Pids: r.GetPids(),
		Env: s.GetSpec().GetEnv(), Labels: s.GetSpec().GetLabels(),
		TimeoutS: s.GetSpec().GetTimeout().AsDuration().Seconds(), IdleS: s.GetSpec().GetIdleTimeout().AsDuration().Seconds(),
		OnIdle: s.GetSpec().GetOnIdle(), Lease: s.GetSpec().GetLease(), Reuse: s.GetSpec().GetReuse(), Run: s.GetSpec().GetRollout().GetRun(), Group: s.GetSpec().GetRollout().GetGroup(), EpisodeName: s.GetSpec().GetRollout().GetEpisode(), Snapshot: s.GetSpec().GetSnapshot(), Template: s.GetSpec().GetTemplate(), Volumes: toMountsJSON(s.GetSpec().GetVolumes()),
		Deterministic: toDeterministicJSON(s.GetSpec().GetDeterministic()), NotFixed: s.GetNotFixed(),
		Parent: s.GetParent(), Ancestors: s.GetAncestors(), Standby: s.GetStandby(),
		CreatedAt: timeOf(s.GetCreatedAt()), ExpiresAt: timeOf(s.GetExpiresAt()), End: toEndJSON(s.GetEnd()),
	}
}

type deterministicJSON struct {
	Clock time.Time `json:"clock"`
	Seed  int64     `json:"seed"`
}

func toDeterministicJSON(d *covev1.Deterministic) *deterministicJSON {
	if d == nil {
		return nil
	}
	return &deterministicJSON{Clock: timeOf(d.GetClock()), Seed: d.GetSeed()}
}

// stateName is the domain's word: "running".
func stateName(s covev1.SandboxState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "SANDBOX_STATE_"))
}

type endJSON struct {
	Cause    string    `json:"cause"`
	ExitCode *int32    `json:"exit_code,omitempty"` // for exited and signalled
	Signal   string    `json:"signal,omitempty"`
	Detail   string    `json:"detail,omitempty"`
	At       time.Time `json:"at,omitzero"`
}

func toEndJSON(e *covev1.End) *endJSON {
	if e == nil {
		return nil
	}
	j := &endJSON{Cause: e.GetCause(), Signal: e.GetSignal(), Detail: e.GetDetail(), At: timeOf(e.GetAt())}
	switch sandbox.Cause(e.GetCause()) {
	case sandbox.Exited, sandbox.Signalled:
		code := e.GetExitCode()
		j.ExitCode = &code
	}
	return j
}

// endText is a short human form: "exit 3", "signal SIGKILL", "oom".
func endText(e *covev1.End) string {
	switch {
	case e == nil:
		return ""
	case e.GetCause() == string(sandbox.Exited):
		return sandbox.End{Cause: sandbox.Exited, ExitCode: int(e.GetExitCode())}.String()
	case e.GetCause() == string(sandbox.Signalled):
		return sandbox.End{Cause: sandbox.Signalled, Signal: e.GetSignal()}.String()
	case e.GetDetail() != "":
		return e.GetCause() + ": " + e.GetDetail()
	}
	return e.GetCause()
}

type processJSON struct {
	ExecID      string    `json:"exec_id"`
	PID         int32     `json:"pid"`
	Args        []string  `json:"args"`
	User        string    `json:"user,omitempty"`
	Cwd         string    `json:"cwd,omitempty"`
	PTY         bool      `json:"pty"`
	Running     bool      `json:"running"`
	StartedAt   time.Time `json:"started_at,omitzero"`
	End         *endJSON  `json:"end,omitempty"`
	DurationS   float64   `json:"duration_s,omitempty"`
	OutputBytes int64     `json:"output_bytes,omitempty"`
}

func toProcessJSON(p *covev1.Process) processJSON {
	return processJSON{
		ExecID: p.GetExecId(), PID: p.GetPid(), Args: p.GetArgs(), User: p.GetUser(), Cwd: p.GetCwd(), PTY: p.GetPty(),
		Running: p.GetEnd() == nil, StartedAt: timeOf(p.GetStartedAt()), End: toEndJSON(p.GetEnd().GetEnd()),
		DurationS: p.GetEnd().GetDuration().AsDuration().Seconds(), OutputBytes: p.GetEnd().GetOutputBytes(),
	}
}

type taskJSON struct {
	PID     int32  `json:"pid"`
	PPID    int32  `json:"ppid"`
	UID     int32  `json:"uid"`
	State   string `json:"state"`
	Command string `json:"command"`
	ExecID  string `json:"exec_id,omitempty"`
}

type psJSON struct {
	Processes []processJSON `json:"processes"`
	Tasks     []taskJSON    `json:"tasks"`
}

type statsJSON struct {
	ID         string  `json:"id"`
	CPUTimeS   float64 `json:"cpu_time_s"`
	Memory     int64   `json:"memory"`
	MemoryPeak int64   `json:"memory_peak,omitempty"`
	DiskUsed   int64   `json:"disk_used"`
	Processes  int64   `json:"processes"`
	OOMKills   int64   `json:"oom_kills,omitempty"`

	EgressSent     int64 `json:"egress_sent,omitempty"`
	EgressReceived int64 `json:"egress_received,omitempty"`
}

func toStatsJSON(id string, s *covev1.StatsResponse) statsJSON {
	return statsJSON{ID: id, CPUTimeS: s.GetCpuTime().AsDuration().Seconds(), Memory: s.GetMemory(),
		MemoryPeak: s.GetMemoryPeak(), DiskUsed: s.GetDiskUsed(), Processes: s.GetProcesses(), OOMKills: s.GetOomKills(), EgressSent: s.GetEgressSent(), EgressReceived: s.GetEgressReceived()}
}

type imageJSON struct {
	ID         string    `json:"id"`
	Names      []string  `json:"names"`
	Size       int64     `json:"size"`
	Source     string    `json:"source"`
	Platform   string    `json:"platform"`
	CreatedAt  time.Time `json:"created_at,omitzero"`
	Env        []string  `json:"env,omitempty"`
	WorkingDir string    `json:"working_dir,omitempty"`
	User       string    `json:"user,omitempty"`
	Entrypoint []string  `json:"entrypoint,omitempty"`
	Cmd        []string  `json:"cmd,omitempty"`

	Labels       map[string]string `json:"labels,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
}

func toImageJSON(i *covev1.Image) imageJSON {
	j := imageJSON{ID: i.GetId(), Names: i.GetNames(), Size: i.GetSize(), Source: i.GetSource(), Platform: i.GetPlatform(),
		CreatedAt: timeOf(i.GetCreatedAt()), Env: i.GetEnv(), WorkingDir: i.GetWorkingDir(), User: i.GetUser(),
		Entrypoint: i.GetEntrypoint(), Cmd: i.GetCmd(), Labels: i.GetLabels(), ExposedPorts: i.GetExposedPorts()}
	if j.Names == nil {
		j.Names = []string{}
	}
	return j
}

type buildJSON struct {
	ID     string     `json:"id"`
	State  string     `json:"state"`
	Steps  int32      `json:"steps"`
	Cached int32      `json:"cached"`
	Image  *imageJSON `json:"image,omitempty"`
}

func toBuildJSON(b *covev1.ImageBuild) buildJSON {
	j := buildJSON{ID: b.GetId(), State: b.GetState(), Steps: b.GetSteps(), Cached: b.GetCached()}
	if b.GetImage() != nil {
		img := toImageJSON(b.GetImage())
		j.Image = &img
	}
	return j
}

type keyJSON struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	CreatedAt  time.Time `json:"created_at,omitzero"`
	LastUsedAt time.Time `json:"last_used_at,omitzero"`
	Secret     string    `json:"secret,omitempty"` // only from key create and rotate

	Tenant         string    `json:"tenant"`
	Role           string    `json:"role"`
	Scopes         []string  `json:"scopes,omitempty"`
	ExpiresAt      time.Time `json:"expires_at,omitzero"`
	OldSecretUntil time.Time `json:"old_secret_until,omitzero"`
}

func toKeyJSON(k *covev1.Key) keyJSON {
	return keyJSON{ID: k.GetId(), Name: k.GetName(), CreatedAt: timeOf(k.GetCreatedAt()), LastUsedAt: timeOf(k.GetLastUsedAt()),
		Tenant: k.GetTenant(), Role: k.GetRole(), Scopes: k.GetScopes(), ExpiresAt: timeOf(k.GetExpiresAt()), OldSecretUntil: timeOf(k.GetOldSecretUntil())}
}

type capacityJSON struct {
	Sandboxes int64   `json:"sandboxes"`
	CPU       float64 `json:"cpu"`
	Memory    int64   `json:"memory"`
	Disk      int64   `json:"disk"`
}

func toCapacityJSON(c *covev1.Capacity) capacityJSON {
	return capacityJSON{Sandboxes: c.GetSandboxes(), CPU: c.GetCpu(), Memory: c.GetMemory(), Disk: c.GetDisk()}
}

type infoJSON struct {
	URL         string       `json:"url"`
	Version     string       `json:"version"`
	Runtime     string       `json:"runtime"`
	Total       capacityJSON `json:"total"`
	Used        capacityJSON `json:"used"`
	WarmKernels int32        `json:"warm_kernels"`
	WarmTarget  int32        `json:"warm_target"`
	HeldKernels int32        `json:"held_kernels"`
	HeldTarget  int32        `json:"held_target"`
	LostCalls   int64        `json:"lost_calls"`
	Full        string       `json:"full,omitempty"`
	Snapshots   totalsJSON   `json:"snapshots"`
}

type totalsJSON struct {
	Count  int64     `json:"count"`
	Bytes  int64     `json:"bytes"`
	AgeS   int64     `json:"age_s"`
	Oldest time.Time `json:"oldest,omitzero"`
}

func toTotalsJSON(t *covev1.SnapshotTotals) totalsJSON {
	return totalsJSON{t.GetCount(), t.GetBytes(), t.GetAgeSeconds(), timeOf(t.GetOldest())}
}

// each maps a list, never to null.
func each[T, J any](in []T, f func(T) J) []J {
	out := make([]J, 0, len(in))
	for _, v := range in {
		out = append(out, f(v))
	}
	return out
}
