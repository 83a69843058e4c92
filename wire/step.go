package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Step of a run.
func Step(s sandbox.Step) *covev1.Step {
	p := &covev1.Step{Id: s.ID, Seq: s.Seq, Run: s.Run, Group: s.Group, Episode: s.Episode, Sandbox: s.Sandbox, Reset_: s.Reset, ExecId: s.ExecID,
		Command: utf8String(s.Command), Cwd: utf8String(s.Cwd), User: utf8String(s.User), StartedAt: Time(s.StartedAt), EndedAt: Time(s.EndedAt),
		PeakMemory: s.PeakMemory, BytesIn: s.BytesIn, BytesOut: s.BytesOut, Stdout: stepOutput(s.Stdout), Stderr: stepOutput(s.Stderr),
		EgressDenied: s.EgressDenied, ReplayMissed: s.ReplayMissed, EgressSent: s.EgressSent, EgressReceived: s.EgressReceived,
		Env: validUTF8(s.Env), NotKept: s.NotKept}
	if f := s.Files; f != nil {
		p.Files = &covev1.StepFiles{Added: f.Added, Modified: f.Modified, Deleted: f.Deleted, Bytes: f.Bytes, Truncated: f.Truncated, Changes: fileChanges(f.Changes)}
	}
	if e := s.Egress; e != nil {
		p.Egress = &covev1.StepEgress{Requests: e.Requests, Denied: e.Denied, Sent: e.Sent, Received: e.Received, Hosts: validUTF8(e.Hosts)}
	}
	for _, a := range s.Args {
		p.Args = append(p.Args, utf8String(a))
	}
	if s.End != nil {
		p.End, p.Duration, p.CpuTime = End(*s.End), durationpb.New(s.Duration), durationpb.New(s.CPUTime)
	}
	return p
}

func stepOutput(o sandbox.StepOutput) *covev1.StepOutput {
	if len(o.Head) == 0 && len(o.Tail) == 0 && o.Dropped == 0 && o.Digest == "" {
		return nil
	}
	return &covev1.StepOutput{Head: o.Head, Dropped: o.Dropped, Tail: o.Tail, Digest: o.Digest}
}

// Cost of a run, or of what else it is summed by.
func Cost(c sandbox.Cost) *covev1.Cost {
	return &covev1.Cost{Run: c.Run, Group: c.Group, Episode: c.Episode, Sandbox: c.Sandbox, Reset_: c.Reset, Step: c.Step, Sandboxes: c.Sandboxes, Episodes: c.Episodes, Steps: c.Steps,
		CpuSeconds: c.CPU, StepCpuSeconds: c.StepCPU, MemoryGibSeconds: c.Memory, MemoryReservedGibSeconds: c.Reserved, DiskGibSeconds: c.Disk,
		SnapshotGib: c.Snapshots, Seconds: c.Seconds, StepSeconds: c.StepSeconds, IdleSeconds: c.Idle(), StandbySeconds: c.Standby, EgressSent: c.Sent, EgressReceived: c.Received}
}
