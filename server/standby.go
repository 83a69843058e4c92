package server

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// asItIs is a record with what only the node knows: whether it is awake. That
// changes with every call into a sandbox, so it is asked and never stored.
func (s *Server) asItIs(ctx context.Context, sb sandbox.Sandbox) sandbox.Sandbox {
	sb.Standby = s.standby(ctx)[sb.ID]
	return sb
}

// PauseRequest asks for a sandbox to be put on standby.
type PauseRequest struct {
	Sandbox    string
	Cold       bool   // it is to hold no memory
	IfBusy     string // "refuse" leaves one alone in which processes run; "" and "freeze" do not
	DropMemory bool   // only its files are kept; it is then cold
}

// PauseSandbox puts a sandbox on standby. It is finished once begun: a caller that
// leaves half-way would not know whether its sandbox is paused.
func (s *Server) PauseSandbox(ctx context.Context, r PauseRequest) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.pause", about("id", r.Sandbox), about("sandbox", r.Sandbox))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if sb, err = s.live(ctx, r.Sandbox); err != nil {
		return sb, err
	}
	switch r.IfBusy {
	case "", "freeze":
	case "refuse":
		if err := s.refuseBusy(ctx, sb.ID); err != nil {
			return sb, err
		}
	default:
		return sb, sandbox.InvalidField("if_busy", `%.20q is not accepted; "freeze" and "refuse" are`, r.IfBusy)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotTimeout)
	defer cancel()
	defer context.AfterFunc(s.calls.cut, cancel)()
	if r.DropMemory {
		if sb, err = s.DropMemory(ctx, sb.ID); err != nil {
			return sb, err
		}
	}
	if err := s.node.Pause(ctx, sb.ID, r.Cold || r.DropMemory); err != nil {
		return sb, s.explain(ctx, sb.ID, err)
	}
	return s.asItIs(ctx, sb), nil
}

// DropMemory leaves a sandbox its files and nothing else, as if its machine had been
// switched off and on: a snapshot of the files is taken, the sandbox restored to it,
// and the snapshot deleted. It takes the rights of these. Should that break off, the
// snapshot goes by itself.
func (s *Server) DropMemory(ctx context.Context, id string) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.drop_memory", about("sandbox", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	const atMost = time.Hour
	taken, err := s.CreateSnapshot(ctx, CreateSnapshotRequest{Sandbox: id, Kind: sandbox.FilesystemSnapshot, TTL: atMost}, func(sandbox.Progress) {})
	if err != nil {
		return sb, err
	}
	sb, _, err = s.RestoreSandbox(ctx, id, taken.Snapshot.ID)
	_, derr := s.DeleteSnapshot(ctx, taken.Snapshot.ID)
	return sb, firstError(err, derr)
}

// mostNamed is how many of what keeps a sandbox busy an error names.
const mostNamed = 5

// refuseBusy fails if processes that were started through the API run in a
// sandbox. One on standby has nothing that runs, and is not woken to be asked. An
// exec that begins after it was asked is met by the pause like any other.
func (s *Server) refuseBusy(ctx context.Context, id string) error {
	if s.standby(ctx)[id] != sandbox.Awake {
		return nil
	}
	var busy []string
	err := s.inside(ctx, id, func() error {
		ps, _, err := s.node.Processes(ctx, id)
		for _, p := range ps {
			if p.End == nil {
				busy = append(busy, p.ExecID)
			}
		}
		return err
	})
	if err != nil || len(busy) == 0 {
		return err
	}
	named := strings.Join(busy[:min(len(busy), mostNamed)], ", ")
	if len(busy) > mostNamed {
		named += ", …"
	}
	return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.Busy, Msg: fmt.Sprintf("%d processes run: %s", len(busy), named),
		Hint: "wait for them, or pause without if_busy: they stand still with the sandbox and go on when it wakes"}
}

// ResumeSandbox wakes a sandbox, and says how long the node took.
func (s *Server) ResumeSandbox(ctx context.Context, id string) (sb sandbox.Sandbox, took time.Duration, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.resume", about("id", id), about("sandbox", id))
	if err != nil {
		return sb, 0, err
	}
	defer call.end(&err)
	if sb, err = s.live(ctx, id); err != nil {
		return sb, 0, err
	}
	if took, err = s.node.Resume(ctx, sb.ID); err != nil {
		return sb, 0, s.explain(ctx, sb.ID, err)
	}
	return s.asItIs(ctx, sb), took, nil
}

// live is the record of a sandbox that has not ended, or why there is none.
func (s *Server) live(ctx context.Context, id string) (sandbox.Sandbox, error) {
	sb, err := s.get(ctx, id)
	if err != nil {
		return sb, err
	}
	return sb, sb.Usable()
}
