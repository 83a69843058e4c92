package e2e

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// aheadStart is the start command of a template that says every few milliseconds who it is,
// when, and with which random bytes.
const aheadStart = `while :; do echo "$(hostname) $(date +%s%N) $(od -An -tx8 -N8 /dev/urandom | tr -d ' ')" >> /tmp/ticks; touch /tmp/up; sleep 0.02; done`

// aheadHeld waits until the node holds as many kernels as it wants, and says how many.
func aheadHeld(t *testing.T, w *world.World, want func(held, target int32) bool) int32 {
	t.Helper()
	var info *covev1.InfoResponse
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		var err error
		if info, err = w.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		if want(info.HeldKernels, info.HeldTarget) {
			return info.HeldKernels
		}
	}
	t.Fatalf("%d kernels are held of %d", info.HeldKernels, info.HeldTarget)
	return 0
}

// inUse creates from what spec says until kernels are held of it.
func inUse(t *testing.T, w *world.World, spec sandbox.Spec) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		w.Create(t, spec).Must(t, "sleep 0.5")
		if info, err := w.Info(t.Context()); err != nil || info.HeldTarget > 0 {
			return
		}
	}
	t.Fatal("it was created from again and again, and none is held")
}

func full(held, target int32) bool { return target > 0 && held >= target }
func none(held, target int32) bool { return held == 0 && target == 0 }

// Creates from a template take kernels that were restored ahead. Each begins when it is
// created, with a name, a secret, variables, limits and random bytes of its own, and what
// ran in the template has not run in between. When the template is deleted nothing is
// held, and what was made goes on.
func TestRestoredAhead(t *testing.T) {
	w := world.New(t, world.Options{})
	tpl, err := w.BuildTemplate(t.Context(), "ahead", aheadStart, "test -e /tmp/up")
	if err != nil {
		t.Fatal(err)
	}
	spec := world.Small()
	spec.Template = tpl.Ref()
	begun := func(i int) (*world.Box, time.Time) {
		s := spec
		s.Env = map[string]string{"WHO": fmt.Sprint("child", i)}
		s.Resources.MemoryLimit = int64(128+i) * sandbox.MiB
		at := time.Now()
		return w.Create(t, s), at
	}
	inUse(t, w, spec)
	seen := map[string]string{} // what must be one's own, and whose it was
	own := func(b *world.Box, what, value string) {
		t.Helper()
		if whose, there := seen[value]; there {
			t.Errorf("%s of %s is that of %s: %s", what, b.ID, whose, value)
		}
		seen[value] = b.ID
	}
	var boxes []*world.Box
	for i := 2; i < 6; i++ {
		before := aheadHeld(t, w, full)
		b, at := begun(i)
		if info, err := w.Info(t.Context()); err != nil || info.HeldKernels >= before {
			t.Errorf("%d kernels were held, and after a create %d are (%v)", before, info.HeldKernels, err)
		}
		boxes = append(boxes, b)
		if got := b.Must(t, "hostname; echo $WHO; echo $COVE_SANDBOX_ID; awk '/MemTotal/ {print $2}' /proc/meminfo"); got != fmt.Sprintf("%s\nchild%d\n%s\n%d", b.ID, i, b.ID, (128+i)<<10) {
			t.Errorf("%s is %q", b.ID, got)
		}
		if now, err := strconv.ParseInt(b.Must(t, "date +%s"), 10, 64); err != nil || now < at.Unix() || now > time.Now().Unix()+1 {
			t.Errorf("it is %d inside, and was created at %d (%v)", now, at.Unix(), err)
		}
		own(b, "random bytes", b.Must(t, "od -An -tx8 -N16 /dev/urandom"))
		own(b, "random bytes of Python", b.Must(t, "python3 -c 'import secrets; print(secrets.token_hex(16))'"))
		if uuid := b.Must(t, "cat /proc/sys/kernel/random/uuid 2>/dev/null || true"); uuid != "" {
			own(b, "uuid", uuid)
		}
		b.Must(t, "until grep -q ^"+b.ID+" /tmp/ticks; do sleep 0.02; done")
		ticks := b.Must(t, "cat /tmp/ticks")
		others := 0
		for line := range strings.Lines(ticks) {
			f := strings.Fields(line)
			if len(f) != 3 {
				continue // one that the checkpoint cut
			}
			when, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatalf("tick %q: %v", line, err)
			}
			switch early := when < at.UnixNano(); {
			case f[0] == b.ID && early:
				t.Errorf("%s ticked before it was created: %q", b.ID, line)
			case f[0] == b.ID:
				own(b, "a tick's random bytes", f[2])
			case !early:
				others++ // a turn that the checkpoint cut in two: its name was asked for before
			case time.Unix(0, when).After(tpl.CreatedAt.Add(time.Second)):
				t.Errorf("%s ticked after the template was made and before the sandbox: %q", b.ID, line)
			}
		}
		if others > 1 {
			t.Errorf("%s ticked %d times under another name", b.ID, others)
		}
	}
	w.AssertReconciled(t)
	aheadHeld(t, w, full)
	if _, err := w.Client().Templates.Delete(t.Context(), connect.NewRequest(&covev1.DeleteTemplateRequest{Name: tpl.Name})); err != nil {
		t.Fatal(err)
	}
	aheadHeld(t, w, none)
	for _, b := range boxes {
		if got := b.Must(t, "hostname"); got != b.ID {
			t.Errorf("%s is %q", b.ID, got)
		}
	}
	w.AssertReconciled(t)
}

