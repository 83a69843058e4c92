package storetest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const (
	crashRounds  = 20
	crashWriters = 8
	crashEnv     = "COVE_STORETEST_CRASH_CHILD" // "<round> <dir>"; set in the child only
)

// Crash kills a process that writes, with SIGKILL at a random moment, twenty
// times over on the same data, and checks after each that everything the store
// had answered for is there, and that nothing is there by half. open opens the
// data kept in dir, again and again.
//
// The child is this test binary, told to run the calling test alone; so call
// Crash from a top-level test that does nothing else.
func Crash(t *testing.T, open func(dir string) (store.Store, error)) {
	bare := open
	open = func(dir string) (store.Store, error) {
		st, err := bare(dir)
		return scoped{st}, err
	}
	if told := os.Getenv(crashEnv); told != "" {
		crashChild(t, told, open)
		return
	}
	dir := t.TempDir()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	acked := map[string]string{} // id → the last state that was answered for it
	for round := range crashRounds {
		for _, line := range crashRun(t, dir, round, 1+random.IntN(400)) {
			verb, id, _ := strings.Cut(line, " ")
			if acked[id] != "ended" { // the lines of one id are in order, but be sure
				acked[id] = verb
			}
		}
		st, err := open(dir)
		if err != nil {
			t.Fatalf("round %d: open after the kill: %v", round, err)
		}
		checkSurvivors(t, st, round, acked)
		if err := st.Close(); err != nil {
			t.Fatalf("round %d: close: %v", round, err)
		}
		if t.Failed() {
			return
		}
	}
	if len(acked) < crashRounds {
		t.Errorf("only %d answers in %d rounds: the test did not test", len(acked), crashRounds)
	}
}

// crashRun starts a child, kills it after so many answers and returns every
// answer it gave.
func crashRun(t *testing.T, dir string, round, answers int) (lines []string) {
	t.Helper()
	// Pdeathsig is sent when the thread that forked ends, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var output strings.Builder
	cmd := exec.Command(self, "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", crashEnv, round, dir))
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		w.Close()
		t.Fatal(err)
	}
	w.Close()
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if err == io.EOF {
			break // a line without its newline was never finished, so never said
		}
		if err != nil {
			t.Error(err)
			break
		}
		if lines = append(lines, strings.TrimSuffix(line, "\n")); len(lines) == answers {
			cmd.Process.Kill()
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.Success() || len(lines) < answers {
		t.Fatalf("round %d: the child ended by itself (%v) after %d answers:\n%s", round, err, len(lines), output.String())
	}
	return lines
}

// crashChild writes until it is killed. Every answer of the store is one write
// to descriptor 3, which the kernel makes whole.
func crashChild(t *testing.T, told string, open func(dir string) (store.Store, error)) {
	round, dir, _ := strings.Cut(told, " ")
	st, err := open(dir)
	if err != nil {
		t.Fatal(err)
	}
	answers := os.NewFile(3, "answers")
	ctx := context.Background()
	var wg sync.WaitGroup
	for writer := range crashWriters {
		wg.Go(func() {
			for i := 0; ; i++ {
				id := fmt.Sprintf("r%sw%dn%d", round, writer, i)
				sb := newSandbox(id, i)
				if _, _, err := st.CreateSandbox(ctx, sb, store.Idempotency{Key: "k" + id, Hash: "h"}); err != nil {
					t.Error(err)
					return
				}
				fmt.Fprintf(answers, "created %s\n", id)
				if i%2 == 0 {
					if _, err := st.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error { sb.Episode = 2; return nil }); err != nil {
						t.Error(err)
						return
					}
					fmt.Fprintf(answers, "updated %s\n", id)
				}
				if i%4 == 0 {
					if _, err := st.EndSandbox(ctx, id, sandbox.End{Cause: sandbox.TTL, At: at(i)}); err != nil {
						t.Error(err)
						return
					}
					fmt.Fprintf(answers, "ended %s\n", id)
				}
			}
		})
	}
	wg.Wait()
}

func checkSurvivors(t *testing.T, st store.Store, round int, acked map[string]string) {
	t.Helper()
	found, err := walk(t.Context(), st, store.Filter{States: sandbox.States, PageSize: 1000})
	if err != nil {
		t.Fatalf("round %d: %v", round, err)
	}
	byID := map[string]sandbox.Sandbox{}
	for _, sb := range found {
		byID[sb.ID] = sb
	}
	for id, verb := range acked {
		sb, ok := byID[id]
		if !ok || verb != "created" && sb.Episode != 2 || verb == "ended" && sb.State != sandbox.EndedState {
			t.Errorf("round %d: %s was answered as %s and is found: %v, episode %d, %s", round, id, verb, ok, sb.Episode, sb.State)
		}
	}
	// A sandbox may be there without an answer, when the kill came in
	// between. It must be whole then: record, labels and key.
	labelled, err := walk(t.Context(), st, store.Filter{Labels: map[string]string{"run": "r1"}, States: sandbox.States, PageSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	same(t, "found by label", ids(labelled), ids(found))
	for _, sb := range found {
		byKey, err := st.SandboxByKey(t.Context(), store.Idempotency{Key: "k" + sb.ID, Hash: "h"})
		if err != nil || byKey.ID != sb.ID {
			t.Errorf("round %d: the key of %s: %s, %v", round, sb.ID, byKey.ID, err)
		}
	}
}
