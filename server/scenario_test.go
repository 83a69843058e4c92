package server

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// scenario is one call of the API and what must come of it.
type scenario struct {
	proc  string // "Sandboxes/Create"
	name  string
	call  func(context.Context, *world) error
	want  *sandbox.Error // nil = it works
	field string         // of an invalid request
	says  string
}

// unary makes a call of one RPC with one message.
func unary[Q, A any](pick func(*world) func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), msg *Q) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		_, err := pick(w)(ctx, connect.NewRequest(msg))
		return err
	}
}

// stream makes a call that reads until the first event or error; with all, to its end.
func stream[Q, A any](pick func(*world) func(context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[A], error), msg *Q) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		s, err := pick(w)(ctx, connect.NewRequest(msg))
		if err != nil {
			return err
		}
		defer s.Close()
		if s.Receive() {
			return nil
		}
		return s.Err()
	}
}

// The sandbox every scenario finds: "liveone", with the running processes "proc",
// "term" on a terminal and "reads" with an open stdin, and the file /etc/passwd. "deadone" was killed for its memory.
const live, dead, none = "liveone", "deadone", "nosuchone"

func scenarioWorld(t *testing.T) *world {
	w := newWorld(t)
	for _, id := range []string{live, dead} {
		sb := sandbox.Sandbox{ID: id, Node: "n1", State: sandbox.Running, Episode: 1, ImageID: "sha256:base",
			Spec: sandbox.Spec{Image: "base", Labels: map[string]string{"run": "7"}}.WithDefaults(sandbox.StandardDefaults()), CreatedAt: time.Now().UTC()}
		if _, _, err := w.store.CreateSandbox(w.all(), sb, storeNoKey); err != nil {
			t.Fatal(err)
		}
		w.place(sb)
	}
	w.node.die(dead, sandbox.OOM)
	w.ended(dead)
	w.addState()
	w.addSecret(&covev1.CreateSecretRequest{Name: "api", Value: secretOfScenarios, Hosts: []string{"api.test"}, Env: "API_KEY"})
	_ = w.start(live, "proc", sleeping)
	for _, spec := range []sandbox.ProcessSpec{{ExecID: "term", Command: sleeping, PTY: &sandbox.TermSize{Rows: 24, Cols: 80}}, {ExecID: "reads", Args: []string{"cat"}, Stdin: true}} {
		for _, err := range w.node.Machine.Start(t.Context(), live, spec, 0) {
			if err != nil {
				t.Fatal(err)
			}
			break // it has begun
		}
	}
	return w
}

