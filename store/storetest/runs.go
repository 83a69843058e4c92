package storetest

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// newRun is a record with every field set.
func newRun(id, name string, minutes int) sandbox.Run {
	return sandbox.Run{ID: id, Tenant: sandbox.DefaultTenant, Name: name, Labels: map[string]string{"model": "it's \"x\""}, TTL: 90 * time.Second, Keep: true,
		Output: sandbox.KeepWhole, State: sandbox.RunActive, CreatedAt: at(minutes), Key: "k" + id, Resumed: 2,
		End: &sandbox.End{Cause: sandbox.LeaseExpired, Detail: "before", At: at(minutes - 1)}}
}

func sameRun(t *testing.T, got, want sandbox.Run) {
	t.Helper()
	if !got.CreatedAt.Equal(want.CreatedAt) || (got.End == nil) != (want.End == nil) || got.End != nil && !got.End.At.Equal(want.End.At) {
		t.Errorf("times: %+v, want %+v", got, want)
	}
	got.CreatedAt, got.End, want.End = want.CreatedAt, nil, nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func sameRuns(t *testing.T, st store.Store, ctx context.Context, ended bool, ids ...string) {
	t.Helper()
	list, err := st.ListRuns(ctx, ended)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range list {
		got = append(got, r.ID)
	}
	if !reflect.DeepEqual(got, ids) {
		t.Errorf("runs %v, want %v", got, ids)
	}
}

var runCases = []scenario{
	{"a run is found by id and name, and stays after its end", func(t *testing.T, st store.Store) {
		old, young := newRun("aa", "grpo-7", 1), newRun("bb", "aa", 5) // named like the other's id
		for _, r := range []sandbox.Run{old, young} {
			if err := st.CreateRun(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "the name again", st.CreateRun(t.Context(), newRun("cc", "grpo-7", 9)), sandbox.ErrAlreadyExists)
		fails(t, "no name", st.CreateRun(t.Context(), newRun("cc", "", 9)), sandbox.ErrInvalid)
		fails(t, "no id", st.CreateRun(t.Context(), newRun("../c", "x", 9)), sandbox.ErrInvalid)
		for ref, want := range map[string]sandbox.Run{"aa": old, "grpo-7": old, "bb": young} {
			got, err := st.GetRun(t.Context(), ref)
			if err != nil {
				t.Fatal(ref, err)
			}
			sameRun(t, got, want)
		}
		_, err := st.GetRun(t.Context(), "nosuch")
		fails(t, "no run", err, sandbox.ErrNoRun)
		sameRuns(t, st, t.Context(), false, "bb", "aa")
		got, err := st.UpdateRun(t.Context(), "aa", func(r *sandbox.Run) error {
			r.State, r.End = sandbox.RunEnded, &sandbox.End{Cause: sandbox.KilledByUser, At: at(7)}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		old.State, old.End = sandbox.RunEnded, &sandbox.End{Cause: sandbox.KilledByUser, At: at(7)}
		sameRun(t, got, old)
		sameRuns(t, st, t.Context(), false, "bb")
		sameRuns(t, st, t.Context(), true, "bb", "aa")
		_, err = st.UpdateRun(t.Context(), "aa", func(r *sandbox.Run) error { r.Name = "other"; return nil })
		fails(t, "another name", err, sandbox.ErrInvalid)
		_, err = st.UpdateRun(t.Context(), "aa", func(*sandbox.Run) error { return errors.New("no") })
		if err == nil {
			t.Error("a refused change is an error")
		}
		_, err = st.UpdateRun(t.Context(), "zz", func(*sandbox.Run) error { return nil })
		fails(t, "an update of none", err, sandbox.ErrNoRun)
		for range 2 {
			if err := st.DeleteRun(t.Context(), "aa"); err != nil {
				t.Fatal(err)
			}
		}
		sameRuns(t, st, t.Context(), true, "bb")
	}},
	{"sandboxes are listed by their run", func(t *testing.T, st store.Store) {
		mine, other, none := newSandbox("mine", 1), newSandbox("other", 2), newSandbox("none", 3)
		other.Spec.Rollout.Run, none.Spec.Rollout = "run2", sandbox.Rollout{}
		for _, sb := range []sandbox.Sandbox{mine, other, none} {
			create(t, st, sb)
		}
		end(t, st, "mine", 9)
		for run, want := range map[string]int{"run1": 1, "run2": 1, "nosuch": 0, "": 3} {
			got, _, err := st.ListSandboxes(t.Context(), store.Filter{Run: run, States: sandbox.States, Labels: map[string]string{"run": "r1"}})
			if err != nil || len(got) != want {
				t.Errorf("of %q: %d, want %d (%v)", run, len(got), want, err)
			}
		}
	}},
	{"a checkpoint is put over the version that was seen", func(t *testing.T, st store.Store) {
		if err := st.CreateRun(t.Context(), newRun("aa", "r", 1)); err != nil {
			t.Fatal(err)
		}
		put := func(doc string, over *int64) (sandbox.Checkpoint, error) {
			return st.PutCheckpoint(t.Context(), "aa", sandbox.Checkpoint{Doc: []byte(doc), CreatedAt: at(3)}, over, 2)
		}
		_, err := st.GetCheckpoint(t.Context(), "aa", 0)
		fails(t, "none yet", err, sandbox.ErrNotFound)
		if c, err := put("one\x00", new(int64)); err != nil || c.Version != 1 || c.Size != 4 {
			t.Fatal(c, err)
		}
		_, err = put("x", new(int64))
		fails(t, "an old version", err, sandbox.ErrConflict)
		if c, err := put("two", nil); err != nil || c.Version != 2 {
			t.Fatal(c, err)
		}
		two := int64(2)
		if c, err := put("three", &two); err != nil || c.Version != 3 {
			t.Fatal(c, err)
		}
		for version, want := range map[int64]string{0: "three", 2: "two"} {
			c, err := st.GetCheckpoint(t.Context(), "aa", version)
			if err != nil || !bytes.Equal(c.Doc, []byte(want)) || !c.CreatedAt.Equal(at(3)) {
				t.Error(version, c, err)
			}
		}
		_, err = st.GetCheckpoint(t.Context(), "aa", 1)
		fails(t, "one that is too old", err, sandbox.ErrNotFound)
		list, err := st.ListCheckpoints(t.Context(), "aa")
		if err != nil || len(list) != 2 || list[0].Version != 3 || list[0].Doc != nil || list[1].Size != 3 {
			t.Error(list, err)
		}
		_, err = st.PutCheckpoint(t.Context(), "zz", sandbox.Checkpoint{Doc: []byte("x")}, nil, 2)
		fails(t, "of no run", err, sandbox.ErrNoRun)
		if err := st.DeleteRun(t.Context(), "aa"); err != nil {
			t.Fatal(err)
		}
		_, err = st.GetCheckpoint(t.Context(), "aa", 0)
		fails(t, "of a deleted run", err, sandbox.ErrNotFound)
	}},
	{"of many who put over the same version one wins", func(t *testing.T, st store.Store) {
		if err := st.CreateRun(t.Context(), newRun("aa", "r", 1)); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		won := 0
		for range 16 {
			wg.Go(func() {
				_, err := st.PutCheckpoint(t.Context(), "aa", sandbox.Checkpoint{Doc: []byte("x")}, new(int64), 4)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					won++
				} else if !errors.Is(err, sandbox.ErrConflict) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if won != 1 {
			t.Errorf("%d won", won)
		}
	}},
}

// foreignRuns: a tenant neither sees, changes nor deletes another's, and has the
// same names.
func foreignRuns(t *testing.T, st store.Store, red, blue context.Context) {
	r := newRun("redrun", "same", 0)
	r.Tenant = "blue" // what a record says is not what it is
	if err := st.CreateRun(red, r); err != nil {
		t.Fatal(err)
	}
	_, err := st.GetRun(blue, "redrun")
	fails(t, "another's run", err, sandbox.ErrNoRun)
	_, err = st.UpdateRun(blue, "redrun", func(*sandbox.Run) error { return nil })
	fails(t, "a change of it", err, sandbox.ErrNoRun)
	_, err = st.PutCheckpoint(blue, "redrun", sandbox.Checkpoint{Doc: []byte("x")}, nil, 1)
	fails(t, "a checkpoint of it", err, sandbox.ErrNoRun)
	if _, err := st.PutCheckpoint(red, "redrun", sandbox.Checkpoint{Doc: []byte("x")}, nil, 1); err != nil {
		t.Error(err)
	}
	_, err = st.GetCheckpoint(blue, "redrun", 0)
	fails(t, "its checkpoint", err, sandbox.ErrNotFound)
	if list, err := st.ListCheckpoints(blue, "redrun"); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
	if err := st.DeleteRun(blue, "redrun"); err != nil {
		t.Fatal(err)
	}
	if err := st.CreateRun(blue, newRun("bluerun", "same", 1)); err != nil {
		t.Fatal(err)
	}
	sameRuns(t, st, blue, true, "bluerun")
	sameRuns(t, st, red, true, "redrun")
	sameRuns(t, st, all(t.Context()), true, "bluerun", "redrun")
}
