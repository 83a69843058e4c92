//go:build !race

package agent_test

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

//go:embed testdata/meta_runner.py
var metaRunner string

//go:embed testdata/meta_ops.py
var metaOps string

//go:embed testdata/meta_procs.py
var metaProcs string

// session is the runner of a script in one sandbox. The runner is an exec that
// lives through everything: who copies a session and changes its sandbox
// attaches to the same exec in another one, at the byte where he was.
type session struct {
	m      *machine
	id     string
	offset int64
}

const metaExec = "script"

var errEnough = errors.New("enough")

// stuckAfter ends a step that would never end; nothing is measured against it.
const stuckAfter = 2 * time.Minute

func (m *machine) begin(ctx context.Context, id string, s script) (session, error) {
	e := session{m: m, id: id}
	spec := sandbox.ProcessSpec{ExecID: metaExec, Args: []string{"python3", "-S", "-E", "-c", metaRunner + metaOps + metaProcs},
		User: "root", Stdin: true, Cwd: "/", Env: map[string]string{"COVE_SEED": fmt.Sprint(s.seed)}}
	if s.pty {
		spec.PTY = &sandbox.TermSize{Rows: 24, Cols: 80}
	}
	_, err := e.collect(ctx, "== ready\n", func(ctx context.Context, g *guest.Client, sink func(sandbox.ProcessEvent) error) error {
		return g.Start(ctx, spec, 0, sink)
	})
	return e, err
}

// run performs steps and returns what they printed, a line that starts with its
// number for each.
func (e *session) run(ctx context.Context, steps []string) (string, error) {
	before := time.Now()
	out, err := e.collect(ctx, "== done\n", func(ctx context.Context, g *guest.Client, sink func(sandbox.ProcessEvent) error) error {
		if err := g.SendInput(ctx, metaExec, []byte(strings.Join(append(steps[:len(steps):len(steps)], "--\n"), "\n"))); err != nil {
			return err
		}
		return g.Attach(ctx, metaExec, e.offset, sink)
	})
	if err != nil {
		return out, err
	}
	return realTimes(out, before, time.Now()), nil
}

// realTimes takes the readings of CLOCK_REALTIME out of what was printed. The
// sandbox calibrates its own clock against the host's, hence a little room.
func realTimes(out string, from, to time.Time) string {
	const room = time.Second
	var kept []string
	for line := range strings.Lines(out) {
		var at float64
		if n, _ := fmt.Sscanf(line, "@real %f", &at); n == 0 {
			kept = append(kept, line)
		} else if t := time.UnixMicro(int64(at * 1e6)); t.Before(from.Add(-room)) || t.After(to.Add(room)) {
			kept = append(kept, fmt.Sprintf("real time %v is not between %v and %v\n", t, from, to))
		}
	}
	return strings.Join(kept, "")
}

// quit ends the runner and says how it ended.
func (e *session) quit(ctx context.Context) (string, error) {
	g, release, err := e.m.Guest(ctx, e.id)
	if err != nil {
		return "", err
	}
	defer release()
	if err := g.SendInput(ctx, metaExec, []byte("quit\n")); err != nil {
		return "", err
	}
	end, err := g.Wait(ctx, metaExec)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s, %d bytes\n", end.End, end.OutputBytes), nil
}

// collect reads the runner's output up to a mark.
func (e *session) collect(ctx context.Context, mark string, f func(context.Context, *guest.Client, func(sandbox.ProcessEvent) error) error) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, stuckAfter)
	defer cancel()
	g, release, err := e.m.Guest(ctx, e.id)
	if err != nil {
		return "", fmt.Errorf("%s: %w", e.id, err)
	}
	defer release()
	var out []byte
	err = f(ctx, g, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Output != nil:
			if ev.Output.Offset != e.offset {
				return fmt.Errorf("output goes on at %d, not at %d", ev.Output.Offset, e.offset)
			}
			out = append(out, ev.Output.Data...)
			e.offset = ev.Output.Offset + int64(len(ev.Output.Data))
		case ev.Lost != nil:
			return fmt.Errorf("lost output %+v", *ev.Lost)
		case ev.End != nil:
			return fmt.Errorf("the runner ended: %+v", *ev.End)
		}
		if strings.HasSuffix(string(out), mark) {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		return string(out), fmt.Errorf("%s: %w after\n%s", e.id, err, out)
	}
	return strings.TrimSuffix(string(out), mark), nil
}
