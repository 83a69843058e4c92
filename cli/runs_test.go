package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// fakeRuns has one active run of two sandboxes and two steps, "grpo-7".
type fakeRuns struct {
	covev1.UnimplementedRunsHandler
}

func (fakeRuns) one() *covev1.Run {
	return &covev1.Run{Id: "r1", Name: "grpo-7", State: "active", Ttl: durationpb.New(5 * time.Minute), Sandboxes: 2, Steps: 2, Output: "head_tail",
		CreatedAt: timestamppb.New(time.Now().Add(-time.Hour)), ExpiresAt: timestamppb.New(time.Now().Add(90*time.Second + 500*time.Millisecond))}
}
func (f fakeRuns) known(ref string) error {
	if ref != "r1" && ref != "grpo-7" {
		return wire.ToConnect(sandbox.NoSuchRun("run", ref))
	}
	return nil
}
func (f fakeRuns) List(context.Context, *connect.Request[covev1.ListRunsRequest]) (*connect.Response[covev1.ListRunsResponse], error) {
	return connect.NewResponse(&covev1.ListRunsResponse{Runs: []*covev1.Run{f.one()}}), nil
}
func (f fakeRuns) Get(_ context.Context, r *connect.Request[covev1.GetRunRequest]) (*connect.Response[covev1.GetRunResponse], error) {
	return connect.NewResponse(&covev1.GetRunResponse{Run: f.one()}), f.known(r.Msg.Run)
}
func (f fakeRuns) Reap(_ context.Context, r *connect.Request[covev1.ReapRunRequest]) (*connect.Response[covev1.ReapRunResponse], error) {
	return connect.NewResponse(&covev1.ReapRunResponse{Run: f.one(), Ids: []string{"aa", "bb"}}), f.known(r.Msg.Run)
}
func (f fakeRuns) Delete(context.Context, *connect.Request[covev1.DeleteRunRequest]) (*connect.Response[covev1.DeleteRunResponse], error) {
	return connect.NewResponse(&covev1.DeleteRunResponse{}), nil
}
func (f fakeRuns) ListSteps(_ context.Context, r *connect.Request[covev1.ListStepsRequest]) (*connect.Response[covev1.ListStepsResponse], error) {
	step := &covev1.Step{Id: "r1-1", Seq: 1, Run: "r1", Sandbox: "aa", ExecId: "x", Command: "ls", Duration: durationpb.New(time.Second), CpuTime: durationpb.New(10 * time.Millisecond),
		End: &covev1.End{Cause: "exited"}, Stdout: &covev1.StepOutput{Head: []byte("a\n"), Dropped: 3, Tail: []byte{0xff}}}
	if r.Msg.Cursor == "" {
		return connect.NewResponse(&covev1.ListStepsResponse{Steps: []*covev1.Step{step}, NextCursor: "r1.5", More: true}), f.known(r.Msg.Run)
	}
	return connect.NewResponse(&covev1.ListStepsResponse{NextCursor: "r1.9", Steps: []*covev1.Step{{Id: "r1-2", Seq: 2, Sandbox: "bb", Args: []string{"a", "b"}, End: &covev1.End{Cause: "oom"}}}}), nil
}
func (f fakeRuns) FollowSteps(_ context.Context, _ *connect.Request[covev1.FollowStepsRequest], s *connect.ServerStream[covev1.FollowStepsEvent]) error {
	_ = s.Send(&covev1.FollowStepsEvent{Cursor: "r1.5"})
	return s.Send(&covev1.FollowStepsEvent{Cursor: "r1.9", Step: &covev1.Step{Id: "r1-2", Seq: 2, Group: "g"}})
}
func (f fakeRuns) Cost(_ context.Context, r *connect.Request[covev1.CostRequest]) (*connect.Response[covev1.CostResponse], error) {
	if r.Msg.By == "step" || r.Msg.By == "episode" {
		run, box := strings.Repeat("r", 20), strings.Repeat("s", 20)
		resp := &covev1.CostResponse{Total: &covev1.Cost{}}
		for n := range int64(2) {
			c := &covev1.Cost{Run: run, Group: "group-" + box, Episode: "1", Sandbox: box}
			if c.Reset_ = n + 1; r.Msg.By == "step" {
				c.Reset_, c.Step = 0, fmt.Sprintf("%s-%d", run, n+1)
			}
			resp.Costs = append(resp.Costs, c)
		}
		return connect.NewResponse(resp), nil
	}
	c := &covev1.Cost{Run: "r1", Sandboxes: 2, Episodes: 4, Steps: 8, CpuSeconds: 10, MemoryReservedGibSeconds: 20}
	return connect.NewResponse(&covev1.CostResponse{Costs: []*covev1.Cost{c}, Total: c}), nil
}

