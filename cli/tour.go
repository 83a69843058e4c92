package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// tourCmd is the visible first sandbox of "make start": create, run, reset,
// look again, remove, each with what it took as seen from here.
func (a *app) tourCmd() *cobra.Command {
	return &cobra.Command{
		Use: "tour", Hidden: true, Short: "Create, use, reset and remove one sandbox, with timings", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			api, err := a.client()
			if err != nil {
				return err
			}
			// Not counted: the connection, and a server still warming up.
			for range 100 {
				info, err := api.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
				if err != nil {
					return err
				}
				if info.Msg.GetWarmKernels() > 0 || info.Msg.GetWarmTarget() == 0 {
					break
				}
				select {
				case <-time.After(50 * time.Millisecond):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			t := &tour{app: a}
			defer t.remove()
			return t.run(ctx)
		},
	}
}

type tour struct {
	app *app
	id  string
}

func (t *tour) step(what string, f func() (string, error)) error {
	start := time.Now()
	got, err := f()
	if err != nil {
		return err
	}
	took := time.Since(start)
	line := fmt.Sprintf("  %-46s %8s   %s", what, formatDuration(took.Round(10*time.Microsecond)), escape(got))
	_, err = fmt.Fprintln(t.app.Stdout, strings.TrimRight(line, " "))
	return err
}

func (t *tour) run(ctx context.Context) error {
	api := t.app.api
	steps := []struct {
		what string
		do   func() (string, error)
	}{
		{"create a sandbox", func() (string, error) {
			resp, err := api.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{
				Image: "base", Labels: map[string]string{"cove": "tour"}, Timeout: duration(10 * time.Minute).proto()}}))
			if err != nil {
				return "", err
			}
			t.id = resp.Msg.GetSandbox().GetId()
			return t.id, nil
		}},
		{"uname -sr", func() (string, error) { return t.exec(ctx, "uname -sr") }},
		{"python3 -c 'print(6*7)'", func() (string, error) { return t.exec(ctx, "python3 -c 'print(6*7)'") }},
		{"echo left behind > /note; ls /note", func() (string, error) { return t.exec(ctx, "echo left behind > /note; ls /note") }},
		{"reset it", func() (string, error) {
			resp, err := api.Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: t.id}))
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("episode %d", resp.Msg.GetSandbox().GetEpisode()), nil
		}},
		{"ls /note", func() (string, error) {
			got, err := t.exec(ctx, "ls /note 2>/dev/null || echo gone")
			if err == nil && got != "gone" {
				err = fmt.Errorf("the reset left /note behind")
			}
			return got, err
		}},
		{"remove it", func() (string, error) { return "", t.remove() }},
	}
	for _, s := range steps {
		if err := t.step(s.what, s.do); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

func (t *tour) exec(ctx context.Context, line string) (string, error) {
	var out bytes.Buffer
	spec := &covev1.ProcessSpec{ExecId: newExecID(), Command: line, User: "root"}
	f := &follower{app: t.app, sandbox: t.id, execID: spec.ExecId, spec: spec,
		onOutput: func(o *covev1.ProcessOutput) error { _, err := out.Write(o.GetData()); return err }}
	end, err := f.run(ctx)
	if err != nil {
		return "", err
	}
	if err := exitOf(end.GetEnd()); err != nil {
		return "", fmt.Errorf("%s: %s", endText(end.GetEnd()), strings.TrimSpace(out.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

func (t *tour) remove() error {
	if t.id == "" {
		return nil
	}
	id := t.id
	t.id = ""
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	_, err := t.app.api.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}
