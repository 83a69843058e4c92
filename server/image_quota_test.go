package server

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Images count for each tenant that names them, and what does not fit is neither
// named nor kept.
func TestImagesCountInTheQuota(t *testing.T) {
	s := newShared(t) // red has one image of 100 bytes
	used := func(who string) int64 {
		t.Helper()
		r, err := s.client.Tenants.Get(t.Context(), connect.NewRequest(&covev1.GetTenantRequest{Name: who}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Tenant.Used.ImageBytes
	}
	if n := used("red"); n != 100 {
		t.Fatalf("red's image counts %d", n)
	}
	for _, who := range []string{"red", "blue"} {
		s.quota(who, &covev1.Quota{ImageBytes: 150})
	}
	if _, body := s.as("red", "PUT", "/v1/images?name=two", strings.NewReader("redtwo")); classIn(body) != "quota_exceeded" || !strings.Contains(body, "cove image rm") {
		t.Error(body)
	}
	if s.node.lib.Have("sha256:redtwo") {
		t.Error("what was refused takes room")
	}
	if _, body := s.as("red", "PUT", "/v1/images?name=again", strings.NewReader("redsown")); !strings.Contains(body, "again") {
		t.Errorf("the same content by another name: %s", body)
	}
	// Another's content counts as if nobody else had it, and is not taken away.
	if _, body := s.as("blue", "PUT", "/v1/images?name=mine", strings.NewReader("redsown")); !strings.Contains(body, "mine") {
		t.Error(body)
	}
	if r, b := used("red"), used("blue"); r != 100 || b != 100 {
		t.Errorf("red %d, blue %d", r, b)
	}
	if _, err := s.blue.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "mine"})); err != nil {
		t.Fatal(err)
	}
	if b := used("blue"); b != 0 || !s.node.lib.Have("sha256:redsown") {
		t.Errorf("blue %d", b)
	}
	// Who is at the bound does not fetch in vain.
	s.quota("red", &covev1.Quota{ImageBytes: 100})
	if _, body := s.as("red", "PUT", "/v1/images?name=three", strings.NewReader("redthree")); classIn(body) != "quota_exceeded" {
		t.Error(body)
	}
	st, err := s.red.Images.Pull(t.Context(), connect.NewRequest(&covev1.PullImageRequest{Reference: "reg.test/a"}))
	if err == nil {
		for st.Receive() {
		}
		err = st.Err()
	}
	wantError(t, err, sandbox.ErrQuotaExceeded, "images")
	// Everybody's names count for nobody.
	if resp, body := s.http("PUT", "/v1/images?name=common&shared=true", strings.NewReader("redtwo")); resp.StatusCode != 200 {
		t.Error(body)
	}
}

// What is uploaded for builds has the bound of the tenant's images: what is more alone
// is refused, and what is more together goes, the oldest first, at once.
func TestBuildFilesAreBounded(t *testing.T) {
	var ticks atomic.Int64
	w := newWorld(t, func(c *Config) {
		c.Clock = func() time.Time { return time.Unix(1e9, 0).Add(time.Duration(ticks.Add(1)) * time.Millisecond) }
	})
	ctx := builder(t, w)
	size := func(n int) Upload { return someFiles(strings.Repeat("x", n)) }
	if err := w.server.PutBuildFiles(ctx, "probe", size(1000)); err != nil {
		t.Fatal(err)
	}
	list, err := w.server.store.ListBuilt(ctx)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	one := list[0].Size
	if _, err := w.client.Tenants.SetQuota(t.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: sandbox.DefaultTenant, Quota: &covev1.Quota{ImageBytes: 2*one + one/2}})); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "b", "c", "b"} {
		if err := w.server.PutBuildFiles(ctx, key, size(1000)); err != nil {
			t.Fatal(key, err)
		}
	}
	for key, want := range map[string]bool{"probe": false, "a": false, "b": true, "c": true} {
		if has, err := w.server.HasBuildFiles(ctx, key); has != want || err != nil {
			t.Errorf("%s: %t, %v", key, has, err)
		}
	}
	if err := w.server.PutBuildFiles(ctx, "large", size(int(4*one))); !errors.Is(err, sandbox.ErrQuotaExceeded) {
		t.Errorf("more than the quota at once: %v", err)
	}
	if has, err := w.server.HasBuildFiles(ctx, "b"); !has || err != nil {
		t.Errorf("what was refused took another's place: %v", err)
	}
}

// Nobody takes from the image quota past the table.
func TestImageQuotaIsInTheTable(t *testing.T) {
	s := newWorld(t).server
	for op, r := range operations {
		ctx := context.WithValue(store.In(t.Context(), sandbox.DefaultTenant), callContext{}, &call{s: s, op: op, rule: r})
		_, err := s.imageBound(ctx)
		if says := r.takes&imageQuota != 0; says != (err == nil) {
			t.Errorf("%s: the table says %t, and it is asked: %v", op, says, err)
		}
	}
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	// They take nothing: how much a plan may expect, and whose turn it is.
	looks := []string{"quotaOf", "tellNode", "judge"}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || slices.Contains(looks, fn.Name.Name) {
				continue
			}
			ast.Inspect(fn, func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "of" && isSelector(sel.X, "quotas") {
					t.Errorf("%s: %s asks for a quota past quotaOf", name, fn.Name.Name)
				}
				return true
			})
		}
	}
}
