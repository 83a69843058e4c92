package server

import (
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (w *world) setPlan(run string, items ...*covev1.PlanItem) *covev1.Plan {
	w.Helper()
	resp, err := w.client.Runs.SetPlan(w.Context(), connect.NewRequest(&covev1.SetPlanRequest{Run: run, Items: items}))
	if err != nil {
		w.Fatal(err)
	}
	return resp.Msg.Plan
}

// plan waits for a plan that is what ok says, by long polls.
func (w *world) plan(run string, ok func(*covev1.Plan) bool) *covev1.Plan {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		resp, err := w.client.Runs.GetPlan(w.Context(), connect.NewRequest(&covev1.GetPlanRequest{Run: run, Wait: durationpb.New(time.Second)}))
		if err != nil {
			w.Fatal(err)
		}
		if ok(resp.Msg.Plan) {
			return resp.Msg.Plan
		}
		if time.Now().After(end) {
			w.Fatalf("the plan stays %v", resp.Msg.Plan)
		}
	}
}

// A plan is staged, says what is ready and what will not be, is replaced and
// cancelled, ends with its run, and is staged again by a server that starts.
func TestPlan(t *testing.T) {
	w, pass, _ := leased(t)
	run := w.run(&covev1.CreateRunRequest{Name: "r", Ttl: durationpb.New(time.Minute)})
	if p := w.plan("r", func(*covev1.Plan) bool { return true }); p.State != "none" || p.Version != 0 {
		t.Errorf("before any: %v", p)
	}
	sb := w.create(nil)
	memory := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Kind: "memory"}).Id
	files := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Kind: "filesystem"}).Id
	first := w.setPlan("r", &covev1.PlanItem{Image: "base", Count: 3}, &covev1.PlanItem{Snapshot: memory, Count: 2}, &covev1.PlanItem{Snapshot: files, Count: 1})
	if first.Version != 1 || first.State != "staging" || len(first.Items) != 3 {
		t.Errorf("at first: %v", first)
	}
	ready := func(p *covev1.Plan) bool { return p.State == "ready" }
	p := w.plan(run.Id, ready)
	for _, it := range p.Items {
		if it.State != "ready" || it.Error != nil {
			t.Errorf("%v", it)
		}
	}
	if p.Kernels != 4 || p.KernelsReady < p.KernelsAim {
		t.Errorf("kernels: %v", p)
	}
	// What was made of it is not expected any more.
	w.create(in("r", "g"))
	w.plan("r", func(p *covev1.Plan) bool { return p.Kernels == 3 })

	second := w.setPlan("r", &covev1.PlanItem{Image: "base", Count: 1}, &covev1.PlanItem{Snapshot: "nosuch", Count: 1}, &covev1.PlanItem{Template: "nosuch", Count: 1})
	if second.Version != 2 {
		t.Errorf("replaced: %v", second)
	}
	p = w.plan("r", func(p *covev1.Plan) bool { return p.State == "failed" })
	if p.Items[0].State != "ready" || p.Items[1].State != "failed" || p.Items[1].Error.GetCode() != "not_found" || p.Items[2].Error.GetCode() != "not_found" {
		t.Errorf("what cannot be: %v", p.Items)
	}

	// As after a restart: what is on record is staged again.
	w.server.plans.drop(run.Id)
	w.server.stagePlans()
	if p = w.plan("r", func(p *covev1.Plan) bool { return p.State == "failed" }); p.Version != 2 {
		t.Errorf("after a restart: %v", p)
	}

	if p = w.setPlan("r"); p.State != "none" {
		t.Errorf("cancelled: %v", p)
	}
	if p = w.setPlan("r", &covev1.PlanItem{Image: "base", Count: 1}); p.Version != 4 {
		t.Errorf("after a cancelled one: %v", p)
	}
	held := w.server.plans.get(run.Id)
	pass(2 * time.Minute)
	w.reap()
	if got := w.server.plans.get(run.Id); got != nil || held == nil {
		t.Error("a plan outlives its run")
	}
	w.server.plans.work.Wait()
	if rec, err := w.server.store.GetRun(w.own(), "r"); err != nil || rec.Plan != nil || rec.State != sandbox.RunEnded {
		t.Errorf("on record: %+v, %v", rec, err)
	}
	_, err := w.client.Runs.SetPlan(t.Context(), connect.NewRequest(&covev1.SetPlanRequest{Run: "r", Items: []*covev1.PlanItem{{Image: "base", Count: 1}}}))
	wantError(t, err, sandbox.ErrPrecondition)
}

// A plan is bounded by what its tenant may have.
func TestPlanWithinQuota(t *testing.T) {
	w := newWorld(t)
	if _, err := w.client.Tenants.SetQuota(t.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: "default", Quota: &covev1.Quota{Sandboxes: 2}})); err != nil {
		t.Fatal(err)
	}
	w.run(&covev1.CreateRunRequest{Name: "r"})
	w.setPlan("r", &covev1.PlanItem{Image: "base", Count: 50})
	p := w.plan("r", func(p *covev1.Plan) bool { return p.State == "ready" })
	if p.Kernels != 2 {
		t.Errorf("heated to %d kernels for a tenant of 2 sandboxes", p.Kernels)
	}
}
