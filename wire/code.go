package wire

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"

	"github.com/cove-sandbox/cove/sandbox"
)

// CodeRequest is the body of POST /v1/sandboxes/{id}/code.
type CodeRequest struct {
	Code     string            `json:"code"`
	Context  string            `json:"context,omitempty"`
	Language string            `json:"language,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	Timeout  float64           `json:"timeout,omitempty"` // seconds
}

// CodeEvent is a line of what comes of an execution.
type CodeEvent struct {
	Type           string          `json:"type"`
	Text           string          `json:"text"`
	Name           string          `json:"name"`
	Value          string          `json:"value"`
	Traceback      string          `json:"traceback"`
	ExecutionCount int64           `json:"execution_count"`
	Error          json.RawMessage `json:"error"`
	Raw            json.RawMessage `json:"-"` // the line
}

// CodeContext is a context of the code interpreter.
type CodeContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

// maxCodeLine bounds one line, which code inside wrote: a picture is a few megabytes.
const maxCodeLine = 64 << 20

// RunCode executes code in a sandbox and passes on what comes of it. It returns when
// that has ended; an error of the code is an event, not one of RunCode.
func (c *Client) RunCode(ctx context.Context, id string, r CodeRequest, each func(CodeEvent) error) error {
	resp, err := c.sendJSON(ctx, http.MethodPost, sandboxPath(id, "code"), r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 64<<10), maxCodeLine)
	for lines.Scan() {
		ev := CodeEvent{Raw: bytes.Clone(lines.Bytes())}
		if err := json.Unmarshal(ev.Raw, &ev); err != nil {
			return &sandbox.Error{Class: sandbox.Unavailable, Msg: "what answers as the code interpreter of the sandbox is none", Err: err}
		}
		switch ev.Type {
		case "failure":
			return fromResponse(http.StatusOK, ev.Error)
		case "keepalive":
			continue
		}
		if err := each(ev); err != nil {
			return err
		}
		if ev.Type == "end_of_execution" || ev.Type == "unexpected_end_of_execution" {
			return nil
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: "one result is larger than " + sandbox.FormatSize(maxCodeLine)}
	}
	return unreachable(resp.Request, errors.Join(io.ErrUnexpectedEOF, lines.Err()))
}

// CodeContexts lists the contexts of a sandbox.
func (c *Client) CodeContexts(ctx context.Context, id string) ([]CodeContext, error) {
	var out struct {
		Contexts []CodeContext `json:"contexts"`
	}
	err := c.askJSON(ctx, http.MethodGet, sandboxPath(id, "code/contexts"), nil, &out)
	return out.Contexts, err
}

// CreateCodeContext starts one.
func (c *Client) CreateCodeContext(ctx context.Context, id, language, cwd string) (out CodeContext, err error) {
	err = c.askJSON(ctx, http.MethodPost, sandboxPath(id, "code/contexts"), map[string]string{"language": language, "cwd": cwd}, &out)
	return out, err
}

// RestartCodeContext gives one a new kernel.
func (c *Client) RestartCodeContext(ctx context.Context, id, which string) error {
	return c.askJSON(ctx, http.MethodPost, sandboxPath(id, "code/contexts/"+url.PathEscape(which)+"/restart"), nil, nil)
}

// RemoveCodeContext ends one.
func (c *Client) RemoveCodeContext(ctx context.Context, id, which string) error {
	return c.askJSON(ctx, http.MethodDelete, sandboxPath(id, "code/contexts/"+url.PathEscape(which)), nil, nil)
}

func (c *Client) askJSON(ctx context.Context, method, path string, body, into any) error {
	resp, err := c.sendJSON(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return unreachable(resp.Request, err)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return &sandbox.Error{Class: sandbox.Internal, Msg: "the server's answer is not understood", Err: err}
	}
	return nil
}

func (c *Client) sendJSON(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, sandbox.InvalidField("body", "%v", err)
		}
		content = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, content)
	if err != nil {
		return nil, sandbox.InvalidField("url", "%v", err)
	}
	req.Header.Set("Content-Type", "application/json")
	return c.send(req)
}