func (f fakeRuns) Create(_ context.Context, r *connect.Request[covev1.CreateRunRequest]) (*connect.Response[covev1.CreateRunResponse], error) {
	run := f.one()
	run.Name, run.Ttl, run.Keep, run.Labels = r.Msg.Name, r.Msg.Ttl, r.Msg.Keep, r.Msg.Labels
	return connect.NewResponse(&covev1.CreateRunResponse{Run: run}), nil
}
func (f fakeRuns) Heartbeat(_ context.Context, r *connect.Request[covev1.HeartbeatRunRequest]) (*connect.Response[covev1.HeartbeatRunResponse], error) {
	return connect.NewResponse(&covev1.HeartbeatRunResponse{Run: f.one()}), f.known(r.Msg.Run)
}
func (f fakeRuns) Group(_ context.Context, r *connect.Request[covev1.GroupRequest], s *connect.ServerStream[covev1.GroupEvent]) error {
	if err := f.known(r.Msg.Spec.Rollout.Run); err != nil {
		return err
	}
	_ = s.Send(&covev1.GroupEvent{State: "queued", Position: 3})
	ev := &covev1.GroupEvent{State: "done", Count: r.Msg.Count, Results: []*covev1.ForkResult{{Error: &covev1.ErrorDetail{Code: "no_capacity"}, Message: "full"}}}
	for range r.Msg.Count - 1 {
		ev.Results = append(ev.Results, &covev1.ForkResult{Sandbox: &covev1.Sandbox{Id: "aa", Spec: r.Msg.Spec}})
	}
	return s.Send(ev)
}
func (f fakeRuns) SetPlan(_ context.Context, r *connect.Request[covev1.SetPlanRequest]) (*connect.Response[covev1.SetPlanResponse], error) {
	p := &covev1.Plan{Version: 1, State: "staging", Kernels: 8}
	if len(r.Msg.Items) == 0 {
		p = &covev1.Plan{State: "none"}
	}
	for _, it := range r.Msg.Items {
		p.Items = append(p.Items, &covev1.PlanItemStatus{Item: it, State: "staging", Step: "download"})
	}
	return connect.NewResponse(&covev1.SetPlanResponse{Plan: p}), f.known(r.Msg.Run)
}
func (f fakeRuns) GetPlan(_ context.Context, r *connect.Request[covev1.GetPlanRequest]) (*connect.Response[covev1.GetPlanResponse], error) {
	return connect.NewResponse(&covev1.GetPlanResponse{Plan: &covev1.Plan{Version: 1, State: "failed", Items: []*covev1.PlanItemStatus{
		{Item: &covev1.PlanItem{Image: "nosuch", Count: 8}, State: "failed", Error: &covev1.ErrorDetail{Code: "image_not_found"}, Message: "no image nosuch"}}}}), f.known(r.Msg.Run)
}
func (f fakeRuns) PutCheckpoint(_ context.Context, r *connect.Request[covev1.PutCheckpointRequest]) (*connect.Response[covev1.PutCheckpointResponse], error) {
	if v := r.Msg.IfVersion; v != nil && *v != 6 {
		return nil, wire.ToConnect(sandbox.WrongVersion(*v, 6))
	}
	return connect.NewResponse(&covev1.PutCheckpointResponse{Checkpoint: &covev1.Checkpoint{Version: 7, Size: int64(len(r.Msg.Doc))}}), f.known(r.Msg.Run)
}
func (f fakeRuns) GetCheckpoint(_ context.Context, r *connect.Request[covev1.GetCheckpointRequest]) (*connect.Response[covev1.GetCheckpointResponse], error) {
	return connect.NewResponse(&covev1.GetCheckpointResponse{Checkpoint: &covev1.Checkpoint{Version: 6, Size: 3, Doc: []byte("{}\n")}}), f.known(r.Msg.Run)
}
func (f fakeRuns) ListCheckpoints(_ context.Context, r *connect.Request[covev1.ListCheckpointsRequest]) (*connect.Response[covev1.ListCheckpointsResponse], error) {
	return connect.NewResponse(&covev1.ListCheckpointsResponse{Checkpoints: []*covev1.Checkpoint{{Version: 6, Size: 3}}}), f.known(r.Msg.Run)
}

