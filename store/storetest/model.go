package storetest

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// model is the contract as maps. Everything is drawn from small sets, so that
// sequences meet each other's ids, keys, names and instants.
type model struct {
	t  *testing.T
	st store.Store

	sandboxes map[string]sandbox.Sandbox
	idem      map[string]idemUse // by key
	images    map[string]sandbox.Image
	names     map[string]string // → image id
	keys      map[string]store.Key

	stateModel
}

type idemUse struct{ hash, id string }

var (
	genID     = rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h"})
	genKey    = rapid.SampledFrom([]string{"", "", "k1", "k2", "k3"})
	genHash   = rapid.SampledFrom([]string{"h1", "h1", "h2"})
	genImage  = rapid.SampledFrom([]string{"sha256:1", "sha256:2", "sha256:3"})
	genName   = rapid.SampledFrom([]string{"base", "py", "sha256:1"})
	genMinute = rapid.IntRange(0, 5)
	genLabels = rapid.MapOfN(rapid.SampledFrom([]string{"x", "y", "z"}), rapid.SampledFrom([]string{"", "1", "2"}), 0, 3)
	genState  = rapid.SampledFrom(sandbox.States)
)

// checkModel searches for a sequence of calls in which a store and the model
// differ.
func checkModel(t *testing.T, open func(t *testing.T) store.Store) {
	rapid.Check(t, func(rt *rapid.T) {
		st := open(t)
		defer st.Close()
		m := &model{t: t, st: st, sandboxes: map[string]sandbox.Sandbox{}, idem: map[string]idemUse{},
			images: map[string]sandbox.Image{}, names: map[string]string{}, keys: map[string]store.Key{},
			stateModel: newStateModel()}
		actions := map[string]func(*rapid.T){
			"create": m.create, "byKey": m.byKey, "get": m.get, "list": m.list, "update": m.update, "end": m.end,
			"forget": m.forget, "forgetEnded": m.forgetEnded,
			"putImage": m.putImage, "getImage": m.getImage, "listImages": m.listImages,
			"removeName": m.removeName, "removeImage": m.removeImage,
			"createKey": m.createKey, "keyByHash": m.keyByHash, "listKeys": m.listKeys, "revokeKey": m.revokeKey, "touchKey": m.touchKey,
		}
		maps.Copy(actions, m.stateActions())
		rt.Repeat(actions)
	})
}

// expect compares an outcome: the class of the error ("" for none) and, where
// there is none, the value.
func expect(rt *rapid.T, what string, err error, class sandbox.Class, got, want any) {
	rt.Helper()
	if c := sandbox.ClassOf(err); c != class {
		rt.Fatalf("%s: %v, want class %q", what, err, class)
	}
	if class == "" && canonical(got) != canonical(want) {
		rt.Fatalf("%s:\n got %s\nwant %s", what, canonical(got), canonical(want))
	}
}

func (m *model) create(rt *rapid.T) {
	sb := newSandbox(genID.Draw(rt, "id"), genMinute.Draw(rt, "created"))
	sb.State = rapid.SampledFrom([]sandbox.State{sandbox.Creating, sandbox.Running}).Draw(rt, "state")
	sb.Spec.Labels = genLabels.Draw(rt, "labels")
	sb.ImageID = genImage.Draw(rt, "image")
	sb.Lineage = genLineage(rt)
	idem := store.Idempotency{Key: genKey.Draw(rt, "key"), Hash: genHash.Draw(rt, "hash")}

	got, existed, err := m.st.CreateSandbox(m.t.Context(), sb, idem)
	use, used := m.idem[idem.Key]
	_, taken := m.sandboxes[sb.ID]
	switch {
	case used && use.hash != idem.Hash, !used && taken:
		expect(rt, "create", err, sandbox.AlreadyExists, nil, nil)
	case used:
		expect(rt, "create", err, "", got, m.sandboxes[use.id])
	default:
		expect(rt, "create", err, "", got, sb)
		m.sandboxes[sb.ID] = sb
		if idem.Key != "" {
			m.idem[idem.Key] = idemUse{idem.Hash, sb.ID}
		}
	}
	if want := used && err == nil; existed != want {
		rt.Fatalf("create: existed %v, want %v", existed, want)
	}
}

