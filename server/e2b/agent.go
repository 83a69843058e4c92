package e2b

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
)

// call is which sandbox a request to the agent is for and who it is to be inside.
type call struct {
	sandbox sandbox.Sandbox
	user    string // "" = the image's
}

type callContext struct{}

func meant(ctx context.Context) call {
	c, _ := ctx.Value(callContext{}).(call)
	return c
}

const (
	idHeader   = "E2b-Sandbox-Id"
	portHeader = "E2b-Sandbox-Port"
)

// inside serves a plain route of a sandbox.
func (d *dialect) inside(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, ok := d.enter(w, r)
		if !ok {
			return
		}
		err := d.server.Permit(ctx, rt.op)
		if err == nil {
			err = rt.serve(w, r.WithContext(ctx))
		}
		switch {
		case err == nil:
		case gone(err):
			writeGone(w, meant(ctx).sandbox.ID)
		default:
			if e := sandbox.AsError(err); e.Class == sandbox.Invalid && e.Field == "user" {
				err = unauthenticated(e.Msg) // as E2B says of a user that is not there
			}
			writeError(w, sandbox.WithOp(string(rt.op), err))
		}
	})
}

// called serves the methods of a service.
func (d *dialect) called(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		op, known := procedures[r.URL.Path]
		if !known {
			writeError(w, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such method: " + r.URL.Path})
			return
		}
		ctx, ok := d.enter(w, r)
		if !ok {
			return
		}
		if err := d.server.Permit(ctx, op); err != nil {
			writeError(w, err)
			return
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// enter finds who calls and which sandbox is meant. Where that does not go, it has
// answered.
func (d *dialect) enter(w http.ResponseWriter, r *http.Request) (context.Context, bool) {
	g, err := d.granted(r)
	ctx := r.Context()
	if err == nil {
		ctx, err = d.server.Vouched(ctx, g.key, r.RemoteAddr)
	}
	if err != nil {
		writeError(w, err)
		return nil, false
	}
	strangers.Known(ctx)
	sb, err := d.live(ctx, g.sandbox)
	if err == nil && sb.Standby != sandbox.Awake {
		if !resumes(sb) {
			writeGone(w, sb.ID)
			return nil, false
		}
		sb, err = d.wake(ctx, sb, max(sb.Spec.Timeout, leastResumed))
	}
	switch {
	case err == nil:
	case gone(err):
		writeGone(w, g.sandbox)
		return nil, false
	default:
		writeError(w, err)
		return nil, false
	}
	user := r.URL.Query().Get("username")
	if name, ok := basicUser(r); ok && user == "" {
		user = name
	}
	return context.WithValue(ctx, callContext{}, call{sandbox: sb, user: user}), true
}

// leastResumed is how long a sandbox lives at least that a request has woken.
const leastResumed = 5 * time.Minute

// granted is what the token of a request, or the signature of its URL, stands for.
func (d *dialect) granted(r *http.Request) (grant, error) {
	id := r.Header.Get(idHeader)
	if token := r.Header.Get("X-Access-Token"); token != "" {
		g, ok := d.tokens.check(token)
		if !ok || id != "" && id != g.sandbox {
			return g, unauthenticated(noToken)
		}
		return g, nil
	}
	q := r.URL.Query()
	if q.Get("signature") == "" || r.URL.Path != "/files" {
		return grant{}, unauthenticated(noToken)
	}
	operation := "read"
	if r.Method == http.MethodPost {
		operation = "write"
	}
	return d.tokens.signed(r.Context(), id, signature{q.Get("signature"), q.Get("path"), operation, q.Get("username"), q.Get("signature_expiration")}, d.clock())
}

// basicUser is the user of "Authorization: Basic base64(user:)".
func basicUser(r *http.Request) (string, bool) {
	rest, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Basic ")
	if !ok {
		return "", false
	}
	b, err := base64.StdEncoding.DecodeString(rest)
	name, _, _ := strings.Cut(string(b), ":")
	return name, err == nil && name != ""
}

// health is GET /health. Without the header of a sandbox it is the API's own. With
// it, it says whether the sandbox runs, which needs a token here as everywhere: the
// SDKs send it, and nobody else is told what exists.
func (d *dialect) health(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get(idHeader) != "" {
		if _, ok := d.enter(w, r); !ok {
			return
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// envs is GET /envs.
func (d *dialect) envs(w http.ResponseWriter, r *http.Request) error {
	env := meant(r.Context()).sandbox.Spec.Env
	if env == nil {
		env = map[string]string{}
	}
	return writeJSON(w, http.StatusOK, env)
}

// users remembers the default user of images: content does not change under its id.
type users struct {
	mu struct {
		sync.Mutex
		byImage map[string]string
	}
}

// maxImages bounds what is remembered.
const maxImages = 1000

func newUsers() *users {
	u := &users{}
	u.mu.byImage = map[string]string{}
	return u
}

// owner is the user that what is written belongs to: the one that was named, or the
// image's. A key that may not look at images has what it writes belong to root.
func (d *dialect) owner(ctx context.Context) string {
	c := meant(ctx)
	if c.user != "" {
		return c.user
	}
	id := c.sandbox.ImageID
	d.users.mu.Lock()
	name, known := d.users.mu.byImage[id]
	d.users.mu.Unlock()
	if known {
		return name
	}
	img, err := d.server.GetImage(ctx, id)
	if err != nil {
		return "root"
	}
	name = img.Config.User
	if name == "" {
		name = "root"
	}
	d.users.mu.Lock()
	defer d.users.mu.Unlock()
	if len(d.users.mu.byImage) >= maxImages {
		clear(d.users.mu.byImage)
	}
	d.users.mu.byImage[id] = name
	return name
}

// home is a named user's, by the sandbox's own /etc/passwd; "" for the default
// user, whose relative paths Cove resolves by itself.
func (d *dialect) home(ctx context.Context) (string, error) {
	c := meant(ctx)
	if c.user == "" {
		return "", nil
	}
	data, _, err := d.server.ReadFile(ctx, c.sandbox.ID, "/etc/passwd", 0, 0)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return "", err
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if f := strings.Split(lines.Text(), ":"); len(f) >= 6 && f[0] == c.user {
			return f[5], nil
		}
	}
	return "", sandbox.InvalidField("user", "invalid username: '%.60s'", c.user)
}

// resolve is where a path leads: "~" and what is relative begin at the user's home.
func (d *dialect) resolve(ctx context.Context, p string) (string, error) {
	home, err := d.home(ctx)
	switch {
	case err != nil:
		return "", err
	case path.IsAbs(p):
		return path.Clean(p), nil
	}
	if rest, ok := strings.CutPrefix(p, "~"); ok && (rest == "" || rest[0] == '/') {
		p = "." + rest
	}
	if home != "" {
		return path.Join(home, p), nil
	}
	here, err := d.server.StatFile(ctx, meant(ctx).sandbox.ID, ".")
	if err != nil {
		return "", err
	}
	return path.Join(here.Path, p), nil
}
