package store

import "github.com/cove-sandbox/cove/sandbox"

// DefaultPageSize is a page of ListSandboxes where none is asked for.
const DefaultPageSize = 100

// CheckNew is what every implementation of CreateSandbox asks of a new record:
// an id that is one, a state, and an end exactly when it has ended. What a
// record breaks here is a defect of the caller, not of a user's request.
func CheckNew(sb sandbox.Sandbox) error {
	switch {
	case !sandbox.ValidID(sb.ID):
		return sandbox.InvalidField("id", "%.80q is no sandbox id", sb.ID)
	case !sb.State.Valid():
		return sandbox.InvalidField("state", "%.80q is no state", sb.State)
	case sb.State == sandbox.EndedState && (sb.End == nil || sb.End.Cause == ""):
		return sandbox.InvalidField("end", "an ended sandbox has an end with a cause")
	case sb.State != sandbox.EndedState && sb.End != nil:
		return sandbox.InvalidField("end", "a sandbox that is %s has no end", sb.State)
	}
	return nil
}

// CheckUpdate is what every implementation of UpdateSandbox asks of the record
// after f: it is still the same sandbox in the same place of a list, its state
// has not gone back, and it has not ended, which only EndSandbox records.
func CheckUpdate(old, next sandbox.Sandbox) error {
	switch {
	case next.ID != old.ID:
		return sandbox.InvalidField("id", "an update cannot change it")
	case next.Tenant != old.Tenant:
		return sandbox.InvalidField("tenant", "an update cannot change it")
	case !next.CreatedAt.Equal(old.CreatedAt):
		return sandbox.InvalidField("created_at", "an update cannot change it")
	case next.State == sandbox.EndedState || next.End != nil:
		return sandbox.InvalidField("end", "an update cannot end a sandbox; EndSandbox does")
	case next.State == old.State:
		return nil
	}
	return old.Become(next.State)
}
