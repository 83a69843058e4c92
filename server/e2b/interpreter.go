package e2b

import (
	"encoding/json"
	"net/http"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/interpreter"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
)

// The SDKs of the code interpreter speak to port 49999 of a sandbox. Who has a token
// comes to it by the operations, so that what holds for them holds here: rights, the
// audit log, and the variables of the sandbox, which its kernels do not know. Who has
// none is a visitor of a port like any other.

// interpreterRoutes are the calls by their pattern.
func (d *dialect) interpreterRoutes() map[string]route {
	return map[string]route{
		"POST /execute":               {"code.run", d.execute},
		"GET /contexts":               {"code.list_contexts", d.listContexts},
		"POST /contexts":              {"code.create_context", d.createContext},
		"DELETE /contexts/{id}":       {"code.remove_context", d.removeContext},
		"POST /contexts/{id}/restart": {"code.restart_context", d.restartContext},
	}
}

// interpreting serves the calls of the code interpreter's SDKs, and leaves all others
// to next.
func (d *dialect) interpreting(next http.Handler) http.Handler {
	mux := http.NewServeMux()
	for pattern, r := range d.interpreterRoutes() {
		mux.Handle(pattern, edge.Recover(d.log, d.interpreted(r)))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		port, id, named, err := d.addressed(r)
		if _, pattern := mux.Handler(r); err != nil || !named || port != interpreter.Port || pattern == "" {
			next.ServeHTTP(w, r)
			return
		}
		// The SDKs send the access token with code, and the traffic token with everything.
		token := r.Header.Get("X-Access-Token")
		if g, ok := d.traffic.check(r.Header.Get(trafficName)); token == "" && ok {
			token = d.tokens.mint(g)
		}
		if token == "" {
			next.ServeHTTP(w, r)
			return
		}
		r.Header.Set("X-Access-Token", token)
		r.Header.Set(idHeader, id)
		mux.ServeHTTP(w, r)
	})
}

// interpreted serves one route.
func (d *dialect) interpreted(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, ok := d.enter(w, r)
		if !ok {
			return
		}
		strangers.Known(ctx)
		err := d.server.Permit(ctx, rt.op)
		if err == nil {
			r.Body = http.MaxBytesReader(w, r.Body, maxMessage)
			err = rt.serve(w, r.WithContext(ctx))
		}
		switch {
		case err == nil:
		case gone(err), sandbox.AsError(err).Reason == sandbox.PortClosed: // what E2B's proxy says of both
			e := sandbox.AsError(err)
			writeRefusal(w, http.StatusBadGateway, refusal{Code: http.StatusBadGateway, Message: message(e), SandboxID: meant(ctx).sandbox.ID})
		default:
			writeError(w, sandbox.WithOp(string(rt.op), err))
		}
	})
}

// execute is POST /execute. A failure after the answer has begun breaks it off: the
// SDKs then look whether the sandbox is there.
func (d *dialect) execute(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Code     string            `json:"code"`
		Context  string            `json:"context_id"`
		Language string            `json:"language"`
		Env      map[string]string `json:"env_vars"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	begun, rc := false, http.NewResponseController(w)
	err := d.server.RunCode(r.Context(), server.CodeRequest{Sandbox: meant(r.Context()).sandbox.ID, Code: req.Code, Context: req.Context, Language: req.Language, Env: req.Env},
		func(data []byte) error {
			if !begun {
				begun = true
				w.Header().Set("Content-Type", "application/x-ndjson")
				w.Header().Set("X-Content-Type-Options", "nosniff") // code inside wrote it
			}
			if _, err := w.Write(data); err != nil {
				return err
			}
			return rc.Flush()
		})
	if err != nil && begun {
		panic(http.ErrAbortHandler)
	}
	return err
}

type contextJSON struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

func (d *dialect) createContext(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Language string `json:"language"`
		Cwd      string `json:"cwd"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	c, err := d.server.CreateCodeContext(r.Context(), meant(r.Context()).sandbox.ID, req.Language, req.Cwd)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, contextJSON(c))
}

func (d *dialect) listContexts(w http.ResponseWriter, r *http.Request) error {
	list, err := d.server.ListCodeContexts(r.Context(), meant(r.Context()).sandbox.ID)
	if err != nil {
		return err
	}
	out := []contextJSON{}
	for _, c := range list {
		out = append(out, contextJSON(c))
	}
	return writeJSON(w, http.StatusOK, out)
}

func (d *dialect) removeContext(w http.ResponseWriter, r *http.Request) error {
	if err := d.server.RemoveCodeContext(r.Context(), meant(r.Context()).sandbox.ID, r.PathValue("id")); err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, json.RawMessage("null"))
}

func (d *dialect) restartContext(w http.ResponseWriter, r *http.Request) error {
	if err := d.server.RestartCodeContext(r.Context(), meant(r.Context()).sandbox.ID, r.PathValue("id")); err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, json.RawMessage("null"))
}
