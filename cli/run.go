package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// runGrace is how long the command may go on after Ctrl-C: docker's stop.
	runGrace = 10 * time.Second
	// runLease is how long a sandbox of run outlives a caller that vanished
	// without a word.
	runLease = time.Minute
	// runSlack keeps the sandbox until its command's timeout has been reported.
	runSlack = time.Minute
	// removeWithin bounds the removal at the end, which must also happen when
	// the caller's context is over.
	removeWithin = 20 * time.Second
)

func (a *app) runCmd() *cobra.Command {
	var f specFlags
	var pf processFlags
	var keep bool
	ttl := duration(runLease)
	cmd := &cobra.Command{
		Use:   "run [flags] [IMAGE] -- COMMAND [ARG...]",
		Short: "Create a sandbox, run a command in it, remove it",
		Long: `Create a sandbox, run a command in it, and remove it. Ends with the command's
exit code, 124 when --timeout passed, 128+n when signal n ended it, 127 when
there is no such command, 126 when it cannot be executed, 125 when Cove itself
failed. Without a command the image's own entrypoint is run.

Ctrl-C is passed on; after 10 s, or a second one, the command is killed. The
sandbox is removed in every case but --keep: when this command is killed or
its machine is lost, by the server, --lease-ttl later.`,
		Example: `  cove run -- python3 -c 'print(6*7)'
  cove run -it python:3.12 -- bash
  echo hello | cove run -i -- tr a-z A-Z`,
		Annotations:       map[string]string{ownSignals: "1", ownCode: "1"},
		ValidArgsFunction: a.imageNames,
		Args:              cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			command := args
			// The first argument is the image, unless one was named by flag or
			// the command line began with "--".
			if f.image == "" && cmd.ArgsLenAtDash() != 0 && len(args) > 0 {
				f.image = args[0]
				var err error
				if command, err = commandOf(cmd, args[1:]); err != nil {
					return err
				}
			}
			return a.run(cmd.Context(), f, pf, command, keep, time.Duration(ttl))
		},
	}
	a.addSpecFlags(cmd, &f)
	addReuseFlag(cmd, &f)
	addProcessFlags(cmd, &pf)
	fs := cmd.Flags()
	fs.SetInterspersed(false)
	fs.BoolVar(&keep, "keep", false, "keep the sandbox afterwards")
	fs.Var(&ttl, "lease-ttl", "how long the sandbox outlives this command if that is gone without a word, 1s to 7d")
	fs.Lookup("timeout").Usage = "kill the command after this long (default: never)"
	return cmd
}

func (a *app) run(ctx context.Context, f specFlags, pf processFlags, command []string, keep bool, ttl time.Duration) (err error) {
	api, err := a.client()
	if err != nil {
		return err
	}
	if len(command) == 0 {
		if command, err = a.entrypoint(ctx, f.image); err != nil {
			return err
		}
	}
	timeout := f.timeout.duration
	if timeout > 0 {
		f.timeout.duration += duration(runSlack)
	}
	// From here on, so that a signal cannot end us between the server's answer and
	// the removal.
	sigs, stop := a.Notify(sessionSignals...)
	defer stop()
	cctx, cancel := context.WithCancel(ctx)
	defer cancel()
	created, interrupted := make(chan struct{}), make(chan bool, 1)
	go func() {
		select {
		case <-sigs:
			cancel()
			interrupted <- true
		case <-created:
			interrupted <- false
		}
	}()
	var lease *ownLease
	if f.lease == "" && !keep {
		if lease, err = a.holdLease(cctx, "cove run", ttl); err == nil {
			f.lease = lease.id
			defer func() {
				if err := lease.end(); err != nil {
					a.warnf("lease %s could not be ended, and expires by itself: %v", lease.id, err)
				}
			}()
		}
	}
	var resp *connect.Response[covev1.CreateSandboxResponse]
	if err == nil {
		resp, err = a.createSandbox(cctx, f.request())
	}
	close(created)
	if <-interrupted && err != nil {
		return errLeft
	}
	if err != nil {
		return err
	}
	id := resp.Msg.GetSandbox().GetId()
	defer func() {
		if keep {
			a.warnf("sandbox %s is kept; 'cove rm %s' removes it", id, id)
			return
		}
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		_, kerr := api.Sandboxes.Kill(rctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
		if kerr != nil && !errors.Is(kerr, sandbox.ErrNotFound) {
			a.warnf("sandbox %s could not be removed: %v", id, kerr)
			if err == nil {
				err = &ExitError{Code: exitCove}
			}
		}
	}()
	s := &session{app: a, flags: pf, grace: runGrace, removed: !keep, sigs: sigs}
	return s.run(ctx, id, &covev1.ProcessSpec{Args: command, Timeout: timeout.proto()})
}

// entrypoint is what the image runs when nothing else is asked for.
func (a *app) entrypoint(ctx context.Context, image string) ([]string, error) {
	if image == "" {
		image = "base"
	}
	resp, err := a.api.Images.Get(ctx, connect.NewRequest(&covev1.GetImageRequest{Name: image}))
	if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
		return nil, err
	}
	var img *covev1.Image
	if err == nil {
		img = resp.Msg.GetImage()
	}
	command := append(append([]string{}, img.GetEntrypoint()...), img.GetCmd()...)
	if len(command) == 0 {
		what := fmt.Sprintf("image %s names no command of its own", image)
		if err != nil {
			what = fmt.Sprintf("no command, and no image %s here that names one", image)
		}
		return nil, usagef("cove run "+image+" -- COMMAND", "%s", what)
	}
	return command, nil
}
