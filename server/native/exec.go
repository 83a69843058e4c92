package native

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

// execRequest is the body of POST /v1/sandboxes/{id}/exec: Processes/Start for
// who speaks neither streams nor protos. api/openapi.json describes it.
type execRequest struct {
	ExecID      string            `json:"exec_id"`
	Args        []string          `json:"args"`
	Command     string            `json:"command"`
	Cwd         string            `json:"cwd"`
	Env         map[string]string `json:"env"`
	User        string            `json:"user"`
	Stdin       string            `json:"stdin"`
	StdinBase64 []byte            `json:"stdin_base64"`
	Timeout     seconds           `json:"timeout"`
	MaxOutput   int64             `json:"max_output"`
	Base64      bool              `json:"base64"`

	KillOnCancel bool `json:"kill_on_cancel"`
}

// execResponse has the fields of "cove exec --json" (docs/cli-json.md), and the
// end's beside them: what most callers look at is one step away.
type execResponse struct {
	SandboxID    string  `json:"sandbox_id"`
	ExecID       string  `json:"exec_id"`
	Replayed     bool    `json:"replayed,omitempty"`
	Stdout       *string `json:"stdout,omitempty"`
	StdoutBase64 *[]byte `json:"stdout_base64,omitempty"`
	Stderr       *string `json:"stderr,omitempty"`
	StderrBase64 *[]byte `json:"stderr_base64,omitempty"`
	Truncated    bool    `json:"truncated"`
	OutputBytes  int64   `json:"output_bytes"`
	Cause        string  `json:"cause"`
	ExitCode     *int    `json:"exit_code,omitempty"`
	Signal       string  `json:"signal,omitempty"`
	Detail       string  `json:"detail,omitempty"`
	DurationS    float64 `json:"duration_s"`
	EgressDenied int64   `json:"egress_denied,omitempty"`
	ReplayMissed int64   `json:"replay_missed,omitempty"`
}

const (
	// mostCaptured is what one answer holds of both streams together: the client
	// of such a call reads it whole, and so does the server before it answers.
	mostCaptured    = 16 << 20
	defaultCaptured = 1 << 20
)

// seconds reads 1.5 and "1.5s" alike.
type seconds time.Duration

func (s *seconds) UnmarshalJSON(b []byte) error {
	var n float64
	if json.Unmarshal(b, &n) == nil {
		const most = 1e9 // a duration holds nine of these; no timeout is thirty years
		if n < 0 || n > most {
			return sandbox.InvalidField("timeout", "%v is not accepted; seconds from 0 are", n)
		}
		*s = seconds(n * float64(time.Second))
		return nil
	}
	var text string
	if json.Unmarshal(b, &text) == nil {
		if d, err := time.ParseDuration(text); err == nil {
			*s = seconds(d)
			return nil
		}
	}
	return sandbox.InvalidField("timeout", `%.40s is not accepted; seconds (90) or a duration ("1m30s") are`, b)
}

// exec is POST /v1/sandboxes/{id}/exec. A client that leaves does not end the
// process, unless it said kill_on_cancel; with the same exec_id it is asked for
// again and nothing runs twice.
func (d *dialect) exec(w http.ResponseWriter, r *http.Request) error {
	var req execRequest
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	spec, err := req.spec()
	if err != nil {
		return err
	}
	if spec.ExecID == "" {
		spec.ExecID = sandbox.NewID(rand.Reader)
	}
	id := r.PathValue("id")
	got := captured{execID: spec.ExecID, left: req.MaxOutput}
	if err := d.server.ExecProcess(r.Context(), server.StartRequest{Sandbox: id, Process: spec, KillOnCancel: req.KillOnCancel}, got.take); err != nil {
		return inBody(err)
	}
	out := execResponse{SandboxID: id, ExecID: spec.ExecID, Replayed: got.replayed}
	out.output(&got, req.Base64)
	out.ended(got.end)
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(out) // an error means that the client left
	return nil
}

// spec is the process that is asked for. MaxOutput gets its default here.
func (r *execRequest) spec() (sandbox.ProcessSpec, error) {
	p := sandbox.ProcessSpec{ExecID: r.ExecID, Args: r.Args, Command: r.Command, Cwd: r.Cwd, Env: r.Env, User: r.User,
		Input: r.StdinBase64, Timeout: time.Duration(r.Timeout)}
	switch {
	case r.Stdin != "" && len(r.StdinBase64) > 0:
		return p, sandbox.InvalidField("stdin", "and stdin_base64 are both given; one of them is accepted")
	case r.Stdin != "":
		p.Input = []byte(r.Stdin)
	}
	if len(p.Input) > server.MaxInput {
		return p, server.TooMuchInput("stdin", len(p.Input))
	}
	switch {
	case r.MaxOutput == 0:
		r.MaxOutput = defaultCaptured
	case r.MaxOutput < 0 || r.MaxOutput > mostCaptured:
		return p, sandbox.InvalidField("max_output", "%d is not accepted; up to %d bytes are, or 0 for %d", r.MaxOutput, mostCaptured, defaultCaptured)
	}
	return p, nil
}

