package sandbox

// States lists every state of a sandbox in the order it passes through them.
// It may skip some but never goes back: a sandbox whose node is lost goes from
// creating straight to ended.
var States = []State{Creating, Running, Ending, EndedState}

// rank is the place of s in the order of States, -1 for no state at all.
func (s State) rank() int {
	for i, t := range States {
		if s == t {
			return i
		}
	}
	return -1
}

// Valid says whether s is a state.
func (s State) Valid() bool { return s.rank() >= 0 }

// Live says whether a sandbox in state s may still hold resources: every state
// but ended.
func (s State) Live() bool { return s.Valid() && s != EndedState }

// CanBecome says whether a sandbox may go from s to next. Staying is not a
// transition.
func (s State) CanBecome(next State) bool { return s.Valid() && next.rank() > s.rank() }

// Become moves sb to next, one of Running and Ending; Finish is the only way
// to ended, because an end needs a cause. A sandbox that is over is ErrEnded, a
// step back is ErrPrecondition.
func (sb *Sandbox) Become(next State) error {
	switch {
	case sb.State == EndedState:
		return sb.endedError()
	case next == EndedState:
		return &Error{Class: Internal, Msg: "an end without a cause"}
	case !sb.State.CanBecome(next):
		return &Error{Class: Precondition, Msg: "sandbox " + sb.ID + " is " + string(sb.State) + ", it cannot become " + string(next)}
	}
	sb.State = next
	return nil
}

// Finish ends sb. The first end wins: on an ended sandbox it changes nothing
// and returns false.
func (sb *Sandbox) Finish(end End) bool {
	if sb.State == EndedState {
		return false
	}
	sb.State, sb.End = EndedState, &end
	return true
}

// Usable is nil while calls into sb may be served, that is while it runs.
// Otherwise the error says what it is instead, and why it ended.
func (sb *Sandbox) Usable() error {
	switch sb.State {
	case Running:
		return nil
	case EndedState:
		return sb.endedError()
	case Ending:
		return &Error{Class: Ended, Msg: "sandbox " + sb.ID + " is ending"}
	}
	return &Error{Class: Precondition, Msg: "sandbox " + sb.ID + " is still " + string(sb.State), Hint: "try again when it runs"}
}

func (sb *Sandbox) endedError() *Error {
	e := &Error{Class: Ended, Msg: "sandbox " + sb.ID + " has ended"}
	if sb.End != nil {
		e.Msg += ": " + sb.End.String()
	}
	return e
}
