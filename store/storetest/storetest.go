// Package storetest holds what every implementation of store.Store must do:
// the sentences of the contract as scenarios ([Run]), a search for sequences of
// calls in which it differs from a plain model in memory (part of Run), and
// kill -9 at random moments ([Crash]).
package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Run runs the suite. open returns an empty store every time; the suite closes
// it, and Close may be called again by open's own cleanup.
func Run(t *testing.T, bare func(t *testing.T) store.Store) {
	open := func(t *testing.T) store.Store { return scoped{bare(t)} }
	for _, group := range []struct {
		name  string
		cases []scenario
	}{
		{"Sandboxes", sandboxCases},
		{"List", listCases},
		{"Images", imageCases},
		{"Keys", keyCases},
		{"Snapshots", snapshotCases},
		{"Tree", treeCases},
		{"Templates", templateCases},
		{"Secrets", secretCases},
		{"Logins", loginCases},
		{"Builds", buildCases},
		{"Leases", leaseCases},
		{"Runs", runCases},
		{"Shipments", shipmentCases},
		{"Volumes", volumeCases},
		{"Grades", gradeCases},
		{"Races", raceCases},
		{"Contexts", contextCases},
	} {
		t.Run(group.name, func(t *testing.T) {
			for _, c := range group.cases {
				t.Run(c.name, func(t *testing.T) {
					st := open(t)
					t.Cleanup(func() {
						if err := st.Close(); err != nil {
							t.Errorf("close: %v", err)
						}
					})
					c.run(t, st)
				})
			}
		})
	}
	t.Run("Tenants", func(t *testing.T) { tenantCases(t, bare) })
	t.Run("Model", func(t *testing.T) { checkModel(t, open) })
}

type scenario struct {
	name string
	run  func(t *testing.T, st store.Store)
}

// epoch is when these tests take place: with nanoseconds, and away from UTC, so
// that a store which drops either is found out.
var epoch = time.Date(2026, 3, 4, 5, 6, 7, 123456789, time.FixedZone("", 2*3600))

func at(minutes int) time.Time { return epoch.Add(time.Duration(minutes) * time.Minute) }

// newSandbox is a record with every field set.
func newSandbox(id string, minutes int) sandbox.Sandbox {
	return sandbox.Sandbox{
		ID: id,
		Spec: sandbox.Spec{
			Image:       "base",
			Resources:   sandbox.Resources{MilliCPU: 1500, Memory: 1 << 29, MemoryLimit: 1 << 30, Disk: 1 << 40, Pids: 77},
			Env:         map[string]string{"PATH": "/bin", "QUOTE": `it's "x"; --`, "EMPTY": "", "UNICODE": "żółw\n"},
			Labels:      map[string]string{"run": "r1", "n": id},
			Timeout:     time.Hour,
			IdleTimeout: 90 * time.Second,
			Rollout:     sandbox.Rollout{Run: "run1", Group: "g", Episode: "e"},
		},
		ImageID: "sha256:base", Node: "node1", State: sandbox.Running, Episode: 1,
		CreatedAt: at(minutes), ExpiresAt: at(minutes + 60),
	}
}

func newImage(id string, minutes int) sandbox.Image {
	return sandbox.Image{ID: id, Size: 1 << 33, Source: "tar", Platform: "linux/amd64", CreatedAt: at(minutes),
		Config: sandbox.ImageConfig{Env: []string{"A=b", "C="}, WorkingDir: "/w", User: "u:g", Entrypoint: []string{"/e"}, Cmd: []string{"c", ""}}}
}

// create and the like report with Errorf, not Fatalf: races call them from
// goroutines of their own.
func create(t *testing.T, st store.Store, sb sandbox.Sandbox) sandbox.Sandbox {
	t.Helper()
	got, existed, err := st.CreateSandbox(t.Context(), sb, store.Idempotency{})
	if err != nil || existed {
		t.Errorf("create %s: existed %v, %v", sb.ID, existed, err)
	}
	return got
}

func end(t *testing.T, st store.Store, id string, minutes int) sandbox.Sandbox {
	t.Helper()
	sb, err := st.EndSandbox(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser, At: at(minutes)})
	if err != nil {
		t.Errorf("end %s: %v", id, err)
	}
	return sb
}

func get(t *testing.T, st store.Store, id string) sandbox.Sandbox {
	t.Helper()
	sb, err := st.GetSandbox(t.Context(), id)
	if err != nil {
		t.Fatalf("get %s: %v", id, err)
	}
	return sb
}

// same compares two values as what they mean: instants whatever their zone,
// empty maps and none alike.
func same(t testing.TB, what string, got, want any) {
	t.Helper()
	if g, w := canonical(got), canonical(want); g != w {
		t.Errorf("%s:\n got %s\nwant %s", what, g, w)
	}
}

func canonical(v any) string {
	own := func(tenant string) string { return strings.TrimPrefix(tenant, sandbox.DefaultTenant) } // what says none is its
	switch x := v.(type) {
	case sandbox.Sandbox:
		x.Tenant = own(x.Tenant)
		x.CreatedAt, x.ExpiresAt = x.CreatedAt.UTC(), x.ExpiresAt.UTC()
		if x.End != nil {
			e := *x.End
			e.At = e.At.UTC()
			x.End = &e
		}
		v = x
	case sandbox.Image:
		x.CreatedAt = x.CreatedAt.UTC()
		v = x
	case sandbox.Snapshot:
		x.Tenant = own(x.Tenant)
		x.CreatedAt, x.ExpiresAt = x.CreatedAt.UTC(), x.ExpiresAt.UTC()
		v = x
	case sandbox.Template:
		x.Tenant = own(x.Tenant)
		x.CreatedAt = x.CreatedAt.UTC()
		v = x
	case store.Key:
		x.Tenant = own(x.Tenant)
		x.CreatedAt, x.LastUsedAt = x.CreatedAt.UTC(), x.LastUsedAt.UTC()
		v = x
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprintf("%+v", v)
	}
	return string(b)
}

// fails checks the class of an error, and that it is a *sandbox.Error at all.
func fails(t testing.TB, what string, err error, want *sandbox.Error) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || !errors.Is(err, want) {
		t.Errorf("%s: %v (%T), want %s", what, err, err, want.Class)
	}
}

// walk reads every page of a list.
func walk(ctx context.Context, st store.Store, f store.Filter) ([]sandbox.Sandbox, error) {
	var all []sandbox.Sandbox
	seen := map[string]bool{}
	for {
		page, next, err := st.ListSandboxes(ctx, f)
		if err != nil {
			return nil, err
		}
		if f.PageSize > 0 && len(page) > f.PageSize {
			return nil, fmt.Errorf("a page of %d where %d were asked for", len(page), f.PageSize)
		}
		if next != "" && len(page) == 0 {
			return nil, errors.New("an empty page that is not the last")
		}
		for _, sb := range page {
			if seen[sb.ID] { // and so a walk that does not advance comes to an end
				return nil, fmt.Errorf("%s is on two pages", sb.ID)
			}
			seen[sb.ID] = true
		}
		all = append(all, page...)
		if next == "" {
			return all, nil
		}
		f.PageToken = next
	}
}

func ids(sbs []sandbox.Sandbox) []string {
	out := []string{}
	for _, sb := range sbs {
		out = append(out, sb.ID)
	}
	return out
}
