package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var output = []scenario{
	{"100 MiB of output", allOfTheOutput},
	{"endless output that nobody reads", endlessUnread},
	{"endless output and a reader that rests", endlessRestingReader},
	{"many endless outputs", manyEndless},
	{"output that is no text", binaryOutput},
}

// Not a byte of 100 MiB is lost on the way to a reader who stays, and stdout
// and stderr are not mixed up.
func allOfTheOutput(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	sums := map[sandbox.Stream]hash.Hash{sandbox.Stdout: sha256.New(), sandbox.Stderr: sha256.New()}
	var next int64
	var end sandbox.ProcessEnd
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	err := b.Start(ctx, sandbox.ProcessSpec{User: "root", Args: []string{"python3", "-c", `
import hashlib, os
sums = [hashlib.sha256(), hashlib.sha256()]
block = hashlib.shake_128(b'cove').digest(1 << 16)
for i in range(1600):
    data = i.to_bytes(8, 'little') + block[8:]
    which = 1 if i % 16 == 15 else 0
    sums[which].update(data)
    view = memoryview(data)
    while view: view = view[os.write(1 + which, view):]
open('/sums', 'w').write(' '.join(s.hexdigest() for s in sums))
`}}, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Lost != nil:
			return fmt.Errorf("lost [%d, %d)", ev.Lost.From, ev.Lost.To)
		case ev.Output != nil:
			if ev.Output.Offset != next {
				return fmt.Errorf("offset %d after %d", ev.Output.Offset, next)
			}
			next += int64(len(ev.Output.Data))
			sums[ev.Output.Stream].Write(ev.Output.Data)
		case ev.End != nil:
			end = *ev.End
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if end.Cause != sandbox.Exited || end.ExitCode != 0 || end.OutputBytes != 1600<<16 || next != 1600<<16 {
		t.Errorf("%d bytes came, end %+v", next, end)
	}
	want := b.Must(t, "cat /sums")
	if got := hex.EncodeToString(sums[sandbox.Stdout].Sum(nil)) + " " + hex.EncodeToString(sums[sandbox.Stderr].Sum(nil)); got != want {
		t.Errorf("received %s\n   sent %s", got, want)
	}
}

const boundedGrowth = 192 << 20 // of the server; the outputs below are gigabytes

// A process that prints for ever while nobody listens: its deadline ends it,
// and what is held is bounded in the server and inside.
func endlessUnread(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	before := w.ServerMemory(t)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := errors.New("left")
	err := b.Start(ctx, sandbox.ProcessSpec{ExecID: "yes", Command: "yes 0123456789abcdef", Timeout: 5 * time.Second}, 0, func(ev sandbox.ProcessEvent) error {
		if ev.Started != nil {
			return left
		}
		return nil
	})
	if !errors.Is(err, left) {
		t.Fatal(err)
	}
	leave()
	wctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r, err := w.Client().Processes.Wait(wctx, connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: b.ID, ExecId: "yes"}))
	if err != nil {
		t.Fatal(err)
	}
	end := r.Msg.End
	if end.GetEnd().GetCause() != string(sandbox.Deadline) {
		t.Fatalf("ended by %v", end)
	}
	var got world.Result
	if err := attachAll(wctx, b, "yes", &got); err != nil {
		t.Fatal(err)
	}
	if got.End.Cause != sandbox.Deadline || got.End.OutputBytes != end.OutputBytes {
		t.Errorf("replayed end %+v, waited end %v", got.End, end)
	}
	// What is held is the end of it, announced as such; or all of it, where
	// the process was held back instead.
	held := int64(len(got.Out))
	if len(got.Lost) > 0 && got.Lost[0].To+held != end.OutputBytes || len(got.Lost) == 0 && held != end.OutputBytes {
		t.Errorf("%d bytes printed, lost %v, %d held", end.OutputBytes, got.Lost, held)
	}
	if held > 64<<20 {
		t.Errorf("%d MiB are held", held>>20)
	}
	if grown := w.ServerMemory(t) - before; grown > boundedGrowth {
		t.Errorf("the server grew by %d MiB", grown>>20)
	}
	b.WantRunning(t)
}

func attachAll(ctx context.Context, b *world.Box, execID string, r *world.Result) error {
	return b.Attach(ctx, execID, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Lost != nil:
			r.Lost = append(r.Lost, *ev.Lost)
		case ev.Output != nil:
			r.Out = append(r.Out, ev.Output.Data...)
		case ev.End != nil:
			r.End = *ev.End
		}
		return nil
	})
}

// A reader that keeps its stream open and takes nothing from it.
func endlessRestingReader(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	before := w.ServerMemory(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := w.Client().Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: b.ID, Process: &covev1.ProcessSpec{
		ExecId: "yes", Command: "yes 0123456789abcdef"}}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	// Meanwhile the sandbox answers others, and the resting reader's process
	// can be ended.
	for range 20 {
		b.Must(t, "head -c 100000 /dev/zero | wc -c")
	}
	if grown := w.ServerMemory(t) - before; grown > boundedGrowth {
		t.Errorf("the server grew by %d MiB", grown>>20)
	}
	if _, err := w.Client().Processes.Signal(ctx, connect.NewRequest(&covev1.SignalRequest{SandboxId: b.ID, ExecId: "yes"})); err != nil {
		t.Fatal(err)
	}
	r, err := w.Client().Processes.Wait(ctx, connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: b.ID, ExecId: "yes"}))
	if err != nil {
		t.Fatal(err)
	}
	if c := r.Msg.End.GetEnd().GetCause(); c != string(sandbox.KilledByUser) {
		t.Errorf("ended by %s", c)
	}
}

func manyEndless(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	before := w.ServerMemory(t)
	done := make(chan error, 16)
	for i := range cap(done) {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var end sandbox.ProcessEnd
			err := b.Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprint("yes", i), Command: "yes | tr -d '\\n'", Timeout: 5 * time.Second}, 0, func(ev sandbox.ProcessEvent) error {
				if ev.End != nil {
					end = *ev.End
				}
				return nil
			})
			if err == nil && end.Cause != sandbox.Deadline {
				err = fmt.Errorf("ended by %v", end.End)
			}
			done <- err
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if grown := w.ServerMemory(t) - before; grown > boundedGrowth {
		t.Errorf("the server grew by %d MiB", grown>>20)
	}
	// 16 buffers inside are within the sandbox's own 128 MiB: it still runs.
	b.WantRunning(t)
	b.Must(t, "echo alive")
}

func binaryOutput(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Python(t, `
import os, sys
os.write(1, bytes(range(256)) * 4)
os.write(2, b'\xff\xfe\x00')
`, time.Minute)
	if len(r.Out) != 1024 || r.Out[255] != 255 || string(r.Err) != "\xff\xfe\x00" {
		t.Errorf("got %q, %q", r.Out, r.Err)
	}
	// A process may name itself as it likes; the list of processes survives.
	r = b.Exec(t, sandbox.ProcessSpec{User: "root", Command: `bash -c 'exec -a $'"'"'\xff\xfe\x1b[31m\n'"'"' sleep 1000' & sleep 0.3; echo`})
	r.WantExit(t, 0)
	_, tasks := b.Tasks(t)
	found := false
	for _, task := range tasks {
		found = found || strings.Contains(task.Command, "1000")
	}
	if !found {
		t.Errorf("the oddly named process is not listed: %+v", tasks)
	}
}
