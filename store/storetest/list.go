package storetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func checkList(t *testing.T, st store.Store, what string, f store.Filter, want ...string) {
	t.Helper()
	sbs, err := walk(t.Context(), st, f)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if want == nil {
		want = []string{}
	}
	same(t, what, ids(sbs), want)
}

var listCases = []scenario{
	{"an empty store lists nothing", func(t *testing.T, st store.Store) {
		sbs, next, err := st.ListSandboxes(t.Context(), store.Filter{})
		if len(sbs) != 0 || next != "" || err != nil {
			t.Errorf("%v, next %q, %v", sbs, next, err)
		}
	}},

	{"the newest come first, then by id, whole", func(t *testing.T, st store.Store) {
		for _, sb := range []sandbox.Sandbox{newSandbox("m", 5), newSandbox("z", 1), newSandbox("b", 5), newSandbox("a", 9), newSandbox("10", 5)} {
			create(t, st, sb)
		}
		later := newSandbox("n", 5)
		later.CreatedAt = later.CreatedAt.Add(1) // a nanosecond counts
		create(t, st, later)
		checkList(t, st, "all", store.Filter{}, "a", "n", "m", "b", "10", "z")
		sbs, err := walk(t.Context(), st, store.Filter{})
		if err != nil {
			t.Fatal(err)
		}
		same(t, "an entry", sbs[0], newSandbox("a", 9))
	}},

	{"states choose, and none means all but ended", func(t *testing.T, st store.Store) {
		for i, s := range []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Ending} {
			sb := newSandbox(string(s), i)
			sb.State = s
			create(t, st, sb)
		}
		create(t, st, newSandbox("over", 9))
		end(t, st, "over", 10)
		checkList(t, st, "no states", store.Filter{}, "ending", "running", "creating")
		checkList(t, st, "an empty list of states", store.Filter{States: []sandbox.State{}}, "ending", "running", "creating")
		checkList(t, st, "running", store.Filter{States: []sandbox.State{sandbox.Running}}, "running")
		checkList(t, st, "two", store.Filter{States: []sandbox.State{sandbox.Ending, sandbox.Creating}}, "ending", "creating")
		checkList(t, st, "ended", store.Filter{States: []sandbox.State{sandbox.EndedState}}, "over")
		checkList(t, st, "ended and running", store.Filter{States: []sandbox.State{sandbox.EndedState, sandbox.Running}}, "over", "running")
		checkList(t, st, "all", store.Filter{States: sandbox.States}, "over", "ending", "running", "creating")
		checkList(t, st, "one twice", store.Filter{States: []sandbox.State{sandbox.Running, sandbox.Running}}, "running")
		_, _, err := st.ListSandboxes(t.Context(), store.Filter{States: []sandbox.State{"paused"}})
		fails(t, "an unknown state", err, sandbox.ErrInvalid)
	}},

	{"a list follows the states of its sandboxes", func(t *testing.T, st store.Store) {
		sb := newSandbox("a1", 0)
		sb.State = sandbox.Creating
		create(t, st, sb)
		for _, s := range []sandbox.State{sandbox.Running, sandbox.Ending} {
			if _, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error { return sb.Become(s) }); err != nil {
				t.Fatal(err)
			}
			checkList(t, st, string(s), store.Filter{States: []sandbox.State{s}}, "a1")
			checkList(t, st, "creating", store.Filter{States: []sandbox.State{sandbox.Creating}})
		}
		end(t, st, "a1", 1)
		checkList(t, st, "live", store.Filter{})
		checkList(t, st, "live by label", store.Filter{Labels: map[string]string{"run": "r1"}})
		checkList(t, st, "ended by label", store.Filter{Labels: map[string]string{"run": "r1"}, States: []sandbox.State{sandbox.EndedState}}, "a1")
	}},

	{"all labels must match, exactly", func(t *testing.T, st store.Store) {
		for i, labels := range []map[string]string{
			{"run": "r1", "group": "g1"},
			{"run": "r1", "group": "g2"},
			{"run": "r2", "group": "g1", "odd": `%_'"\`},
			nil,
			{"run": "", "a/b.c_d-e": "żółw"},
		} {
			sb := newSandbox(fmt.Sprintf("a%d", i), i)
			sb.Spec.Labels = labels
			create(t, st, sb)
		}
		for _, c := range []struct {
			labels map[string]string
			want   []string
		}{
			{nil, []string{"a4", "a3", "a2", "a1", "a0"}},
			{map[string]string{}, []string{"a4", "a3", "a2", "a1", "a0"}},
			{map[string]string{"run": "r1"}, []string{"a1", "a0"}},
			{map[string]string{"group": "g1"}, []string{"a2", "a0"}},
			{map[string]string{"run": "r1", "group": "g1"}, []string{"a0"}},
			{map[string]string{"run": "r2", "group": "g1", "odd": `%_'"\`}, []string{"a2"}},
			{map[string]string{"odd": "%"}, nil},
			{map[string]string{"run": "R1"}, nil},
			{map[string]string{"run": "r"}, nil},
			{map[string]string{"run": ""}, []string{"a4"}},
			{map[string]string{"a/b.c_d-e": "żółw"}, []string{"a4"}},
			{map[string]string{"nosuch": ""}, nil},
			{map[string]string{"run": "r1", "nosuch": ""}, nil},
		} {
			checkList(t, st, fmt.Sprint(c.labels), store.Filter{Labels: c.labels}, c.want...)
			checkList(t, st, fmt.Sprint(c.labels, " by ones"), store.Filter{Labels: c.labels, PageSize: 1}, c.want...)
		}
	}},

	{"changed labels are found as they are now", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		if _, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error {
			sb.Spec.Labels = map[string]string{"run": "r2", "new": "x"}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		checkList(t, st, "old value", store.Filter{Labels: map[string]string{"run": "r1"}})
		checkList(t, st, "gone label", store.Filter{Labels: map[string]string{"n": "a1"}})
		checkList(t, st, "new", store.Filter{Labels: map[string]string{"run": "r2", "new": "x"}}, "a1")
	}},

	{"pages of every size hold every sandbox once, in order", func(t *testing.T, st store.Store) {
		var want []string
		for i := range 12 {
			sb := newSandbox(fmt.Sprintf("a%02d", i), i/4) // four at the same instant
			create(t, st, sb)
			if i%3 == 0 {
				end(t, st, sb.ID, 99)
			}
			want = append([]string{sb.ID}, want...)
		}
		for size := 1; size <= 13; size++ {
			f := store.Filter{PageSize: size, States: sandbox.States}
			checkList(t, st, fmt.Sprint("pages of ", size), f, want...)
			f.Labels = map[string]string{"run": "r1"}
			checkList(t, st, fmt.Sprint("labelled pages of ", size), f, want...)
		}
	}},

	{"a page is 100 unless told, and a full last page has no next", func(t *testing.T, st store.Store) {
		for i := range 101 {
			create(t, st, newSandbox(fmt.Sprintf("a%03d", i), i))
		}
		sbs, next, err := st.ListSandboxes(t.Context(), store.Filter{})
		if len(sbs) != 100 || next == "" || err != nil {
			t.Fatalf("%d sandboxes, next %q, %v", len(sbs), next, err)
		}
		sbs, next, err = st.ListSandboxes(t.Context(), store.Filter{PageToken: next})
		if len(sbs) != 1 || next != "" || err != nil {
			t.Fatalf("%d sandboxes, next %q, %v", len(sbs), next, err)
		}
		sbs, next, err = st.ListSandboxes(t.Context(), store.Filter{PageSize: 101})
		if len(sbs) != 101 || next != "" || err != nil {
			t.Fatalf("%d sandboxes, next %q, %v", len(sbs), next, err)
		}
	}},

	{"pages stay in place while sandboxes come and go", func(t *testing.T, st store.Store) {
		for i := range 6 {
			create(t, st, newSandbox(fmt.Sprintf("a%d", i), 10*i))
		}
		f := store.Filter{PageSize: 2}
		page := func(want ...string) {
			t.Helper()
			sbs, next, err := st.ListSandboxes(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "a page", ids(sbs), want)
			f.PageToken = next
		}
		page("a5", "a4")
		create(t, st, newSandbox("new", 100)) // before what was read: not seen, and shifts nothing
		create(t, st, newSandbox("a4x", 40))  // same instant, later id: before a4 in the order
		create(t, st, newSandbox("late", 25)) // in what is still to come
		end(t, st, "a4", 200)                 // the one that the page ended with
		if err := st.ForgetSandbox(t.Context(), "a5"); err != nil {
			t.Fatal(err)
		}
		page("a3", "late")
		if err := st.ForgetSandbox(t.Context(), "late"); err != nil { // the token's own sandbox
			t.Fatal(err)
		}
		page("a2", "a1")
		page("a0")
		if f.PageToken != "" {
			t.Error("the last page has a next")
		}
	}},

	{"a wrong page is refused by field", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		for _, token := range []string{"x", "!!", "a1", "0", strings.Repeat("A", 1<<16)} {
			_, _, err := st.ListSandboxes(t.Context(), store.Filter{PageToken: token})
			fails(t, fmt.Sprintf("token %.20s", token), err, sandbox.ErrInvalid)
		}
		_, _, err := st.ListSandboxes(t.Context(), store.Filter{PageSize: -1})
		fails(t, "a negative size", err, sandbox.ErrInvalid)
	}},
}
