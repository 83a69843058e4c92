package e2b

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
)

// Labels of ours beside the caller's metadata, which are labels too: what the SDKs
// are told again and the record has no other place for.
const (
	ownPrefix     = "e2b."
	templateLabel = "e2b.template"
	resumeLabel   = "e2b.auto-resume"
	forgetLabel   = "e2b.auto-pause-without-memory"
)

// baseTemplate is what the SDKs ask for when they are not told.
const baseTemplate = "base"

// newSandbox is the body of a create, of both versions.
type newSandbox struct {
	TemplateID          string            `json:"templateID"`
	Timeout             *float64          `json:"timeout"`
	Metadata            map[string]string `json:"metadata"`
	EnvVars             map[string]string `json:"envVars"`
	AllowInternetAccess *bool             `json:"allow_internet_access"`
	Network             *networkConfig    `json:"network"`
	AutoPause           bool              `json:"autoPause"`
	AutoPauseMemory     *bool             `json:"autoPauseMemory"`
	AutoResume          *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
	VolumeMounts []volumeMount `json:"volumeMounts"`
	IAM          *struct {
		Tokens map[string]any `json:"tokens"`
	} `json:"iam"`
}

// created is what every call that gives out a sandbox answers.
type created struct {
	TemplateID      string  `json:"templateID"`
	SandboxID       string  `json:"sandboxID"`
	ClientID        string  `json:"clientID"`
	EnvdVersion     string  `json:"envdVersion"`
	EnvdAccessToken string  `json:"envdAccessToken"`
	TrafficToken    string  `json:"trafficAccessToken,omitempty"`
	Domain          *string `json:"domain"`
}

// detail is a sandbox as get and list have it. The Python SDK wants every field
// that is not omitempty.
type detail struct {
	created
	Alias               string            `json:"alias,omitempty"` // the template's name
	VolumeMounts        []volumeMount     `json:"volumeMounts"`
	StartedAt           time.Time         `json:"startedAt"`
	EndAt               time.Time         `json:"endAt"`
	CPUCount            int64             `json:"cpuCount"`
	MemoryMB            int64             `json:"memoryMB"`
	DiskSizeMB          int64             `json:"diskSizeMB"`
	State               string            `json:"state"`
	Metadata            map[string]string `json:"metadata"`
	AllowInternetAccess bool              `json:"allowInternetAccess"`
	Network             *networkConfig    `json:"network,omitempty"`
	Lifecycle           lifecycle         `json:"lifecycle"`
}

type lifecycle struct {
	OnTimeout  string `json:"onTimeout"`
	AutoResume bool   `json:"autoResume"`
}

const (
	stateRunning = "running"
	statePaused  = "paused"
)

// create is POST /sandboxes and /v2/sandboxes, which differ in the timeout of who
// says none.
func (d *dialect) create(timeout time.Duration) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		var req newSandbox
		if err := readJSON(r, &req); err != nil {
			return err
		}
		spec, err := d.spec(r.Context(), req, timeout)
		if err != nil {
			return err
		}
		c, err := d.server.CreateSandbox(r.Context(), server.CreateRequest{Spec: spec, Key: r.Header.Get("Idempotency-Key")})
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusCreated, d.created(r.Context(), c.Sandbox))
	}
}

func (d *dialect) spec(ctx context.Context, req newSandbox, timeout time.Duration) (spec sandbox.Spec, err error) {
	if req.IAM != nil && len(req.IAM.Tokens) > 0 {
		return spec, unsupported("iam", "workload identity")
	}
	if spec.Timeout, err = seconds("timeout", req.Timeout, timeout); err != nil {
		return spec, err
	}
	spec.Env, spec.Volumes = req.EnvVars, mounts(req.VolumeMounts)
	spec.Labels = map[string]string{templateLabel: cmp.Or(strings.TrimSpace(req.TemplateID), baseTemplate)}
	for k, v := range req.Metadata {
		if strings.HasPrefix(k, ownPrefix) {
			return spec, sandbox.InvalidField("metadata", "key %.60q: those with %q are Cove's own", k, ownPrefix)
		}
		spec.Labels[k] = v
	}
	if req.AutoPause {
		spec.OnTimeout = sandbox.IdlePause
		if req.AutoPauseMemory != nil && !*req.AutoPauseMemory {
			spec.Labels[forgetLabel] = "true"
		}
	}
	if req.AutoResume != nil && req.AutoResume.Enabled {
		spec.Labels[resumeLabel] = "true"
	}
	spec.Ingress = req.Network.ingress()
	spec.Ingress.NoWake = spec.Labels[resumeLabel] == ""
	if spec.Network, err = req.Network.policy(req.AllowInternetAccess); err != nil {
		return spec, err
	}
	if spec.Secrets, err = d.withSecrets(ctx, spec.Network.Headers); err != nil {
		return spec, err
	}
	return spec, d.origin(ctx, &spec, req.TemplateID)
}

