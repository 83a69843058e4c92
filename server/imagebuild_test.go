package server

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// builder has a caller of the default tenant.
func builder(t *testing.T, w *world) context.Context {
	t.Helper()
	ctx, err := w.server.Authenticate(t.Context(), w.secret, "")
	if err != nil {
		t.Fatal(err)
	}
	return ctx
}

// told collects what a build tells, one word each: "step 2", "cached 2", "output hi".
type toldBuild struct{ words []string }

func (b *toldBuild) sink(ev ImageBuildEvent) error {
	switch ev.Kind {
	case BuildOutput:
		b.words = append(b.words, "output "+strings.TrimSpace(ev.Text))
	case BuildStepCached:
		b.words = append(b.words, fmt.Sprint("cached ", ev.Step))
	case BuildStepBegun:
		b.words = append(b.words, fmt.Sprint("step ", ev.Step))
	case BuildWarning:
		b.words = append(b.words, "warning "+ev.Text)
	}
	return nil
}

func (b *toldBuild) String() string { return strings.Join(b.words, ", ") }

// someFiles is a tar with one file.
func someFiles(content string) Upload {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: "a", Mode: 0o644, Size: int64(len(content))})
	_, _ = w.Write([]byte(content))
	_ = w.Close() // into memory: none of these fails
	return Upload{Reader: &b, Size: int64(b.Len())}
}

func TestBuildImage(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	file := "FROM base\nENV A=1\nRUN [\"echo\", \"one\"]\nRUN [\"sh\", \"-c\", \"echo two | tee two\"]\n"
	run := func(file string) (ImageBuild, string) {
		t.Helper()
		var told toldBuild
		b, err := w.server.BuildImage(ctx, ImageBuildRequest{Name: "app", Dockerfile: []byte(file)}, told.sink)
		if err != nil {
			t.Fatal(err)
		}
		return b, told.String()
	}
	first, told := run(file)
	if told != "step 1, step 2, step 3, output one, step 4, output two" {
		t.Error(told)
	}
	if first.State != BuildDone || !slices.Equal(first.Image.Names, []string{"app"}) || first.Steps != 3 || first.Cached != 0 {
		t.Errorf("%+v", first)
	}
	if !slices.Contains(first.Image.Config.Env, "A=1") {
		t.Error(first.Image.Config)
	}
	again, told := run(file)
	if told != "step 1, step 2, step 3, cached 3, step 4, cached 4" || again.Image.ID != first.Image.ID || again.Cached != 2 {
		t.Error("the second time:", told, again)
	}
	changed, told := run(strings.ReplaceAll(file, "two", "three"))
	if told != "step 1, step 2, step 3, cached 3, step 4, output three" || changed.Image.ID == first.Image.ID {
		t.Error("with another last line:", told)
	}
	if n := w.node.liveCount(); n != 0 {
		t.Error("sandboxes are left:", n)
	}
	if left := w.records(); len(left) != 0 {
		t.Error("records are left:", left)
	}
}

