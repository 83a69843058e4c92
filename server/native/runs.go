package native

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type runs struct{ *server.Server }

func (s runs) Create(ctx context.Context, r *connect.Request[covev1.CreateRunRequest]) (*connect.Response[covev1.CreateRunResponse], error) {
	m := r.Msg
	ttl, err := wire.DurationFrom("ttl", m.Ttl)
	if err != nil {
		return nil, err
	}
	run, existed, err := s.CreateRun(ctx, server.RunRequest{Name: m.Name, Labels: m.Labels, TTL: ttl, Keep: m.Keep, Output: sandbox.OutputRule(m.Output),
		Resume: m.Resume, Key: m.IdempotencyKey, Steps: stepDetails(m.StepDetails)})
	return answer(&covev1.CreateRunResponse{Run: protoRun(run), Existed: existed}, err)
}

func stepDetails(names []string) (out []sandbox.StepDetail) {
	for _, n := range names {
		out = append(out, sandbox.StepDetail(n))
	}
	return out
}

func (s runs) Get(ctx context.Context, r *connect.Request[covev1.GetRunRequest]) (*connect.Response[covev1.GetRunResponse], error) {
	run, err := s.GetRun(ctx, r.Msg.Run)
	return answer(&covev1.GetRunResponse{Run: protoRun(run)}, err)
}

func (s runs) List(ctx context.Context, r *connect.Request[covev1.ListRunsRequest]) (*connect.Response[covev1.ListRunsResponse], error) {
	list, err := s.ListRuns(ctx, r.Msg.Ended, r.Msg.Labels)
	return answer(&covev1.ListRunsResponse{Runs: each(list, protoRun)}, err)
}

func (s runs) Heartbeat(ctx context.Context, r *connect.Request[covev1.HeartbeatRunRequest]) (*connect.Response[covev1.HeartbeatRunResponse], error) {
	run, err := s.RenewRun(ctx, r.Msg.Run)
	return answer(&covev1.HeartbeatRunResponse{Run: protoRun(run)}, err)
}

func (s runs) End(ctx context.Context, r *connect.Request[covev1.EndRunRequest]) (*connect.Response[covev1.EndRunResponse], error) {
	run, ids, err := s.EndRun(ctx, r.Msg.Run, r.Msg.Detail)
	return answer(&covev1.EndRunResponse{Run: protoRun(run), Ids: ids}, err)
}

func (s runs) Reap(ctx context.Context, r *connect.Request[covev1.ReapRunRequest]) (*connect.Response[covev1.ReapRunResponse], error) {
	run, ids, err := s.ReapRun(ctx, r.Msg.Run)
	return answer(&covev1.ReapRunResponse{Run: protoRun(run), Ids: ids}, err)
}

func (s runs) Delete(ctx context.Context, r *connect.Request[covev1.DeleteRunRequest]) (*connect.Response[covev1.DeleteRunResponse], error) {
	return answer(&covev1.DeleteRunResponse{}, s.DeleteRun(ctx, r.Msg.Run))
}

func (s runs) Group(ctx context.Context, r *connect.Request[covev1.GroupRequest], out *connect.ServerStream[covev1.GroupEvent]) error {
	ev, err := group(ctx, s.Server, r.Msg, func(ev *covev1.GroupEvent) {
		_ = out.Send(ev) // ctx says so when the client left
	})
	if err != nil {
		return err
	}
	return out.Send(ev)
}

// group makes one and returns its last event.
func group(ctx context.Context, s *server.Server, m *covev1.GroupRequest, send func(*covev1.GroupEvent)) (*covev1.GroupEvent, error) {
	spec, err := wire.SpecFrom(m.Spec)
	if err != nil {
		return nil, err
	}
	wait, err := wire.DurationFrom("max_wait", m.MaxWait)
	if err != nil {
		return nil, err
	}
	req := server.GroupRequest{Spec: spec, Sandbox: m.Sandbox, Count: int(m.Count), AtLeast: int(m.AtLeast), Key: m.IdempotencyKey, Wait: wait}
	made, err := s.CreateGroup(ctx, req, func(p server.GroupProgress) {
		send(&covev1.GroupEvent{State: p.State, Position: int32(p.Position), Ready: int32(p.Ready), Count: m.Count, RetryAfter: wire.Duration(p.RetryAfter)})
	})
	if err != nil {
		return nil, err
	}
	last := &covev1.GroupEvent{State: "done", Count: m.Count, Existed: made.Existed, Results: each(made.Children, forkResult)}
	for _, c := range made.Children {
		if c.Err == nil {
			last.Ready++
		}
	}
	return last, nil
}

