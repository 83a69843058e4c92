package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// GradeSpecFrom is what a request asks for.
func GradeSpecFrom(r *covev1.CreateGradeRequest) (g sandbox.GradeSpec, err error) {
	timeout, err := DurationFrom("timeout", r.Timeout)
	if err != nil {
		return g, err
	}
	res, err := ResourcesFrom(r.Resources)
	return sandbox.GradeSpec{Sandbox: r.Sandbox, Tests: r.Tests, TestsPath: r.TestsPath, Command: r.Command, Args: r.Args, Results: sandbox.GradeResults(r.Results),
		Separate: r.Separate, Artifacts: r.Artifacts, Expected: r.Expected, Image: r.Image, Snapshot: r.Snapshot, Resources: res,
		Env: r.Env, Cwd: r.Cwd, Timeout: timeout, Stop: r.Stop, Labels: r.Labels}, err
}

// Grade with all that is known of it.
func Grade(g sandbox.Grade) *covev1.Grade {
	v := g.Verdict
	out := GradeInBrief(g)
	out.Log, out.LogDropped = v.Log, v.LogDropped
	for _, t := range v.Tests {
		out.Tests = append(out.Tests, &covev1.TestResult{Id: t.ID, Outcome: t.Outcome, Duration: durationpb.New(t.Duration), Message: t.Message})
	}
	for _, f := range v.Findings {
		out.Findings = append(out.Findings, &covev1.Finding{Kind: f.Kind, Path: f.Path, Detail: f.Detail, Carried: f.Carried})
	}
	return out
}

// GradeInBrief is for lists: a hundred logs are a long answer.
func GradeInBrief(g sandbox.Grade) *covev1.Grade {
	v, s := g.Verdict, g.Spec
	out := &covev1.Grade{Id: g.ID, Sandbox: s.Sandbox, State: string(g.State), Reward: v.Reward, Rewards: v.Rewards, Reason: v.Reason,
		FindingsDropped: int32(v.FindingsDropped), Digest: v.Digest, ImageId: v.ImageID, Carried: v.Carried, CarriedBytes: v.Bytes,
		Setup: durationpb.New(v.Setup), Paused: durationpb.New(v.Paused), CreatedAt: Time(g.CreatedAt), FinishedAt: Time(g.FinishedAt), Labels: s.Labels,
		Results: string(s.Results), Separate: s.Separate, Command: s.Command, Args: s.Args, Artifacts: s.Artifacts, TestsSnapshot: s.Tests, Timeout: durationpb.New(s.Timeout)}
	if v.Error != nil {
		out.Error = &covev1.GradeError{Code: string(v.Error.Class), Message: v.Error.Msg, Hint: v.Error.Hint}
	}
	if v.End != nil {
		out.Cause, out.ExitCode = string(v.End.Cause), int32(v.End.ExitCode)
	}
	return out
}