// A server that is killed while kernels are held, and amid creates that take them, leaves
// none of them: the next one has exactly the sandboxes on record.
func TestHeldAfterACrash(t *testing.T) {
	w := world.New(t, world.Options{})
	parent := w.Create(t, world.Small())
	parent.Must(t, "echo kept > /tmp/kept")
	snap := parent.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
	inUse(t, w, world.From(snap))
	aheadHeld(t, w, full)
	made := make(chan error, 4)
	for range cap(made) {
		go func() {
			_, err := w.TryCreate(t.Context(), world.From(snap), "")
			made <- err
		}()
	}
	if err := <-made; err != nil { // one stands; the others are wherever they are
		t.Error(err)
	}
	w.Kill(t)
	w.Start(t)
	for range cap(made) - 1 {
		<-made
	}
	w.AssertReconciled(t)
	running, err := w.Running(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range running {
		b := &world.Box{W: w, ID: sb.ID}
		if got := b.Must(t, "cat /tmp/kept; hostname"); got != "kept\n"+sb.ID {
			t.Errorf("%s has %q", sb.ID, got)
		}
	}
}

// A kernel that is held has a network that lets nothing through; who takes it has the
// policy of its create, not that of the snapshot or of who took one before.
func TestHeldWithANetwork(t *testing.T) {
	bank := newBank(t)
	w := world.New(t, world.Options{Flags: []string{"--dns", bank.resolver, "--egress-roots", bank.roots}})
	fetch := "curl -sSk -m 20 --data-binary sent https://" + net.JoinHostPort(bankName, bank.port) + "/echo"
	spec := bank.spec()
	spec.Secrets = nil
	parent := w.Create(t, spec)
	if got := parent.Must(t, fetch); !strings.HasSuffix(got, "said sent") {
		t.Fatalf("the bank answers %q", got)
	}
	open := world.From(parent.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID)
	open.Network = spec.Network
	closed := open
	closed.Network = sandbox.Network{Mode: sandbox.NetworkRules, Rules: []sandbox.NetworkRule{{Action: sandbox.NetworkAllow, Domain: "other.test"}}}
	inUse(t, w, open)
	for i, spec := range []sandbox.Spec{open, closed, open} {
		before := aheadHeld(t, w, full)
		b := w.Create(t, spec)
		if info, err := w.Info(t.Context()); err != nil || info.HeldKernels >= before {
			t.Errorf("%d kernels were held, and after a create %d are (%v)", before, info.HeldKernels, err)
		}
		r := b.Root(t, fetch)
		if allowed := i != 1; allowed && !strings.HasSuffix(strings.TrimSpace(string(r.Out)), "said sent") || !allowed && r.End.ExitCode == 0 {
			t.Errorf("create %d: exit %d, %q %q", i, r.End.ExitCode, r.Out, r.Err)
		}
	}
	w.AssertReconciled(t)
}