func TestRunsAreMade(t *testing.T) {
	f := newFakeAPI(t)
	file := filepath.Join(t.TempDir(), "plan.json")
	write := func(text string) string {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	f.cove(t, settings{}, "runs", "create", "grpo-7", "--ttl", "10m").want(t, 0, "r1\n")
	if r := f.cove(t, settings{}, "runs", "create", "grpo-8", "--ttl", "10m", "--keep", "--json"); r.code != 0 || !strings.Contains(r.stdout, `"ttl_s": 600`) || !strings.Contains(r.stdout, `"keep": true`) {
		t.Error(r)
	}
	f.cove(t, settings{}, "runs", "heartbeat", "grpo-8").want(t, 1, "", "no run 'grpo-8'")
	f.cove(t, settings{}, "runs", "heartbeat", "grpo-7").want(t, 0, "r1\n")
	f.cove(t, settings{}, "runs", "group", "create", "grpo-7", "--count", "3", "--name", "g").want(t, 0, "aa\naa\n", "one does not stand: full")
	if r := f.cove(t, settings{}, "runs", "group", "create", "grpo-7", "--count", "2", "--name", "g", "--json"); r.code != 0 || !strings.Contains(r.stdout, `"code": "no_capacity"`) || !strings.Contains(r.stdout, `"group": "g"`) {
		t.Error(r)
	}
	f.cove(t, settings{}, "runs", "group", "create", "grpo-7").want(t, 1, "", "count")
	f.cove(t, settings{}, "runs", "group", "crate", "grpo-7").want(t, 2, "", "create")

	if r := f.cove(t, settings{}, "runs", "plan", "grpo-7", write(`[{"image": "base", "count": 8}]`), "--json"); r.code != 0 || !strings.Contains(r.stdout, `"state": "staging"`) || !strings.Contains(r.stdout, `"count": 8`) {
		t.Error(r)
	}
	if r := f.cove(t, settings{}, "runs", "plan", "grpo-7", "--show"); r.code != 1 || !strings.Contains(r.stdout, "no image nosuch") {
		t.Error(r)
	}
	f.cove(t, settings{}, "runs", "plan", "grpo-7", "--cancel").want(t, 0, "no plan\n")
	f.cove(t, settings{}, "runs", "plan", "grpo-7").want(t, 2, "", "--show")
	for text, want := range map[string]string{`[]`: "no items", `{}`: "no plan", `[{"img": "base"}]`: "img"} {
		f.cove(t, settings{}, "runs", "plan", "grpo-7", write(text)).want(t, 2, "", want)
	}

	f.cove(t, settings{}, "runs", "checkpoint", "put", "grpo-7", write("doc"), "--if-version", "6").want(t, 0, "7\n")
	f.cove(t, settings{}, "runs", "checkpoint", "put", "grpo-7", write("doc"), "--if-version", "0").want(t, 1, "", "6")
	f.cove(t, settings{}, "runs", "checkpoint", "get", "grpo-7").want(t, 0, "{}\n")
	if r := f.cove(t, settings{}, "runs", "checkpoint", "get", "grpo-7", "--json"); r.code != 0 || !strings.Contains(r.stdout, `"doc": "{}\n"`) {
		t.Error(r)
	}
	if r := f.cove(t, settings{}, "runs", "checkpoint", "ls", "grpo-7", "--json"); r.code != 0 || !strings.Contains(r.stdout, `"version": 6`) {
		t.Error(r)
	}
}

func TestRuns(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "runs", "ls").want(t, 0, "NAME    ID  STATE   SANDBOXES  STEPS  EXPIRES   AGE\ngrpo-7  r1  active  2          2      in 1m30s  1h\n")
	f.cove(t, settings{}, "runs", "reap", "grpo-7").want(t, 0, "aa\nbb\n")
	f.cove(t, settings{}, "runs", "rm", "grpo-7", "--json").want(t, 0, "[\n  \"grpo-7\"\n]\n")
	f.cove(t, settings{}, "runs", "show", "grpo-8").want(t, 1, "", "no run 'grpo-8'")
	f.cove(t, settings{}, "runs", "rm", "grpo-8").want(t, 1, "", "no run 'grpo-8'")
	if r := f.cove(t, settings{}, "runs", "show", "r1"); r.code != 0 || !strings.Contains(r.stdout, "grpo-7") {
		t.Error(r)
	}
	r := f.cove(t, settings{}, "runs", "steps", "grpo-7", "--json")
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	if r.code != 0 || len(lines) != 2 || !strings.Contains(lines[0], `"head":"a\n"`) || !strings.Contains(lines[0], `"tail_base64":"/w=="`) || !strings.Contains(lines[1], `"cursor":"r1.9"`) {
		t.Error(r)
	}
	if r := f.cove(t, settings{}, "runs", "steps", "grpo-7", "--follow", "--json", "--group", "g"); r.code != 0 || strings.Count(r.stdout, "\n") != 1 {
		t.Error(r)
	}
	if r := f.cove(t, settings{}, "runs", "steps", "grpo-7"); r.code != 0 || !strings.Contains(r.stdout, "exited with 0") || !strings.Contains(r.stdout, "a b") {
		t.Error(r)
	}
}