func forkResult(c server.Child) *covev1.ForkResult {
	if c.Err != nil {
		detail, msg := wire.ErrorDetail(c.Err)
		return &covev1.ForkResult{Error: detail, Message: msg}
	}
	return &covev1.ForkResult{Sandbox: wire.Sandbox(c.Sandbox)}
}

// postGroup is POST /v1/groups: Runs/Group for who speaks neither streams nor
// protos. Each event is a line of JSON; a group that fails after the first one
// ends with a line that has the error, as an answer would have it.
func (d *dialect) postGroup(w http.ResponseWriter, r *http.Request) error {
	var m covev1.GroupRequest
	if err := readMessage(w, r, &m); err != nil {
		return err
	}
	lines := jsonLines{w: w, r: r}
	last, err := group(r.Context(), d.server, &m, func(ev *covev1.GroupEvent) { lines.write(ev) })
	if err != nil {
		return lines.fail(err)
	}
	lines.write(last)
	return nil
}

func (s runs) SetPlan(ctx context.Context, r *connect.Request[covev1.SetPlanRequest]) (*connect.Response[covev1.SetPlanResponse], error) {
	p, err := s.Server.SetPlan(ctx, r.Msg.Run, each(r.Msg.Items, wire.PlanItemFrom))
	return answer(&covev1.SetPlanResponse{Plan: protoPlan(p)}, err)
}

func (s runs) GetPlan(ctx context.Context, r *connect.Request[covev1.GetPlanRequest]) (*connect.Response[covev1.GetPlanResponse], error) {
	wait, err := wire.DurationFrom("wait", r.Msg.Wait)
	if err != nil {
		return nil, err
	}
	p, err := s.Server.GetPlan(ctx, r.Msg.Run, wait)
	return answer(&covev1.GetPlanResponse{Plan: protoPlan(p)}, err)
}

func protoPlan(p server.PlanStatus) *covev1.Plan {
	out := &covev1.Plan{Version: p.Version, State: string(p.State), Kernels: int32(p.Kernels), KernelsAim: int32(p.KernelsAim), KernelsReady: int32(p.KernelsReady),
		CreatedAt: wire.Time(p.CreatedAt)}
	for _, it := range p.Items {
		item := &covev1.PlanItemStatus{Item: wire.PlanItem(it.PlanItem), State: string(it.State)}
		if it.State == server.PlanStaging {
			item.Step, item.Done, item.Total = it.Progress.Step, it.Progress.Done, it.Progress.Total
		}
		if it.Err != nil {
			item.Error, item.Message = wire.ErrorDetail(it.Err)
		}
		out.Items = append(out.Items, item)
	}
	return out
}

func (s runs) PutCheckpoint(ctx context.Context, r *connect.Request[covev1.PutCheckpointRequest]) (*connect.Response[covev1.PutCheckpointResponse], error) {
	c, err := s.Server.PutCheckpoint(ctx, r.Msg.Run, r.Msg.Doc, r.Msg.IfVersion)
	c.Doc = nil // the caller has it
	return answer(&covev1.PutCheckpointResponse{Checkpoint: wire.Checkpoint(c)}, err)
}

func (s runs) GetCheckpoint(ctx context.Context, r *connect.Request[covev1.GetCheckpointRequest]) (*connect.Response[covev1.GetCheckpointResponse], error) {
	c, err := s.Server.GetCheckpoint(ctx, r.Msg.Run, r.Msg.Version)
	return answer(&covev1.GetCheckpointResponse{Checkpoint: wire.Checkpoint(c)}, err)
}

func (s runs) ListCheckpoints(ctx context.Context, r *connect.Request[covev1.ListCheckpointsRequest]) (*connect.Response[covev1.ListCheckpointsResponse], error) {
	list, err := s.Server.ListCheckpoints(ctx, r.Msg.Run)
	return answer(&covev1.ListCheckpointsResponse{Checkpoints: each(list, wire.Checkpoint)}, err)
}

