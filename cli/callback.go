package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) callbackCmd() *cobra.Command {
	var to string
	var port int
	var replace, asJSON bool
	cmd := &cobra.Command{
		Use:   "callback ID NAME --to URL",
		Short: "Let code in a sandbox call an HTTP server of this machine, until Ctrl-C",
		Long: `Serve http://cove.internal/NAME inside a sandbox with a server that this machine
reaches, over the API: the sandbox needs no network. Requests and answers stream
both ways. What comes was written by code inside: the server must bear it.`,
		Example: `  cove callback $id llm --to http://127.0.0.1:8000/v1
  cove exec $id -- curl http://cove.internal/llm/models`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := url.Parse(to)
			if err != nil || target.Scheme != "http" && target.Scheme != "https" || target.Host == "" || target.RawQuery != "" {
				return usage(cmd, fmt.Errorf("--to must be an http:// or https:// address, such as http://127.0.0.1:8000/v1"))
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			f := &forwarder{app: a, id: id, name: args[1], target: target, asJSON: asJSON,
				client: &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
					Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second}}}
			defer f.client.CloseIdleConnections()
			return f.run(cmd.Context(), &covev1.ServeCallbacksRequest{SandboxId: id, Name: args[1], Port: int32(port), Replace: replace, Owner: newExecID()})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&to, "to", "", "address of the server; what follows the name inside is added to its path (required)")
	fs.IntVar(&port, "port", 0, "port inside, if a program there needs 80 for itself (default: 80)")
	fs.BoolVar(&replace, "replace", false, "take the name over from whoever serves it")
	fs.BoolVar(&asJSON, "json", false, "print each request as a line of JSON")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

// forwarder passes the requests of one name on.
type forwarder struct {
	*app
	id, name string
	target   *url.URL
	client   *http.Client
	asJSON   bool
	serving  func() // once, when the name is served; nil = nobody asks

	mu struct { // also of output
		sync.Mutex
		under map[string]context.CancelFunc
	}
}

// callbackJSON is a promise: see docs/cli-json.md.
type callbackJSON struct {
	Request string `json:"request"`
	Method  string `json:"method"`
	Path    string `json:"path"`
	Status  int    `json:"status"`
	Error   string `json:"error,omitempty"`
}

