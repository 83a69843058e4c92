package e2b

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

const (
	buildWaiting  = "waiting"
	buildBuilding = "building"
	buildReady    = "ready"
	buildError    = "error"

	maxBuilds   = 64        // of a tenant that are asked for or run
	keptBuilds  = 64        // of a tenant that are over; older ones go first
	maxLog      = 1 << 20   // bytes of one build's log, which what is built writes
	maxLine     = 8 << 10   // bytes; what is longer is cut
	perEntry    = 100       // bytes that an entry costs beside its text
	unstarted   = time.Hour // that one waits for its steps
	keepBuild   = 24 * time.Hour
	buildSteps  = 1000
	logPage     = 100              // entries of one answer; E2B's bound
	longestWait = 10 * time.Minute // for a ready command; E2B's
)

// builds of templates, in memory: they end with this process, as E2B's SDKs are told
// then.
type builds struct {
	mu struct {
		sync.Mutex
		byID map[string]*templateBuild
	}
}

// templateBuild is one that was asked for, runs or is over.
type templateBuild struct {
	id, tenant, name string
	tags             []string
	size             sandbox.Resources
	asked            time.Time

	mu struct {
		sync.Mutex
		status string
		log    []logEntry
		logged int // bytes of log
		reason *buildReason
		cancel context.CancelFunc
	}
}

type logEntry struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"`
	Message   string    `json:"message"`
	Step      string    `json:"step,omitempty"`
}

// buildReason is why a build failed.
type buildReason struct {
	Message    string     `json:"message"`
	Step       string     `json:"step,omitempty"`
	LogEntries []logEntry `json:"logEntries"`
}

func newBuilds() *builds {
	b := &builds{}
	b.mu.byID = map[string]*templateBuild{}
	return b
}

// newBuildID is a UUID: the SDKs read it as one.
func newBuildID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func (bs *builds) add(b *templateBuild, now time.Time) error {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	var over []*templateBuild
	open := 0
	for id, old := range bs.mu.byID {
		age := now.Sub(old.asked)
		switch status := old.status(); {
		case age > keepBuild && status != buildBuilding, age > unstarted && status == buildWaiting:
			delete(bs.mu.byID, id)
		case old.tenant != b.tenant:
		case status == buildReady, status == buildError:
			over = append(over, old)
		default:
			open++
		}
	}
	if open >= maxBuilds {
		return &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: fmt.Sprintf("%d builds of templates are under way", open), RetryAfter: time.Minute}
	}
	slices.SortFunc(over, func(a, b *templateBuild) int { return a.asked.Compare(b.asked) })
	for _, old := range over[:max(0, len(over)-keptBuilds)] {
		delete(bs.mu.byID, old.id)
	}
	b.asked = now
	b.mu.status = buildWaiting
	bs.mu.byID[b.id] = b
	return nil
}

// find is a build of the caller's tenant.
func (bs *builds) find(r *http.Request) (*templateBuild, error) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b := bs.mu.byID[r.PathValue("build")]
	if b == nil || b.tenant != server.CallerTenant(r.Context()) || b.name != r.PathValue("id") {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such build"}
	}
	return b, nil
}

// cancel ends the builds of a name that run, and says whether there were any.
func (bs *builds) cancel(tenant, name string) (any bool) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	for _, b := range bs.mu.byID {
		if b.tenant == tenant && b.name == name && !b.over() {
			any = true
			b.stop()
		}
	}
	return any
}

func (b *templateBuild) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.cancel != nil {
		b.mu.cancel()
	} else {
		b.mu.status, b.mu.reason = buildError, &buildReason{Message: canceledBuild, Step: "base", LogEntries: []logEntry{}}
	}
}

func (b *templateBuild) status() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.status
}

func (b *templateBuild) over() bool {
	status := b.status()
	return status == buildReady || status == buildError
}

func (b *templateBuild) note(level, step, text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for line := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		if b.mu.logged > maxLog {
			return
		}
		if len(line) > maxLine {
			line = strings.ToValidUTF8(line[:maxLine], "") + " …"
		}
		if b.mu.logged += len(line) + perEntry; b.mu.logged > maxLog {
			level, line = "warn", "the log is longer than is kept"
		}
		b.mu.log = append(b.mu.log, logEntry{time.Now().UTC(), level, line, step})
	}
}