func (m *model) byKey(rt *rapid.T) {
	idem := store.Idempotency{Key: genKey.Draw(rt, "key"), Hash: genHash.Draw(rt, "hash")}
	got, err := m.st.SandboxByKey(m.t.Context(), idem)
	switch use, used := m.idem[idem.Key]; {
	case !used:
		expect(rt, "by key", err, sandbox.NotFound, nil, nil)
	case use.hash != idem.Hash:
		expect(rt, "by key", err, sandbox.AlreadyExists, nil, nil)
	default:
		expect(rt, "by key", err, "", got, m.sandboxes[use.id])
	}
}

func (m *model) get(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	got, err := m.st.GetSandbox(m.t.Context(), id)
	if want, ok := m.sandboxes[id]; ok {
		expect(rt, "get", err, "", got, want)
	} else {
		expect(rt, "get", err, sandbox.NotFound, nil, nil)
	}
}

func (m *model) list(rt *rapid.T) {
	f := store.Filter{
		Labels:   rapid.MapOfN(rapid.SampledFrom([]string{"x", "y", "z"}), rapid.SampledFrom([]string{"", "1", "2"}), 0, 2).Draw(rt, "labels"),
		States:   rapid.SliceOfN(genState, 0, 3).Draw(rt, "states"),
		PageSize: rapid.IntRange(0, 4).Draw(rt, "page size"),
	}
	var want []sandbox.Sandbox
	for _, sb := range m.sandboxes {
		ok := len(f.States) == 0 && sb.State != sandbox.EndedState || slices.Contains(f.States, sb.State)
		for k, v := range f.Labels {
			have, has := sb.Spec.Labels[k]
			ok = ok && has && have == v
		}
		if ok {
			want = append(want, sb)
		}
	}
	slices.SortFunc(want, func(a, b sandbox.Sandbox) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(b.ID, a.ID)
	})
	got, err := walk(m.t.Context(), m.st, f)
	expect(rt, "list", err, "", ids(got), ids(want))
	for i := range got {
		expect(rt, "list entry", nil, "", got[i], want[i])
	}
}

func (m *model) update(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	to := genState.Draw(rt, "to")
	labels := genLabels.Draw(rt, "labels")
	episode := rapid.Int64Range(1, 3).Draw(rt, "episode")
	refuse := rapid.IntRange(0, 9).Draw(rt, "refuse") == 0
	got, err := m.st.UpdateSandbox(m.t.Context(), id, func(sb *sandbox.Sandbox) error {
		sb.Spec.Labels, sb.Episode, sb.State = labels, episode, to
		if refuse {
			return sandbox.ErrConflict
		}
		return nil
	})
	sb, ok := m.sandboxes[id]
	switch {
	case !ok:
		expect(rt, "update", err, sandbox.NotFound, nil, nil)
	case sb.State == sandbox.EndedState:
		expect(rt, "update", err, sandbox.Ended, nil, nil)
	case refuse:
		expect(rt, "update", err, sandbox.Conflict, nil, nil)
	case to == sandbox.EndedState:
		expect(rt, "update", err, sandbox.Invalid, nil, nil)
	case to != sb.State && !sb.State.CanBecome(to):
		expect(rt, "update", err, sandbox.Precondition, nil, nil)
	default:
		sb.Spec.Labels, sb.Episode, sb.State = maps.Clone(labels), episode, to
		expect(rt, "update", err, "", got, sb)
		m.sandboxes[id] = sb
	}
}

