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