func scenarios() []scenario {
	create := func(f func(*covev1.CreateSandboxRequest)) func(context.Context, *world) error {
		m := &covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Resources: &covev1.Resources{}}}
		f(m)
		return unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateSandboxRequest]) (*connect.Response[covev1.CreateSandboxResponse], error) {
			return w.client.Sandboxes.Create
		}, m)
	}
	type sreq = connect.Request[covev1.StartProcessRequest]
	start := func(f func(*covev1.StartProcessRequest)) func(context.Context, *world) error {
		m := &covev1.StartProcessRequest{SandboxId: live, Process: &covev1.ProcessSpec{Command: "true"}}
		f(m)
		return stream(func(w *world) func(context.Context, *sreq) (*connect.ServerStreamForClient[covev1.ProcessEvent], error) {
			return w.client.Processes.Start
		}, m)
	}
	pick := struct {
		get     func(*world) func(context.Context, *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error)
		list    func(*world) func(context.Context, *connect.Request[covev1.ListSandboxesRequest]) (*connect.Response[covev1.ListSandboxesResponse], error)
		timeout func(*world) func(context.Context, *connect.Request[covev1.SetTimeoutRequest]) (*connect.Response[covev1.SetTimeoutResponse], error)
		read    func(*world) func(context.Context, *connect.Request[covev1.ReadFileRequest]) (*connect.Response[covev1.ReadFileResponse], error)
		write   func(*world) func(context.Context, *connect.Request[covev1.WriteFileRequest]) (*connect.Response[covev1.WriteFileResponse], error)
		wait    func(*world) func(context.Context, *connect.Request[covev1.WaitProcessRequest]) (*connect.Response[covev1.WaitProcessResponse], error)
		resize  func(*world) func(context.Context, *connect.Request[covev1.ResizeRequest]) (*connect.Response[covev1.ResizeResponse], error)
		lsFiles func(*world) func(context.Context, *connect.Request[covev1.ListFilesRequest]) (*connect.Response[covev1.ListFilesResponse], error)
		pull    func(*world) func(context.Context, *connect.Request[covev1.PullImageRequest]) (*connect.ServerStreamForClient[covev1.PullImageEvent], error)
	}{
		func(w *world) func(context.Context, *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
			return w.client.Sandboxes.Get
		},
		func(w *world) func(context.Context, *connect.Request[covev1.ListSandboxesRequest]) (*connect.Response[covev1.ListSandboxesResponse], error) {
			return w.client.Sandboxes.List
		},
		func(w *world) func(context.Context, *connect.Request[covev1.SetTimeoutRequest]) (*connect.Response[covev1.SetTimeoutResponse], error) {
			return w.client.Sandboxes.SetTimeout
		},
		func(w *world) func(context.Context, *connect.Request[covev1.ReadFileRequest]) (*connect.Response[covev1.ReadFileResponse], error) {
			return w.client.Files.Read
		},
		func(w *world) func(context.Context, *connect.Request[covev1.WriteFileRequest]) (*connect.Response[covev1.WriteFileResponse], error) {
			return w.client.Files.Write
		},
		func(w *world) func(context.Context, *connect.Request[covev1.WaitProcessRequest]) (*connect.Response[covev1.WaitProcessResponse], error) {
			return w.client.Processes.Wait
		},
		func(w *world) func(context.Context, *connect.Request[covev1.ResizeRequest]) (*connect.Response[covev1.ResizeResponse], error) {
			return w.client.Processes.Resize
		},
		func(w *world) func(context.Context, *connect.Request[covev1.ListFilesRequest]) (*connect.Response[covev1.ListFilesResponse], error) {
			return w.client.Files.List
		},
		func(w *world) func(context.Context, *connect.Request[covev1.PullImageRequest]) (*connect.ServerStreamForClient[covev1.PullImageEvent], error) {
			return w.client.Images.Pull
		},
	}
	invalid, notFound, ended := sandbox.ErrInvalid, sandbox.ErrNotFound, sandbox.ErrEnded
	list := []scenario{
		{"Sandboxes/Create", "all defaults", create(func(m *covev1.CreateSandboxRequest) { m.Spec = nil }), nil, "", ""},
		{"Sandboxes/Create", "full spec", create(func(m *covev1.CreateSandboxRequest) {
			m.Spec = &covev1.SandboxSpec{Image: "base", Resources: &covev1.Resources{Cpu: 0.5, Memory: 1 << 28, MemoryLimit: 1 << 29, Disk: 1 << 30, Pids: 100},
				Env: map[string]string{"A": "b"}, Labels: map[string]string{"run": "9"}, Timeout: durationpb.New(time.Hour), IdleTimeout: durationpb.New(time.Minute)}
		}), nil, "", ""},
		{"Sandboxes/Create", "unknown image", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Image = "bse" }), sandbox.ErrImageNotFound, "",
			"no image 'bse'; did you mean 'base'?"},
		{"Sandboxes/Create", "image", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Image = "a b" }), invalid, "spec.image", "printable"},
		{"Sandboxes/Create", "negative cpu", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Resources.Cpu = -1 }), invalid, "spec.resources.cpu", ""},
		{"Sandboxes/Create", "NaN cpu", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Resources.Cpu = math.NaN() }), invalid, "spec.resources.cpu", ""},
		{"Sandboxes/Create", "memory", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Resources.Memory = 5 }), invalid, "spec.resources.memory", "32MiB"},
		{"Sandboxes/Create", "memory limit", create(func(m *covev1.CreateSandboxRequest) {
			m.Spec.Resources.Memory, m.Spec.Resources.MemoryLimit = 1<<30, 1<<29
		}), invalid, "spec.resources.memory_limit", ""},
		{"Sandboxes/Create", "disk", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Resources.Disk = -1 }), invalid, "spec.resources.disk", ""},
		{"Sandboxes/Create", "pids", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Resources.Pids = 1 << 40 }), invalid, "spec.resources.pids", ""},
		{"Sandboxes/Create", "env", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Env = map[string]string{"A=B": "c"} }), invalid, "spec.env", ""},
		{"Sandboxes/Create", "labels", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Labels = map[string]string{"-": ""} }), invalid, "spec.labels", ""},
		{"Sandboxes/Create", "timeout", create(func(m *covev1.CreateSandboxRequest) { m.Spec.Timeout = durationpb.New(-1) }), invalid, "spec.timeout", ""},
		{"Sandboxes/Create", "idle timeout", create(func(m *covev1.CreateSandboxRequest) {
			m.Spec.IdleTimeout = &durationpb.Duration{Seconds: 1, Nanos: -5}
		}), invalid, "spec.idle_timeout", ""},
		{"Sandboxes/Create", "idempotency key", create(func(m *covev1.CreateSandboxRequest) { m.IdempotencyKey = "a\nb" }), invalid, "idempotency_key", ""},

		{"Sandboxes/Get", "live", unary(pick.get, &covev1.GetSandboxRequest{Id: live}), nil, "", ""},
		{"Sandboxes/Get", "ended", unary(pick.get, &covev1.GetSandboxRequest{Id: dead}), nil, "", ""},
		{"Sandboxes/Get", "unknown", unary(pick.get, &covev1.GetSandboxRequest{Id: none}), notFound, "", "cove ls"},
		{"Sandboxes/Get", "no id", unary(pick.get, &covev1.GetSandboxRequest{}), invalid, "id", ""},
		{"Sandboxes/Get", "path for an id", unary(pick.get, &covev1.GetSandboxRequest{Id: "../x"}), invalid, "id", ""},
		{"Sandboxes/List", "all", unary(pick.list, &covev1.ListSandboxesRequest{}), nil, "", ""},
		{"Sandboxes/List", "page size", unary(pick.list, &covev1.ListSandboxesRequest{PageSize: 1001}), invalid, "page_size", "1000"},
		{"Sandboxes/List", "negative page size", unary(pick.list, &covev1.ListSandboxesRequest{PageSize: -1}), invalid, "page_size", ""},
		{"Sandboxes/List", "page token", unary(pick.list, &covev1.ListSandboxesRequest{PageToken: "x"}), invalid, "page_token", ""},
		{"Sandboxes/List", "states", unary(pick.list, &covev1.ListSandboxesRequest{States: []covev1.SandboxState{77}}), invalid, "states", "running"},
		{"Sandboxes/List", "labels", unary(pick.list, &covev1.ListSandboxesRequest{Labels: map[string]string{" ": ""}}), invalid, "labels", ""},
		{"Sandboxes/SetLease", "none", unary(func(w *world) func(context.Context, *connect.Request[covev1.SetLeaseRequest]) (*connect.Response[covev1.SetLeaseResponse], error) {
			return w.client.Sandboxes.SetLease
		}, &covev1.SetLeaseRequest{Id: live}), nil, "", ""},
		{"Sandboxes/SetLease", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.SetLeaseRequest]) (*connect.Response[covev1.SetLeaseResponse], error) {
			return w.client.Sandboxes.SetLease
		}, &covev1.SetLeaseRequest{Id: live, Lease: "nope"}), notFound, "lease", "make a new one"},
		{"Grades/Create", "no artifacts", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateGradeRequest]) (*connect.Response[covev1.CreateGradeResponse], error) {
			return w.client.Grades.Create
		}, &covev1.CreateGradeRequest{Sandbox: live, Args: []string{"true"}}), sandbox.ErrInvalid, "artifacts", "at least one"},
		{"Grades/Create", "an ended one", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateGradeRequest]) (*connect.Response[covev1.CreateGradeResponse], error) {
			return w.client.Grades.Create
		}, &covev1.CreateGradeRequest{Sandbox: dead, Args: []string{"true"}, Artifacts: []string{"/work"}}), sandbox.ErrEnded, "", "oom"},
		{"Grades/Get", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetGradeRequest]) (*connect.Response[covev1.GetGradeResponse], error) {
			return w.client.Grades.Get
		}, &covev1.GetGradeRequest{Id: "nosuch"}), sandbox.ErrNotFound, "", "cove grades ls"},
		{"Grades/Cancel", "no id", unary(func(w *world) func(context.Context, *connect.Request[covev1.CancelGradeRequest]) (*connect.Response[covev1.CancelGradeResponse], error) {
			return w.client.Grades.Cancel
		}, &covev1.CancelGradeRequest{Id: "NO"}), invalid, "id", ""},
		{"Grades/Wait", "too long", unary(func(w *world) func(context.Context, *connect.Request[covev1.WaitGradeRequest]) (*connect.Response[covev1.WaitGradeResponse], error) {
			return w.client.Grades.Wait
		}, &covev1.WaitGradeRequest{Id: "nosuch", MaxWait: durationpb.New(2 * time.Hour)}), sandbox.ErrInvalid, "max_wait", "1h"},
		{"Grades/List", "a state", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListGradesRequest]) (*connect.Response[covev1.ListGradesResponse], error) {
			return w.client.Grades.List
		}, &covev1.ListGradesRequest{State: "splendid"}), sandbox.ErrInvalid, "state", "grader_failed"},
		{"Leases/Create", "ttl", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateLeaseRequest]) (*connect.Response[covev1.CreateLeaseResponse], error) {
			return w.client.Leases.Create
		}, &covev1.CreateLeaseRequest{Ttl: durationpb.New(1)}), invalid, "ttl", "168h"},
		{"Leases/Heartbeat", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.HeartbeatRequest]) (*connect.Response[covev1.HeartbeatResponse], error) {
			return w.client.Leases.Heartbeat
		}, &covev1.HeartbeatRequest{Id: "nope"}), notFound, "id", ""},
		{"Leases/Get", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetLeaseRequest]) (*connect.Response[covev1.GetLeaseResponse], error) {
			return w.client.Leases.Get
		}, &covev1.GetLeaseRequest{Id: "nope"}), notFound, "id", ""},
		{"Leases/End", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.EndLeaseRequest]) (*connect.Response[covev1.EndLeaseResponse], error) {
			return w.client.Leases.End
		}, &covev1.EndLeaseRequest{Id: "nope"}), nil, "", ""},
		{"Runs/Create", "ttl", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateRunRequest]) (*connect.Response[covev1.CreateRunResponse], error) {
			return w.client.Runs.Create
		}, &covev1.CreateRunRequest{Name: "r", Ttl: durationpb.New(time.Millisecond)}), invalid, "ttl", "1s"},
		{"Runs/Get", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetRunRequest]) (*connect.Response[covev1.GetRunResponse], error) {
			return w.client.Runs.Get
		}, &covev1.GetRunRequest{Run: "nope"}), notFound, "run", "cove runs ls"},
		{"Runs/List", "labels", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListRunsRequest]) (*connect.Response[covev1.ListRunsResponse], error) {
			return w.client.Runs.List
		}, &covev1.ListRunsRequest{Labels: map[string]string{" ": ""}}), invalid, "labels", ""},
		{"Runs/Heartbeat", "none named", unary(func(w *world) func(context.Context, *connect.Request[covev1.HeartbeatRunRequest]) (*connect.Response[covev1.HeartbeatRunResponse], error) {
			return w.client.Runs.Heartbeat
		}, &covev1.HeartbeatRunRequest{}), invalid, "run", ""},
		{"Runs/End", "detail", unary(func(w *world) func(context.Context, *connect.Request[covev1.EndRunRequest]) (*connect.Response[covev1.EndRunResponse], error) {
			return w.client.Runs.End
		}, &covev1.EndRunRequest{Run: "nope", Detail: "a\nb"}), invalid, "detail", ""},
		{"Runs/Reap", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.ReapRunRequest]) (*connect.Response[covev1.ReapRunResponse], error) {
			return w.client.Runs.Reap
		}, &covev1.ReapRunRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/Delete", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.DeleteRunRequest]) (*connect.Response[covev1.DeleteRunResponse], error) {
			return w.client.Runs.Delete
		}, &covev1.DeleteRunRequest{Run: "nope"}), nil, "", ""},
		{"Runs/Group", "count", stream(func(w *world) func(context.Context, *connect.Request[covev1.GroupRequest]) (*connect.ServerStreamForClient[covev1.GroupEvent], error) {
			return w.client.Runs.Group
		}, &covev1.GroupRequest{Count: 5000}), invalid, "count", "1024"},
		{"Runs/Replay", "none named", stream(func(w *world) func(context.Context, *connect.Request[covev1.ReplayRequest]) (*connect.ServerStreamForClient[covev1.ReplayEvent], error) {
			return w.client.Runs.Replay
		}, &covev1.ReplayRequest{}), invalid, "sandbox", ""},
		{"Runs/PutCheckpoint", "empty", unary(func(w *world) func(context.Context, *connect.Request[covev1.PutCheckpointRequest]) (*connect.Response[covev1.PutCheckpointResponse], error) {
			return w.client.Runs.PutCheckpoint
		}, &covev1.PutCheckpointRequest{Run: "nope"}), invalid, "doc", ""},
		{"Runs/SetPlan", "two origins", unary(func(w *world) func(context.Context, *connect.Request[covev1.SetPlanRequest]) (*connect.Response[covev1.SetPlanResponse], error) {
			return w.client.Runs.SetPlan
		}, &covev1.SetPlanRequest{Run: "nope", Items: []*covev1.PlanItem{{Image: "a", Template: "b", Count: 1}}}), invalid, "items[0].image", ""},
		{"Runs/SetPlan", "none of them", unary(func(w *world) func(context.Context, *connect.Request[covev1.SetPlanRequest]) (*connect.Response[covev1.SetPlanResponse], error) {
			return w.client.Runs.SetPlan
		}, &covev1.SetPlanRequest{Run: "nope", Items: []*covev1.PlanItem{{Image: "a"}}}), invalid, "items[0].count", ""},
		{"Runs/SetPlan", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.SetPlanRequest]) (*connect.Response[covev1.SetPlanResponse], error) {
			return w.client.Runs.SetPlan
		}, &covev1.SetPlanRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/GetPlan", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetPlanRequest]) (*connect.Response[covev1.GetPlanResponse], error) {
			return w.client.Runs.GetPlan
		}, &covev1.GetPlanRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/GetCheckpoint", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetCheckpointRequest]) (*connect.Response[covev1.GetCheckpointResponse], error) {
			return w.client.Runs.GetCheckpoint
		}, &covev1.GetCheckpointRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/ListCheckpoints", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListCheckpointsRequest]) (*connect.Response[covev1.ListCheckpointsResponse], error) {
			return w.client.Runs.ListCheckpoints
		}, &covev1.ListCheckpointsRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/ListSteps", "page size", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListStepsRequest]) (*connect.Response[covev1.ListStepsResponse], error) {
			return w.client.Runs.ListSteps
		}, &covev1.ListStepsRequest{Run: "nope", PageSize: 5000}), invalid, "page_size", "1000"},
		{"Runs/FollowSteps", "unknown", stream(func(w *world) func(context.Context, *connect.Request[covev1.FollowStepsRequest]) (*connect.ServerStreamForClient[covev1.FollowStepsEvent], error) {
			return w.client.Runs.FollowSteps
		}, &covev1.FollowStepsRequest{Run: "nope"}), notFound, "run", ""},
		{"Runs/Cost", "by", unary(func(w *world) func(context.Context, *connect.Request[covev1.CostRequest]) (*connect.Response[covev1.CostResponse], error) {
			return w.client.Runs.Cost
		}, &covev1.CostRequest{By: "day"}), invalid, "by", "group"},
		{"Shipments/Create", "kind", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateShipmentRequest]) (*connect.Response[covev1.CreateShipmentResponse], error) {
			return w.client.Shipments.Create
		}, &covev1.CreateShipmentRequest{Name: "s", Sink: &covev1.ShipmentSink{Kind: "post"}}), invalid, "sink.kind", "pull"},
		{"Shipments/Create", "no run", unary(func(w *world) func(context.Context, *connect.Request[covev1.CreateShipmentRequest]) (*connect.Response[covev1.CreateShipmentResponse], error) {
			return w.client.Shipments.Create
		}, &covev1.CreateShipmentRequest{Name: "s", Run: "nope", Sink: &covev1.ShipmentSink{Kind: "pull"}}), notFound, "run", "cove runs ls"},
		{"Shipments/Get", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.GetShipmentRequest]) (*connect.Response[covev1.GetShipmentResponse], error) {
			return w.client.Shipments.Get
		}, &covev1.GetShipmentRequest{Shipment: "nope"}), notFound, "shipment", "cove ship ls"},
		{"Shipments/List", "none", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListShipmentsRequest]) (*connect.Response[covev1.ListShipmentsResponse], error) {
			return w.client.Shipments.List
		}, &covev1.ListShipmentsRequest{}), nil, "", ""},
		{"Shipments/Pause", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.PauseShipmentRequest]) (*connect.Response[covev1.PauseShipmentResponse], error) {
			return w.client.Shipments.Pause
		}, &covev1.PauseShipmentRequest{Shipment: "nope"}), notFound, "shipment", ""},
		{"Shipments/Resume", "none named", unary(func(w *world) func(context.Context, *connect.Request[covev1.ResumeShipmentRequest]) (*connect.Response[covev1.ResumeShipmentResponse], error) {
			return w.client.Shipments.Resume
		}, &covev1.ResumeShipmentRequest{}), invalid, "shipment", ""},
		{"Shipments/Delete", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.DeleteShipmentRequest]) (*connect.Response[covev1.DeleteShipmentResponse], error) {
			return w.client.Shipments.Delete
		}, &covev1.DeleteShipmentRequest{Shipment: "nope"}), nil, "", ""},
		{"Shipments/Ack", "unknown", unary(func(w *world) func(context.Context, *connect.Request[covev1.AckShipmentRequest]) (*connect.Response[covev1.AckShipmentResponse], error) {
			return w.client.Shipments.Ack
		}, &covev1.AckShipmentRequest{Shipment: "nope", Cursor: "x"}), notFound, "shipment", ""},
		{"Leases/List", "none", unary(func(w *world) func(context.Context, *connect.Request[covev1.ListLeasesRequest]) (*connect.Response[covev1.ListLeasesResponse], error) {
			return w.client.Leases.List
		}, &covev1.ListLeasesRequest{}), nil, "", ""},

		{"Sandboxes/SetTimeout", "good", unary(pick.timeout, &covev1.SetTimeoutRequest{Id: live, Timeout: durationpb.New(time.Hour)}), nil, "", ""},
		{"Sandboxes/SetTimeout", "removed", unary(pick.timeout, &covev1.SetTimeoutRequest{Id: live}), nil, "", ""},
		{"Sandboxes/SetTimeout", "bad", unary(pick.timeout, &covev1.SetTimeoutRequest{Id: live, Timeout: durationpb.New(-5)}), invalid, "timeout", ""},
		{"Sandboxes/SetTimeout", "ended", unary(pick.timeout, &covev1.SetTimeoutRequest{Id: dead}), ended, "", "oom"},
		{"Sandboxes/SetTimeout", "unknown", unary(pick.timeout, &covev1.SetTimeoutRequest{Id: none}), notFound, "", ""},

		{"Processes/Start", "command", start(func(m *covev1.StartProcessRequest) {}), nil, "", ""},
		{"Processes/Start", "args", start(func(m *covev1.StartProcessRequest) {
			m.Process = &covev1.ProcessSpec{Args: []string{"echo", "hi"}, Pty: &covev1.TermSize{Rows: 24, Cols: 80}}
		}), nil, "", ""},
		{"Processes/Start", "no process", start(func(m *covev1.StartProcessRequest) { m.Process = nil }), invalid, "process", ""},
		{"Processes/Start", "nothing to run", start(func(m *covev1.StartProcessRequest) { m.Process.Command = "" }), invalid, "process.args", ""},
		{"Processes/Start", "both", start(func(m *covev1.StartProcessRequest) { m.Process.Args = []string{"x"} }), invalid, "process.args", ""},
		{"Processes/Start", "exec id", start(func(m *covev1.StartProcessRequest) { m.Process.ExecId = "a/b" }), invalid, "process.exec_id", ""},
		{"Processes/Start", "cwd", start(func(m *covev1.StartProcessRequest) { m.Process.Cwd = "tmp" }), invalid, "process.cwd", ""},
		{"Processes/Start", "env", start(func(m *covev1.StartProcessRequest) { m.Process.Env = map[string]string{"1": ""} }), invalid, "process.env", ""},
		{"Processes/Start", "user", start(func(m *covev1.StartProcessRequest) { m.Process.User = strings.Repeat("u", 300) }), invalid, "process.user", ""},
		{"Processes/Start", "pty", start(func(m *covev1.StartProcessRequest) { m.Process.Pty = &covev1.TermSize{Rows: 1 << 20, Cols: 1} }), invalid, "process.pty.rows", ""},
		{"Processes/Start", "timeout", start(func(m *covev1.StartProcessRequest) { m.Process.Timeout = durationpb.New(-1) }), invalid, "process.timeout", ""},
		{"Processes/Start", "offset", start(func(m *covev1.StartProcessRequest) { m.Offset = -1 }), invalid, "offset", ""},
		{"Processes/Start", "input", start(func(m *covev1.StartProcessRequest) { m.Process.Input = make([]byte, MaxInput+1) }), sandbox.ErrTooLarge, "process.input", "PUT"},
		{"Processes/Start", "sandbox id", start(func(m *covev1.StartProcessRequest) { m.SandboxId = "A" }), invalid, "sandbox_id", ""},
		{"Processes/Start", "no such program", start(func(m *covev1.StartProcessRequest) { m.Process = &covev1.ProcessSpec{Args: []string{"frobnicate"}} }), notFound, "process.args", "frobnicate"},
		{"Processes/Start", "ended", start(func(m *covev1.StartProcessRequest) { m.SandboxId = dead }), ended, "", "oom: by itself"},
		{"Processes/Start", "unknown", start(func(m *covev1.StartProcessRequest) { m.SandboxId = none }), notFound, "", "no sandbox 'nosuchone'"},
		{"Processes/Wait", "still running", unary(pick.wait, &covev1.WaitProcessRequest{SandboxId: live, ExecId: "proc", MaxWait: durationpb.New(1)}), nil, "", ""},
		{"Processes/Wait", "max_wait", unary(pick.wait, &covev1.WaitProcessRequest{SandboxId: live, ExecId: "proc", MaxWait: durationpb.New(-1)}), invalid, "max_wait", ""},
		{"Processes/Wait", "too long", unary(pick.wait, &covev1.WaitProcessRequest{SandboxId: live, ExecId: "proc", MaxWait: durationpb.New(1000 * time.Hour)}), invalid, "max_wait", "1h"},
		{"Processes/Wait", "no such process", unary(pick.wait, &covev1.WaitProcessRequest{SandboxId: live, ExecId: "x"}), notFound, "", ""},
		{"Processes/Wait", "exec id", unary(pick.wait, &covev1.WaitProcessRequest{SandboxId: live}), invalid, "exec_id", ""},
		{"Processes/Resize", "good", unary(pick.resize, &covev1.ResizeRequest{SandboxId: live, ExecId: "term", Size: &covev1.TermSize{Rows: 1, Cols: 2}}), nil, "", ""},
		{"Processes/Resize", "no size", unary(pick.resize, &covev1.ResizeRequest{SandboxId: live, ExecId: "proc"}), invalid, "size", ""},
		{"Processes/Resize", "no cols", unary(pick.resize, &covev1.ResizeRequest{SandboxId: live, ExecId: "proc", Size: &covev1.TermSize{Rows: 1}}), invalid, "size.cols", ""},

		{"Files/Read", "good", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: "/etc/passwd"}), nil, "", ""},
		{"Files/Read", "no path", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: ""}), invalid, "path", "missing"},
		{"Files/Read", "offset", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: "/etc/passwd", Offset: -1}), invalid, "offset", ""},
		{"Files/Read", "length", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: "/etc/passwd", Length: -1}), invalid, "length", ""},
		{"Files/Read", "too long", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: "/etc/passwd", Length: maxFile + 1}), sandbox.ErrTooLarge, "length", "GET"},
		{"Files/Read", "missing", unary(pick.read, &covev1.ReadFileRequest{SandboxId: live, Path: "/x"}), notFound, "", "/x"},
		{"Files/Read", "ended", unary(pick.read, &covev1.ReadFileRequest{SandboxId: dead, Path: "/x"}), ended, "", "oom"},
		{"Files/Write", "good", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Data: []byte("x")}), nil, "", ""},
		{"Files/Write", "largest", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Data: make([]byte, maxFile)}), nil, "", ""},
		{"Files/Write", "too large", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Data: make([]byte, maxFile+1)}), sandbox.ErrTooLarge, "data", "PUT"},
		{"Files/Write", "far too large", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Data: make([]byte, 25<<20+1)}), sandbox.ErrTooLarge, "", "PUT"},
		{"Files/Write", "mode", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Mode: 0o10000}), invalid, "mode", ""},
		{"Files/Write", "user", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", User: "a\x00"}), invalid, "user", ""},
		{"Files/Write", "append and atomic", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/f", Append: true, Atomic: true}), invalid, "append", ""},
		{"Files/Write", "disk full", unary(pick.write, &covev1.WriteFileRequest{SandboxId: live, Path: "/full/f"}), sandbox.ErrDiskFull, "", ""},
		{"Files/List", "good", unary(pick.lsFiles, &covev1.ListFilesRequest{SandboxId: live, Path: "/etc", Depth: 2}), nil, "", ""},
		{"Files/List", "depth", unary(pick.lsFiles, &covev1.ListFilesRequest{SandboxId: live, Path: "/etc", Depth: -1}), invalid, "depth", ""},
		{"Files/List", "limit", unary(pick.lsFiles, &covev1.ListFilesRequest{SandboxId: live, Path: "/etc", Limit: 10001}), invalid, "limit", "10000"},

		{"Images/Pull", "good", stream(pick.pull, &covev1.PullImageRequest{Reference: "reg/python"}), nil, "", ""},
		{"Images/Pull", "no reference", stream(pick.pull, &covev1.PullImageRequest{}), invalid, "reference", ""},
		{"Images/Pull", "name", stream(pick.pull, &covev1.PullImageRequest{Reference: "reg/x", Name: "a b"}), invalid, "name", ""},
		{"Images/Pull", "platform", stream(pick.pull, &covev1.PullImageRequest{Reference: "reg/x", Platform: "a b"}), invalid, "platform", ""},
	}
	add := func(proc, name string, call func(context.Context, *world) error, want *sandbox.Error, field, says string) {
		list = append(list, scenario{proc, name, call, want, field, says})
	}
	ctxCall := func(f func(ctx context.Context, w *world) error) func(context.Context, *world) error { return f }
	// The many methods that take a sandbox and little else.
	for _, id := range []string{live, dead, none, "B/"} {
		var want *sandbox.Error
		field, says := "", ""
		switch id {
		case dead:
			want, says = ended, "oom"
		case none:
			want = notFound
		case "B/":
			want, field = invalid, "sandbox_id"
		}
		c := func(f func(ctx context.Context, w *world) (any, error)) func(context.Context, *world) error {
			return func(ctx context.Context, w *world) error { _, err := f(ctx, w); return err }
		}
		add("Processes/Attach", id, stream(func(w *world) func(context.Context, *connect.Request[covev1.AttachProcessRequest]) (*connect.ServerStreamForClient[covev1.ProcessEvent], error) {
			return w.client.Processes.Attach
		}, &covev1.AttachProcessRequest{SandboxId: id, ExecId: "proc"}), want, field, says)
		add("Processes/SendInput", id, c(func(ctx context.Context, w *world) (any, error) {
			if id == live {
				s, err := w.client.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: id,
					Process: &covev1.ProcessSpec{ExecId: "in", Command: sleeping, Stdin: true}}))
				if err != nil {
					return nil, err
				}
				defer s.Close()
				s.Receive()
			}
			return w.client.Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: id, ExecId: "in", Data: []byte("x")}))
		}), want, field, says)
		add("Processes/CloseInput", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.CloseInput(ctx, connect.NewRequest(&covev1.CloseInputRequest{SandboxId: id, ExecId: "reads"}))
		}), want, field, says)
		add("Processes/List", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.List(ctx, connect.NewRequest(&covev1.ListProcessesRequest{SandboxId: id}))
		}), want, field, says)
		add("Files/Stat", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Stat(ctx, connect.NewRequest(&covev1.StatFileRequest{SandboxId: id, Path: "/etc/passwd"}))
		}), want, field, says)
		add("Files/Mkdir", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Mkdir(ctx, connect.NewRequest(&covev1.MkdirRequest{SandboxId: id, Path: "/d", Parents: true}))
		}), want, field, says)
		add("Files/Chmod", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Chmod(ctx, connect.NewRequest(&covev1.ChmodRequest{SandboxId: id, Path: "/etc/passwd", Mode: 0o600}))
		}), want, field, says)
		add("Files/Chown", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Chown(ctx, connect.NewRequest(&covev1.ChownRequest{SandboxId: id, Path: "/etc/passwd", User: "user"}))
		}), want, field, says)
		add("Files/SetAttributes", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.SetAttributes(ctx, connect.NewRequest(&covev1.SetAttributesRequest{SandboxId: id, Path: "/etc/passwd", Attributes: map[string]string{"a": "b"}}))
		}), want, field, says)
		add("Files/Move", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: id, From: "/etc/passwd", To: "/p"}))
		}), want, field, says)
		add("Files/Remove", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Remove(ctx, connect.NewRequest(&covev1.RemoveFileRequest{SandboxId: id, Path: "/etc/passwd"}))
		}), want, field, says)
		add("Files/Watch", id, stream(func(w *world) func(context.Context, *connect.Request[covev1.WatchFilesRequest]) (*connect.ServerStreamForClient[covev1.WatchFilesEvent], error) {
			return w.client.Files.Watch
		}, &covev1.WatchFilesRequest{SandboxId: id, Path: "/"}), want, field, says)
		if id == "B/" {
			field = "id"
		}
		add("Sandboxes/Stats", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.Stats(ctx, connect.NewRequest(&covev1.StatsRequest{Id: id}))
		}), want, field, says)
		differs := want
		if want == nil {
			differs = sandbox.ErrUnsupported // the fake driver has no layers
		}
		add("Sandboxes/Diff", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.Diff(ctx, connect.NewRequest(&covev1.DiffRequest{Id: id}))
		}), differs, field, says)
		add("Sandboxes/Reset", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: id}))
		}), want, field, says)
		add("Processes/Signal", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.Signal(ctx, connect.NewRequest(&covev1.SignalRequest{SandboxId: id, ExecId: "proc"}))
		}), want, strings.Replace(field, "id", "sandbox_id", 1), says)
		if id == dead {
			want = nil // killing the dead is fine
		}
		add("Sandboxes/Kill", id, c(func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
		}), want, field, "")
	}
	for _, tc := range []struct {
		proc, name string
		f          func(ctx context.Context, w *world) (any, error)
		want       *sandbox.Error
		field      string
	}{
		{"Sandboxes/KillByLabel", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.KillByLabel(ctx, connect.NewRequest(&covev1.KillByLabelRequest{Labels: map[string]string{"run": "7"}}))
		}, nil, ""},
		{"Sandboxes/KillByLabel", "no label", func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.KillByLabel(ctx, connect.NewRequest(&covev1.KillByLabelRequest{}))
		}, invalid, "labels"},
		{"Sandboxes/KillByLabel", "bad label", func(ctx context.Context, w *world) (any, error) {
			return w.client.Sandboxes.KillByLabel(ctx, connect.NewRequest(&covev1.KillByLabelRequest{Labels: map[string]string{"": ""}}))
		}, invalid, "labels"},
		{"Processes/Attach", "offset", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.ProcessEvent], error) {
			return w.client.Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: live, ExecId: "proc", Offset: -1}))
		}), invalid, "offset"},
		{"Processes/Attach", "exec id", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.ProcessEvent], error) {
			return w.client.Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: live}))
		}), invalid, "exec_id"},
		{"Processes/SendInput", "too much", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: live, ExecId: "proc", Data: make([]byte, MaxInput+1)}))
		}, sandbox.ErrTooLarge, "data"},
		{"Processes/SendInput", "stdin closed", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: live, ExecId: "proc", Data: []byte("x")}))
		}, sandbox.ErrPrecondition, ""},
		{"Processes/SendInput", "exec id", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: live}))
		}, invalid, "exec_id"},
		{"Processes/CloseInput", "exec id", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.CloseInput(ctx, connect.NewRequest(&covev1.CloseInputRequest{SandboxId: live}))
		}, invalid, "exec_id"},
		{"Processes/Signal", "signal", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.Signal(ctx, connect.NewRequest(&covev1.SignalRequest{SandboxId: live, ExecId: "proc", Signal: strings.Repeat("K", 20)}))
		}, invalid, "signal"},
		{"Processes/Resize", "exec id", func(ctx context.Context, w *world) (any, error) {
			return w.client.Processes.Resize(ctx, connect.NewRequest(&covev1.ResizeRequest{SandboxId: live}))
		}, invalid, "exec_id"},
		{"Files/Stat", "path", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Stat(ctx, connect.NewRequest(&covev1.StatFileRequest{SandboxId: live}))
		}, invalid, "path"},
		{"Files/Mkdir", "path", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Mkdir(ctx, connect.NewRequest(&covev1.MkdirRequest{SandboxId: live, Path: "a\x00"}))
		}, invalid, "path"},
		{"Files/Move", "from", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: live, To: "/x"}))
		}, invalid, "from"},
		{"Files/Move", "to", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: live, From: "/x"}))
		}, invalid, "to"},
		{"Files/Remove", "path", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Remove(ctx, connect.NewRequest(&covev1.RemoveFileRequest{SandboxId: live, Path: "/" + strings.Repeat("x", 5000)}))
		}, invalid, "path"},
		{"Files/Chmod", "mode", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Chmod(ctx, connect.NewRequest(&covev1.ChmodRequest{SandboxId: live, Path: "/x", Mode: 1 << 20}))
		}, invalid, "mode"},
		{"Files/SetAttributes", "attributes", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.SetAttributes(ctx, connect.NewRequest(&covev1.SetAttributesRequest{SandboxId: live, Path: "/x", Attributes: map[string]string{"a": strings.Repeat("x", 5000)}}))
		}, invalid, "attributes"},
		{"Files/Chown", "user", func(ctx context.Context, w *world) (any, error) {
			return w.client.Files.Chown(ctx, connect.NewRequest(&covev1.ChownRequest{SandboxId: live, Path: "/x"}))
		}, invalid, "user"},
		{"Files/Watch", "path", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.WatchFilesEvent], error) {
			return w.client.Files.Watch(ctx, connect.NewRequest(&covev1.WatchFilesRequest{SandboxId: live, Path: ""}))
		}), invalid, "path"},
		{"Images/List", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.List(ctx, connect.NewRequest(&covev1.ListImagesRequest{}))
		}, nil, ""},
		{"Images/Get", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Get(ctx, connect.NewRequest(&covev1.GetImageRequest{Name: "base"}))
		}, nil, ""},
		{"Images/Get", "unknown", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Get(ctx, connect.NewRequest(&covev1.GetImageRequest{Name: "zzz"}))
		}, sandbox.ErrImageNotFound, ""},
		{"Images/Get", "no name", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Get(ctx, connect.NewRequest(&covev1.GetImageRequest{}))
		}, invalid, "name"},
		{"Images/Remove", "unknown", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Remove(ctx, connect.NewRequest(&covev1.RemoveImageRequest{Name: "zzz"}))
		}, sandbox.ErrImageNotFound, ""},
		{"Images/Remove", "no name", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Remove(ctx, connect.NewRequest(&covev1.RemoveImageRequest{}))
		}, invalid, "name"},
		{"Images/Build", "no file", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.BuildImageEvent], error) {
			return w.client.Images.Build(ctx, connect.NewRequest(&covev1.BuildImageRequest{Name: "app"}))
		}), invalid, "dockerfile"},
		{"Images/Build", "unknown base", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.BuildImageEvent], error) {
			return w.client.Images.Build(ctx, connect.NewRequest(&covev1.BuildImageRequest{Name: "app", Dockerfile: "FROM zzz"}))
		}), sandbox.ErrImageNotFound, "dockerfile:1"},
		{"Images/StartBuild", "name", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.StartBuild(ctx, connect.NewRequest(&covev1.BuildImageRequest{Name: "a b", Dockerfile: "FROM base"}))
		}, invalid, "name"},
		{"Images/GetBuild", "unknown", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.GetBuild(ctx, connect.NewRequest(&covev1.GetBuildRequest{Id: "zzz"}))
		}, sandbox.ErrNotFound, ""},
		{"Images/FollowBuild", "unknown", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.BuildImageEvent], error) {
			return w.client.Images.FollowBuild(ctx, connect.NewRequest(&covev1.FollowBuildRequest{Id: "zzz"}))
		}), sandbox.ErrNotFound, ""},
		{"Images/CancelBuild", "unknown", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.CancelBuild(ctx, connect.NewRequest(&covev1.CancelBuildRequest{Id: "zzz"}))
		}, sandbox.ErrNotFound, ""},
		{"Images/HasFiles", "key", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.HasFiles(ctx, connect.NewRequest(&covev1.HasFilesRequest{Key: "a b"}))
		}, invalid, "key"},
		{"Images/Push", "unknown", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.PushImageEvent], error) {
			return w.client.Images.Push(ctx, connect.NewRequest(&covev1.PushImageRequest{Name: "zzz", Reference: "reg.test/x"}))
		}), sandbox.ErrImageNotFound, ""},
		{"Images/Prune", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Prune(ctx, connect.NewRequest(&covev1.PruneImagesRequest{}))
		}, nil, ""},
		{"Images/Login", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Login(ctx, connect.NewRequest(&covev1.LoginRegistryRequest{Registry: "ghcr.io", Username: "me", Password: "pw"}))
		}, nil, ""},
		{"Images/Login", "no registry", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Login(ctx, connect.NewRequest(&covev1.LoginRegistryRequest{Username: "me", Password: "pw"}))
		}, invalid, "registry"},
		{"Images/Login", "nobody", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Login(ctx, connect.NewRequest(&covev1.LoginRegistryRequest{Registry: "ghcr.io"}))
		}, invalid, "username"},
		{"Images/Logins", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Logins(ctx, connect.NewRequest(&covev1.ListLoginsRequest{}))
		}, nil, ""},
		{"Images/Logout", "unknown", func(ctx context.Context, w *world) (any, error) {
			return w.client.Images.Logout(ctx, connect.NewRequest(&covev1.LogoutRegistryRequest{Registry: "zzz.test"}))
		}, sandbox.ErrNotFound, "registry"},
		{"Keys/Create", "no name", func(ctx context.Context, w *world) (any, error) {
			return w.client.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{}))
		}, invalid, "name"},
		{"Keys/List", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Keys.List(ctx, connect.NewRequest(&covev1.ListKeysRequest{}))
		}, nil, ""},
		{"Keys/Revoke", "a secret for an id", func(ctx context.Context, w *world) (any, error) {
			return w.client.Keys.Revoke(ctx, connect.NewRequest(&covev1.RevokeKeyRequest{Id: "cove_x"}))
		}, invalid, "id"},
		{"Keys/Rotate", "a secret for an id", func(ctx context.Context, w *world) (any, error) {
			return w.client.Keys.Rotate(ctx, connect.NewRequest(&covev1.RotateKeyRequest{Id: "cove_x"}))
		}, invalid, "id"},
		{"Keys/Create", "a scope that is none", func(ctx context.Context, w *world) (any, error) {
			return w.client.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "x", Scopes: []string{"everything"}}))
		}, invalid, "scopes"},
		{"Tenants/Create", "a name that is none", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.Create(ctx, connect.NewRequest(&covev1.CreateTenantRequest{Name: "A B"}))
		}, invalid, "name"},
		{"Tenants/Create", "a bound below nothing", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.Create(ctx, connect.NewRequest(&covev1.CreateTenantRequest{Name: "a", Quota: &covev1.Quota{Memory: -1}}))
		}, invalid, "quota.memory"},
		{"Tenants/Create", "no number", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.Create(ctx, connect.NewRequest(&covev1.CreateTenantRequest{Name: "a", Quota: &covev1.Quota{CreatesPerSecond: math.NaN()}}))
		}, invalid, "quota.creates_per_second"},
		{"Tenants/Get", "its own", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.Get(ctx, connect.NewRequest(&covev1.GetTenantRequest{}))
		}, nil, ""},
		{"Tenants/List", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.List(ctx, connect.NewRequest(&covev1.ListTenantsRequest{}))
		}, nil, ""},
		{"Tenants/SetQuota", "of nobody", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.SetQuota(ctx, connect.NewRequest(&covev1.SetQuotaRequest{Name: "nobody"}))
		}, sandbox.ErrNotFound, ""},
		{"Tenants/Delete", "the default", func(ctx context.Context, w *world) (any, error) {
			return w.client.Tenants.Delete(ctx, connect.NewRequest(&covev1.DeleteTenantRequest{Name: "default"}))
		}, sandbox.ErrPrecondition, ""},
		{"System/Audit", "good", stream2(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.AuditEntry], error) {
			return w.client.System.Audit(ctx, connect.NewRequest(&covev1.AuditRequest{}))
		}), nil, ""},
		{"System/Info", "good", func(ctx context.Context, w *world) (any, error) {
			return w.client.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
		}, nil, ""},
	} {
		add(tc.proc, tc.name, ctxCall(func(ctx context.Context, w *world) error { _, err := tc.f(ctx, w); return err }), tc.want, tc.field, "")
	}
	return slices.Concat(list, stateScenarios(), networkScenarios(), secretScenarios(), recordingScenarios())
}

