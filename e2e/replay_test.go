package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

func diff(t *testing.T, w *world.World, r *covev1.DiffRequest) *covev1.DiffResponse {
	t.Helper()
	resp, err := w.Client().Sandboxes.Diff(t.Context(), connect.NewRequest(r))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg
}

// said is a diff as lines: "A /path", "M /path content,mode", "D /path".
func said(d *covev1.DiffResponse) (lines []string) {
	for _, c := range d.Changes {
		line := strings.ToUpper(c.Kind[:1]) + " " + c.Path
		if len(c.What) > 0 {
			line += " " + strings.Join(c.What, ",")
		}
		lines = append(lines, line)
	}
	return lines
}

func wantDiff(t *testing.T, d *covev1.DiffResponse, want ...string) {
	t.Helper()
	if got := said(d); !slices.Equal(got, want) || d.Truncated || d.Omitted || d.Added+d.Modified+d.Deleted != int64(len(want)) {
		t.Errorf("got  %q\nwant %q (%v)", got, want, d)
	}
}

// What a sandbox changed, against its image, a snapshot, a reset and the memory it came
// with, with names and files that are made to confuse.
func TestDiffOfASandbox(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	wantDiff(t, diff(t, w, &covev1.DiffRequest{Id: b.ID}))
	root := func(cmd string) { t.Helper(); b.Must(t, cmd) }
	root(`set -e
echo hi > /root/new; chmod 600 /etc/passwd; chown 7:7 /etc/group; echo more >> /etc/profile
rm -rf /usr/share/doc; mkdir /usr/share/doc; touch /usr/share/doc/mine
rm /etc/fstab || true; rm -rf /media; ln -s /nowhere /media; mkfifo /tmp/pipe
truncate -s 1T /tmp/sparse; printf x > "$(printf '/tmp/a\377b\nc')"
python3 -c "f = open('/etc/shells', 'r+b'); s = f.read(); f.seek(0); f.write(s)"  # the same content again`)
	got := said(diff(t, w, &covev1.DiffRequest{Id: b.ID, Limit: 100_000}))
	for _, want := range []string{"A /root/new", "M /etc/passwd mode", "M /etc/group owner", "M /etc/profile content", "M /media type", "A /tmp/pipe", "A /tmp/sparse", "A /tmp/a\uFFFDb\nc", "A /usr/share/doc/mine"} {
		if !slices.Contains(got, want) {
			t.Errorf("%q is missing: %q", want, got)
		}
	}
	for _, g := range got {
		if g == "M /usr/share/doc" || strings.HasPrefix(g, "A /usr/share/doc/") && g != "A /usr/share/doc/mine" || g == "D /usr/share/doc" {
			t.Errorf("a directory that was made anew is there: %q", g)
		}
	}
	// A change whose time was put back is found by its content.
	root(`set -e; cp -p /etc/profile /tmp/then; touch -r /etc/bash.bashrc /tmp/ref; python3 - <<'END'
import os
p = '/etc/bash.bashrc'
st = os.stat(p)
with open(p, 'r+b') as f:
    f.write(b'X')
os.utime(p, ns=(st.st_atime_ns, st.st_mtime_ns))
END`)
	if got := said(diff(t, w, &covev1.DiffRequest{Id: b.ID, Limit: 100_000})); !slices.Contains(got, "M /etc/bash.bashrc content") {
		t.Errorf("a change with its old time is not seen: %q", got)
	}
	root("rm /tmp/sparse") // a tar of it would be refused
	snap := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot}).ID
	wantDiff(t, diff(t, w, &covev1.DiffRequest{Id: b.ID, Since: snap}))
	root("echo two >> /root/new; rm /tmp/pipe; mkdir /srv/made; rm /media; mkdir /media")
	wantDiff(t, diff(t, w, &covev1.DiffRequest{Id: b.ID, Since: snap, Hash: true}), "M /media type", "M /root/new content", "A /srv/made", "D /tmp/pipe")
	// A copy begins with what its source had.
	forks, err := w.Client().Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: b.ID, Count: 1}))
	if err != nil {
		t.Fatal(err)
	}
	kid := forks.Msg.Results[0].Sandbox.Id
	defer w.Client().Sandboxes.Kill(t.Context(), connect.NewRequest(&covev1.KillRequest{Id: kid}))
	wantDiff(t, diff(t, w, &covev1.DiffRequest{Id: kid}))
	if _, err := w.Client().Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: b.ID})); err != nil {
		t.Fatal(err)
	}
	wantDiff(t, diff(t, w, &covev1.DiffRequest{Id: b.ID}))
	// Many: counted, and the first are listed.
	root("mkdir /srv/many && cd /srv/many && seq 1 3000 | xargs touch")
	if d := diff(t, w, &covev1.DiffRequest{Id: b.ID}); d.Added != 3001 || len(d.Changes) != sandbox.DiffEntries || !d.Omitted {
		t.Errorf("%d added, %d listed", d.Added, len(d.Changes))
	}
}

