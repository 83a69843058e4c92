package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Diff of the files of a sandbox. Bytes of paths that are not UTF-8 are replaced.
func Diff(d sandbox.Diff) *covev1.DiffResponse {
	return &covev1.DiffResponse{Since: d.Since, Changes: fileChanges(d.Changes), Added: d.Added, Modified: d.Modified, Deleted: d.Deleted, Bytes: d.Bytes,
		Omitted: d.Omitted, Truncated: d.Truncated, Took: durationpb.New(d.Took)}
}

func fileChanges(list []sandbox.Change) (out []*covev1.FileChanged) {
	for _, c := range list {
		out = append(out, &covev1.FileChanged{Path: utf8String(c.Path), Kind: string(c.Kind), What: c.What, Before: fileState(c.Before), Now: fileState(c.Now)})
	}
	return out
}

func fileState(s *sandbox.FileState) *covev1.FileState {
	if s == nil {
		return nil
	}
	return &covev1.FileState{Type: string(s.Type), Size: s.Size, Mode: s.Mode, Uid: s.UID, Gid: s.GID, Target: utf8String(s.Target), Hash: s.Hash}
}

// Replayed is what came of a replay.
func Replayed(r sandbox.Replayed) *covev1.Replayed {
	p := &covev1.Replayed{Run: r.Run, Sandbox: r.Sandbox, Reset_: r.Reset, StartedFrom: r.StartedFrom, Steps: r.Steps, Replayed: r.Replayed, Same: r.Same,
		Kept: r.Kept, NotFixed: r.NotFixed, Deterministic: r.Deterministic, Took: durationpb.New(r.Took)}
	for _, d := range r.Differences {
		p.Differences = append(p.Differences, &covev1.StepDifference{Step: d.Step, Id: d.ID, What: d.What, Offset: d.Offset, Expected: d.Expected, Actual: d.Actual,
			Command: utf8String(d.Command), Detail: utf8String(d.Detail)})
	}
	for _, g := range r.Gaps {
		p.Gaps = append(p.Gaps, &covev1.ReplayGap{AfterStep: g.AfterStep, What: g.What, Detail: utf8String(g.Detail)})
	}
	return p
}