func stream2[A any](open func(context.Context, *world) (*connect.ServerStreamForClient[A], error)) func(context.Context, *world) (any, error) {
	return func(ctx context.Context, w *world) (any, error) {
		s, err := open(ctx, w)
		if err != nil {
			return nil, err
		}
		defer s.Close()
		for s.Receive() {
		}
		return nil, s.Err()
	}
}

func TestScenarios(t *testing.T) {
	// One world for those that only look or fail, a new one where something is changed for good.
	shared := scenarioWorld(t)
	shared.addVolume()
	var covered []string
	for _, sc := range scenarios() {
		covered = append(covered, "/cove.v1."+sc.proc)
		t.Run(sc.proc+"/"+sc.name, func(t *testing.T) {
			w := shared
			if sc.want == nil {
				w = scenarioWorld(t)
				if strings.HasPrefix(sc.proc, "Volumes/") || strings.Contains(sc.name, "volume") {
					w.addVolume() // it takes as long as all the rest
				}
			}
			err := sc.call(t.Context(), w)
			if sc.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Class != sc.want.Class {
				t.Fatalf("want %s, got %v", sc.want.Class, err)
			}
			if e.Field != sc.field {
				t.Errorf("field %q, want %q (%v)", e.Field, sc.field, e)
			}
			if !strings.Contains(e.Error()+" "+e.Hint, sc.says) {
				t.Errorf("%q (hint %q) does not say %q", e, e.Hint, sc.says)
			}
			if want := string(nativeProcedures["/cove.v1."+sc.proc]); e.Op != want && sc.name != "far too large" && !strings.HasPrefix(e.Op, "guest") && !strings.HasPrefix(e.Op, "volume.") {
				t.Errorf("op %q, want %q", e.Op, want)
			}
		})
	}
	for _, p := range procedures() {
		if !slices.Contains(covered, p) {
			t.Errorf("no scenario for %s", p)
		}
	}
	if n := len(shared.records()); n != 2 {
		t.Errorf("refused calls left records: %d", n)
	}
	if n := shared.node.liveCount(); n != 1 {
		t.Errorf("refused calls left %d sandboxes, want the one", n)
	}
}