func (m *model) end(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	end := sandbox.End{Cause: rapid.SampledFrom(sandbox.Causes).Draw(rt, "cause"), At: at(genMinute.Draw(rt, "at"))}
	got, err := m.st.EndSandbox(m.t.Context(), id, end)
	sb, ok := m.sandboxes[id]
	if !ok {
		expect(rt, "end", err, sandbox.NotFound, nil, nil)
		return
	}
	sb.Finish(end)
	m.sandboxes[id] = sb
	expect(rt, "end", err, "", got, sb)
}

func (m *model) drop(id string) {
	delete(m.sandboxes, id)
	maps.DeleteFunc(m.idem, func(_ string, use idemUse) bool { return use.id == id })
}

func (m *model) forget(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	expect(rt, "forget", m.st.ForgetSandbox(m.t.Context(), id), "", nil, nil)
	m.drop(id)
}

func (m *model) forgetEnded(rt *rapid.T) {
	before := at(genMinute.Draw(rt, "before"))
	limit := rapid.IntRange(0, 3).Draw(rt, "limit")
	old := map[string]bool{}
	for id, sb := range m.sandboxes {
		if sb.End != nil && sb.End.At.Before(before) {
			old[id] = true
		}
	}
	n, err := m.st.ForgetEnded(m.t.Context(), before, limit)
	expect(rt, "forget ended", err, "", n, min(limit, len(old)))
	// Which of them is the store's choice.
	for id := range old {
		if _, err := m.st.GetSandbox(m.t.Context(), id); err != nil {
			m.drop(id)
			n--
		}
	}
	if n != 0 {
		rt.Fatalf("forget ended: %d more said than gone", n)
	}
}

func (m *model) image(id string) sandbox.Image {
	img := m.images[id]
	for name, to := range m.names {
		if to == id {
			img.Names = append(img.Names, name)
		}
	}
	slices.Sort(img.Names)
	return img
}

func (m *model) putImage(rt *rapid.T) {
	img := newImage(genImage.Draw(rt, "id"), genMinute.Draw(rt, "created"))
	name := rapid.OneOf(genName, rapid.Just("")).Draw(rt, "name")
	expect(rt, "put", m.st.PutImage(m.t.Context(), img, name), "", nil, nil)
	m.images[img.ID] = img
	if name != "" {
		m.names[name] = img.ID
	}
}

func (m *model) getImage(rt *rapid.T) {
	which := rapid.OneOf(genName, genImage).Draw(rt, "name or id")
	got, err := m.st.GetImage(m.t.Context(), which)
	id := which
	if _, ok := m.images[id]; !ok {
		id = m.names[which]
	}
	if id == "" {
		expect(rt, "get image", err, sandbox.ImageNotFound, nil, nil)
	} else {
		expect(rt, "get image", err, "", got, m.image(id))
	}
}

func (m *model) listImages(rt *rapid.T) {
	got, err := m.st.ListImages(m.t.Context())
	expect(rt, "list images", err, "", len(got), len(m.images))
	for i, img := range got {
		expect(rt, "listed image", nil, "", img, m.image(img.ID))
		if i > 0 && (img.CreatedAt.After(got[i-1].CreatedAt) || img.CreatedAt.Equal(got[i-1].CreatedAt) && img.ID > got[i-1].ID) {
			rt.Fatalf("list images: %s is after %s", img.ID, got[i-1].ID)
		}
	}
}

func (m *model) removeName(rt *rapid.T) {
	name := genName.Draw(rt, "name")
	got, err := m.st.RemoveImageName(m.t.Context(), name)
	id, ok := m.names[name]
	if !ok {
		expect(rt, "remove name", err, sandbox.ImageNotFound, nil, nil)
		return
	}
	delete(m.names, name)
	expect(rt, "remove name", err, "", got, m.image(id))
}