// captured is what a process printed, up to a bound. What is over it is dropped
// and not left unread, so that the process comes to its end.
type captured struct {
	execID         string
	left           int64
	stdout, stderr bytes.Buffer
	replayed       bool
	end            sandbox.ProcessEnd
}

func (c *captured) take(evs []sandbox.ProcessEvent, _ bool) error {
	for _, ev := range evs {
		switch {
		case ev.Started != nil:
			c.replayed = ev.Started.Replayed
		case ev.Output != nil:
			to := &c.stdout
			if ev.Output.Stream == sandbox.Stderr {
				to = &c.stderr
			}
			n := min(c.left, int64(len(ev.Output.Data)))
			to.Write(ev.Output.Data[:n])
			c.left -= n
		case ev.End != nil:
			c.end = *ev.End
		case ev.Standby != nil && *ev.Standby != sandbox.Awake: // one answer is all there is: it comes now, for nobody knows when the sandbox wakes
			return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.Asleep, Msg: "the sandbox was paused; the process stands still",
				Hint: fmt.Sprintf("ask again with \"exec_id\": %q: that wakes the sandbox, and nothing runs twice", c.execID)}
		}
	}
	return nil
}

// output is text where it is UTF-8, and bytes where it is not or they were asked
// for: lossy text would be silently something else.
func (r *execResponse) output(c *captured, bytes bool) {
	r.OutputBytes = c.end.OutputBytes
	r.Truncated = int64(c.stdout.Len()+c.stderr.Len()) < r.OutputBytes
	for _, o := range []struct {
		data  []byte
		text  **string
		bytes **[]byte
	}{{c.stdout.Bytes(), &r.Stdout, &r.StdoutBase64}, {c.stderr.Bytes(), &r.Stderr, &r.StderrBase64}} {
		if o.data == nil {
			o.data = []byte{}
		}
		data := o.data
		if r.Truncated {
			data = wholeRunes(data)
		}
		if bytes || !utf8.Valid(data) {
			*o.bytes = &o.data
			continue
		}
		text := string(data)
		*o.text = &text
	}
}

// wholeRunes leaves out a character that the bound cut in two.
func wholeRunes(b []byte) []byte {
	for cut := 1; cut < utf8.UTFMax && cut <= len(b); cut++ {
		if tail := b[len(b)-cut:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return b[:len(b)-cut]
			}
			break
		}
	}
	return b
}

func (r *execResponse) ended(end sandbox.ProcessEnd) {
	r.Cause, r.Signal, r.Detail = string(end.Cause), end.Signal, end.Detail
	r.DurationS = end.Duration.Seconds()
	r.EgressDenied, r.ReplayMissed = end.EgressDenied, end.ReplayMissed
	switch end.Cause {
	case sandbox.Exited, sandbox.Signalled:
		code := int(end.ExitCode)
		r.ExitCode = &code
	}
}

// inBody spells a field as this body does, which has nothing around a process.
func inBody(err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || !strings.HasPrefix(e.Field, "process.") {
		return err
	}
	c := *e
	c.Field = strings.TrimPrefix(c.Field, "process.")
	return &c
}

// jsonNames are the fields of a struct as JSON has them.
func jsonNames(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

// readJSON reads a body of one JSON value, and refuses fields that nobody knows.
func readJSON(w http.ResponseWriter, r *http.Request, into any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: fmt.Sprintf("the message is larger than %s", sandbox.FormatSize(maxMessage)),
			Hint: "larger content goes over PUT /v1/sandboxes/{id}/files"}
	case err != nil:
		return sandbox.Errorf(sandbox.Canceled, "", "reading the body: %w", err)
	case len(bytes.TrimSpace(body)) == 0:
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body is empty", Hint: `say what to run: {"command": "ls -l"} or {"args": ["ls", "-l"]}`}
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body is no JSON object", Err: err}
	}
	known := jsonNames(reflect.TypeOf(into).Elem())
	for name := range fields {
		if !slices.Contains(known, name) {
			hint := sandbox.DidYouMean(name, known)
			if hint == "" {
				hint = "known are " + strings.Join(known, ", ")
			}
			return sandbox.InvalidField(fmt.Sprintf("%.60s", name), "there is no such field").WithHint("%s", hint)
		}
	}
	err = json.Unmarshal(body, into)
	var e *sandbox.Error
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &wrong):
		return sandbox.InvalidField(wrong.Field, "a %s is not accepted; %s is", wrong.Value, wrong.Type)
	case err != nil:
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body", Err: err}
	}
	return nil
}
