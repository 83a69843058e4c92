package sandbox

import (
	"errors"
	"testing"
	"time"
)

func TestTransitions(t *testing.T) {
	allowed := map[[2]State]bool{
		{Creating, Running}: true, {Creating, Ending}: true, {Creating, EndedState}: true,
		{Running, Ending}: true, {Running, EndedState}: true,
		{Ending, EndedState}: true,
	}
	all := append([]State{"", "paused"}, States...)
	for _, from := range all {
		for _, to := range all {
			if got := from.CanBecome(to); got != allowed[[2]State{from, to}] {
				t.Errorf("%q.CanBecome(%q) = %v", from, to, got)
			}
			sb := Sandbox{ID: "a", State: from}
			if from == EndedState {
				sb.End = &End{Cause: TTL}
			}
			err := sb.Become(to)
			switch ok := allowed[[2]State{from, to}] && to != EndedState; {
			case ok && (err != nil || sb.State != to):
				t.Errorf("%q to %q: %v, state %q", from, to, err, sb.State)
			case !ok && (err == nil || sb.State != from):
				t.Errorf("%q to %q: %v, state %q; want a refusal", from, to, err, sb.State)
			case from == EndedState && !errors.Is(err, ErrEnded):
				t.Errorf("%q to %q: %v, want ErrEnded", from, to, err)
			}
		}
	}
}

func TestLive(t *testing.T) {
	for s, want := range map[State]bool{Creating: true, Running: true, Ending: true, EndedState: false, "": false, "x": false} {
		if s.Live() != want {
			t.Errorf("%q.Live() = %v", s, !want)
		}
	}
}

func TestFirstEndWins(t *testing.T) {
	for _, from := range []State{Creating, Running, Ending} {
		sb := Sandbox{ID: "a", State: from}
		at := time.Unix(1, 0)
		if !sb.Finish(End{Cause: OOM, At: at}) || sb.Finish(End{Cause: KilledByUser}) {
			t.Fatalf("from %s: the first end must win and the second must not", from)
		}
		if sb.State != EndedState || sb.End.Cause != OOM || !sb.End.At.Equal(at) {
			t.Fatalf("from %s: ended as %s, %v", from, sb.State, sb.End)
		}
	}
}

func TestUsable(t *testing.T) {
	for s, want := range map[State]error{Creating: ErrPrecondition, Running: nil, Ending: ErrEnded, EndedState: ErrEnded} {
		sb := Sandbox{ID: "a", State: s}
		if err := sb.Usable(); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", s, err, want)
		}
	}
	sb := Sandbox{ID: "a", State: EndedState, End: &End{Cause: Infra, Detail: "disk on fire"}}
	if got := sb.Usable().Error(); got != "sandbox a has ended: infra: disk on fire" {
		t.Errorf("the cause is not told: %s", got)
	}
}
