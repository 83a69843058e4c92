// Package shiptest is the suite that every sink passes.
package shiptest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/parquet-go/parquet-go"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
)

// Target is a sink under test, with what it leads to.
type Target struct {
	Open func(t *testing.T) ship.Sink
	// Held is what has arrived, in order.
	Held func(t *testing.T) []ship.Record
	// Break has what is behind the sink refuse everything, until it is told otherwise.
	Break func(t *testing.T, broken bool)
	// Replaces says that a batch that comes again is there once.
	Replaces bool
}

// Run runs the suite; make returns an empty target each time.
func Run(t *testing.T, make func(t *testing.T) Target) {
	for name, f := range map[string]func(*testing.T, Target){
		"what is delivered is there, in order":     inOrder,
		"another sink goes on where one has ended": reopened,
		"a batch that comes again is the same":     again,
		"what is refused is taken later":           refused,
	} {
		t.Run(name, func(t *testing.T) { f(t, make(t)) })
	}
}

// Batch has n records of a run, the first of number from.
func Batch(run string, from, n int) ship.Batch {
	b := ship.Batch{Run: run, From: int64(from) * 100, To: int64(from+n) * 100}
	reward := 0.5
	for i := range n {
		seq := int64(from + i)
		st := sandbox.Step{ID: fmt.Sprintf("%s-%d", run, seq), Seq: seq, Rollout: sandbox.Rollout{Run: run, Group: "g", Episode: "e"}, Sandbox: "sb", Reset: 1, ExecID: "x",
			Args: []string{"echo", "it's", ""}, StartedAt: time.Unix(1700000000, int64(i)*1000).UTC(), EndedAt: time.Unix(1700000001, 0).UTC(),
			End: &sandbox.End{Cause: sandbox.Exited, ExitCode: i % 3}, Stdout: sandbox.StepOutput{Head: []byte("out \xff\x00\n"), Dropped: 7, Tail: []byte("tail")}}
		r := ship.StepRecord("t1", st)
		if i%5 == 4 {
			r = ship.GradeRecord("t1", sandbox.Grade{ID: fmt.Sprintf("%sg%d", run, seq), Rollout: st.Rollout, Reset: 1, Spec: sandbox.GradeSpec{Sandbox: "sb"}, State: sandbox.Graded,
				FinishedAt: st.EndedAt, Verdict: sandbox.Verdict{Reward: &reward, Rewards: map[string]float64{"style": 1}, Tests: []sandbox.TestResult{{ID: "t", Outcome: "passed"}}}})
		}
		b.Records = append(b.Records, r)
	}
	return b
}

// ParseLines reads records as lines of JSON.
func ParseLines(t *testing.T, b []byte) (out []ship.Record) {
	t.Helper()
	for line := range bytes.Lines(b) {
		var r ship.Record
		if err := json.Unmarshal(line, &r); err != nil || line[len(line)-1] != '\n' {
			t.Fatalf("no line of JSON: %v in %.200q", err, line)
		}
		out = append(out, r)
	}
	return out
}

// parquetRow is what the suite compares of a row.
type parquetRow struct {
	Schema   int32              `parquet:"schema"`
	Kind     string             `parquet:"kind"`
	ID       string             `parquet:"id"`
	Run      string             `parquet:"run"`
	Args     []string           `parquet:"args,list"`
	ExitCode *int32             `parquet:"exit_code,optional"`
	Head     []byte             `parquet:"stdout_head"`
	Dropped  int64              `parquet:"stdout_dropped"`
	Reward   *float64           `parquet:"reward,optional"`
	Rewards  map[string]float64 `parquet:"rewards"`
	EndedAt  time.Time          `parquet:"ended_at,optional,timestamp(microsecond)"`
}

