package store

import (
	"context"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Grades outlive the sandboxes that were graded.
type Grades interface {
	// CreateGrade records a grade that begins; sandbox.ErrAlreadyExists where the
	// id is taken.
	CreateGrade(ctx context.Context, g sandbox.Grade) error
	// UpdateGrade applies f to a grade in one transaction. f may be called again;
	// its error is returned as it is and nothing is changed. It cannot change the
	// id, the tenant or when the grade began.
	UpdateGrade(ctx context.Context, id string, f func(*sandbox.Grade) error) (sandbox.Grade, error)
	GetGrade(ctx context.Context, id string) (sandbox.Grade, error)
	// ListGrades pages through newest first (CreatedAt, then ID).
	ListGrades(ctx context.Context, f GradeFilter) (grades []sandbox.Grade, next string, err error)
	// ForgetGrades wants the installation's scope. It deletes at most limit grades
	// that began before the time and have ended, and says how many.
	ForgetGrades(ctx context.Context, before time.Time, limit int) (int, error)
}

// GradeFilter chooses grades. The zero value means all.
type GradeFilter struct {
	Sandbox   string
	State     sandbox.GradeState
	Unlogged  bool   // only those whose verdict the log of their run does not have
	PageSize  int    // 0 = 100
	PageToken string // opaque; from the page before
}

// CheckGrade is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckGrade(g sandbox.Grade) error {
	switch {
	case !sandbox.ValidID(g.ID):
		return sandbox.InvalidField("id", "%.80q is no grade id", g.ID)
	case !slices.Contains(sandbox.GradeStates, g.State):
		return sandbox.InvalidField("state", "%.80q is no state of a grade", g.State)
	}
	return nil
}
