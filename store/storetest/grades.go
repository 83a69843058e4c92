package storetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newGrade(id, box string, minutes int) sandbox.Grade {
	return sandbox.Grade{ID: id, State: sandbox.Grading, CreatedAt: at(minutes), Spec: sandbox.GradeSpec{Sandbox: box, Artifacts: []string{"/work"}, Timeout: time.Minute}}
}

var gradeCases = []scenario{
	{"a grade is there with its verdict", func(t *testing.T, st store.Store) {
		g := newGrade("g1", "box", 1)
		if err := st.CreateGrade(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		fails(t, "the same id again", st.CreateGrade(t.Context(), g), sandbox.ErrAlreadyExists)
		fails(t, "no id", st.CreateGrade(t.Context(), newGrade("../x", "box", 1)), sandbox.ErrInvalid)
		reward := 0.5
		done, err := st.UpdateGrade(t.Context(), "g1", func(g *sandbox.Grade) error {
			g.State, g.Verdict, g.ID, g.CreatedAt = sandbox.Graded, sandbox.Verdict{Reward: &reward, Findings: []sandbox.Finding{{Kind: "link", Path: "/work/x"}}}, "other", at(9)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := st.GetGrade(t.Context(), "g1")
		if err != nil || got.State != sandbox.Graded || got.Verdict.Reward == nil || *got.Verdict.Reward != 0.5 || len(got.Verdict.Findings) != 1 || !got.CreatedAt.Equal(at(1)) ||
			got.Spec.Timeout != time.Minute || done.ID != "g1" {
			t.Errorf("%+v %v", got, err)
		}
		mine := errors.New("no")
		if _, err := st.UpdateGrade(t.Context(), "g1", func(g *sandbox.Grade) error { g.State = sandbox.GradeInfra; return mine }); !errors.Is(err, mine) {
			t.Error(err)
		}
		if got, err := st.GetGrade(t.Context(), "g1"); err != nil || got.State != sandbox.Graded {
			t.Error("an update that failed changed it:", got.State, err)
		}
		_, err = st.UpdateGrade(t.Context(), "g2", func(*sandbox.Grade) error { return nil })
		fails(t, "an update of none", err, sandbox.ErrNotFound)
		_, err = st.GetGrade(t.Context(), "g2")
		fails(t, "none", err, sandbox.ErrNotFound)
	}},
	{"grades are listed in pages, newest first", func(t *testing.T, st store.Store) {
		for i, id := range []string{"a", "b", "c", "d", "e"} {
			g := newGrade(id, "box"+id, i)
			if id == "b" {
				g.State = sandbox.GradeInfra
			}
			if err := st.CreateGrade(t.Context(), g); err != nil {
				t.Fatal(err)
			}
		}
		var ids string
		for f := (store.GradeFilter{PageSize: 2}); ; {
			page, next, err := st.ListGrades(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range page {
				ids += g.ID
			}
			if next == "" {
				break
			}
			f.PageToken = next
		}
		if ids != "edcba" {
			t.Error(ids)
		}
		for want, f := range map[string]store.GradeFilter{"c": {Sandbox: "boxc"}, "b": {State: sandbox.GradeInfra}} {
			if page, _, err := st.ListGrades(t.Context(), f); err != nil || len(page) != 1 || page[0].ID != want {
				t.Error(want, page, err)
			}
		}
		_, _, err := st.ListGrades(t.Context(), store.GradeFilter{PageToken: "x"})
		fails(t, "a token of nobody", err, sandbox.ErrInvalid)
		// "a" and "c" begin before, and "b" has ended.
		if n, err := st.ForgetGrades(t.Context(), at(3), 10); err != nil || n != 1 {
			t.Error("what runs is not forgotten:", n, err)
		}
	}},
}

// foreignGrades: a tenant neither sees nor changes another's.
func foreignGrades(t *testing.T, st store.Store, red, blue context.Context) {
	if err := st.CreateGrade(red, newGrade("redgrade", "redbox", 0)); err != nil {
		t.Fatal(err)
	}
	_, err := st.GetGrade(blue, "redgrade")
	fails(t, "another's grade", err, sandbox.ErrNotFound)
	_, err = st.UpdateGrade(blue, "redgrade", func(*sandbox.Grade) error { return nil })
	fails(t, "a change of another's grade", err, sandbox.ErrNotFound)
	if page, _, err := st.ListGrades(blue, store.GradeFilter{Sandbox: "redbox"}); err != nil || len(page) != 0 {
		t.Error(page, err)
	}
	_, err = st.ForgetGrades(red, at(3), 10)
	fails(t, "a tenant forgets", err, sandbox.ErrDenied)
	if page, _, err := st.ListGrades(red, store.GradeFilter{}); err != nil || len(page) != 1 {
		t.Error(page, err)
	}
}