func (s runs) ListSteps(ctx context.Context, r *connect.Request[covev1.ListStepsRequest]) (*connect.Response[covev1.ListStepsResponse], error) {
	m := r.Msg
	page, err := s.Server.ListSteps(ctx, server.StepFilter{Run: m.Run, Cursor: m.Cursor, PageSize: int(m.PageSize), Sandbox: m.Sandbox, Group: m.Group, Episode: m.Episode, Running: m.Running})
	return answer(&covev1.ListStepsResponse{Steps: each(page.Steps, wire.Step), NextCursor: page.Next, More: page.More, Running: each(page.Running, wire.Step)}, err)
}

func (s runs) FollowSteps(ctx context.Context, r *connect.Request[covev1.FollowStepsRequest], out *connect.ServerStream[covev1.FollowStepsEvent]) error {
	return s.Server.FollowSteps(ctx, r.Msg.Run, r.Msg.Cursor, func(st *sandbox.Step, cursor string) error { return out.Send(stepEvent(st, cursor)) })
}

func stepEvent(st *sandbox.Step, cursor string) *covev1.FollowStepsEvent {
	ev := &covev1.FollowStepsEvent{Cursor: cursor}
	if st != nil {
		ev.Step = wire.Step(*st)
	}
	return ev
}

// getSteps is GET /v1/runs/{id}/steps: each step a line of JSON.
func (d *dialect) getSteps(w http.ResponseWriter, r *http.Request) error {
	q, lines := r.URL.Query(), jsonLines{w: w, r: r}
	if v := q.Get("follow"); v == "true" || v == "1" {
		return lines.fail(d.server.FollowSteps(r.Context(), r.PathValue("id"), q.Get("cursor"), func(st *sandbox.Step, cursor string) error {
			lines.write(stepEvent(st, cursor))
			return nil
		}))
	}
	lines.together = true
	f := server.StepFilter{Run: r.PathValue("id"), Cursor: q.Get("cursor"), PageSize: 1000}
	for {
		page, err := d.server.ListSteps(r.Context(), f)
		if err != nil {
			return lines.fail(err)
		}
		lines.begin()
		for i, st := range page.Steps {
			lines.write(stepEvent(&st, page.After[i]))
		}
		if f.Cursor = page.Next; !page.More {
			return nil
		}
	}
}

func (s runs) Cost(ctx context.Context, r *connect.Request[covev1.CostRequest]) (*connect.Response[covev1.CostResponse], error) {
	costs, total, err := s.Server.Cost(ctx, server.CostRequest{By: r.Msg.By, Run: r.Msg.Run})
	return answer(&covev1.CostResponse{Costs: each(costs, wire.Cost), Total: wire.Cost(total)}, err)
}

func (s runs) Replay(ctx context.Context, r *connect.Request[covev1.ReplayRequest], out *connect.ServerStream[covev1.ReplayEvent]) error {
	ev, err := replay(ctx, s.Server, r.Msg, func(ev *covev1.ReplayEvent) {
		_ = out.Send(ev) // ctx says so when the client left
	})
	if err != nil {
		return err
	}
	return out.Send(ev)
}

// replay runs an episode again and returns its last event.
func replay(ctx context.Context, s *server.Server, m *covev1.ReplayRequest, send func(*covev1.ReplayEvent)) (*covev1.ReplayEvent, error) {
	last := &covev1.ReplayEvent{State: "done"}
	done, err := s.Replay(ctx, server.ReplayRequest{Run: m.Run, Sandbox: m.Sandbox, Episode: m.Episode, Reset: m.Reset_, Keep: m.Keep, All: m.All}, func(p server.ReplayProgress) {
		last.Step, last.Steps, last.Same = p.Step, p.Steps, p.Same
		send(&covev1.ReplayEvent{State: p.State, Step: p.Step, Steps: p.Steps, Same: p.Same})
	})
	last.Result = wire.Replayed(done)
	return last, err
}

// postReplay is POST /v1/replays: Runs/Replay for who speaks neither streams nor protos.
func (d *dialect) postReplay(w http.ResponseWriter, r *http.Request) error {
	var m covev1.ReplayRequest
	if err := readMessage(w, r, &m); err != nil {
		return err
	}
	lines := jsonLines{w: w, r: r}
	last, err := replay(r.Context(), d.server, &m, func(ev *covev1.ReplayEvent) { lines.write(ev) })
	if err != nil {
		return lines.fail(err)
	}
	lines.write(last)
	return nil
}

func protoRun(r server.RunStatus) *covev1.Run {
	p := wire.Run(r.Run)
	p.Sandboxes, p.Steps, p.Checkpoint = int32(r.Sandboxes), r.Steps, r.Checkpoint
	return p
}
