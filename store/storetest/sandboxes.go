package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

var sandboxCases = []scenario{
	{"what is created reads back whole", func(t *testing.T, st store.Store) {
		sb := newSandbox("a1", 0)
		same(t, "created", create(t, st, sb), sb)
		same(t, "got", get(t, st, "a1"), sb)
	}},

	{"a bare record reads back whole", func(t *testing.T, st store.Store) {
		sb := sandbox.Sandbox{ID: "a1", State: sandbox.Creating}
		same(t, "created", create(t, st, sb), sb)
		got := get(t, st, "a1")
		same(t, "got", got, sb)
		if !got.CreatedAt.IsZero() || !got.ExpiresAt.IsZero() || got.End != nil {
			t.Errorf("times %v and %v, end %v, were not set", got.CreatedAt, got.ExpiresAt, got.End)
		}
	}},

	{"a missing sandbox is not found", func(t *testing.T, st store.Store) {
		for _, id := range []string{"nosuch", "", "A B", "x'y", "\xff\x00"} {
			_, err := st.GetSandbox(t.Context(), id)
			fails(t, "get", err, sandbox.ErrNoSandbox)
			_, err = st.EndSandbox(t.Context(), id, sandbox.End{Cause: sandbox.TTL, At: epoch})
			fails(t, "end", err, sandbox.ErrNoSandbox)
			_, err = st.UpdateSandbox(t.Context(), id, func(*sandbox.Sandbox) error { t.Error("f called"); return nil })
			fails(t, "update", err, sandbox.ErrNoSandbox)
		}
	}},

	{"an id is taken once, even by an ended sandbox", func(t *testing.T, st store.Store) {
		first := create(t, st, newSandbox("a1", 0))
		_, _, err := st.CreateSandbox(t.Context(), newSandbox("a1", 5), store.Idempotency{Key: "k", Hash: "h"})
		fails(t, "create again", err, sandbox.ErrAlreadyExists)
		same(t, "the first", get(t, st, "a1"), first)
		_, err = st.SandboxByKey(t.Context(), store.Idempotency{Key: "k", Hash: "h"})
		fails(t, "the refused creation's key", err, sandbox.ErrNotFound)
		ended := end(t, st, "a1", 1)
		_, _, err = st.CreateSandbox(t.Context(), newSandbox("a1", 5), store.Idempotency{})
		fails(t, "create after the end", err, sandbox.ErrAlreadyExists)
		same(t, "the first", get(t, st, "a1"), ended)
	}},

	{"a record that makes no sense is refused", func(t *testing.T, st store.Store) {
		for name, spoil := range map[string]func(*sandbox.Sandbox){
			"no id":           func(sb *sandbox.Sandbox) { sb.ID = "" },
			"a bad id":        func(sb *sandbox.Sandbox) { sb.ID = "../x" },
			"no state":        func(sb *sandbox.Sandbox) { sb.State = "" },
			"ended, no end":   func(sb *sandbox.Sandbox) { sb.State = sandbox.EndedState },
			"running, an end": func(sb *sandbox.Sandbox) { sb.End = &sandbox.End{Cause: sandbox.TTL} },
		} {
			sb := newSandbox("a1", 0)
			spoil(&sb)
			_, _, err := st.CreateSandbox(t.Context(), sb, store.Idempotency{})
			fails(t, name, err, sandbox.ErrInvalid)
		}
		all, err := walk(t.Context(), st, store.Filter{States: sandbox.States})
		if err != nil || len(all) != 0 {
			t.Errorf("left behind: %v, %v", ids(all), err)
		}
	}},

	{"a creation may be recorded ended", func(t *testing.T, st store.Store) {
		sb := newSandbox("a1", 0)
		sb.State, sb.End = sandbox.EndedState, &sandbox.End{Cause: sandbox.Infra, Detail: "no disk", At: at(1)}
		create(t, st, sb)
		same(t, "got", get(t, st, "a1"), sb)
		if n, err := st.ForgetEnded(t.Context(), at(2), 10); n != 1 || err != nil {
			t.Errorf("forgot %d, %v", n, err)
		}
	}},

	{"the same key and hash return the first sandbox as it is now", func(t *testing.T, st store.Store) {
		idem := store.Idempotency{Key: "k", Hash: "h"}
		first := newSandbox("a1", 0)
		if _, existed, err := st.CreateSandbox(t.Context(), first, idem); existed || err != nil {
			t.Fatalf("existed %v, %v", existed, err)
		}
		got, existed, err := st.CreateSandbox(t.Context(), newSandbox("a2", 1), idem)
		if !existed || err != nil {
			t.Fatalf("existed %v, %v", existed, err)
		}
		same(t, "the second create", got, first)
		_, err = st.GetSandbox(t.Context(), "a2")
		fails(t, "the sandbox that was not needed", err, sandbox.ErrNotFound)

		// The very same record is what a server that lost the answer sends.
		got, existed, err = st.CreateSandbox(t.Context(), first, idem)
		if !existed || err != nil {
			t.Errorf("the same id again: existed %v, %v", existed, err)
		}
		same(t, "the third create", got, first)

		ended := end(t, st, "a1", 2)
		got, existed, err = st.CreateSandbox(t.Context(), newSandbox("a3", 3), idem)
		if !existed || err != nil {
			t.Fatalf("after the end: existed %v, %v", existed, err)
		}
		same(t, "the create after the end", got, ended)
	}},

	{"the same key with another hash is a misuse", func(t *testing.T, st store.Store) {
		if _, _, err := st.CreateSandbox(t.Context(), newSandbox("a1", 0), store.Idempotency{Key: "k", Hash: "h"}); err != nil {
			t.Fatal(err)
		}
		_, existed, err := st.CreateSandbox(t.Context(), newSandbox("a2", 0), store.Idempotency{Key: "k", Hash: "other"})
		fails(t, "create", err, sandbox.ErrAlreadyExists)
		if existed {
			t.Error("a refusal says that it existed")
		}
		_, err = st.GetSandbox(t.Context(), "a2")
		fails(t, "the refused sandbox", err, sandbox.ErrNotFound)
	}},

	{"no key never matches no key", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		create(t, st, newSandbox("a2", 0))
		_, err := st.SandboxByKey(t.Context(), store.Idempotency{})
		fails(t, "by no key", err, sandbox.ErrNotFound)
	}},

	{"a sandbox is found by its key", func(t *testing.T, st store.Store) {
		idem := store.Idempotency{Key: "it's a key", Hash: "h"}
		_, err := st.SandboxByKey(t.Context(), idem)
		fails(t, "an unknown key", err, sandbox.ErrNotFound)
		sb := newSandbox("a1", 0)
		if _, _, err := st.CreateSandbox(t.Context(), sb, idem); err != nil {
			t.Fatal(err)
		}
		got, err := st.SandboxByKey(t.Context(), idem)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "by key", got, sb)
		_, err = st.SandboxByKey(t.Context(), store.Idempotency{Key: idem.Key, Hash: "other"})
		fails(t, "another hash", err, sandbox.ErrAlreadyExists)
		if got, err = st.SandboxByKey(t.Context(), store.Idempotency{Key: idem.Key}); err != nil {
			t.Fatal(err)
		}
		same(t, "by key, whatever it was used for", got, sb)
	}},

	{"an update is kept and returned", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		want := newSandbox("a1", 0)
		want.Episode, want.ExpiresAt, want.State = 7, time.Time{}, sandbox.Ending
		want.Spec.Timeout = 0
		got, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error {
			same(t, "what f sees", *sb, newSandbox("a1", 0))
			sb.Episode, sb.ExpiresAt, sb.State = 7, time.Time{}, sandbox.Ending
			sb.Spec.Timeout = 0
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		same(t, "returned", got, want)
		same(t, "kept", get(t, st, "a1"), want)
	}},

	{"an update whose f fails changes nothing and returns its error", func(t *testing.T, st store.Store) {
		sb := create(t, st, newSandbox("a1", 0))
		mine := errors.New("mine")
		_, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error {
			sb.Episode, sb.Spec.Labels["run"] = 9, "other"
			return mine
		})
		if !errors.Is(err, mine) {
			t.Errorf("%v", err)
		}
		same(t, "kept", get(t, st, "a1"), sb)
	}},

	{"an update cannot change what it must not", func(t *testing.T, st store.Store) {
		sb := create(t, st, newSandbox("a1", 0))
		for name, c := range map[string]struct {
			spoil func(*sandbox.Sandbox)
			want  *sandbox.Error
		}{
			"id":         {func(sb *sandbox.Sandbox) { sb.ID = "a2" }, sandbox.ErrInvalid},
			"created_at": {func(sb *sandbox.Sandbox) { sb.CreatedAt = sb.CreatedAt.Add(1) }, sandbox.ErrInvalid},
			"end":        {func(sb *sandbox.Sandbox) { sb.Finish(sandbox.End{Cause: sandbox.TTL}) }, sandbox.ErrInvalid},
			"state back": {func(sb *sandbox.Sandbox) { sb.State = sandbox.Creating }, sandbox.ErrPrecondition},
		} {
			_, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error { c.spoil(sb); return nil })
			fails(t, name, err, c.want)
		}
		same(t, "kept", get(t, st, "a1"), sb)
	}},

	{"an ended sandbox is not updated", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		ended := end(t, st, "a1", 1)
		_, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error { sb.Episode++; return nil })
		fails(t, "update", err, sandbox.ErrEnded)
		same(t, "kept", get(t, st, "a1"), ended)
	}},

	{"an end is kept whole, and the first one wins", func(t *testing.T, st store.Store) {
		sb := create(t, st, newSandbox("a1", 0))
		first := sandbox.End{Cause: sandbox.Signalled, ExitCode: 137, Signal: "SIGKILL", Detail: `it said "no"`, At: at(3)}
		sb.State, sb.End = sandbox.EndedState, &first
		got, err := st.EndSandbox(t.Context(), "a1", first)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "the first end", got, sb)
		got, err = st.EndSandbox(t.Context(), "a1", sandbox.End{Cause: sandbox.OOM, At: at(9)})
		if err != nil {
			t.Fatal(err)
		}
		same(t, "the second end", got, sb)
		same(t, "kept", get(t, st, "a1"), sb)
	}},

	{"an end without a cause is refused", func(t *testing.T, st store.Store) {
		sb := create(t, st, newSandbox("a1", 0))
		_, err := st.EndSandbox(t.Context(), "a1", sandbox.End{At: epoch})
		fails(t, "end", err, sandbox.ErrInvalid)
		same(t, "kept", get(t, st, "a1"), sb)
	}},

	{"a forgotten sandbox leaves nothing, and its key is free", func(t *testing.T, st store.Store) {
		idem := store.Idempotency{Key: "k", Hash: "h"}
		if _, _, err := st.CreateSandbox(t.Context(), newSandbox("a1", 0), idem); err != nil {
			t.Fatal(err)
		}
		create(t, st, newSandbox("a2", 0))
		for range 2 { // forgetting what is not there is no error
			if err := st.ForgetSandbox(t.Context(), "a1"); err != nil {
				t.Fatal(err)
			}
		}
		_, err := st.GetSandbox(t.Context(), "a1")
		fails(t, "get", err, sandbox.ErrNotFound)
		_, err = st.SandboxByKey(t.Context(), idem)
		fails(t, "by key", err, sandbox.ErrNotFound)
		sbs, err := walk(t.Context(), st, store.Filter{Labels: map[string]string{"run": "r1"}, States: sandbox.States})
		same(t, "the list", ids(sbs), []string{"a2"})
		if err != nil {
			t.Error(err)
		}
		if _, existed, err := st.CreateSandbox(t.Context(), newSandbox("a1", 1), store.Idempotency{Key: "k", Hash: "other"}); existed || err != nil {
			t.Errorf("id and key are not free: existed %v, %v", existed, err)
		}
	}},

	{"only what ended before is forgotten, a limited number at a time", func(t *testing.T, st store.Store) {
		for i := range 10 {
			id := fmt.Sprintf("a%d", i)
			idem := store.Idempotency{Key: "k" + id, Hash: "h"}
			if _, _, err := st.CreateSandbox(t.Context(), newSandbox(id, 0), idem); err != nil {
				t.Fatal(err)
			}
			if i < 8 {
				end(t, st, id, 10+i)
			}
		}
		forget := func(before time.Time, limit, want int) {
			t.Helper()
			if n, err := st.ForgetEnded(t.Context(), before, limit); n != want || err != nil {
				t.Errorf("forgot %d, %v, want %d", n, err, want)
			}
		}
		forget(at(10), 100, 0) // ended at that time, not before
		forget(at(10).Add(1), 100, 1)
		forget(at(16), 0, 0)
		forget(at(16), 2, 2)
		forget(at(16), 100, 3)
		forget(at(16), 100, 0)
		sbs, err := walk(t.Context(), st, store.Filter{States: sandbox.States})
		same(t, "left", ids(sbs), []string{"a9", "a8", "a7", "a6"})
		if err != nil {
			t.Error(err)
		}
		for i := range 10 {
			_, err := st.SandboxByKey(t.Context(), store.Idempotency{Key: fmt.Sprintf("ka%d", i), Hash: "h"})
			if i < 6 {
				fails(t, "a forgotten key", err, sandbox.ErrNotFound)
			} else if err != nil {
				t.Errorf("the key of a%d: %v", i, err)
			}
		}
		if _, existed, err := st.CreateSandbox(t.Context(), newSandbox("b1", 0), store.Idempotency{Key: "ka0", Hash: "other"}); existed || err != nil {
			t.Errorf("a forgotten key is not free: existed %v, %v", existed, err)
		}
	}},

	{"the store and its callers share no memory", func(t *testing.T, st store.Store) {
		sb := newSandbox("a1", 0)
		created := create(t, st, sb)
		sb.Spec.Labels["run"], created.Spec.Labels["run"] = "given", "returned"
		got := get(t, st, "a1")
		got.Spec.Labels["run"] = "got"
		same(t, "kept", get(t, st, "a1"), newSandbox("a1", 0))
	}},

	{"a large record is kept", func(t *testing.T, st store.Store) {
		sb := newSandbox("a1", 0)
		for i := range 64 {
			sb.Spec.Labels[fmt.Sprintf("label%d", i)] = fmt.Sprintf("%0256d", i)
		}
		for i := range 256 {
			sb.Spec.Env[fmt.Sprintf("VAR%d", i)] = fmt.Sprintf("%01000d", i)
		}
		create(t, st, sb)
		same(t, "got", get(t, st, "a1"), sb)
	}},
}