func (m *model) removeImage(rt *rapid.T) {
	id, prepared := genImage.Draw(rt, "id"), rapid.Bool().Draw(rt, "prepared")
	remove := m.st.RemoveImage
	if prepared {
		remove = m.st.RemovePreparedImage
	}
	err := remove(m.t.Context(), id)
	_, ok := m.images[id]
	used := len(m.image(id).Names) > 0
	for _, sb := range m.sandboxes {
		used = used || sb.State != sandbox.EndedState && sb.ImageID == id
	}
	var forget []string
	for snap, s := range m.snapshots {
		if prepared && s.Content.Image == id {
			forget = append(forget, snap)
			s.Content.Image = ""
		}
		used = used || slices.Contains(store.ImagesOf(s), id)
	}
	switch {
	case !ok:
		expect(rt, "remove image", err, sandbox.ImageNotFound, nil, nil)
	case used:
		expect(rt, "remove image", err, sandbox.Precondition, nil, nil)
	default:
		expect(rt, "remove image", err, "", nil, nil)
		delete(m.images, id)
		for _, snap := range forget {
			s := m.snapshots[snap]
			s.Content.Image = ""
			m.snapshots[snap] = s
		}
	}
}

func (m *model) createKey(rt *rapid.T) {
	k := newKey(genID.Draw(rt, "secret"), genMinute.Draw(rt, "created"))
	k.ID = genID.Draw(rt, "id")
	err := m.st.CreateKey(m.t.Context(), k)
	_, taken := m.keys[k.ID]
	for _, other := range m.keys {
		taken = taken || slices.Equal(other.Hash, k.Hash)
	}
	if taken {
		expect(rt, "create key", err, sandbox.AlreadyExists, nil, nil)
		return
	}
	expect(rt, "create key", err, "", nil, nil)
	m.keys[k.ID] = k
}

func (m *model) keyByHash(rt *rapid.T) {
	hash := newKey(genID.Draw(rt, "secret"), 0).Hash
	got, err := m.st.KeyByHash(m.t.Context(), hash)
	for _, k := range m.keys {
		if slices.Equal(k.Hash, hash) {
			m.expectKey(rt, err, got, k)
			return
		}
	}
	expect(rt, "key by hash", err, sandbox.NotFound, nil, nil)
}

// expectKey allows LastUsedAt the minute that the contract allows.
func (m *model) expectKey(rt *rapid.T, err error, got, want store.Key) {
	rt.Helper()
	if d := want.LastUsedAt.Sub(got.LastUsedAt); d >= -time.Minute && d <= time.Minute && got.LastUsedAt.IsZero() == want.LastUsedAt.IsZero() {
		got.LastUsedAt = want.LastUsedAt
	}
	expect(rt, "key", err, "", got, want)
}

func (m *model) listKeys(rt *rapid.T) {
	got, err := m.st.ListKeys(m.t.Context())
	expect(rt, "list keys", err, "", len(got), len(m.keys))
	for i, k := range got {
		m.expectKey(rt, nil, k, m.keys[k.ID])
		if i > 0 && (k.CreatedAt.Before(got[i-1].CreatedAt) || k.CreatedAt.Equal(got[i-1].CreatedAt) && k.ID < got[i-1].ID) {
			rt.Fatalf("list keys: %s is after %s", k.ID, got[i-1].ID)
		}
	}
}

func (m *model) revokeKey(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	err := m.st.RevokeKey(m.t.Context(), id)
	if _, ok := m.keys[id]; !ok {
		expect(rt, "revoke", err, sandbox.NotFound, nil, nil)
		return
	}
	expect(rt, "revoke", err, "", nil, nil)
	delete(m.keys, id)
}

func (m *model) touchKey(rt *rapid.T) {
	id := genID.Draw(rt, "id")
	when := at(10 * genMinute.Draw(rt, "tens of minutes"))
	err := m.st.TouchKey(m.t.Context(), id, when)
	k, ok := m.keys[id]
	if !ok {
		expect(rt, "touch", err, sandbox.NotFound, nil, nil)
		return
	}
	expect(rt, "touch", err, "", nil, nil)
	if when.After(k.LastUsedAt) {
		k.LastUsedAt = when
		m.keys[id] = k
	}
}
