package server

import (
	"math"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

// What sandboxes used is summed once, over looks, ends and restarts.
func TestCost(t *testing.T) {
	dir := t.TempDir()
	w, pass, _ := leased(t, func(c *Config) { c.StepDir = filepath.Join(dir, "steps") })
	run := w.run(&covev1.CreateRunRequest{Name: "r", Ttl: durationpb.New(10 * time.Hour)})
	a, b := w.create(in("r", "g1")), w.create(in("r", "g2"))
	w.step(a.Id, "x", "true")
	w.step(a.Id, "y", "true")
	cpu := func(id string, d time.Duration) {
		w.node.does(func(c *calls) { c.used[id] = sandbox.Stats{CPUTime: d, Memory: 1 << 30, DiskUsed: 2 << 30} })
	}
	cpu(a.Id, 3*time.Second)
	pass(10 * time.Second)
	w.server.lookAtAll(w.all())
	cpu(a.Id, 5*time.Second)
	pass(10 * time.Second)
	w.server.spends.init()
	w.restartSteps() // counts on from the look on record
	w.server.lookAtAll(w.all())
	pass(10 * time.Second)
	w.kill(a.Id)
	w.kill(b.Id)
	cost := func(by string) *covev1.CostResponse {
		t.Helper()
		r, err := w.client.Runs.Cost(t.Context(), connect.NewRequest(&covev1.CostRequest{By: by, Run: "r"}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg
	}
	total := cost("run").Total
	if total.Sandboxes != 2 || total.Steps != 2 || total.Episodes != 1 || !near(total.CpuSeconds, 5) || !near(total.Seconds, 60) {
		t.Errorf("%v", total)
	}
	if c := cost("run").Costs; len(c) != 1 || c[0].Run != run.Id || !near(c[0].CpuSeconds, 5) {
		t.Errorf("%v", c)
	}
	if c := cost("group").Costs; len(c) != 2 || c[0].Group != "g1" || !near(c[0].Seconds, 30) || !near(c[0].MemoryReservedGibSeconds, 15) || !near(c[0].MemoryGibSeconds, 30) {
		t.Errorf("%v", c)
	}
	if c := cost("step").Costs; len(c) != 2 || c[0].Step == "" {
		t.Errorf("%v", c)
	}
	if c := cost("tenant").Costs; len(c) != 1 {
		t.Errorf("%v", c)
	}
	_, err := w.client.Runs.Cost(t.Context(), connect.NewRequest(&covev1.CostRequest{By: "day"}))
	wantError(t, err, sandbox.ErrInvalid, "group")
}

// An episode is a sandbox from its start, or a reset, on, and has what was used in it;
// a step has what it used itself.
func TestCostOfEpisodesAndSteps(t *testing.T) {
	dir := t.TempDir()
	w, pass, _ := leased(t, func(c *Config) { c.StepDir = filepath.Join(dir, "steps") })
	run := w.run(&covev1.CreateRunRequest{Name: "r", Ttl: durationpb.New(10 * time.Hour)})
	a := w.create(in("r", "g"))
	cpu := func(d time.Duration) {
		w.node.does(func(c *calls) { c.used[a.Id] = sandbox.Stats{CPUTime: d, Memory: 1 << 30} })
	}
	w.step(a.Id, "x", "true")
	cpu(3 * time.Second)
	pass(10 * time.Second)
	if _, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: a.Id})); err != nil {
		t.Fatal(err)
	}
	w.step(a.Id, "y", "true")
	cpu(8 * time.Second)
	pass(20 * time.Second)
	w.kill(a.Id)
	cost := func(by string) *covev1.CostResponse {
		t.Helper()
		r, err := w.client.Runs.Cost(t.Context(), connect.NewRequest(&covev1.CostRequest{By: by, Run: "r"}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg
	}
	for i, want := range []struct {
		reset        int64
		cpu, seconds float64
		sandboxes    int64
	}{{2, 5, 20, 0}, {1, 3, 10, 1}} {
		c := cost("episode").Costs
		if len(c) != 2 || c[i].Sandbox != a.Id || c[i].Reset_ != want.reset || c[i].Episodes != 1 || c[i].Steps != 1 || c[i].Sandboxes != want.sandboxes ||
			!near(c[i].CpuSeconds, want.cpu) || !near(c[i].Seconds, want.seconds) {
			t.Fatalf("%v", c)
		}
	}
	if total := cost("episode").Total; total.Episodes != 2 || total.Sandboxes != 1 || !near(total.CpuSeconds, 8) || !near(total.Seconds, 30) {
		t.Errorf("%v", total)
	}

	log, err := w.server.stepsOf(sandbox.DefaultTenant, run.Id)
	if err != nil {
		t.Fatal(err)
	}
	st := sandbox.Step{ID: run.Id + "-9", Seq: 9, Rollout: sandbox.Rollout{Run: run.Id}, Sandbox: a.Id, Reset: 2, End: &sandbox.End{Cause: sandbox.Exited},
		Duration: 4 * time.Second, CPUTime: 2 * time.Second, PeakMemory: 1 << 29, EgressSent: 100, EgressReceived: 200}
	record, err := encodeRecord(stepEnded, st.Seq, keyOf(a.Id, 2, "z"), st)
	if err == nil {
		_, err = log.log.Append(record)
	}
	if err != nil {
		t.Fatal(err)
	}
	steps := cost("step")
	c := steps.Costs[0] // the most expensive
	if len(steps.Costs) != 3 || c.Step != st.ID || !near(c.CpuSeconds, 2) || !near(c.MemoryGibSeconds, 2) || !near(c.MemoryReservedGibSeconds, 2) || !near(c.Seconds, 4) ||
		!near(c.IdleSeconds, 0) || c.EgressSent != 100 || c.EgressReceived != 200 {
		t.Errorf("%v", c)
	}
	if total := steps.Total; total.Steps != 3 || total.CpuSeconds < 2 || total.MemoryGibSeconds < 2 || total.MemoryReservedGibSeconds < 2 || total.EgressSent != 100 {
		t.Errorf("%v", total)
	}
}
