package server

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// noted is what the log has, as "op outcome".
func (w *world) noted() (ops map[string]int, entries []sandbox.AuditEntry) {
	w.Helper()
	for !w.server.audit.flush(w.Context()) {
		<-tick()
	}
	entries, err := w.store.ListAudit(w.all(), 0, time.Time{}, 1000)
	if err != nil {
		w.Fatal(err)
	}
	ops = map[string]int{}
	for _, e := range entries {
		ops[e.Op+" "+e.Outcome]++
	}
	return ops, entries
}

// Code inside that asks in a loop does not grow the log: whoever answers
// decided once to serve.
func TestCodeInsideDoesNotGrowTheLog(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.serve(&covev1.ServeCallbacksRequest{SandboxId: sb.Id, Name: "llm"})
	for range 5 {
		got := w.inside(sb.Id, "POST", "/llm", strings.NewReader("prompt"))
		if err := s.answer(s.request().Id, 200, "words"); err != nil {
			t.Fatal(err)
		}
		w.wantReply(got, 200, "", "words")
	}
	if err := s.answer("nosuchrequest", 200, "late"); sandbox.ClassOf(err) != sandbox.NotFound {
		t.Error(err)
	}
	s.leave()
	<-s.ended

	p, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id,
		Process: &covev1.ProcessSpec{ExecId: "in", Command: sleeping, Stdin: true, Pty: &covev1.TermSize{Rows: 24, Cols: 80}}}))
	if err != nil || !p.Receive() {
		t.Fatal(err)
	}
	defer p.Close()
	for range 5 {
		if _, err := w.client.Processes.SendInput(t.Context(), connect.NewRequest(&covev1.SendInputRequest{SandboxId: sb.Id, ExecId: "in", Data: []byte("\x1b[1;1R")})); err != nil {
			t.Fatal(err)
		}
		if _, err := w.client.Processes.Resize(t.Context(), connect.NewRequest(&covev1.ResizeRequest{SandboxId: sb.Id, ExecId: "in", Size: &covev1.TermSize{Rows: 20, Cols: 20}})); err != nil {
			t.Fatal(err)
		}
		if _, err := w.client.Processes.Wait(t.Context(), connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: sb.Id, ExecId: "in", MaxWait: durationpb.New(1)})); err != nil {
			t.Fatal(err)
		}
	}
	ops, entries := w.noted()
	for ops["callback.serve canceled"] == 0 && t.Context().Err() == nil { // the client knows of its end first
		<-tick()
		ops, entries = w.noted()
	}
	for what, want := range map[string]int{"callback.serve ok": 1, "callback.serve canceled": 1, "process.start ok": 1, "process.send_input ok": 1, "process.resize ok": 1} {
		if ops[what] != want {
			t.Errorf("%d of %q, want %d", ops[what], what, want)
		}
	}
	if len(entries) != 6 { // and the sandbox's creation
		t.Errorf("the log has %v", ops)
	}

	// What another does to the same process is another thing.
	k, err := w.client.Keys.Create(t.Context(), connect.NewRequest(&covev1.CreateKeyRequest{Name: "other"}))
	if err != nil {
		t.Fatal(err)
	}
	other := (&shared{world: w}).dial(k.Msg.Secret)
	if _, err := other.Processes.SendInput(t.Context(), connect.NewRequest(&covev1.SendInputRequest{SandboxId: sb.Id, ExecId: "in", Data: []byte("x")})); err != nil {
		t.Fatal(err)
	}
	if ops, _ := w.noted(); ops["process.send_input ok"] != 2 {
		t.Errorf("another's input is not in the log: %v", ops)
	}
}

// Logins by SSH have the address of who came, as all entries have.
func TestLoginIsNotedByAddress(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	keys := all(t, w.store.ListKeys)
	if _, err := w.server.Reach().Login(t.Context(), sb.Id, keys[0].ID, "[fd00::7]:51234"); err != nil {
		t.Fatal(err)
	}
	_, entries := w.noted()
	for _, e := range entries {
		if e.Op == "ssh.login" && e.Remote == "fd00::7" {
			return
		}
	}
	t.Errorf("no login from fd00::7: %+v", entries)
}