// Two deterministic sandboxes see the same, and so does a replay; what is not fixed is
// found as the first difference.
func TestDeterministicReplay(t *testing.T) {
	w := world.New(t, world.Options{})
	run, err := w.Client().Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "fixed", StepDetails: []string{"files", "egress"}}))
	if err != nil {
		t.Fatal(err)
	}
	spec := world.Small()
	spec.Deterministic = &sandbox.Deterministic{Seed: 7}
	spec.Rollout = sandbox.Rollout{Run: run.Msg.Run.Id}
	// To the minute: a machine that is busy may need seconds until a command looks.
	script := []string{
		`date '+%F %R'; echo $$; sh -c 'echo $$'; env | sort; hostname; nproc; python3 -c 'import os; print(hash("x"), os.getpid())'`,
		`echo x > /tmp/made; date -r /tmp/made '+%F %R'; python3 -c 'import time; a = time.time(); time.sleep(.01); print(time.time() > a, time.monotonic() > 0)'`,
		`date '+%F %R'; echo $$`,
	}
	var outs [2]string
	var boxes [2]*world.Box
	for i := range outs {
		boxes[i] = w.Create(t, spec)
		for n, c := range script {
			if i == 1 && n > 0 {
				w.Restart(t) // a server that is killed between any two steps changes nothing
			}
			outs[i] += boxes[i].Must(t, c)
		}
	}
	if outs[0] != outs[1] || !strings.Contains(outs[0], "2025-01-01 00:01") || !strings.Contains(outs[0], "2025-01-01 00:03") {
		t.Errorf("they differ:\n%s\n---\n%s", outs[0], outs[1])
	}
	clockOverRestart(t, w, spec)
	replay := func() *covev1.Replayed {
		t.Helper()
		r, err := replayOf(t.Context(), w, boxes[0].ID, nil)
		if err != nil || r == nil {
			t.Fatal(err)
		}
		return r
	}
	if r := replay(); !r.Same || r.Replayed != 3 || !r.Deterministic || len(r.NotFixed) == 0 || len(r.Gaps) != 0 {
		t.Errorf("%v", r)
	}
	boxes[0].Must(t, "od -An -N16 -tx1 /dev/urandom; date +%N")
	if r := replay(); r.Same || len(r.Differences) != 1 || r.Replayed != 4 || !strings.Contains(r.Differences[0].Command, "urandom") || r.Differences[0].What != "stdout" || r.Differences[0].Offset < 0 {
		t.Errorf("%v", r)
	}
	steps, err := w.Client().Runs.ListSteps(t.Context(), connect.NewRequest(&covev1.ListStepsRequest{Run: "fixed", Sandbox: boxes[0].ID}))
	if err != nil {
		t.Fatal(err)
	}
	if f := steps.Msg.Steps[1].Files; f.GetAdded() != 1 || f.Changes[0].Path != "/tmp/made" || steps.Msg.Steps[0].Files == nil || steps.Msg.Steps[1].Egress == nil {
		t.Errorf("%v", steps.Msg.Steps[1])
	}
	if _, err := w.Client().Runs.Reap(t.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: "fixed"})); err != nil {
		t.Fatal(err)
	}
}

// clockOverRestart has a process run while the server is killed: what begins beside it
// leaves the clock, what begins when it is over begins at the next minute.
func clockOverRestart(t *testing.T, w *world.World, spec sandbox.Spec) {
	t.Helper()
	b := w.Create(t, spec)
	begun := errors.New("begun")
	if err := b.Start(t.Context(), sandbox.ProcessSpec{ExecID: "long", Command: "until [ -e /tmp/go ]; do sleep 0.05; done"}, 0, func(sandbox.ProcessEvent) error { return begun }); !errors.Is(err, begun) {
		t.Fatal(err)
	}
	w.Restart(t)
	if got := b.Must(t, "date +%R; touch /tmp/go"); got != "00:01" {
		t.Errorf("beside what ran on it is %s", got)
	}
	if err := b.Attach(t.Context(), "long", 0, func(sandbox.ProcessEvent) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got := b.Must(t, "date +%R"); got != "00:02" {
		t.Errorf("after it it is %s", got)
	}
}
