package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// execResponse is the answer of POST /v1/sandboxes/{id}/exec, as a client reads it.
type execResponse struct {
	ExecID       string  `json:"exec_id"`
	Replayed     bool    `json:"replayed"`
	Stdout       *string `json:"stdout"`
	StdoutBase64 *[]byte `json:"stdout_base64"`
	Stderr       *string `json:"stderr"`
	Truncated    bool    `json:"truncated"`
	OutputBytes  int64   `json:"output_bytes"`
	Cause        string  `json:"cause"`
	ExitCode     *int    `json:"exit_code"`
}

func (w *world) exec(id, body string) (status int, out execResponse, raw string) {
	w.Helper()
	resp, raw := w.http("POST", "/v1/sandboxes/"+id+"/exec", strings.NewReader(body), "Content-Type", "application/json")
	if resp.StatusCode == http.StatusOK {
		if err := json.Unmarshal([]byte(raw), &out); err != nil {
			w.Fatalf("%v: %s", err, raw)
		}
	}
	return resp.StatusCode, out, raw
}

func TestExecOverPlainHTTP(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	status, out, raw := w.exec(sb.Id, `{"exec_id":"one","command":"echo hello"}`)
	if status != 200 || *out.Stdout != "hello\n" || *out.Stderr != "" || out.Cause != "exited" || *out.ExitCode != 0 || out.Replayed || out.Truncated || out.OutputBytes != 6 {
		t.Errorf("%d %s", status, raw)
	}
	// Asked again by its id it does not run again.
	if _, out, raw := w.exec(sb.Id, `{"exec_id":"one","command":"echo other"}`); !out.Replayed || *out.Stdout != "hello\n" {
		t.Error(raw)
	}
	if _, out, raw := w.exec(sb.Id, `{"command":"echo oops; exit 3"}`); *out.ExitCode != 3 || out.ExecID == "" {
		t.Error("a failing command is an answer, not an error:", raw)
	}
	if _, out, raw := w.exec(sb.Id, `{"args":["cat"],"stdin":"words","timeout":"1m30s"}`); *out.Stdout != "words" {
		t.Error(raw)
	}
	if ops, entries := w.noted(); ops["process.exec ok"] != 4 || !strings.Contains(strings.Join(entries[len(entries)-4].Things, " "), "exec:one") {
		t.Errorf("the audit log has %v, %v", ops, entries)
	}
}

func TestExecOutputIsBoundedAndExact(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	if _, out, raw := w.exec(sb.Id, `{"args":["cat"],"stdin":"0123456789","max_output":4}`); *out.Stdout != "0123" || !out.Truncated || out.OutputBytes != 10 {
		t.Error(raw)
	}
	// A character that the bound cuts is left out, not turned into bytes.
	if _, out, raw := w.exec(sb.Id, `{"args":["cat"],"stdin":"ab→","max_output":4}`); out.Stdout == nil || *out.Stdout != "ab" || !out.Truncated {
		t.Error(raw)
	}
	if _, out, raw := w.exec(sb.Id, `{"args":["cat"],"stdin_base64":"/wA="}`); out.Stdout != nil || string(*out.StdoutBase64) != "\xff\x00" || *out.Stderr != "" {
		t.Error(raw)
	}
	if _, out, raw := w.exec(sb.Id, `{"args":["cat"],"stdin":"x","base64":true}`); out.Stdout != nil || string(*out.StdoutBase64) != "x" {
		t.Error(raw)
	}
}

func TestExecSaysWhatIsWrong(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	for body, want := range map[string]struct {
		class sandbox.Class
		words string
	}{
		``:                                  {sandbox.Invalid, "the body is empty"},
		`{`:                                 {sandbox.Invalid, "no JSON object"},
		`{}`:                                {sandbox.Invalid, "args: neither args nor command"},
		`{"comand":"ls"}`:                   {sandbox.Invalid, "comand: there is no such field"},
		`{"args":"ls"}`:                     {sandbox.Invalid, "args: a string is not accepted"},
		`{"command":"ls","timeout":"soon"}`: {sandbox.Invalid, "timeout: "},
		`{"command":"ls","timeout":-1}`:     {sandbox.Invalid, "timeout: "},
		`{"command":"ls","cwd":"x"}`:        {sandbox.Invalid, "cwd: "},
		`{"command":"ls","max_output":-1}`:  {sandbox.Invalid, "max_output: "},
		`{"args":["nope"]}`:                 {sandbox.NotFound, "command not found: nope"},
		`{"command":"cat","stdin":"` + strings.Repeat("x", MaxInput+1) + `"}`: {sandbox.TooLarge, "stdin: "},
	} {
		status, _, raw := w.exec(sb.Id, body)
		if class := classIn(raw); class != string(want.class) || !strings.Contains(raw, want.words) {
			t.Errorf("%.60s: %d %s", body, status, raw)
		}
	}
	if status, _, raw := w.exec("nosuchbox", `{"command":"echo x"}`); status != 404 {
		t.Errorf("%d %s", status, raw)
	}
}
