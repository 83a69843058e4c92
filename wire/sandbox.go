package wire

import (
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Time leaves out the zero time, which means "never" or "not yet".
func Time(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// TimeFrom is the zero time where the field is unset.
func TimeFrom(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// Duration leaves out zero, which means "none" in every request.
func Duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// DurationFrom checks what protobuf leaves unchecked, and names the field.
func DurationFrom(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	if err := d.CheckValid(); err != nil {
		return 0, sandbox.InvalidField(field, `not a duration; want seconds like "90s"`)
	}
	return d.AsDuration(), nil
}

var states = map[sandbox.State]covev1.SandboxState{
	sandbox.Creating:   covev1.SandboxState_SANDBOX_STATE_CREATING,
	sandbox.Running:    covev1.SandboxState_SANDBOX_STATE_RUNNING,
	sandbox.Ending:     covev1.SandboxState_SANDBOX_STATE_ENDING,
	sandbox.EndedState: covev1.SandboxState_SANDBOX_STATE_ENDED,
}

// State is UNSPECIFIED for a state the protocol does not know.
func State(s sandbox.State) covev1.SandboxState { return states[s] }

// StateFrom fails on UNSPECIFIED and on numbers this version does not know.
func StateFrom(s covev1.SandboxState) (sandbox.State, error) {
	for d, p := range states {
		if p == s {
			return d, nil
		}
	}
	return "", sandbox.InvalidField("states", "unknown state %d; want creating, running, ending or ended", s)
}

// Resources in protocol units: cores instead of thousandths.
func Resources(r sandbox.Resources) *covev1.Resources {
	return &covev1.Resources{
		Cpu:         float64(r.MilliCPU) / 1000,
		Memory:      r.Memory,
		MemoryLimit: r.MemoryLimit,
		Disk:        r.Disk,
		Pids:        r.Pids,
	}
}

// ResourcesFrom checks only what would be lost in conversion; the domain
// checks the rest.
func ResourcesFrom(r *covev1.Resources) (sandbox.Resources, error) {
	if r == nil {
		return sandbox.Resources{}, nil
	}
	if math.IsNaN(r.Cpu) || math.Abs(r.Cpu) > 1e6 {
		return sandbox.Resources{}, sandbox.InvalidField("spec.resources.cpu", "not a number of cores; want e.g. 0.5 or 2")
	}
	milli := int64(math.Round(r.Cpu * 1000))
	if milli == 0 && r.Cpu != 0 { // 0 would silently mean the default
		return sandbox.Resources{}, sandbox.InvalidField("spec.resources.cpu", "%g cores; want at least 0.001", r.Cpu)
	}
	return sandbox.Resources{
		MilliCPU:    milli,
		Memory:      r.Memory,
		MemoryLimit: r.MemoryLimit,
		Disk:        r.Disk,
		Pids:        r.Pids,
	}, nil
}

func Spec(s sandbox.Spec) *covev1.SandboxSpec {
	return &covev1.SandboxSpec{
		Image:       s.Image,
		Resources:   Resources(s.Resources),
		Env:         s.Env,
		Labels:      s.Labels,
		Timeout:     timeout(s),
		IdleTimeout: Duration(s.IdleTimeout),
		OnIdle:      string(s.OnIdle),
		OnTimeout:   string(s.OnTimeout),
		Ingress:     ingress(s.Ingress),
		Snapshot:    s.Snapshot,
		Template:    s.Template,
		Volumes:     volumeMounts(s.Volumes),
		Network:     Network(s.Network),
		Secrets:     s.Secrets,
		Lease:       s.Lease,
		Reuse:       s.Reuse,
		Rollout:     Rollout(s.Rollout),

		Deterministic: deterministic(s.Deterministic),
	}
}

func deterministic(d *sandbox.Deterministic) *covev1.Deterministic {
	if d == nil {
		return nil
	}
	return &covev1.Deterministic{Clock: Time(d.Clock), Seed: d.Seed}
}

func deterministicFrom(p *covev1.Deterministic) *sandbox.Deterministic {
	if p == nil {
		return nil
	}
	return &sandbox.Deterministic{Clock: TimeFrom(p.Clock), Seed: p.Seed}
}

func ingress(in sandbox.Ingress) *covev1.Ingress {
	if !in.Public && in.Host == "" && len(in.TLS) == 0 && !in.NoWake {
		return nil
	}
	p := &covev1.Ingress{Public: in.Public, Host: in.Host, NoWake: in.NoWake}
	for _, port := range in.TLS {
		p.Tls = append(p.Tls, int32(port))
	}
	return p
}

func ingressFrom(p *covev1.Ingress) sandbox.Ingress {
	in := sandbox.Ingress{Public: p.GetPublic(), Host: p.GetHost(), NoWake: p.GetNoWake()}
	for _, port := range p.GetTls() {
		in.TLS = append(in.TLS, int(port))
	}
	return in
}

// timeout is there with 0 where never was asked for, so that a spec that is
// sent again means the same.
func timeout(s sandbox.Spec) *durationpb.Duration {
	if s.NoTimeout && s.Timeout == 0 {
		return durationpb.New(0)
	}
	return Duration(s.Timeout)
}

// SpecFrom names fields as the request does: "spec.resources.cpu".
func SpecFrom(s *covev1.SandboxSpec) (sandbox.Spec, error) {
	if s == nil {
		return sandbox.Spec{}, nil
	}
	r, err := ResourcesFrom(s.Resources)
	if err != nil {
		return sandbox.Spec{}, err
	}
	timeout, err := DurationFrom("spec.timeout", s.Timeout)
	if err != nil {
		return sandbox.Spec{}, err
	}
	idle, err := DurationFrom("spec.idle_timeout", s.IdleTimeout)
	if err != nil {
		return sandbox.Spec{}, err
	}
	network, err := NetworkFrom(s.Network)
	if err != nil {
		return sandbox.Spec{}, err
	}
	return sandbox.Spec{
		Image:       s.Image,
		Resources:   r,
		Env:         s.Env,
		Labels:      s.Labels,
		Timeout:     timeout,
		NoTimeout:   s.Timeout != nil && timeout == 0,
		IdleTimeout: idle,
		OnIdle:      sandbox.IdleAction(s.OnIdle),
		OnTimeout:   sandbox.IdleAction(s.OnTimeout),
		Ingress:     ingressFrom(s.Ingress),
		Snapshot:    s.Snapshot,
		Template:    s.Template,
		Volumes:     volumeMountsFrom(s.Volumes),
		Network:     network,
		Secrets:     s.Secrets,
		Lease:       s.Lease,
		Reuse:       s.Reuse,
		Rollout:     RolloutFrom(s.Rollout),

		Deterministic: deterministicFrom(s.Deterministic),
	}, nil
}

func End(e sandbox.End) *covev1.End {
	return &covev1.End{
		Cause:    string(e.Cause),
		ExitCode: int32(e.ExitCode),
		Signal:   e.Signal,
		Detail:   utf8String(e.Detail),
		At:       Time(e.At),
	}
}

func EndFrom(e *covev1.End) sandbox.End {
	if e == nil {
		return sandbox.End{}
	}
	return sandbox.End{
		Cause:    sandbox.Cause(e.Cause),
		ExitCode: int(e.ExitCode),
		Signal:   e.Signal,
		Detail:   e.Detail,
		At:       TimeFrom(e.At),
	}
}

func Sandbox(s sandbox.Sandbox) *covev1.Sandbox {
	p := &covev1.Sandbox{
		Id:        s.ID,
		Spec:      Spec(s.Spec),
		ImageId:   s.ImageID,
		Node:      s.Node,
		State:     State(s.State),
		Episode:   s.Episode,
		CreatedAt: Time(s.CreatedAt),
		ExpiresAt: Time(s.ExpiresAt),
		Parent:    s.Lineage.Parent,
		Ancestors: s.Lineage.Ancestors,
		Standby:   string(s.Standby),

		NetworkGeneration: s.NetworkGeneration,
		NotFixed:          s.Spec.Deterministic.NotFixed(),
	}
	for _, port := range s.PublicPorts {
		p.PublicPorts = append(p.PublicPorts, int32(port))
	}
	if s.End != nil {
		p.End = End(*s.End)
	}
	return p
}

// SandboxFrom reads what a server sent.
func SandboxFrom(p *covev1.Sandbox) (sandbox.Sandbox, error) {
	spec, err := SpecFrom(p.GetSpec())
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	state, err := StateFrom(p.GetState())
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	s := sandbox.Sandbox{
		ID:        p.Id,
		Spec:      spec,
		ImageID:   p.ImageId,
		Node:      p.Node,
		State:     state,
		Episode:   p.Episode,
		CreatedAt: TimeFrom(p.CreatedAt),
		ExpiresAt: TimeFrom(p.ExpiresAt),
		Lineage:   sandbox.Lineage{Parent: p.Parent, Ancestors: p.Ancestors},
		Standby:   sandbox.Standby(p.Standby),

		NetworkGeneration: p.NetworkGeneration,
	}
	for _, port := range p.PublicPorts {
		s.PublicPorts = append(s.PublicPorts, int(port))
	}
	if p.End != nil {
		e := EndFrom(p.End)
		s.End = &e
	}
	return s, nil
}

func Stats(s sandbox.Stats) *covev1.StatsResponse {
	return &covev1.StatsResponse{
		CpuTime:    durationpb.New(s.CPUTime),
		Memory:     s.Memory,
		MemoryPeak: s.MemoryPeak,
		DiskUsed:   s.DiskUsed,
		Processes:  s.Processes,
		OomKills:   s.OOMKills,

		EgressSent:     s.EgressSent,
		EgressReceived: s.EgressReceived,
	}
}

func StatsFrom(p *covev1.StatsResponse) sandbox.Stats {
	return sandbox.Stats{
		CPUTime:    p.GetCpuTime().AsDuration(),
		Memory:     p.GetMemory(),
		MemoryPeak: p.GetMemoryPeak(),
		DiskUsed:   p.GetDiskUsed(),
		Processes:  p.GetProcesses(),
		OOMKills:   p.GetOomKills(),

		EgressSent:     p.GetEgressSent(),
		EgressReceived: p.GetEgressReceived(),
	}
}
