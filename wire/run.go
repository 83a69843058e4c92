package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Run without what only a server knows.
func Run(r sandbox.Run) *covev1.Run {
	p := &covev1.Run{Id: r.ID, Name: r.Name, Labels: r.Labels, Ttl: durationpb.New(r.TTL), Keep: r.Keep, Output: string(r.Output), State: string(r.State),
		CreatedAt: Time(r.CreatedAt), ExpiresAt: Time(r.ExpiresAt), Resumed: int32(r.Resumed)}
	for _, d := range r.Details {
		p.StepDetails = append(p.StepDetails, string(d))
	}
	if r.End != nil {
		p.End = End(*r.End)
	}
	return p
}

// Rollout is left out where a sandbox is part of nothing.
func Rollout(r sandbox.Rollout) *covev1.Rollout {
	if r == (sandbox.Rollout{}) {
		return nil
	}
	return &covev1.Rollout{Run: r.Run, Group: r.Group, Episode: r.Episode}
}

// RolloutFrom reads what a request says.
func RolloutFrom(p *covev1.Rollout) sandbox.Rollout {
	return sandbox.Rollout{Run: p.GetRun(), Group: p.GetGroup(), Episode: p.GetEpisode()}
}

// Checkpoint of a run.
func PlanItem(it sandbox.PlanItem) *covev1.PlanItem {
	return &covev1.PlanItem{Image: it.Image, Template: it.Template, Snapshot: it.Snapshot, Count: int32(it.Count)}
}

// PlanItemFrom is PlanItem's way back.
func PlanItemFrom(it *covev1.PlanItem) sandbox.PlanItem {
	return sandbox.PlanItem{Image: it.GetImage(), Template: it.GetTemplate(), Snapshot: it.GetSnapshot(), Count: int(it.GetCount())}
}

func Checkpoint(c sandbox.Checkpoint) *covev1.Checkpoint {
	return &covev1.Checkpoint{Version: c.Version, Doc: c.Doc, Size: c.Size, CreatedAt: Time(c.CreatedAt)}
}
