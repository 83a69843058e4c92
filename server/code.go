package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cove-sandbox/cove/interpreter"
	"github.com/cove-sandbox/cove/sandbox"
)

// The code interpreter runs inside, as any other program, and so what it answers
// is what code inside chose to say. Here is decided who may ask it.

const (
	// MaxCode bounds the code of one execution.
	MaxCode = 8 << 20
	// maxCodeAnswer bounds an answer that is not a stream.
	maxCodeAnswer = 1 << 20
	// startCode is how long an interpreter may take that is started because it did
	// not run: after a reset, or in a sandbox from an image.
	startCode = time.Minute
)

// CodeRequest asks for an execution.
type CodeRequest struct {
	Sandbox  string
	Code     string
	Context  string // id; "" = the one of the language
	Language string // "" = Python's, or the context's own
	Env      map[string]string
	Timeout  time.Duration // 0 = none
}

// CodeContext is what executions share their variables in: a kernel.
type CodeContext struct{ ID, Language, Cwd string }

// codeJSON is a context as the interpreter writes it.
type codeJSON struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

// RunCode executes code in a kernel of a sandbox. sink gets what comes of it, JSON
// objects in lines, as it comes; first nothing, when it is taken. When the caller leaves or the time is over, the
// kernel is interrupted.
func (s *Server) RunCode(ctx context.Context, r CodeRequest, sink func([]byte) error) (err error) {
	ctx, call, err := s.begin(ctx, "code.run", about("sandbox", r.Sandbox))
	if err != nil {
		return err
	}
	defer call.end(&err)
	switch {
	case len(r.Code) > MaxCode:
		return &sandbox.Error{Class: sandbox.TooLarge, Field: "code", Msg: fmt.Sprintf("the code has %s; at most %s are accepted", sandbox.FormatSize(int64(len(r.Code))), sandbox.FormatSize(MaxCode)),
			Hint: "write it to a file of the sandbox and import that"}
	case r.Context != "" && r.Language != "":
		return sandbox.InvalidField("language", "a context has its language; one of both is accepted")
	}
	if err := firstError(sandbox.ValidateEnv("env", r.Env), sandbox.ValidateProcessTimeout("timeout", r.Timeout)); err != nil {
		return err
	}
	sb, err := s.live(ctx, r.Sandbox)
	if err != nil {
		return err
	}
	if r.Timeout > 0 {
		over := &sandbox.Error{Class: sandbox.DeadlineReached, Msg: fmt.Sprintf("the code was still running after %s and was interrupted", r.Timeout),
			Hint: "the context and its variables are still there"}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, r.Timeout, over)
		defer cancel()
	}
	env, err := s.processEnv(ctx, sb)
	if err != nil {
		return cmpErr(err, ctx)
	}
	body := map[string]any{"code": r.Code, "context_id": r.Context, "language": r.Language, "env_vars": r.Env, "sandbox_env": env}
	err = s.askInterpreter(ctx, r.Sandbox, http.MethodPost, "/execute", body, func(answer io.Reader) error {
		call.begun()
		if err := sink(nil); err != nil {
			return err
		}
		buf := make([]byte, 32<<10)
		for {
			n, err := answer.Read(buf)
			if n > 0 {
				if err := sink(buf[:n]); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return brokenOff(err)
			}
		}
	})
	return cmpErr(err, ctx)
}

// processEnv are the variables that processes of a sandbox have, for kernels, which
// were started before it had a spec of its own. Placeholders of secrets, and where the
// certificates are that they need, the node alone knows: a process is asked.
func (s *Server) processEnv(ctx context.Context, sb sandbox.Sandbox) (map[string]string, error) {
	if len(sb.Spec.Secrets) == 0 {
		return sb.Spec.Env, nil
	}
	var out []byte
	spec := sandbox.ProcessSpec{ExecID: "interpreter-env-" + sandbox.NewID(s.cfg.Rand), Args: []string{"env", "-0"}}
	for ev, err := range s.node.Start(ctx, sb.ID, spec, 0) {
		if err != nil {
			return nil, s.explain(ctx, sb.ID, err)
		}
		if ev.Output != nil && len(out) < maxCodeAnswer {
			out = append(out, ev.Output.Data...)
		}
	}
	env := map[string]string{}
	for kv := range strings.SplitSeq(string(out), "\x00") {
		if k, v, ok := strings.Cut(kv, "="); ok && utf8.ValidString(kv) {
			env[k] = v
		}
	}
	for _, k := range []string{"PWD", "OLDPWD", "SHLVL", "_"} { // of that process alone
		delete(env, k)
	}
	return env, nil
}

// CreateCodeContext starts a kernel of its own.
func (s *Server) CreateCodeContext(ctx context.Context, id, language, cwd string) (c CodeContext, err error) {
	ctx, call, err := s.begin(ctx, "code.create_context", about("sandbox", id))
	if err != nil {
		return c, err
	}
	defer call.end(&err)
	body := map[string]string{"language": language, "cwd": cwd} // "" is none, to the interpreter too
	var got codeJSON
	err = s.tellInterpreter(ctx, id, http.MethodPost, "/contexts", body, &got)
	return CodeContext(got), err
}