func unsupported(field, what string) error {
	return &sandbox.Error{Class: sandbox.Unsupported, Field: field, Msg: "Cove does not have " + what + " yet"}
}

// origin finds what a template of E2B's is here: a template, a snapshot or an image
// of that name, in this order. E2B's names have small letters only, whatever is asked for;
// Cove's own may have others, so what is named exactly is found first.
func (d *dialect) origin(ctx context.Context, spec *sandbox.Spec, name string) error {
	name = strings.TrimSpace(name)
	err := d.originNamed(ctx, spec, name)
	if small := strings.ToLower(name); err != nil && small != name && errors.Is(err, sandbox.ErrNotFound) {
		if d.originNamed(ctx, spec, small) == nil {
			if spec.Labels != nil {
				spec.Labels[templateLabel] = small
			}
			return nil
		}
	}
	return err
}

func (d *dialect) originNamed(ctx context.Context, spec *sandbox.Spec, name string) error {
	if name == "" || name == baseTemplate {
		return nil // the server's default image
	}
	tpl, err := d.template(ctx, name)
	if err == nil {
		if tpl.Spec.Labels[buildLabel] != "" && tpl.Start == "" && tpl.Ready == (sandbox.Readiness{}) {
			spec.Image, spec.Resources = tpl.Spec.Image, tpl.Spec.Resources
			return nil
		}
		spec.Template = tpl.Ref()
		return nil
	}
	if !missing(err) {
		return err
	}
	if _, err = d.server.GetSnapshot(ctx, name); err == nil {
		spec.Snapshot = name
		return nil
	}
	if !missing(err) {
		return err
	}
	if _, err = d.server.GetImage(ctx, name); err == nil {
		spec.Image = name
		return nil
	}
	if missing(err) {
		return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("template '%.100s' not found", name),
			Hint: "it is the name of a template, a snapshot or an image of this server"}
	}
	return err
}

// missing says that there is no such thing, or that no such thing could have the
// name.
func missing(err error) bool {
	return errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrImageNotFound) || errors.Is(err, sandbox.ErrInvalid)
}

// seconds reads a duration of the API.
func seconds(field string, n *float64, normal time.Duration) (time.Duration, error) {
	if n == nil {
		return normal, nil
	}
	if !(*n > 0) {
		return 0, sandbox.InvalidField(field, "%v is not accepted; seconds above 0 are", *n)
	}
	const most = 1e9 // nine of these fit a duration; the operation refuses it, and says what is the most
	return time.Duration(min(*n, most) * float64(time.Second)), nil
}

// created gives out a sandbox with the token of who asks.
func (d *dialect) created(ctx context.Context, sb sandbox.Sandbox) created {
	c := created{TemplateID: cmp.Or(sb.Spec.Labels[templateLabel], sb.Spec.Template, sb.Spec.Snapshot, sb.Spec.Image, baseTemplate),
		SandboxID: sb.ID, ClientID: "cove", EnvdVersion: envdVersion, EnvdAccessToken: d.tokens.mint(grant{sb.ID, server.CallerKey(ctx)})}
	// Also where ports are public: that of the code interpreter is not, and its SDKs
	// send no access token with the calls for contexts.
	// What it opens is asked for again with each use.
	if d.server.May(ctx, visitOp) || d.server.May(ctx, "code.list_contexts") {
		c.TrafficToken = d.traffic.mint(grant{sb.ID, server.CallerKey(ctx)})
	}
	if d.domain != "" {
		c.Domain = &d.domain
	}
	return c
}

// forever is the end of a sandbox that has none: the SDKs want a time.
const forever = 10 * 365 * 24 * time.Hour

