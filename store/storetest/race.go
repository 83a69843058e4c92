package storetest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const racers = 32

// race starts f(0) to f(racers-1) at the same moment and waits for all.
func race(f func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range racers {
		wg.Go(func() {
			<-start
			f(i)
		})
	}
	close(start)
	wg.Wait()
}

var raceCases = []scenario{
	{"one idempotency key raced by many makes one sandbox", func(t *testing.T, st store.Store) {
		var got [racers]sandbox.Sandbox
		var existed [racers]bool
		race(func(i int) {
			var err error
			got[i], existed[i], err = st.CreateSandbox(t.Context(), newSandbox(fmt.Sprintf("a%d", i), i), store.Idempotency{Key: "k", Hash: "h"})
			if err != nil {
				t.Error(err)
			}
		})
		made := 0
		for i := range racers {
			if !existed[i] {
				made++
			}
			if got[i].ID != got[0].ID {
				t.Errorf("%s and %s were returned for one key", got[i].ID, got[0].ID)
			}
		}
		if made != 1 {
			t.Errorf("%d callers were told that they made it", made)
		}
		checkList(t, st, "the list", store.Filter{States: sandbox.States}, got[0].ID)
	}},

	{"one id raced by many is taken by one", func(t *testing.T, st store.Store) {
		var won [racers]bool
		race(func(i int) {
			sb := newSandbox("a1", i)
			_, _, err := st.CreateSandbox(t.Context(), sb, store.Idempotency{})
			if won[i] = err == nil; !won[i] {
				fails(t, "create", err, sandbox.ErrAlreadyExists)
			}
		})
		winner := -1
		for i := range racers {
			if won[i] && winner >= 0 {
				t.Error("two won")
			}
			if won[i] {
				winner = i
			}
		}
		if winner < 0 {
			t.Fatal("nobody won")
		}
		same(t, "kept", get(t, st, "a1"), newSandbox("a1", winner))
	}},

	{"many creators all get their own", func(t *testing.T, st store.Store) {
		race(func(i int) {
			for j := range 8 {
				id := fmt.Sprintf("a%dx%d", i, j)
				idem := store.Idempotency{Key: "k" + id, Hash: "h"}
				if _, existed, err := st.CreateSandbox(t.Context(), newSandbox(id, i), idem); existed || err != nil {
					t.Errorf("%s: existed %v, %v", id, existed, err)
				}
				// What was answered is there for everyone at once.
				if _, err := st.GetSandbox(t.Context(), id); err != nil {
					t.Errorf("%s right after its creation: %v", id, err)
				}
			}
		})
		sbs, err := walk(t.Context(), st, store.Filter{PageSize: 50})
		if len(sbs) != racers*8 || err != nil {
			t.Errorf("%d sandboxes, %v", len(sbs), err)
		}
	}},

	{"the refused among many do not hurt the others", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("taken", 0))
		race(func(i int) {
			for j := range 8 {
				if i%2 == 0 {
					_, _, err := st.CreateSandbox(t.Context(), newSandbox("taken", 0), store.Idempotency{Key: fmt.Sprintf("k%d", i), Hash: "h"})
					fails(t, "a taken id", err, sandbox.ErrAlreadyExists)
					_, err = st.EndSandbox(t.Context(), "nosuch", sandbox.End{Cause: sandbox.TTL})
					fails(t, "a missing id", err, sandbox.ErrNotFound)
				} else {
					create(t, st, newSandbox(fmt.Sprintf("a%dx%d", i, j), 0))
				}
			}
		})
		sbs, err := walk(t.Context(), st, store.Filter{})
		if len(sbs) != racers/2*8+1 || err != nil {
			t.Errorf("%d sandboxes, %v", len(sbs), err)
		}
	}},

	{"of many ends the first wins, and all are told it", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		var got [racers]sandbox.Sandbox
		race(func(i int) {
			var err error
			got[i], err = st.EndSandbox(t.Context(), "a1", sandbox.End{Cause: sandbox.Infra, Detail: fmt.Sprint(i), At: at(i)})
			if err != nil {
				t.Error(err)
			}
		})
		kept := get(t, st, "a1")
		for i := range racers {
			same(t, "what one was told", got[i], kept)
		}
	}},

	{"no update is lost", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		race(func(i int) {
			for range 4 {
				if _, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error {
					sb.Episode++
					runtime.Gosched() // let the others read the same record, where the store allows it
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
		if got := get(t, st, "a1").Episode; got != 1+racers*4 {
			t.Errorf("episode %d, want %d", got, 1+racers*4)
		}
	}},

	{"an update is before the end or refused, never after", func(t *testing.T, st store.Store) {
		create(t, st, newSandbox("a1", 0))
		var updates atomic.Int64
		var ended atomic.Bool // the end has been answered
		race(func(i int) {
			if i == racers/2 {
				end(t, st, "a1", 1)
				ended.Store(true)
				return
			}
			for {
				late := ended.Load()
				_, err := st.UpdateSandbox(t.Context(), "a1", func(sb *sandbox.Sandbox) error { sb.Episode++; return nil })
				if errors.Is(err, sandbox.ErrEnded) {
					return
				}
				if err != nil || late {
					t.Errorf("an update begun after the end %v: %v", late, err)
					return
				}
				updates.Add(1)
			}
		})
		sb := get(t, st, "a1")
		if sb.State != sandbox.EndedState || sb.Episode != 1+updates.Load() {
			t.Errorf("%s at episode %d after %d updates", sb.State, sb.Episode, updates.Load())
		}
	}},

	{"a name raced by many points at one image that is there", func(t *testing.T, st store.Store) {
		race(func(i int) { put(t, st, newImage(fmt.Sprintf("sha256:%d", i), i), "base") })
		img, err := st.GetImage(t.Context(), "base")
		if err != nil {
			t.Fatal(err)
		}
		same(t, "its names", img.Names, []string{"base"})
		imgs, err := st.ListImages(t.Context())
		if len(imgs) != racers || err != nil {
			t.Errorf("%d images, %v", len(imgs), err)
		}
	}},

	{"of many touches the latest stays", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		addKey(t, st, k)
		race(func(i int) {
			if err := st.TouchKey(t.Context(), "k1", at(10*(racers-i))); err != nil {
				t.Error(err)
			}
		})
		usedAbout(t, lastUsed(t, st, k), at(10*racers))
	}},

	{"a list under change never shows a sandbox twice or loses one", func(t *testing.T, st store.Store) {
		for i := range 20 {
			create(t, st, newSandbox(fmt.Sprintf("a%02d", i), i))
		}
		// All stay throughout, only their states change.
		race(func(i int) {
			if i < 20 {
				end(t, st, fmt.Sprintf("a%02d", i), 50)
				return
			}
			sbs, err := walk(t.Context(), st, store.Filter{States: sandbox.States, PageSize: 7})
			seen := map[string]bool{}
			for _, sb := range sbs {
				seen[sb.ID] = true
			}
			if err != nil || len(sbs) != 20 || len(seen) != 20 {
				t.Errorf("%d entries of %d sandboxes, %v", len(sbs), len(seen), err)
			}
		})
	}},
}

var contextCases = []scenario{
	{"a caller who has left changes nothing and is told so", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		create(t, st, newSandbox("a1", 0))
		put(t, st, newImage("sha256:1", 0), "base")
		put(t, st, newImage("sha256:2", 0), "")
		addKey(t, st, k)

		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		late, cancelLate := context.WithDeadline(t.Context(), time.Unix(1, 0))
		defer cancelLate()
		for _, c := range []struct {
			ctx  context.Context
			want *sandbox.Error
		}{{canceled, sandbox.ErrCanceled}, {late, sandbox.ErrDeadline}} {
			for name, call := range map[string]func(context.Context) error{
				"CreateSandbox": func(ctx context.Context) error {
					_, _, err := st.CreateSandbox(ctx, newSandbox("a2", 0), store.Idempotency{Key: "k", Hash: "h"})
					return err
				},
				"SandboxByKey": func(ctx context.Context) error {
					_, err := st.SandboxByKey(ctx, store.Idempotency{Key: "k", Hash: "h"})
					return err
				},
				"GetSandbox": func(ctx context.Context) error { _, err := st.GetSandbox(ctx, "a1"); return err },
				"ListSandboxes": func(ctx context.Context) error {
					_, _, err := st.ListSandboxes(ctx, store.Filter{})
					return err
				},
				"UpdateSandbox": func(ctx context.Context) error {
					_, err := st.UpdateSandbox(ctx, "a1", func(sb *sandbox.Sandbox) error { sb.Episode++; return nil })
					return err
				},
				"EndSandbox": func(ctx context.Context) error {
					_, err := st.EndSandbox(ctx, "a1", sandbox.End{Cause: sandbox.TTL})
					return err
				},
				"ForgetSandbox":   func(ctx context.Context) error { return st.ForgetSandbox(ctx, "a1") },
				"ForgetEnded":     func(ctx context.Context) error { _, err := st.ForgetEnded(ctx, at(99), 1); return err },
				"PutImage":        func(ctx context.Context) error { return st.PutImage(ctx, newImage("sha256:3", 0), "base") },
				"GetImage":        func(ctx context.Context) error { _, err := st.GetImage(ctx, "base"); return err },
				"ListImages":      func(ctx context.Context) error { _, err := st.ListImages(ctx); return err },
				"RemoveImageName": func(ctx context.Context) error { _, err := st.RemoveImageName(ctx, "base"); return err },
				"RemoveImage":     func(ctx context.Context) error { return st.RemoveImage(ctx, "sha256:2") },
				"CreateKey":       func(ctx context.Context) error { return st.CreateKey(ctx, newKey("k2", 0)) },
				"KeyByHash":       func(ctx context.Context) error { _, err := st.KeyByHash(ctx, k.Hash); return err },
				"ListKeys":        func(ctx context.Context) error { _, err := st.ListKeys(ctx); return err },
				"RevokeKey":       func(ctx context.Context) error { return st.RevokeKey(ctx, "k1") },
				"TouchKey":        func(ctx context.Context) error { return st.TouchKey(ctx, "k1", at(1)) },
			} {
				err := call(c.ctx)
				fails(t, name, err, c.want)
				if !errors.Is(err, c.ctx.Err()) {
					t.Errorf("%s: %v does not wrap %v", name, err, c.ctx.Err())
				}
			}
		}

		same(t, "the sandbox", get(t, st, "a1"), newSandbox("a1", 0))
		checkList(t, st, "the list", store.Filter{States: sandbox.States}, "a1")
		checkImage(t, st, "base", newImage("sha256:1", 0), "base")
		checkImage(t, st, "sha256:2", newImage("sha256:2", 0))
		if keys, err := st.ListKeys(t.Context()); len(keys) != 1 || err != nil || !keys[0].LastUsedAt.IsZero() {
			t.Errorf("keys %v, %v", keys, err)
		}
	}},
}