// A built image goes when its name is another's, or it never had one.
func TestBuiltImagesGoWithTheirNames(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	run := func(name, word string) string {
		t.Helper()
		b, err := w.server.BuildImage(ctx, ImageBuildRequest{Name: name, Dockerfile: []byte("FROM base\nENV A=" + word + "\n")}, func(ImageBuildEvent) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		return b.Image.ID
	}
	old, unnamed, now := run("app", "1"), run("", "2"), run("app", "3")
	<-w.server.content.want().done
	for _, id := range []string{old, unnamed} {
		if _, err := w.server.GetImage(ctx, id); !errors.Is(err, sandbox.ErrImageNotFound) {
			t.Error("still there:", err)
		}
	}
	if img, err := w.server.GetImage(ctx, "app"); err != nil || img.ID != now {
		t.Error(img, err)
	}
	if again := run("app", "1"); again != old {
		t.Error("what is gone is built again:", again, old)
	}
}

func TestBuildThatFails(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	for _, c := range []struct {
		file, field string
		is          error
	}{
		{"FROM base\nRUN [\"sh\", \"-c\", \"echo it broke; exit 3\"]\n", "dockerfile:2", sandbox.ErrPrecondition},
		{"FROM base\nRUN [\"nope\"]\n", "dockerfile:2", sandbox.ErrNotFound},
		{"FROM base\n\nFORM x\n", "dockerfile:3", sandbox.ErrInvalid},
		{"FROM nowhere/x\n", "dockerfile:1", sandbox.ErrImageNotFound},
		{"FROM base\nCOPY a /b\n", "dockerfile:2", sandbox.ErrNotFound},
		{"FROM base\nRUN --mount=type=secret,id=x,required=true [\"true\"]\n", "dockerfile:2", sandbox.ErrInvalid},
		{"", "dockerfile", sandbox.ErrInvalid},
		{"FROM base\nCOPY --from=1 a b\nFROM base\n", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM base AS setup\nFROM base\nCOPY --from=steup x y\n", "dockerfile:3", sandbox.ErrImageNotFound},
		{"FROM base AS a\nCOPY --from=b x y\nFROM base AS b\nFROM a", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM base\n" + strings.Repeat("ENV A=1\n", 10_000), "", sandbox.ErrTooLarge},
		{"FROM base\nENV A=" + strings.Repeat("x", 1000) + "\n" + strings.Repeat("ENV A=$A$A$A$A$A$A$A$A$A$A\n", 20), "dockerfile:5", sandbox.ErrTooLarge},
	} {
		_, err := w.server.BuildImage(ctx, ImageBuildRequest{Name: "app", Dockerfile: []byte(c.file)}, func(ImageBuildEvent) error { return nil })
		var e *sandbox.Error
		if !errors.As(err, &e) || !errors.Is(err, c.is) || e.Field != c.field {
			t.Errorf("%.60q: %v", c.file, err)
			continue
		}
		if strings.Contains(c.file, "steup") && !strings.Contains(e.Msg, "did you mean 'setup'") {
			t.Error("what was meant is not said:", e.Msg)
		}
		if c.is == sandbox.ErrPrecondition && !strings.Contains(e.Hint, "it broke") {
			t.Error("what it printed is not said:", e.Hint)
		}
	}
	if n := w.node.liveCount(); n != 0 {
		t.Error("sandboxes are left:", n)
	}
	if _, err := w.server.GetImage(ctx, "app"); !errors.Is(err, sandbox.ErrImageNotFound) {
		t.Error("a build that failed gave its name:", err)
	}
}

func TestCanceledBuildLeavesNothing(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	leaving, leave := context.WithCancel(ctx)
	_, err := w.server.BuildImage(leaving, ImageBuildRequest{Name: "app", Dockerfile: []byte("FROM base\nRUN [\"sh\", \"-c\", \"echo sleeping; exec sleep 1000\"]\n")}, func(ev ImageBuildEvent) error {
		if ev.Kind == BuildOutput {
			leave()
		}
		return nil
	})
	if !errors.Is(err, sandbox.ErrCanceled) && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b, err := w.server.StartImageBuild(ctx, ImageBuildRequest{Name: "app", Dockerfile: []byte("FROM base\nRUN [\"sh\", \"-c\", \"echo sleeping; exec sleep 1000\"]\n")})
	if err != nil || b.State != BuildRunning {
		t.Fatal(b, err)
	}
	if b, err = w.server.CancelImageBuild(ctx, b.ID); err != nil || b.State != BuildCanceled {
		t.Error(b, err)
	}
	if n, left := w.node.liveCount(), w.records(); n != 0 || len(left) != 0 {
		t.Error("left:", n, left)
	}
	red := store.In(ctx, "red")
	if _, err := w.server.findBuild(red, b.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error("another tenant sees it:", err)
	}
}

func TestBuildSteps(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	files := someFiles("files")
	if err := w.server.PutBuildFiles(ctx, "k1", files); err != nil {
		t.Fatal(err)
	}
	if has, err := w.server.HasBuildFiles(ctx, "k1"); !has || err != nil {
		t.Error(has, err)
	}
	if has, err := w.server.HasBuildFiles(ctx, "k2"); has || err != nil {
		t.Error(has, err)
	}
	req := ImageBuildRequest{Name: "app", From: "base", Steps: []build.Step{
		{Op: "SHELL", Args: []string{"echo"}},
		{Op: "ENV", Args: []string{"A", "$B", "C", "2"}},
		{Op: "COPY", Args: []string{"src", "/app/"}, Files: "k1"},
		{Op: "WORKDIR", Args: []string{"/app"}},
		{Op: "USER", Args: []string{"user"}},
		{Op: "RUN", Args: []string{"hello $A"}},
		{Op: "CMD", Args: []string{"serve"}},
	}}
	var told toldBuild
	b, err := w.server.BuildImage(ctx, req, told.sink)
	if err != nil {
		t.Fatal(err)
	}
	c := b.Image.Config
	if !slices.Contains(c.Env, "A=$B") || c.WorkingDir != "/app" || c.User != "user" || !slices.Equal(c.Cmd, []string{"serve"}) {
		t.Errorf("%+v", c)
	}
	if !slices.Contains(told.words, "output hello $A") {
		t.Error(told.String())
	}
	// Forced, a step and what follows run again, and nothing before.
	req.Steps[5].Force = true
	told = toldBuild{}
	if b, err = w.server.BuildImage(ctx, req, told.sink); err != nil || !strings.Contains(told.String(), "cached 4") || strings.Contains(told.String(), "cached 7") {
		t.Error(told.String(), err)
	}
	req.Steps[2].Files = "gone"
	_, err = w.server.BuildImage(ctx, req, told.sink)
	if !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	_, err = w.server.BuildImage(ctx, ImageBuildRequest{From: "base", Steps: []build.Step{{Op: "DANCE"}}}, told.sink)
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Field != "steps[0]" {
		t.Error(err)
	}
	_, err = w.server.BuildImage(ctx, ImageBuildRequest{From: "nosuch", Steps: []build.Step{{Op: "USER", Args: []string{"root"}}}}, told.sink)
	if !errors.As(err, &e) || e.Field != "from" || e.Class != sandbox.ImageNotFound {
		t.Error(err)
	}
}

// A directory that is there is no layer, and one that was made is one layer, from
// whatever context.
func TestBuildLayersOnce(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	for i, key := range []string{"k1", "k2"} {
		if err := w.server.PutBuildFiles(ctx, key, someFiles(key)); err != nil {
			t.Fatal(err)
		}
		var told toldBuild
		b, err := w.server.BuildImage(ctx, ImageBuildRequest{Name: "app", Context: key, Dockerfile: []byte("FROM base\nCOPY a /b/\nWORKDIR /etc\nRUN [\"true\"]\n")}, told.sink)
		if err != nil {
			t.Fatal(err)
		}
		s, err := w.server.findBuild(ctx, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range s.stages {
			if len(st.comp.Layers) != 2 {
				t.Error(len(st.comp.Layers), "layers")
			}
		}
		if want := []string{"step 1, step 2, step 3, step 4", "step 1, step 2, cached 2, step 3, cached 3, step 4, cached 4"}[i]; told.String() != want {
			t.Error(told.String())
		}
	}
}

// A context of which only what the Dockerfile names was given is not enough for an
// ONBUILD of the base.
func TestBuildTriggersWantTheWholeContext(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	run := func(r ImageBuildRequest) error {
		_, err := w.server.BuildImage(ctx, r, func(ImageBuildEvent) error { return nil })
		return err
	}
	if err := errors.Join(w.server.PutBuildFiles(ctx, "k", someFiles("x")), run(ImageBuildRequest{Name: "parent", Dockerfile: []byte("FROM base\nONBUILD ENV A=1\nONBUILD COPY a /a\n")})); err != nil {
		t.Fatal(err)
	}
	child := ImageBuildRequest{Name: "child", Dockerfile: []byte("FROM parent\nRUN [\"true\"]\n"), Context: "k", ContextPartial: true}
	var e *sandbox.Error
	if err := run(child); !errors.As(err, &e) || e.Class != sandbox.Precondition || e.Field != "context" {
		t.Error(err)
	}
	child.ContextPartial = false
	if err := run(child); err != nil {
		t.Error(err)
	}
}

// Files are what their key says, where it says it.
func TestBuildFilesAreHeldToTheirDigest(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	files := someFiles("x")
	data, err := io.ReadAll(files.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	key := "sha256-" + hex.EncodeToString(sum[:])
	if err := w.server.PutBuildFiles(ctx, key, someFiles("y")); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error("other files:", err)
	}
	if has, err := w.server.HasBuildFiles(ctx, key); has || err != nil {
		t.Error(has, err)
	}
	if err := w.server.PutBuildFiles(ctx, key, someFiles("x")); err != nil {
		t.Error(err)
	}
}

// Secrets are in nothing that is kept or told.
func TestBuildSecrets(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	const value = "hunter2-hunter2"
	file := "FROM base\nRUN --mount=type=secret,id=s,env=TOKEN [\"echo\", \"it is " + value + "\"]\n"
	var told toldBuild
	b, err := w.server.BuildImage(ctx, ImageBuildRequest{Name: "app", Dockerfile: []byte(file), Secrets: map[string][]byte{"s": []byte(value + "\n")}}, told.sink)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(told.String(), value) || !strings.Contains(told.String(), "***") {
		t.Error(told.String())
	}
	all, err := w.store.ListBuilt(w.own())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		if strings.Contains(r.Record+r.Key, value) {
			t.Error("in the cache:", r)
		}
	}
	if strings.Contains(fmt.Sprint(b.Image), value) {
		t.Error(b.Image)
	}
}

// What one tenant has built is not taken from the cache by another.
func TestBuildCacheIsOnesOwn(t *testing.T) {
	w := newWorld(t)
	ctx := builder(t, w)
	req := ImageBuildRequest{Name: "app", Dockerfile: []byte("FROM base\nRUN [\"echo\", \"one\"]\n")}
	if _, err := w.server.BuildImage(ctx, req, func(ImageBuildEvent) error { return nil }); err != nil {
		t.Fatal(err)
	}
	other := store.In(ctx, "red")
	all, err := w.store.ListBuilt(other)
	if err != nil || len(all) != 0 {
		t.Error(all, err)
	}
}
