package storetest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// newShipment is a record with every field set.
func newShipment(id, name string, minutes int) sandbox.Shipment {
	return sandbox.Shipment{ID: id, Tenant: sandbox.DefaultTenant, Name: name, Run: "run1", MaxLag: 1 << 30, Linger: time.Second, Paused: true, Key: "k" + id, CreatedAt: at(minutes).UTC(),
		Sink: sandbox.ShipmentSink{Kind: sandbox.S3Sink, Format: sandbox.Parquet, URL: "https://x", Path: "b/p", Secret: "s", AccessKey: "a", Region: "r"}}
}

var shipmentCases = []scenario{
	{"a shipment is found by id and name, changed and deleted", func(t *testing.T, st store.Store) {
		old, young := newShipment("aa", "lake", 1), newShipment("bb", "aa", 5) // named like the other's id
		for _, s := range []sandbox.Shipment{old, young} {
			if err := st.CreateShipment(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "the name again", st.CreateShipment(t.Context(), newShipment("cc", "lake", 9)), sandbox.ErrAlreadyExists)
		fails(t, "no name", st.CreateShipment(t.Context(), newShipment("cc", "", 9)), sandbox.ErrInvalid)
		fails(t, "no id", st.CreateShipment(t.Context(), newShipment("../c", "x", 9)), sandbox.ErrInvalid)
		for ref, want := range map[string]sandbox.Shipment{"aa": old, "lake": old, "bb": young} {
			if got, err := st.GetShipment(t.Context(), ref); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v, want %+v (%v)", ref, got, want, err)
			}
		}
		if list, err := st.ListShipments(t.Context()); err != nil || !reflect.DeepEqual(list, []sandbox.Shipment{young, old}) {
			t.Errorf("%+v %v", list, err)
		}
		got, err := st.UpdateShipment(t.Context(), "aa", func(s *sandbox.Shipment) error { s.Paused = false; return nil })
		if err != nil || got.Paused {
			t.Error(got, err)
		}
		_, err = st.UpdateShipment(t.Context(), "aa", func(s *sandbox.Shipment) error { s.Run = "other"; return nil })
		fails(t, "another run", err, sandbox.ErrInvalid)
		_, err = st.UpdateShipment(t.Context(), "zz", func(*sandbox.Shipment) error { return nil })
		fails(t, "an update of none", err, sandbox.ErrNotFound)
		for range 2 {
			if err := st.DeleteShipment(t.Context(), "aa"); err != nil {
				t.Fatal(err)
			}
		}
		_, err = st.GetShipment(t.Context(), "lake")
		fails(t, "a deleted one", err, sandbox.ErrNotFound)
	}},
	{"positions go with their shipment and their run", func(t *testing.T, st store.Store) {
		for _, id := range []string{"run1", "run2"} {
			if err := st.CreateRun(t.Context(), newRun(id, "r"+id, 1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := st.CreateShipment(t.Context(), newShipment("aa", "lake", 1)); err != nil {
			t.Fatal(err)
		}
		put := func(p sandbox.ShipmentPosition) error { return st.PutPosition(t.Context(), "aa", p) }
		one, two := sandbox.ShipmentPosition{Run: "run1", At: 5, Pending: 9, Records: 2}, sandbox.ShipmentPosition{Run: "run2", At: 1}
		for _, p := range []sandbox.ShipmentPosition{{Run: "run1", At: 1}, two, one} {
			if err := put(p); err != nil {
				t.Fatal(err)
			}
		}
		same := func(want ...sandbox.ShipmentPosition) {
			t.Helper()
			if got, err := st.ListPositions(t.Context(), "aa"); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%+v, want %+v (%v)", got, want, err)
			}
		}
		same(one, two)
		fails(t, "of no run", put(sandbox.ShipmentPosition{Run: "nosuch", At: 1}), sandbox.ErrNotFound)
		fails(t, "of no shipment", st.PutPosition(t.Context(), "zz", one), sandbox.ErrNotFound)
		if err := st.DeleteRun(t.Context(), "run1"); err != nil {
			t.Fatal(err)
		}
		same(two)
		if err := st.DeleteShipment(t.Context(), "aa"); err != nil {
			t.Fatal(err)
		}
		same()
	}},
	{"verdicts that are not in a log are found", func(t *testing.T, st store.Store) {
		for _, id := range []string{"g1", "g2"} {
			g := newGrade(id, "box", 1)
			g.Rollout, g.Reset = sandbox.Rollout{Run: "run1", Group: "g"}, 3
			if err := st.CreateGrade(t.Context(), g); err != nil {
				t.Fatal(err)
			}
		}
		mark := func(unlogged bool) {
			if _, err := st.UpdateGrade(t.Context(), "g2", func(g *sandbox.Grade) error { g.State, g.Unlogged = sandbox.Graded, unlogged; return nil }); err != nil {
				t.Fatal(err)
			}
		}
		mark(true)
		got, _, err := st.ListGrades(t.Context(), store.GradeFilter{Unlogged: true})
		if err != nil || len(got) != 1 || got[0].ID != "g2" || got[0].Run != "run1" || got[0].Reset != 3 {
			t.Errorf("%+v %v", got, err)
		}
		mark(false)
		if got, _, err := st.ListGrades(t.Context(), store.GradeFilter{Unlogged: true}); err != nil || len(got) != 0 {
			t.Errorf("%+v %v", got, err)
		}
	}},
}

// foreignShipments: a tenant neither sees, changes nor deletes another's, and has the
// same names.
func foreignShipments(t *testing.T, st store.Store, red, blue context.Context) {
	s := newShipment("redship", "same", 0)
	s.Tenant = "blue" // what a record says is not what it is
	if err := st.CreateShipment(red, s); err != nil {
		t.Fatal(err)
	}
	if err := st.CreateRun(red, newRun("redrun2", "same2", 0)); err != nil {
		t.Fatal(err)
	}
	if err := st.CreateRun(blue, newRun("bluerun2", "same2", 0)); err != nil {
		t.Fatal(err)
	}
	_, err := st.GetShipment(blue, "redship")
	fails(t, "another's shipment", err, sandbox.ErrNotFound)
	_, err = st.UpdateShipment(blue, "redship", func(*sandbox.Shipment) error { return nil })
	fails(t, "a change of it", err, sandbox.ErrNotFound)
	fails(t, "a position of it", st.PutPosition(blue, "redship", sandbox.ShipmentPosition{Run: "redrun2", At: 9}), sandbox.ErrNotFound)
	fails(t, "a position in another's run", st.PutPosition(red, "redship", sandbox.ShipmentPosition{Run: "bluerun2", At: 9}), sandbox.ErrNotFound)
	if err := st.PutPosition(red, "redship", sandbox.ShipmentPosition{Run: "redrun2", At: 1}); err != nil {
		t.Fatal(err)
	}
	if list, err := st.ListPositions(blue, "redship"); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
	if err := st.DeleteShipment(blue, "redship"); err != nil {
		t.Fatal(err)
	}
	if list, err := st.ListShipments(blue); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
	if _, err := st.GetShipment(red, "same"); err != nil {
		t.Error(err)
	}
	if err := st.CreateShipment(blue, newShipment("blueship", "same", 1)); err != nil {
		t.Fatal(err)
	}
}