// ListCodeContexts lists those there are, the languages' own first.
func (s *Server) ListCodeContexts(ctx context.Context, id string) (list []CodeContext, err error) {
	ctx, call, err := s.begin(ctx, "code.list_contexts", about("sandbox", id))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	var got []codeJSON
	if err := s.tellInterpreter(ctx, id, http.MethodGet, "/contexts", nil, &got); err != nil {
		return nil, err
	}
	for _, c := range got {
		list = append(list, CodeContext(c))
	}
	return list, nil
}

// RestartCodeContext gives a context a new kernel: its variables are gone, and what
// ran in it ends.
func (s *Server) RestartCodeContext(ctx context.Context, id, which string) (err error) {
	ctx, call, err := s.begin(ctx, "code.restart_context", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.tellInterpreter(ctx, id, http.MethodPost, "/contexts/"+url.PathEscape(which)+"/restart", nil, nil)
}

// RemoveCodeContext ends a context.
func (s *Server) RemoveCodeContext(ctx context.Context, id, which string) (err error) {
	ctx, call, err := s.begin(ctx, "code.remove_context", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.tellInterpreter(ctx, id, http.MethodDelete, "/contexts/"+url.PathEscape(which), nil, nil)
}

// tellInterpreter is a short call.
func (s *Server) tellInterpreter(ctx context.Context, id, method, path string, body, into any) error {
	if strings.HasPrefix(path, "/contexts//") || path == "/contexts/" {
		return sandbox.InvalidField("context", "must be the id of a context")
	}
	return s.askInterpreter(ctx, id, method, path, body, func(answer io.Reader) error {
		data, err := io.ReadAll(io.LimitReader(answer, maxCodeAnswer))
		if err != nil {
			return brokenOff(err)
		}
		if into == nil {
			return nil
		}
		if err := json.Unmarshal(data, into); err != nil {
			return &sandbox.Error{Class: sandbox.Unavailable, Msg: "what answers as the code interpreter of the sandbox is none", Err: err}
		}
		return nil
	})
}

// askInterpreter makes one request of the interpreter inside, which is started if
// it does not run, and hands a good answer over.
func (s *Server) askInterpreter(ctx context.Context, id, method, path string, body any, use func(io.Reader) error) error {
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return sandbox.Errorf(sandbox.Internal, "", "writing a request of the interpreter: %w", err)
		}
	}
	return s.inside(ctx, id, func() error {
		release, err := s.active(ctx, id)
		if err != nil {
			return err
		}
		defer release()
		conn, err := s.node.Dial(ctx, id, interpreter.Port)
		if isReason(err, sandbox.PortClosed) {
			if err = s.startInterpreter(ctx, id); err == nil {
				conn, err = s.node.Dial(ctx, id, interpreter.Port)
			}
		}
		if err != nil {
			return err
		}
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		req, err := http.NewRequestWithContext(ctx, method, "http://interpreter"+path, bytes.NewReader(data))
		if err != nil {
			return sandbox.Errorf(sandbox.Internal, "", "asking the interpreter: %w", err)
		}
		used := false
		once := &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
			DialContext: func(context.Context, string, string) (net.Conn, error) {
				if used {
					return nil, net.ErrClosed // nothing is asked twice
				}
				used = true
				return conn, nil
			}}
		resp, err := once.RoundTrip(req)
		if err != nil {
			return brokenOff(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return refused(resp)
		}
		return use(resp.Body)
	})
}

func isReason(err error, r sandbox.Reason) bool {
	var e *sandbox.Error
	return errors.As(err, &e) && e.Reason == r
}

func brokenOff(err error) error {
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the answer of the code interpreter broke off", Err: err,
		Hint: "ask again; if code inside ended the interpreter, the variables of all its contexts are gone"}
}

// refused is an answer that is none of the good ones. Its words are those of code
// inside.
func refused(resp *http.Response) error {
	data, _ := io.ReadAll(io.LimitReader(resp.Body, 500)) // what came of it is what is said
	msg := strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(data), "\uFFFD")))
	switch resp.StatusCode {
	case http.StatusBadRequest:
		return &sandbox.Error{Class: sandbox.Invalid, Msg: msg}
	case http.StatusNotFound:
		return &sandbox.Error{Class: sandbox.NotFound, Msg: msg}
	case http.StatusTooManyRequests:
		return &sandbox.Error{Class: sandbox.Precondition, Msg: msg}
	}
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: fmt.Sprintf("the code interpreter answered %d: %s", resp.StatusCode, msg)}
}

// startInterpreter runs the interpreter of a sandbox that has one installed, and
// returns when it listens.
func (s *Server) startInterpreter(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startCode, &sandbox.Error{Class: sandbox.DeadlineReached, Msg: fmt.Sprintf("the code interpreter did not come up within %s", startCode)})
	defer cancel()
	if _, err := s.node.StatFile(ctx, id, interpreter.Start); errors.Is(err, sandbox.ErrNotFound) {
		return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortClosed, Msg: "the sandbox has no code interpreter",
			Hint: `create it from the template ` + interpreter.Template + `, which "cove code setup" makes`}
	} else if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		spec := sandbox.ProcessSpec{ExecID: "interpreter-" + sandbox.NewID(s.cfg.Rand), Args: []string{interpreter.Start}}
		for _, err := range s.node.Start(ctx, id, spec, 0) {
			if err != nil {
				ended <- cmpErr(err, ctx)
				return
			}
		}
		ended <- nil // another was faster
	}()
	return readiness{sandbox.Readiness{Port: interpreter.Port}, ""}.await(ctx, s.node, id, ended)
}