// run serves the name over as many streams as it takes. The first must work.
func (f *forwarder) run(ctx context.Context, m *covev1.ServeCallbacksRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	f.mu.under = map[string]context.CancelFunc{}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	const first, last = 100 * time.Millisecond, 5 * time.Second
	for served, wait := false, first; ; wait = min(2*wait, last) {
		began := served
		err := f.follow(ctx, m, &wg, func(where string) {
			wait = first
			if !served {
				fmt.Fprintf(f.Stderr, "%s in %s -> %s\n", where, f.id, f.target)
				if f.serving != nil {
					f.serving()
				}
			}
			served, m.Replace = true, false
		})
		switch {
		case ctx.Err() != nil:
			// Freed at once rather than when the server notices.
			closing, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer done()
			_, _ = f.api.Callbacks.Close(closing, connect.NewRequest(&covev1.CloseCallbacksRequest{SandboxId: m.SandboxId, Name: m.Name, Owner: m.Owner}))
			return nil
		case !served || !errors.Is(err, sandbox.ErrUnavailable):
			return err
		case began:
			fmt.Fprintf(f.Stderr, "%v; trying again\n", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// follow is one stream.
func (f *forwarder) follow(ctx context.Context, m *covev1.ServeCallbacksRequest, wg *sync.WaitGroup, serving func(string)) error {
	st, err := f.api.Callbacks.Serve(ctx, connect.NewRequest(m))
	if err != nil {
		return err
	}
	defer st.Close()
	for st.Receive() {
		switch ev := st.Msg(); {
		case ev.GetServing() != nil:
			serving(ev.GetServing().Url)
		case ev.GetRequest() != nil:
			r := ev.GetRequest()
			rctx, cancel := context.WithCancel(ctx)
			f.mu.Lock()
			_, known := f.mu.under[r.Id] // after a break all are sent again
			if !known {
				f.mu.under[r.Id] = cancel
			}
			f.mu.Unlock()
			if known {
				cancel()
				continue
			}
			wg.Go(func() {
				defer cancel()
				status, err := f.forward(rctx, r)
				f.mu.Lock()
				defer f.mu.Unlock()
				delete(f.mu.under, r.Id)
				f.report(r, status, err)
			})
		case ev.GetGone() != nil:
			f.mu.Lock()
			if cancel := f.mu.under[ev.GetGone().Id]; cancel != nil {
				cancel()
			}
			f.mu.Unlock()
		}
	}
	if err := st.Err(); err != nil {
		return err
	}
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the stream of requests ended"}
}

// report has mu.
func (f *forwarder) report(r *covev1.CallbackRequest, status int, err error) {
	if f.asJSON {
		line := callbackJSON{Request: r.Id, Method: r.Method, Path: r.Path, Status: status}
		if err != nil {
			line.Error = err.Error()
		}
		_ = json.NewEncoder(f.Stdout).Encode(line)
		return
	}
	if err != nil {
		fmt.Fprintf(f.Stderr, "%s %q: %v\n", r.Method, r.Path, err)
	}
}

// forward passes one request on and its answer back.
func (f *forwarder) forward(ctx context.Context, r *covev1.CallbackRequest) (status int, err error) {
	answer := func(status int, h http.Header, body io.Reader, length int64) (int, error) {
		return status, f.api.AnswerCallback(ctx, f.id, r.Id, status, h, body, length)
	}
	say := func(status int, code, message string) (int, error) {
		text := fmt.Sprintf("{\"code\":%q,\"message\":%q}\n", code, message)
		return answer(status, http.Header{"Content-Type": {"application/json"}}, strings.NewReader(text), int64(len(text)))
	}
	where, ok := f.address(r)
	if !ok {
		return say(http.StatusBadRequest, "bad_path", "the path leads out of what is served")
	}
	var body io.Reader = bytes.NewReader(r.Body)
	length := int64(len(r.Body))
	if r.BodyFollows {
		rc, err := f.api.CallbackBody(ctx, f.id, r.Id)
		if err != nil {
			return 0, err
		}
		defer rc.Close()
		body, length = rc, -1
	}
	if length == 0 {
		body = http.NoBody
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, where, body)
	if err != nil {
		return say(http.StatusBadRequest, "bad_request", "this is no request that can be passed on")
	}
	req.ContentLength = length
	for _, h := range r.Headers {
		if h.Name != "Content-Length" && h.Name != "Expect" {
			req.Header.Add(h.Name, h.Value)
		}
	}
	resp, err := f.client.Do(req)
	if err != nil {
		if _, aerr := say(http.StatusBadGateway, "bad_gateway", "the server behind this callback cannot be reached"); aerr != nil {
			return 0, aerr
		}
		return http.StatusBadGateway, err
	}
	defer resp.Body.Close()
	return answer(resp.StatusCode, resp.Header, resp.Body, resp.ContentLength)
}

// address is the target's with what followed the name. Dots in the path would
// lead out of the target's own path at a server that resolves them.
func (f *forwarder) address(r *covev1.CallbackRequest) (string, bool) {
	clear, err := url.PathUnescape(r.Path)
	if err != nil || strings.Contains(clear, "\\") || strings.TrimSuffix(path.Clean(clear), "/") != strings.TrimSuffix(clear, "/") {
		return "", false
	}
	u := strings.TrimSuffix(f.target.String(), "/")
	if r.Path != "/" || u == "" {
		u += r.Path
	}
	if r.Query != "" {
		u += "?" + r.Query
	}
	return u, true
}