func (d *dialect) detail(ctx context.Context, sb sandbox.Sandbox) detail {
	r := sb.Spec.Resources
	out := detail{created: d.created(ctx, sb), StartedAt: sb.CreatedAt.UTC(), EndAt: sb.ExpiresAt.UTC(), CPUCount: max(1, int64(math.Ceil(float64(r.MilliCPU)/1000))),
		MemoryMB: max(r.Memory, r.MemoryLimit) / sandbox.MiB, DiskSizeMB: r.Disk / sandbox.MiB, State: stateOf(sb), Metadata: metadata(sb),
		AllowInternetAccess: sb.Spec.Network.Mode == sandbox.NetworkPublic, Network: configOf(sb.Spec),
		Lifecycle: lifecycle{OnTimeout: cmp.Or(string(sb.Spec.OnTimeout), "kill"), AutoResume: resumes(sb)}}
	d.unresolved(ctx, out.Network, sb.Spec.Secrets)
	if sb.Spec.Snapshot == "" || sb.Spec.Template != "" {
		out.Alias, _, _ = strings.Cut(out.TemplateID[strings.LastIndexByte(out.TemplateID, '/')+1:], ":")
	}
	out.VolumeMounts = d.volumeMounts(ctx, sb.Spec.Volumes)
	if sb.ExpiresAt.IsZero() {
		out.EndAt = sb.CreatedAt.UTC().Add(forever)
	}
	return out
}

func stateOf(sb sandbox.Sandbox) string {
	if sb.Standby != sandbox.Awake {
		return statePaused
	}
	return stateRunning
}

func resumes(sb sandbox.Sandbox) bool { return sb.Spec.Labels[resumeLabel] == "true" }

// metadata is a sandbox's labels without ours.
func metadata(sb sandbox.Sandbox) map[string]string {
	out := map[string]string{}
	for k, v := range sb.Spec.Labels {
		if !strings.HasPrefix(k, ownPrefix) {
			out[k] = v
		}
	}
	return out
}

// live is a sandbox that has not ended. To E2B an ended one is not there, and
// neither is one whose id could not be any.
func (d *dialect) live(ctx context.Context, id string) (sandbox.Sandbox, error) {
	sb, err := d.server.GetSandbox(ctx, id)
	if errors.Is(err, sandbox.ErrInvalid) || err == nil && (sb.End != nil || sb.State == sandbox.EndedState) {
		return sb, noSandbox(id)
	}
	return sb, err
}

// awake is the sandbox of a request that does not wake one.
func (d *dialect) awake(r *http.Request) (sandbox.Sandbox, error) {
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err == nil && sb.Standby != sandbox.Awake {
		err = &sandbox.Error{Class: sandbox.Conflict, Msg: "sandbox " + sb.ID + " is paused"}
	}
	return sb, err
}

func noSandbox(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoSandbox, Msg: fmt.Sprintf("sandbox '%.80s' not found", id)}
}

func (d *dialect) get(w http.ResponseWriter, r *http.Request) error {
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, d.detail(r.Context(), sb))
}

