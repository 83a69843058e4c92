package native

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

// codeRequest is the body of POST /v1/sandboxes/{id}/code. api/openapi.json
// describes it.
type codeRequest struct {
	Code     string            `json:"code"`
	Context  string            `json:"context"`
	Language string            `json:"language"`
	Env      map[string]string `json:"env"`
	Timeout  seconds           `json:"timeout"`
}

// runCode is POST /v1/sandboxes/{id}/code. The answer is a stream of lines; what
// fails after it has begun is its last line.
func (d *dialect) runCode(w http.ResponseWriter, r *http.Request) error {
	var req codeRequest
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	rc := http.NewResponseController(w)
	begun, last := false, byte('\n')
	err := d.server.RunCode(r.Context(), server.CodeRequest{Sandbox: r.PathValue("id"), Code: req.Code, Context: req.Context, Language: req.Language, Env: req.Env, Timeout: time.Duration(req.Timeout)},
		func(data []byte) error {
			if !begun {
				begun = true
				w.Header().Set("Content-Type", "application/x-ndjson")
				w.Header().Set("X-Content-Type-Options", "nosniff") // code inside wrote it
			}
			if len(data) > 0 {
				last = data[len(data)-1]
			}
			if _, err := w.Write(data); err != nil {
				return sandbox.Errorf(sandbox.Canceled, "", "the client left: %w", err)
			}
			return rc.Flush()
		})
	if err == nil || !begun {
		return inBody(err)
	}
	if last != '\n' {
		_, _ = w.Write([]byte("\n")) // the client left, or it is told next
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"type": "failure", "error": json.RawMessage(wire.ErrorJSON(r, sandbox.WithOp("code.run", err)))})
	return nil
}

type contextJSON struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

func (d *dialect) createCodeContext(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Language string `json:"language"`
		Cwd      string `json:"cwd"`
	}
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	c, err := d.server.CreateCodeContext(r.Context(), r.PathValue("id"), req.Language, req.Cwd)
	return writeJSON(w, contextJSON(c), err)
}

func (d *dialect) listCodeContexts(w http.ResponseWriter, r *http.Request) error {
	list, err := d.server.ListCodeContexts(r.Context(), r.PathValue("id"))
	out := []contextJSON{}
	for _, c := range list {
		out = append(out, contextJSON(c))
	}
	return writeJSON(w, map[string]any{"contexts": out}, err)
}

func (d *dialect) removeCodeContext(w http.ResponseWriter, r *http.Request) error {
	return writeJSON(w, struct{}{}, d.server.RemoveCodeContext(r.Context(), r.PathValue("id"), r.PathValue("context")))
}

func (d *dialect) restartCodeContext(w http.ResponseWriter, r *http.Request) error {
	return writeJSON(w, struct{}{}, d.server.RestartCodeContext(r.Context(), r.PathValue("id"), r.PathValue("context")))
}

// writeJSON answers with a value, unless there is an error.
func writeJSON(w http.ResponseWriter, v any, err error) error {
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client left
	return nil
}
