package sandbox

import "time"

// Usage is what a sandbox has used, as the host counts.
type Usage struct {
	CPUTime  time.Duration `json:"cpu_time"`
	Memory   int64         `json:"memory"` // bytes when it was looked at
	DiskUsed int64         `json:"disk_used"`
	Sent     int64         `json:"sent,omitempty"` // bytes by its network
	Received int64         `json:"received,omitempty"`
}

// Spent is what a sandbox used between two looks at it. All but Total, SentBy and
// RecvBy can be summed.
type Spent struct {
	Rollout
	Sandbox string    `json:"sandbox"`
	Reset   int64     `json:"reset,omitempty"` // the sandbox's episode number; 0 in records from before it was kept
	Until   time.Time `json:"until"`
	// Total is the processor time of its kernel by then; the next look counts from
	// there.
	Total    time.Duration `json:"total"`
	SentBy   int64         `json:"sent_by,omitempty"`     // the same, bytes
	RecvBy   int64         `json:"received_by,omitempty"` // the same
	CPU      float64       `json:"cpu,omitempty"`         // seconds
	Memory   float64       `json:"memory,omitempty"`      // GiB-seconds used
	Reserved float64       `json:"reserved,omitempty"`    // GiB-seconds
	Disk     float64       `json:"disk,omitempty"`        // GiB-seconds
	Seconds  float64       `json:"seconds,omitempty"`
	Standby  float64       `json:"standby,omitempty"` // of Seconds
	Sent     int64         `json:"sent,omitempty"`    // bytes
	Received int64         `json:"received,omitempty"`
	First    bool          `json:"first,omitempty"` // look at it at all
}

// SpentSince is what a sandbox used from one look to another. A kernel that was
// replaced counts from nothing again.
func SpentSince(sb Sandbox, before Spent, u Usage, now time.Time) Spent {
	const gib = float64(GiB)
	s := Spent{Rollout: sb.Spec.Rollout, Sandbox: sb.ID, Reset: sb.Episode, Until: now, Total: u.CPUTime, First: before.Until.IsZero()}
	from := before.Until
	if s.First {
		from = sb.CreatedAt
	}
	s.Seconds = max(0, now.Sub(from).Seconds())
	if cpu := u.CPUTime - before.Total; cpu >= 0 {
		s.CPU = cpu.Seconds()
	} else {
		s.CPU = u.CPUTime.Seconds()
	}
	s.SentBy, s.Sent = u.Sent, since(u.Sent, before.SentBy)
	s.RecvBy, s.Received = u.Received, since(u.Received, before.RecvBy)
	s.Disk = float64(u.DiskUsed) / gib * s.Seconds
	if sb.Standby != Awake {
		s.Standby = s.Seconds
	}
	if sb.Standby == Cold { // no process, no memory
		s.Total, s.CPU, s.SentBy, s.RecvBy = 0, 0, 0, 0
		return s
	}
	s.Memory, s.Reserved = float64(u.Memory)/gib*s.Seconds, float64(sb.Spec.Resources.Memory)/gib*s.Seconds
	return s
}

// since is what a counter grew by; one that is less than it was began again.
func since(now, before int64) int64 {
	if now < before {
		return now
	}
	return now - before
}

// Cost is what was used, summed over a run, a group, an episode, a sandbox or a
// tenant.
type Cost struct {
	Tenant string
	Rollout
	Sandbox     string
	Reset       int64 // of an episode: which of the sandbox's
	Step        string
	Sandboxes   int64
	Episodes    int64 // (sandbox, reset) with at least one step
	Steps       int64
	CPU         float64 // seconds of whole sandboxes
	StepCPU     float64
	Memory      float64 // GiB-seconds
	Reserved    float64
	Disk        float64
	Snapshots   float64 // GiB stored now
	Seconds     float64
	StepSeconds float64
	Standby     float64
	Sent        int64 // bytes of networks
	Received    int64
}

// Idle is the time sandboxes were awake without a step, as far as steps did not
// overlap.
func (c Cost) Idle() float64 { return max(0, c.Seconds-c.Standby-c.StepSeconds) }

// AddSpent adds what a sandbox used.
func (c *Cost) AddSpent(s Spent) {
	if s.First {
		c.Sandboxes++
	}
	c.CPU += s.CPU
	c.Memory += s.Memory
	c.Reserved += s.Reserved
	c.Disk += s.Disk
	c.Seconds += s.Seconds
	c.Standby += s.Standby
	c.Sent += s.Sent
	c.Received += s.Received
}

// AddStep adds a step.
func (c *Cost) AddStep(st Step) {
	c.Steps++
	c.StepCPU += st.CPUTime.Seconds()
	c.StepSeconds += st.Duration.Seconds()
}

// AddStepUse adds what a step used by itself, where steps are what is summed; else it
// is in what its sandbox used. Its memory is its peak for as long as it ran, which is
// the most it can have used.
func (c *Cost) AddStepUse(st Step) {
	c.CPU += st.CPUTime.Seconds()
	c.Memory += float64(st.PeakMemory) / float64(GiB) * st.Duration.Seconds()
	c.Seconds += st.Duration.Seconds()
	c.Sent += st.EgressSent
	c.Received += st.EgressReceived
}