// startBuild is POST /v2/templates/{id}/builds/{build}. The build goes on without its
// caller, and with its rights.
func (d *dialect) startBuild(w http.ResponseWriter, r *http.Request) error {
	var req buildRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	b, err := d.builds.find(r)
	if err != nil {
		return err
	}
	image, own, err := d.imageBuild(r.Context(), b, &req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	b.mu.Lock()
	again := b.mu.status != buildWaiting
	if !again {
		b.mu.status, b.mu.cancel = buildBuilding, cancel
	}
	b.mu.Unlock()
	if again {
		cancel()
		return &sandbox.Error{Class: sandbox.Conflict, Msg: "the build was started already"}
	}
	go func() {
		defer cancel()
		err := d.build(ctx, b, image, own, req)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.mu.status = buildReady
		if err != nil {
			b.mu.status, b.mu.reason = buildError, reasonOf(err, own, req)
			b.mu.log = append(b.mu.log, logEntry{time.Now().UTC(), "error", b.mu.reason.Message, b.mu.reason.Step})
		}
	}()
	w.WriteHeader(http.StatusAccepted)
	return nil
}

type buildRequest struct {
	FromImage    string `json:"fromImage"`
	FromTemplate string `json:"fromTemplate"`
	Registry     any    `json:"fromImageRegistry"`
	StartCmd     string `json:"startCmd"`
	ReadyCmd     string `json:"readyCmd"`
	Force        bool   `json:"force"`
	Steps        []struct {
		Type      string   `json:"type"`
		Args      []string `json:"args"`
		FilesHash string   `json:"filesHash"`
		Force     bool     `json:"force"`
	} `json:"steps"`

	ready sandbox.Readiness // what readyCmd says, or the template that it is built from
}

// baseImage is what the SDKs call the image of E2B's base template.
const baseImage = "e2bdev/base"

// provision makes the user that E2B's sandboxes have in an image that lacks it.
const provision = `id -u user >/dev/null 2>&1 || useradd -m -s /bin/bash user 2>/dev/null || adduser -D -s /bin/sh user
if [ -d /etc/sudoers.d ]; then echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user && chmod 0440 /etc/sudoers.d/user; fi`

// imageBuild is the build of a template's image. own is how many of its steps are
// before the caller's. What req leaves to the template it is built from is filled in.
func (d *dialect) imageBuild(ctx context.Context, b *templateBuild, req *buildRequest) (out server.ImageBuildRequest, own int, err error) {
	req.ready = readinessOf(req.ReadyCmd)
	out = server.ImageBuildRequest{Name: imagePrefix + strings.ToLower(b.name) + ":" + b.id, NoCache: req.Force}
	user := "user"
	switch {
	case req.Registry != nil:
		return out, 0, unsupported("fromImageRegistry", "logins to registries that come with a build; 'cove registry login' keeps one")
	case (req.FromImage == "") == (req.FromTemplate == ""):
		return out, 0, sandbox.InvalidField("fromImage", "exactly one of fromImage and fromTemplate is accepted")
	case len(req.Steps) > buildSteps:
		return out, 0, sandbox.InvalidField("steps", "%d steps; at most %d are accepted", len(req.Steps), buildSteps)
	case req.FromTemplate != "":
		var spec sandbox.Spec
		if err := d.origin(ctx, &spec, req.FromTemplate); err != nil {
			return out, 0, err
		}
		if spec.Template != "" {
			t, err := d.server.GetTemplate(ctx, spec.Template)
			if err != nil {
				return out, 0, err
			}
			spec.Image = t.Spec.Image
			if req.StartCmd == "" && req.ReadyCmd == "" { // both, or neither: what is waited for is what was started
				req.StartCmd, req.ready = t.Start, t.Ready
			}
		}
		if spec.Snapshot != "" {
			return out, 0, unsupported("fromTemplate", "builds on snapshots")
		}
		if out.From = spec.Image; out.From == "" {
			out.From = sandbox.StandardDefaults().Image
		}
		user = ""
	default:
		out.From = req.FromImage
		if name, _, _ := strings.Cut(req.FromImage, ":"); name == baseImage {
			out.From = sandbox.StandardDefaults().Image
		}
		out.Steps = []build.Step{{Op: "RUN", Args: []string{provision}, User: "root"}, {Op: "USER", Args: []string{user}}, {Op: "WORKDIR", Args: []string{"/home/user"}}}
	}
	out.Steps = append(out.Steps, build.Step{Op: "SHELL", Args: []string{"/bin/bash", "-c"}})
	own = len(out.Steps)
	for i, s := range req.Steps {
		arg := func(n int) string {
			if n < len(s.Args) {
				return s.Args[n]
			}
			return ""
		}
		step := build.Step{Op: strings.ToUpper(s.Type), Args: s.Args, Files: s.FilesHash, Force: s.Force}
		switch step.Op {
		case "RUN":
			if len(s.Args) == 0 {
				return out, own, sandbox.InvalidField("steps", "step %d has no command", i+1)
			}
			step.Args, step.User = s.Args[:1], arg(1)
		case "COPY":
			if len(s.Args) < 2 || s.FilesHash == "" {
				return out, own, sandbox.InvalidField("steps", "step %d has no files, source or destination", i+1)
			}
			step.Args, step.User, step.Mode = []string{s.Args[0], s.Args[1]}, arg(2), arg(3)
			if strings.ContainsAny(s.Args[0], "*?[") && !strings.HasSuffix(s.Args[1], "/") {
				step.Args[1] += "/" // what many may be copied to is a directory
			}
			if step.User == "" {
				step.User = user
			}
		case "USER":
			user = arg(0)
		case "ENV", "WORKDIR":
		default:
			return out, own, sandbox.InvalidField("steps", "step %d: %.20q is not accepted; RUN, COPY, ENV, WORKDIR and USER are", i+1, s.Type)
		}
		out.Steps = append(out.Steps, step)
	}
	return out, own, nil
}

// build makes the image, of it the template, and has the tags lead there. What does
// not get so far leaves nothing.
func (d *dialect) build(ctx context.Context, b *templateBuild, image server.ImageBuildRequest, own int, req buildRequest) error {
	b.note("info", "base", "building "+b.name+" from "+image.From)
	_, err := d.server.BuildImage(ctx, image, func(ev server.ImageBuildEvent) error {
		step := stepName(ev.Step-2, own) // its first step is FROM
		switch ev.Kind {
		case "step":
			b.note("info", step, ev.Text)
		case "cached":
			b.note("info", step, "CACHED "+ev.Text)
		case "warning":
			b.note("warn", step, ev.Text)
		case "output":
			b.note("info", step, ev.Text)
		}
		return nil
	})
	if err != nil {
		return err
	}
	kept := false
	defer func() {
		if !kept {
			if err := d.server.RemoveImage(context.WithoutCancel(ctx), image.Name); err != nil && !missing(err) {
				d.log.Warn("the image of a failed build stays", "image", image.Name, "err", err)
			}
		}
	}()
	spec := sandbox.Spec{Image: image.Name, Resources: b.size, Labels: map[string]string{buildLabel: b.id}}
	tpl, err := d.server.BuildTemplate(ctx, server.BuildRequest{Name: b.name, Spec: spec, Start: req.StartCmd, Ready: req.ready}, func(ev server.BuildEvent) error {
		if ev.Step != "" {
			b.note("info", "finalize", ev.Step)
		}
		if len(ev.Output) > 0 {
			b.note("info", "finalize", string(bytes.ToValidUTF8(ev.Output, []byte("?"))))
		}
		return nil
	})
	if err != nil {
		return &finalizing{err}
	}
	kept = true
	if _, err := d.server.TagTemplate(ctx, tpl.Ref(), b.tags); err != nil {
		return &finalizing{err}
	}
	b.note("info", "finalize", "Build finished")
	return nil
}

// portReady is what the SDKs' waitForPort is: a port is waited for without ss, which
// few images have.
var portReady = regexp.MustCompile(`^(?:ss -tuln \| grep :|\[ -n "\$\(ss -Htuln sport = :)([0-9]{1,5})(?:\)" \])?$`)

func readinessOf(command string) sandbox.Readiness {
	if command == "" {
		return sandbox.Readiness{}
	}
	if m := portReady.FindStringSubmatch(command); m != nil {
		if port, err := strconv.Atoi(m[1]); err == nil && port >= 1 && port <= 65535 {
			return sandbox.Readiness{Port: port, Timeout: longestWait}
		}
	}
	return sandbox.Readiness{Command: command, Timeout: longestWait}
}

// finalizing is what went wrong after the image was made.
type finalizing struct{ error }

func (f *finalizing) Unwrap() error { return f.error }

// stepName is how E2B calls a step, by its index among all.
func stepName(index, own int) string {
	if n := index - own + 1; n >= 1 {
		return strconv.Itoa(n)
	}
	return "base"
}

// canceledBuild is why a build ended whose template was deleted meanwhile: that is how the
// SDKs cancel one.
const canceledBuild = "the build was canceled by the client"

// reasonOf is why a build failed, and at which of the caller's steps.
func reasonOf(err error, own int, req buildRequest) *buildReason {
	e := sandbox.AsError(err)
	if e.Class == sandbox.Canceled {
		return &buildReason{Message: canceledBuild, Step: "base", LogEntries: []logEntry{}}
	}
	out := &buildReason{Message: message(e), Step: "base", LogEntries: []logEntry{}}
	var late *finalizing
	if errors.As(err, &late) {
		out.Step = "finalize"
		return out
	}
	index, aerr := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(e.Field, "steps["), "]"))
	if aerr != nil || !strings.HasPrefix(e.Field, "steps[") || index < own || index-own >= len(req.Steps) {
		return out
	}
	out.Step = stepName(index, own)
	named := *e
	named.Field = "" // it counts our own steps too; Step does not
	out.Message = message(&named)
	if s := req.Steps[index-own]; strings.EqualFold(s.Type, "RUN") {
		if e.Class == sandbox.Invalid && len(s.Args) > 1 { // nothing else of it can be wrong but the user
			out.Message = fmt.Sprintf("failed to run command '%s': command failed: unauthenticated: invalid username: '%s'", s.Args[0], s.Args[1])
		} else {
			out.Message = fmt.Sprintf("failed to run command '%s': %s", s.Args[0], out.Message)
		}
	}
	return out
}

