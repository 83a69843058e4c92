package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestWhoWaitsIsToldOfAPause: an exec that is waited for when a pause lands used
// to read on silently until somebody woke the sandbox.
func TestWhoWaitsIsToldOfAPause(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	for round := range 3 {
		for _, cold := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d cold=%v", round, cold), func(t *testing.T) { followOverAPause(t, b, cold) })
		}
	}
	t.Run("a call with one answer", func(t *testing.T) { answerOverAPause(t, w, b) })
	t.Run("refused", func(t *testing.T) { refusedPause(t, w, b) })
}

// followOverAPause reads a process whose sandbox is paused and resumed, and wants
// to hear of both.
func followOverAPause(t *testing.T, b *world.Box, cold bool) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	standing := make(chan sandbox.Standby, 8)
	printed, over := make(chan struct{}), make(chan error, 1)
	var r sandbox.ProcessEnd
	go func() {
		seen := 0
		over <- b.Start(ctx, sandbox.ProcessSpec{Command: "echo up; while ! [ -e /tmp/go ]; do sleep 0.05; done; rm /tmp/go", User: "root", Timeout: time.Minute}, 0, func(ev sandbox.ProcessEvent) error {
			switch {
			case ev.Output != nil:
				if seen++; seen == 1 {
					close(printed)
				}
			case ev.Standby != nil:
				standing <- *ev.Standby
			case ev.End != nil:
				r = *ev.End
			}
			return nil
		})
	}()
	within(t, printed, "the process printed nothing")
	want := func(s sandbox.Standby) {
		t.Helper()
		if got := within(t, standing, fmt.Sprintf("nobody told %q", s)); got != s {
			t.Fatalf("told %q, want %q", got, s)
		}
	}
	b.Pause(t, cold)
	if cold {
		if got := within(t, standing, "no news of the pause"); got == sandbox.Hot { // on its way to disk
			want(sandbox.Cold)
		} else if got != sandbox.Cold {
			t.Fatalf("told %q", got)
		}
	} else {
		want(sandbox.Hot)
	}
	if err := b.TryResume(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(sandbox.Awake)
	b.Must(t, "touch /tmp/go")
	if err := within(t, over, "the process did not end"); err != nil || r.Cause != sandbox.Exited || r.ExitCode != 0 {
		t.Fatalf("ended by %v (%v)", r.End, err)
	}
}

// within is what a channel has, in ten seconds at most.
func within[T any](t *testing.T, c <-chan T, without string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatal(without)
		panic("not reached")
	}
}

// answerOverAPause: who asked for one answer gets it, with how to go on.
func answerOverAPause(t *testing.T, w *world.World, b *world.Box) {
	type answer struct {
		body struct {
			Code, Stdout string
			ExitCode     *int `json:"exit_code"`
			Details      []struct{ Debug struct{ Reason, Hint string } }
		}
		err error
	}
	ask := func() (a answer) {
		req, err := http.NewRequestWithContext(t.Context(), "POST", w.URL()+"/v1/sandboxes/"+b.ID+"/exec",
			strings.NewReader(`{"exec_id":"one-answer","command":"touch /tmp/begun; sleep 2; echo done","kill_on_cancel":true}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+w.Key())
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return answer{err: err}
		}
		defer resp.Body.Close()
		var raw bytes.Buffer
		_, _ = raw.ReadFrom(resp.Body)
		a.err = json.Unmarshal(raw.Bytes(), &a.body)
		t.Logf("%d %s", resp.StatusCode, raw.Bytes())
		return a
	}
	first := make(chan answer, 1)
	go func() { first <- ask() }()
	for b.Root(t, "test -e /tmp/begun").End.ExitCode != 0 { // each is a round trip: no sleep needed
	}
	b.Pause(t, false)
	a := within(t, first, "the call says nothing of the pause")
	if a.err != nil || a.body.Code != "failed_precondition" || len(a.body.Details) != 1 ||
		a.body.Details[0].Debug.Reason != "asleep" || !strings.Contains(a.body.Details[0].Debug.Hint, "one-answer") {
		t.Fatalf("%+v", a)
	}
	if a = ask(); a.err != nil || a.body.ExitCode == nil || *a.body.ExitCode != 0 || a.body.Stdout != "done\n" {
		t.Fatalf("asked again: %+v", a)
	}
}

// refusedPause: nothing that runs is frozen where the caller says so.
func refusedPause(t *testing.T, w *world.World, b *world.Box) {
	pause := func(ifBusy string) error {
		_, err := w.Client().Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: b.ID, IfBusy: ifBusy}))
		return err
	}
	if err := pause("refuse"); err != nil {
		t.Fatalf("an idle sandbox: %v", err)
	}
	if got := b.Get(t).Standby; got != sandbox.Hot {
		t.Fatalf("it is %q", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan struct{})
	go b.Start(ctx, sandbox.ProcessSpec{ExecID: "at-work", Args: []string{"sleep", "600"}}, 0, func(ev sandbox.ProcessEvent) error {
		if ev.Started != nil {
			close(started)
		}
		return nil
	})
	defer cancel()
	within(t, started, "the process did not start")
	err := pause("refuse")
	if !errors.Is(err, sandbox.ErrBusy) || !strings.Contains(err.Error(), "at-work") {
		t.Errorf("busy: %v", err)
	}
	if got := b.Get(t).Standby; got != sandbox.Awake {
		t.Errorf("it is %q", got)
	}
	if err := pause("sometimes"); sandbox.ClassOf(err) != sandbox.Invalid {
		t.Errorf("nonsense: %v", err)
	}
}