// ParseParquet reads what the suite compares of the records of a file.
func ParseParquet(t *testing.T, b []byte) (out []ship.Record) {
	t.Helper()
	rows, err := parquet.Read[parquetRow](bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		r := ship.Record{Schema: int(row.Schema), Kind: row.Kind, ID: row.ID, Run: row.Run, Args: row.Args, Reward: row.Reward, Rewards: row.Rewards, EndedAt: row.EndedAt.UTC()}
		if row.ExitCode != nil {
			code := int(*row.ExitCode)
			r.ExitCode = &code
		}
		if len(row.Head) > 0 {
			r.Stdout = &ship.Output{Head: row.Head, Dropped: row.Dropped}
		}
		out = append(out, r)
	}
	return out
}

func deliver(t *testing.T, s ship.Sink, b ship.Batch) {
	t.Helper()
	if err := ship.Deliver(t.Context(), s, b); err != nil {
		t.Fatal(err)
	}
}

func closing(t *testing.T, s ship.Sink) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// holds compares what arrived with batches, without repeats where they may be.
func holds(t *testing.T, target Target, exactly bool, want ...ship.Batch) {
	t.Helper()
	var ids []string
	records := map[string]ship.Record{}
	for _, b := range want {
		for _, r := range b.Records {
			ids, records[r.ID] = append(ids, r.ID), r
		}
	}
	var got []string
	for _, r := range target.Held(t) {
		if !exactly && slices.Contains(got, r.ID) {
			continue
		}
		got = append(got, r.ID)
		w := records[r.ID]
		if r.Schema != ship.Schema || r.Kind != w.Kind || r.Run != w.Run || !slices.Equal(r.Args, w.Args) || !r.EndedAt.Equal(w.EndedAt) || (r.ExitCode == nil) != (w.ExitCode == nil) ||
			r.ExitCode != nil && *r.ExitCode != *w.ExitCode || (r.Reward == nil) != (w.Reward == nil) || r.Rewards["style"] != w.Rewards["style"] {
			t.Errorf("%+v, want %+v", r, w)
		}
		if w.Stdout != nil && (r.Stdout == nil || !bytes.Equal(r.Stdout.Head, w.Stdout.Head) || r.Stdout.Dropped != w.Stdout.Dropped) {
			t.Errorf("%s: output %+v, want %+v", r.ID, r.Stdout, w.Stdout)
		}
	}
	if !slices.Equal(got, ids) {
		t.Errorf("%d records are there: %.300q\nwant %d: %.300q", len(got), got, len(ids), ids)
	}
}

func inOrder(t *testing.T, target Target) {
	s := target.Open(t)
	defer closing(t, s)
	one, two, other := Batch("a", 0, 11), Batch("a", 11, 1), Batch("b", 0, 3)
	for _, b := range []ship.Batch{one, two, other} {
		deliver(t, s, b)
	}
	holds(t, target, true, one, two, other)
}

func reopened(t *testing.T, target Target) {
	one, two := Batch("a", 0, 5), Batch("a", 5, 5)
	for _, b := range []ship.Batch{one, two} {
		s := target.Open(t)
		deliver(t, s, b)
		closing(t, s)
	}
	holds(t, target, true, one, two)
}

func again(t *testing.T, target Target) {
	one, two := Batch("a", 0, 5), Batch("a", 5, 5)
	for range 2 {
		s := target.Open(t)
		deliver(t, s, one)
		closing(t, s)
	}
	s := target.Open(t)
	defer closing(t, s)
	deliver(t, s, two)
	holds(t, target, target.Replaces, one, two)
}

func refused(t *testing.T, target Target) {
	s := target.Open(t)
	defer func() { closing(t, s) }()
	one, two := Batch("a", 0, 5), Batch("a", 5, 100) // more than the room at the end of a page
	deliver(t, s, one)
	target.Break(t, true)
	if err := ship.Deliver(t.Context(), s, two); err == nil {
		t.Fatal("it was taken")
	} else if c := sandbox.ClassOf(err); c == sandbox.Internal {
		t.Errorf("the refusal is %v", err)
	}
	target.Break(t, false)
	holds(t, target, false, one)
	closing(t, s)
	s = target.Open(t)
	deliver(t, s, two)
	holds(t, target, false, one, two)
}