func (d *dialect) kill(w http.ResponseWriter, r *http.Request) error {
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err == nil {
		_, err = d.server.KillSandbox(r.Context(), sb.ID, "")
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *dialect) setTimeout(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Timeout *float64 `json:"timeout"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if req.Timeout != nil && *req.Timeout == 0 { // "now" to E2B; to Cove it would be "never"
		sb, err := d.awake(r)
		if err != nil {
			return err
		}
		if sb.Spec.OnTimeout != sandbox.IdlePause {
			return d.kill(w, r)
		}
		return d.putToSleep(w, r, sb, sb.Spec.Labels[forgetLabel] == "true")
	}
	timeout, err := seconds("timeout", req.Timeout, 15*time.Second)
	if err != nil {
		return err
	}
	sb, err := d.awake(r)
	if err != nil {
		return err
	}
	if _, err := d.server.SetTimeout(r.Context(), sb.ID, timeout); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// refresh is the keep-alive of older SDKs: it only ever gives more time.
func (d *dialect) refresh(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Duration *float64 `json:"duration"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	timeout, err := seconds("duration", req.Duration, 15*time.Second)
	if err != nil {
		return err
	}
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err == nil {
		_, err = d.extend(r.Context(), sb, timeout)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// extend gives a sandbox at least so much time.
func (d *dialect) extend(ctx context.Context, sb sandbox.Sandbox, timeout time.Duration) (sandbox.Sandbox, error) {
	if !sb.ExpiresAt.IsZero() && sb.ExpiresAt.After(d.clock().Add(timeout)) {
		return sb, nil
	}
	return d.server.SetTimeout(ctx, sb.ID, timeout)
}

// mostListed bounds the sandboxes that one list is made of, over all its pages.
const mostListed = 20_000

// list is GET /sandboxes and /v2/sandboxes. E2B sorts by start and filters by what
// the store does not know, so all that match are taken and a page is cut of them.
func (d *dialect) list(w http.ResponseWriter, r *http.Request) error {
	q, err := listQueryFrom(r.URL.Query())
	if err != nil {
		return err
	}
	f := store.Filter{Labels: q.metadata, PageSize: 1000}
	if q.template != "" {
		if f.Labels == nil {
			f.Labels = map[string]string{}
		}
		f.Labels[templateLabel] = q.template
	}
	var all []sandbox.Sandbox
	running := 0
	for more := true; more && len(all) < mostListed; {
		page, next, err := d.server.ListSandboxes(r.Context(), f)
		if err != nil {
			return err
		}
		for _, sb := range page {
			if stateOf(sb) == stateRunning {
				running++
			}
			if q.wants(sb) {
				all = append(all, sb)
			}
		}
		f.PageToken, more = next, next != ""
	}
	slices.SortFunc(all, q.compare)
	out := make([]detail, 0, min(len(all), q.limit))
	for i, sb := range all {
		if i == q.limit {
			w.Header().Set("X-Next-Token", placeOf(all[i-1]).String())
			break
		}
		out = append(out, d.detail(r.Context(), sb))
	}
	w.Header().Set("X-Total-Running", strconv.Itoa(running))
	return writeJSON(w, http.StatusOK, out)
}

// listQuery is what a list asks for.
type listQuery struct {
	metadata map[string]string
	states   []string // none = every one
	after    time.Time
	template string
	oldest   bool // first
	limit    int
	from     *place // the last of the page before
}

const pageSize = 100

func listQueryFrom(v url.Values) (q listQuery, err error) {
	q = listQuery{template: v.Get("template"), oldest: v.Get("order") == "asc", limit: pageSize}
	if q.metadata, err = metadataQuery(v.Get("metadata")); err != nil {
		return q, err
	}
	for _, list := range v["state"] {
		for state := range strings.SplitSeq(list, ",") {
			if state != stateRunning && state != statePaused {
				return q, sandbox.InvalidField("state", "%.20q is not accepted; running and paused are", state)
			}
			q.states = append(q.states, state)
		}
	}
	if s := v.Get("startedAfter"); s != "" {
		if q.after, err = time.Parse(time.RFC3339, s); err != nil {
			return q, sandbox.InvalidField("startedAfter", "%.40q is no time like 2026-01-02T15:04:05Z", s)
		}
	}
	if s := v.Get("limit"); s != "" {
		if q.limit, err = strconv.Atoi(s); err != nil || q.limit < 1 || q.limit > pageSize {
			return q, sandbox.InvalidField("limit", "%.20q is not accepted; 1 to %d is", s, pageSize)
		}
	}
	if s := v.Get("nextToken"); s != "" {
		p, ok := parsePlace(s)
		if !ok {
			return q, sandbox.InvalidField("nextToken", "not one of ours")
		}
		q.from = &p
	}
	return q, nil
}

// metadataQuery reads k=v&k=v, of which the SDKs encode each part once more before
// they encode the whole.
func metadataQuery(s string) (map[string]string, error) {
	if s == "" {
		return nil, nil
	}
	v, err := url.ParseQuery(s)
	if err != nil {
		return nil, sandbox.InvalidField("metadata", "%.60q is no query of keys and values", s)
	}
	out := map[string]string{}
	for k, values := range v {
		key, err := url.QueryUnescape(k)
		value, verr := url.QueryUnescape(values[0])
		if err != nil || verr != nil {
			return nil, sandbox.InvalidField("metadata", "%.60q is no query of keys and values", s)
		}
		out[key] = value
	}
	return out, nil
}

func (q listQuery) wants(sb sandbox.Sandbox) bool {
	return (len(q.states) == 0 || slices.Contains(q.states, stateOf(sb))) && (q.after.IsZero() || sb.CreatedAt.After(q.after)) &&
		(q.from == nil || q.order(*q.from, placeOf(sb)) < 0)
}

func (q listQuery) compare(a, b sandbox.Sandbox) int { return q.order(placeOf(a), placeOf(b)) }

func (q listQuery) order(a, b place) int {
	c := cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.id, b.id))
	if q.oldest {
		return c
	}
	return -c
}

// place is where a sandbox stands in a list.
type place struct {
	at int64
	id string
}

func placeOf(sb sandbox.Sandbox) place { return place{sb.CreatedAt.UnixNano(), sb.ID} }

func (p place) String() string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(p.at, 10) + " " + p.id))
}

func parsePlace(s string) (p place, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	at, id, found := strings.Cut(string(b), " ")
	if err != nil || !found {
		return p, false
	}
	p.id = id
	p.at, err = strconv.ParseInt(at, 10, 64)
	return p, err == nil
}