// buildStatus is GET /templates/{id}/builds/{build}/status.
func (d *dialect) buildStatus(w http.ResponseWriter, r *http.Request) error {
	b, err := d.builds.find(r)
	if err != nil {
		return err
	}
	offset, _ := strconv.Atoi(r.URL.Query().Get("logsOffset")) // 0 for what is none
	limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
	if err != nil || limit < 1 || limit > logPage {
		limit = logPage
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	from := min(max(offset, 0), len(b.mu.log))
	page := append([]logEntry{}, b.mu.log[from:min(from+limit, len(b.mu.log))]...)
	lines := []string{}
	for _, l := range page {
		lines = append(lines, l.Message)
	}
	out := map[string]any{"templateID": b.name, "buildID": b.id, "status": b.mu.status, "logEntries": page, "logs": lines}
	if b.mu.reason != nil {
		out["reason"] = b.mu.reason
	}
	return writeJSON(w, http.StatusOK, out)
}

// buildLogs is GET /templates/{id}/builds/{build}/logs: a page of the log from cursor on, in
// unix milliseconds, or back from there.
func (d *dialect) buildLogs(w http.ResponseWriter, r *http.Request) error {
	b, err := d.builds.find(r)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	limit, err := strconv.Atoi(q.Get("limit"))
	if err != nil || limit < 1 || limit > logPage {
		limit = logPage
	}
	cursor, err := strconv.ParseInt(q.Get("cursor"), 10, 64)
	anywhere, back, level := err != nil, q.Get("direction") == "backward", q.Get("level")
	b.mu.Lock()
	log := slices.Clone(b.mu.log)
	b.mu.Unlock()
	if back {
		slices.Reverse(log)
	}
	page := []logEntry{}
	for _, l := range log {
		at := l.Timestamp.UnixMilli()
		if len(page) < limit && (anywhere || back && at <= cursor || !back && at >= cursor) && logLevels[l.Level] >= logLevels[level] {
			page = append(page, l)
		}
	}
	return writeJSON(w, http.StatusOK, map[string]any{"logs": page})
}

var logLevels = map[string]int{"debug": 0, "info": 1, "warn": 2, "error": 3}