func TestCost(t *testing.T) {
	f := newFakeAPI(t)
	file := filepath.Join(t.TempDir(), "prices.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r := f.cove(t, settings{}, "cost"); r.code != 0 || !strings.Contains(r.stdout, "total") || strings.Contains(r.stdout, "MONEY") {
		t.Error(r)
	}
	// The end of a name that is too long is what tells a row from the next.
	for by, ends := range map[string][]string{"step": {"r-1 ", "r-2 "}, "episode": {"s / 1 ", "s / 2 "}} {
		r := f.cove(t, settings{}, "cost", "--by", by, "--run", "r1")
		if r.code != 0 || !strings.Contains(r.stdout, ends[0]) || !strings.Contains(r.stdout, ends[1]) {
			t.Error(r)
		}
	}
	write(`{"currency": "USD", "cpu_second": 0.5, "memory_reserved_gib_second": 0.1}`)
	if r := f.cove(t, settings{}, "cost", "--prices", file, "--json"); r.code != 0 || !strings.Contains(r.stdout, `"money": 7,`) || !strings.Contains(r.stdout, `"money_per_million_trajectories": 1750000`) {
		t.Error(r)
	}
	for text, want := range map[string]string{`{"cpu": 1}`: `"cpu"`, `{} {}`: "more than one", ``: "empty", `{"cpu_second": "x"}`: "cpu_second"} {
		write(text)
		f.cove(t, settings{}, "cost", "--prices", file).want(t, 1, "", want)
	}
}
