package e2e

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/parquet-go/parquet-go"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/ship/shiptest"
)

// A server that is killed at any moment has on record every step whose end it had
// told, once, and the end of each that it had not. Nothing ran twice. All of it is
// shipped: lines may come again, with the same id; a file of Parquet replaces itself.
func TestStepsSurviveKills(t *testing.T) {
	out := t.TempDir()
	w := world.New(t, world.Options{Flags: []string{"--ship-dir", out}})
	run, err := w.Client().Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "steps", Ttl: durationpb.New(10 * time.Minute)}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := w.Client().Runs.Reap(ctx, connect.NewRequest(&covev1.ReapRunRequest{Run: "steps"})); err != nil {
			t.Error(err)
		}
	})
	for _, format := range []string{"jsonl", "parquet"} {
		if _, err := w.Client().Shipments.Create(t.Context(), connect.NewRequest(&covev1.CreateShipmentRequest{Name: format, Linger: durationpb.New(5 * time.Millisecond),
			Sink: &covev1.ShipmentSink{Kind: "directory", Format: format, Path: format}})); err != nil {
			t.Fatal(err)
		}
	}
	spec := world.Small()
	spec.Rollout = sandbox.Rollout{Run: run.Msg.Run.Id, Group: "g"}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var mu sync.Mutex
	told := map[string]string{} // exec id → what it printed
	for i := range 2 {
		b := w.Create(t, spec)
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				id := fmt.Sprintf("w%d-%d", i, n)
				p := sandbox.ProcessSpec{ExecID: id, Command: "echo " + id + " >> /tmp/ran; echo " + id}
				for { // as SDKs do: the same again until it is answered
					r, err := b.TryExec(t.Context(), p)
					if err == nil {
						mu.Lock()
						told[id] = string(r.Out)
						mu.Unlock()
						break
					}
					if c := sandbox.ClassOf(err); c != sandbox.Unavailable && c != sandbox.Internal {
						t.Errorf("%s: %v", id, err)
						return
					}
					time.Sleep(20 * time.Millisecond)
				}
			}
			lines := strings.Fields(b.Must(t, "cat /tmp/ran"))
			seen := map[string]bool{}
			for _, l := range lines {
				if seen[l] {
					t.Errorf("%s ran twice", l)
				}
				seen[l] = true
			}
		})
	}
	crashes := times(8, 4)
	for range crashes {
		time.Sleep(time.Duration(rand.Int64N(int64(time.Second))))
		w.Kill(t)
		w.Start(t)
	}
	stop()
	wg.Wait()
	onRecord := map[string]int{}
	seqs := map[int64]bool{}
	for cursor, more := "", true; more; {
		r, err := w.Client().Runs.ListSteps(t.Context(), connect.NewRequest(&covev1.ListStepsRequest{Run: "steps", Cursor: cursor, PageSize: 1000}))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Msg.Steps {
			onRecord[s.ExecId]++
			if seqs[s.Seq] {
				t.Errorf("seq %d twice", s.Seq)
			}
			seqs[s.Seq] = true
			if want, ok := told[s.ExecId]; ok && (s.End.GetCause() != "exited" || want != s.ExecId+"\n") {
				t.Errorf("%s: %v, printed %q", s.ExecId, s.End, want)
			}
		}
		cursor, more = r.Msg.NextCursor, r.Msg.More
	}
	lines, table := shipped(t, w, out)
	for id := range told {
		if onRecord[id] != 1 {
			t.Errorf("%s was told and is on record %d times", id, onRecord[id])
		}
		if lines[id] == 0 || table[id] != 1 {
			t.Errorf("%s was told and is shipped %d times as a line, %d times as a row", id, lines[id], table[id])
		}
	}
	t.Logf("%d steps were told over %d kills, %d are on record", len(told), crashes, len(onRecord))
	if len(told) < crashes {
		t.Errorf("too little happened to mean anything")
	}
}

// shipped is how often each exec has arrived, once nothing waits.
func shipped(t *testing.T, w *world.World, dir string) (lines, table map[string]int) {
	t.Helper()
	for _, name := range []string{"jsonl", "parquet"} {
		for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			r, err := w.Client().Shipments.Get(t.Context(), connect.NewRequest(&covev1.GetShipmentRequest{Shipment: name}))
			if err != nil {
				t.Fatal(err)
			}
			if r.Msg.Shipment.Lag == 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("it does not arrive: %v", r.Msg.Shipment)
			}
		}
	}
	lines, table = map[string]int{}, map[string]int{}
	ids := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasPrefix(e.Name(), ".") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if strings.HasSuffix(path, ".jsonl") {
			for _, r := range shiptest.ParseLines(t, b) {
				if was, seen := ids[r.ExecID]; r.Kind == ship.KindStep && seen && was != r.ID {
					t.Errorf("%s has the ids %s and %s", r.ExecID, was, r.ID)
				}
				ids[r.ExecID] = r.ID
				lines[r.ExecID]++
			}
			return nil
		}
		rows, err := parquet.Read[struct {
			ExecID string `parquet:"exec_id"`
		}](bytes.NewReader(b), int64(len(b)))
		for _, r := range rows {
			table[r.ExecID]++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines, table
}
