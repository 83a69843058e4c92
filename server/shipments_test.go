package server

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/ship/shiptest"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// endpoint takes records over HTTPS, unless it is told to refuse them.
type endpoint struct {
	*httptest.Server
	mu      sync.Mutex
	held    []byte
	asked   int
	refuses int // with this status
	auth    string
}

func newEndpoint(t testing.TB) *endpoint {
	e := &endpoint{}
	e.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		e.mu.Lock()
		defer e.mu.Unlock()
		e.asked++
		if e.auth = r.Header.Get("Authorization"); e.refuses != 0 {
			w.WriteHeader(e.refuses)
			return
		}
		e.held = append(e.held, b...)
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *endpoint) refuse(status int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuses = status
}

func (e *endpoint) records(t *testing.T) (all []ship.Record, ids []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range shiptest.ParseLines(t, e.held) {
		all = append(all, r)
		if !slices.Contains(ids, r.ID) {
			ids = append(ids, r.ID)
		}
	}
	return all, ids
}

// allowed lets a server ship to the endpoint.
func (e *endpoint) allowed(t testing.TB) func(*Config) {
	to, err := inward.Parse("ship-allow", []string{"127.0.0.1", "localhost"})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(e.Certificate())
	return func(c *Config) { c.ShipTo, c.ShipCA = to, roots }
}

func (w *world) ship(m *covev1.CreateShipmentRequest) *covev1.Shipment {
	w.Helper()
	if m.Linger == nil {
		m.Linger = durationpb.New(time.Millisecond)
	}
	r, err := w.client.Shipments.Create(w.Context(), connect.NewRequest(m))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Shipment
}

func (w *world) shipment(name string) *covev1.Shipment {
	w.Helper()
	r, err := w.client.Shipments.Get(w.Context(), connect.NewRequest(&covev1.GetShipmentRequest{Shipment: name}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Shipment
}

// stepIDs is what the run's own list says.
func (w *world) stepIDs() (ids []string) {
	w.Helper()
	for _, s := range w.steps(&covev1.ListStepsRequest{PageSize: 1000}).Steps {
		ids = append(ids, "step:"+s.Id)
	}
	return ids
}

func missing(want, have []string) (out []string) {
	for _, id := range want {
		if !slices.Contains(have, id) {
			out = append(out, id)
		}
	}
	return out
}

// Steps, ends of episodes and verdicts arrive in a directory as lines and as Parquet,
// those from before the shipment too.
func TestShipmentToADirectory(t *testing.T) {
	dir := t.TempDir()
	w, sb := stepping(t, func(c *Config) { c.ShipDir = dir })
	w.step(sb.Id, "a", "echo hello")
	w.ship(&covev1.CreateShipmentRequest{Name: "lines", Run: "r", Sink: &covev1.ShipmentSink{Kind: "directory", Path: "out/lines"}})
	w.ship(&covev1.CreateShipmentRequest{Name: "table", Sink: &covev1.ShipmentSink{Kind: "directory", Format: "parquet", Path: "out/table"}})
	if _, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: sb.Id})); err != nil {
		t.Fatal(err)
	}
	w.step(sb.Id, "b", "false")
	w.kill(sb.Id)
	reward := 1.0
	run := w.getRun("r").Id
	g := sandbox.Grade{ID: "g1", Tenant: sandbox.DefaultTenant, Rollout: sandbox.Rollout{Run: run, Group: "g"}, Reset: 2, Spec: sandbox.GradeSpec{Sandbox: sb.Id}, State: sandbox.Graded,
		FinishedAt: time.Unix(1700000000, 5).UTC(), Verdict: sandbox.Verdict{Reward: &reward}, Unlogged: true}
	if err := w.store.CreateGrade(w.own(), g); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a mark that was not taken away is another record with the same id; one that was is none
		if err := w.server.logGrades(w.all()); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"step:" + run + "-1", "episode:" + sb.Id + ".1", "step:" + run + "-2", "episode:" + sb.Id + ".2", "grade:g1.1700000000000000005"}
	lines := func() (out []ship.Record) {
		files, _ := filepath.Glob(filepath.Join(dir, "out/lines/*.jsonl"))
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, shiptest.ParseLines(t, b)...)
		}
		return out
	}
	table := func() (out []ship.Record) {
		files, _ := filepath.Glob(filepath.Join(dir, "out/table/run="+run+"/*.parquet"))
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, shiptest.ParseParquet(t, b)...)
		}
		return out
	}
	for what, read := range map[string]func() []ship.Record{"lines": lines, "table": table} {
		w.until(what, func() bool { return len(read()) >= len(want) })
		var ids []string
		for _, r := range read() {
			ids = append(ids, r.ID)
		}
		if !slices.Equal(ids, want) {
			t.Errorf("%s: %q, want %q", what, ids, want)
		}
		w.until("nothing waits", func() bool { return w.shipment(what).Lag == 0 })
		if sh := w.shipment(what); sh.Records != int64(len(want)) || sh.State != "active" || sh.DeliveredAt == nil || len(sh.Positions) != 1 {
			t.Errorf("%v", sh)
		}
	}
	first := lines()
	if r := first[0]; r.Tenant != sandbox.DefaultTenant || r.Group != "g" || r.Episode != "e1" || r.Sandbox != sb.Id || string(r.Stdout.Head) != "hello\n" || *r.ExitCode != 0 || r.Cursor != "" {
		t.Errorf("%+v", r)
	}
	if r := first[1]; r.Cause != "reset" || r.Reset != 1 || r.StartedAt.IsZero() {
		t.Errorf("%+v", r)
	}
	if r := first[3]; r.Cause != "killed_by_user" || r.Reset != 2 {
		t.Errorf("%+v", r)
	}
	if r := first[4]; *r.Reward != 1 || r.Sandbox != sb.Id || r.State != "graded" {
		t.Errorf("%+v", r)
	}
}

// While a sink does not take records they wait; beyond the bound no step begins, and
// says why. When it takes them again nothing is lost and steps begin.
func TestShipmentHoldsStepsBack(t *testing.T) {
	e := newEndpoint(t)
	w, sb := stepping(t, e.allowed(t), func(c *Config) { c.ShipWait = 50 * time.Millisecond })
	e.refuse(http.StatusServiceUnavailable)
	w.ship(&covev1.CreateShipmentRequest{Name: "out", Run: "r", MaxLag: sandbox.MinLag, Sink: &covev1.ShipmentSink{Kind: "http", Url: e.URL + "/take"}})
	var err error
	n := 0
	for ; err == nil && n < 1000; n++ {
		s, serr := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id,
			Process: &covev1.ProcessSpec{ExecId: fmt.Sprint("x", n), Command: "echo " + strings.Repeat("y", 8000)}}))
		if err = serr; err == nil {
			_, _, err = rest(s)
		}
	}
	wantError(t, err, sandbox.ErrShipmentBehind, "out", "cove ship show")
	if got := len(w.stepIDs()); got != n-1 {
		t.Errorf("%d steps, %d were taken", got, n-1)
	}
	w.until("it fails", func() bool { return w.shipment("out").State == "failing" })
	if sh := w.shipment("out"); sh.Error.GetCode() != "no_capacity" || sh.Lag <= sandbox.MinLag || !strings.Contains(sh.ErrorMessage, "503") {
		t.Errorf("%v", sh)
	}
	// A step that is there already is not held back.
	w.step(sb.Id, "x0", "echo again")
	e.refuse(0)
	w.until("it is taken", func() bool { return w.shipment("out").Lag == 0 })
	w.step(sb.Id, "after", "true")
	w.until("all is there", func() bool { _, ids := e.records(t); return len(missing(w.stepIDs(), ids)) == 0 })
	if sh := w.shipment("out"); sh.State != "active" || sh.Error != nil {
		t.Errorf("%v", sh)
	}
}

// reload has another server's shipments take over where this one's were killed.
func (w *world) reload() {
	w.Helper()
	b := &w.server.ships
	b.stop()
	b.mu.Lock()
	b.mu.started = false
	b.mu.Unlock()
	b.init(w.server)
	if err := b.load(w.all()); err != nil {
		w.Fatal(err)
	}
	b.start()
}

// A server that dies at any moment of a delivery loses nothing, and what comes again
// comes with the same id; a batch of which the store knew is the same batch.
func TestShipmentSurvivesFaults(t *testing.T) {
	for _, fault := range []string{"PutPending", "PutPosition"} {
		t.Run(fault, func(t *testing.T) {
			e := newEndpoint(t)
			dir := t.TempDir()
			w, sb := stepping(t, e.allowed(t), func(c *Config) { c.ShipDir = dir })
			w.ship(&covev1.CreateShipmentRequest{Name: "out", Sink: &covev1.ShipmentSink{Kind: "http", Url: e.URL}})
			w.ship(&covev1.CreateShipmentRequest{Name: "files", Sink: &covev1.ShipmentSink{Kind: "directory", Format: "parquet", Path: "x"}})
			w.step(sb.Id, "a", "true")
			w.until("the first", func() bool { return w.shipment("out").Records == 1 && w.shipment("files").Records == 1 })
			w.store.failing(fault, errStore)
			w.step(sb.Id, "b", "true")
			w.until("it fails", func() bool { return w.shipment("out").State == "failing" && w.shipment("files").State == "failing" })
			w.reload()
			w.step(sb.Id, "c", "true")
			w.until("it fails again", func() bool { return w.shipment("out").State == "failing" && w.shipment("files").State == "failing" })
			w.store.failing(fault, nil)
			w.reload()
			w.until("all", func() bool {
				return w.shipment("out").Records >= 3 && w.shipment("files").Records >= 3 && w.shipment("files").Lag == 0
			})
			all, ids := e.records(t)
			if lost := missing(w.stepIDs(), ids); len(lost) > 0 || len(ids) != 3 {
				t.Errorf("lost %q of %q", lost, ids)
			}
			if fault == "PutPosition" && len(all) == len(ids) {
				t.Error("nothing came twice: the test proves nothing")
			}
			if fault == "PutPending" && len(all) != len(ids) {
				t.Errorf("%d records for %d", len(all), len(ids))
			}
			// Parquet has each once: a batch replaces itself.
			var rows int
			files, _ := filepath.Glob(filepath.Join(dir, "x/run=*/*.parquet"))
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				rows += len(shiptest.ParseParquet(t, b))
			}
			if rows != 3 {
				t.Errorf("%d rows in %q", rows, files)
			}
		})
	}
}

// Ends of episodes that a server which died had no time to put on record are made up
// for.
func TestEpisodesOfAServerThatDied(t *testing.T) {
	w, sb := stepping(t)
	w.step(sb.Id, "a", "true")
	// The store has the end and the log has not, as after a kill in between.
	if _, err := w.store.Store.UpdateSandbox(w.own(), sb.Id, func(sb *sandbox.Sandbox) error { sb.Episode = 3; return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Store.EndSandbox(w.own(), sb.Id, sandbox.End{Cause: sandbox.OOM, At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		w.restartSteps()
	}
	var got []string
	if err := w.server.ExportRun(withCaller(t.Context(), caller{key: store.Key{Role: sandbox.RootRole, Tenant: sandbox.DefaultTenant}}), ExportRequest{Run: "r"}, func(r *ship.Record, _ string) error {
		got = append(got, r.Kind+" "+r.Cause)
		return nil
	}, nil); err != nil {
		t.Fatal(err)
	}
	if want := []string{"step exited", "episode reset", "episode reset", "episode oom"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func (w *world) lines(path string) (out []ship.Record) {
	w.Helper()
	resp, body := w.http("GET", path, nil)
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/x-ndjson" {
		w.Fatal(resp.Status, resp.Header, body)
	}
	for line := range strings.Lines(body) {
		var r ship.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			w.Fatal(err, line)
		}
		out = append(out, r)
	}
	return out
}

// A consumer that pulls goes on where it acknowledged, over all runs, and a run is not
// deleted before.
func TestShipmentPulled(t *testing.T) {
	w, sb := stepping(t)
	w.run(&covev1.CreateRunRequest{Name: "r2"})
	other := w.create(in("r2", "g"))
	w.ship(&covev1.CreateShipmentRequest{Name: "mine", Sink: &covev1.ShipmentSink{Kind: "pull"}})
	w.step(sb.Id, "a", "true")
	w.step(other.Id, "b", "true")
	w.step(sb.Id, "c", "true")
	path := "/v1/shipments/mine/records"
	got := w.lines(path)
	if len(got) != 3 || got[0].Cursor == "" {
		t.Fatalf("%+v", got)
	}
	ack := func(cursor string) (*covev1.Shipment, error) {
		r, err := w.client.Shipments.Ack(t.Context(), connect.NewRequest(&covev1.AckShipmentRequest{Shipment: "mine", Cursor: cursor}))
		if err != nil {
			return nil, err
		}
		return r.Msg.GetShipment(), nil
	}
	var firstOfR ship.Record
	for _, r := range got {
		if r.Run == w.getRun("r").Id && firstOfR.ID == "" {
			firstOfR = r
		}
	}
	for _, bad := range []string{"", "x", "nosuch.0", firstOfR.Run + ".3", firstOfR.Run + ".99999999", "../x.0"} {
		_, err := ack(bad)
		wantError(t, err, sandbox.ErrInvalid)
	}
	for range 2 { // the second changes nothing
		if sh, err := ack(firstOfR.Cursor); err != nil || sh.Records != 1 {
			t.Fatal(sh, err)
		}
	}
	w.reload()
	again := w.lines(path)
	if len(again) != 2 || slices.ContainsFunc(again, func(r ship.Record) bool { return r.ID == firstOfR.ID }) {
		t.Errorf("%+v", again)
	}
	// A consumer that kept its cursor is not bound to what it acknowledged.
	if all := w.lines(path + "?cursor=" + firstOfR.Run + ".0"); len(all) != 3 {
		t.Errorf("%d records", len(all))
	}
	if _, err := w.client.Runs.Reap(t.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	remove := func() error {
		_, err := w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"}))
		return err
	}
	wantError(t, remove(), sandbox.ErrPrecondition, "mine", "cove ship show")
	for _, r := range w.lines(path) {
		if _, err := ack(r.Cursor); err != nil {
			t.Fatal(err)
		}
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	if _, err := w.client.Shipments.Delete(t.Context(), connect.NewRequest(&covev1.DeleteShipmentRequest{Shipment: "mine"})); err != nil {
		t.Fatal(err)
	}
	if resp, _ := w.http("GET", path, nil); resp.StatusCode != 404 {
		t.Error(resp.Status)
	}
}

// A follower sees records as they come.
func TestShipmentFollowed(t *testing.T) {
	w, sb := stepping(t)
	w.ship(&covev1.CreateShipmentRequest{Name: "mine", Run: "r", Sink: &covev1.ShipmentSink{Kind: "pull"}})
	body, err := w.client.ReadShipment(t.Context(), "mine", "", true)
	if err == nil {
		defer body.Close()
		w.step(sb.Id, "a", "echo one")
		var r ship.Record
		err = json.NewDecoder(body).Decode(&r)
		if err == nil && (r.Kind != "step" || r.Cursor == "") {
			t.Errorf("%+v", r)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Who may make a shipment of what, to where.
func TestShipmentRights(t *testing.T) {
	e := newEndpoint(t)
	dir := t.TempDir()
	w, _ := stepping(t, e.allowed(t), func(c *Config) { c.ShipDir = filepath.Join(dir, "ships") })
	s := &shared{world: w, keys: map[string]string{}, tenants: map[string]string{}}
	s.tenant("red")
	boss := s.dial(s.keys["red"])
	hand := s.dial(s.key(boss, &covev1.CreateKeyRequest{Name: "dev", Role: "developer"}))
	if _, err := boss.Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "mine"})); err != nil {
		t.Fatal(err)
	}
	if _, err := boss.Secrets.Create(t.Context(), connect.NewRequest(&covev1.CreateSecretRequest{Name: "token", Value: "hunter2hunter2", Hosts: []string{"records.example.com"}})); err != nil {
		t.Fatal(err)
	}
	sink := func(kind, url, path string) *covev1.ShipmentSink {
		return &covev1.ShipmentSink{Kind: kind, Url: url, Path: path}
	}
	for i, c := range []struct {
		by   *wire.Client
		run  string
		sink *covev1.ShipmentSink
		want *sandbox.Error
	}{
		{hand, "mine", sink("pull", "", ""), nil},
		{hand, "", sink("pull", "", ""), sandbox.ErrDenied},
		{hand, "mine", sink("http", e.URL, ""), sandbox.ErrDenied},
		{boss, "", sink("pull", "", ""), nil},
		{boss, "mine", sink("http", e.URL, ""), nil},
		{boss, "mine", sink("directory", "", "x"), sandbox.ErrDenied},
		{boss, "mine", sink("http", "http://records.example.com/x", ""), sandbox.ErrInvalid},
		{boss, "mine", sink("http", "file:///etc/passwd", ""), sandbox.ErrInvalid},
		{boss, "mine", sink("http", "https://user:pass@records.example.com", ""), sandbox.ErrInvalid},
		{boss, "mine", &covev1.ShipmentSink{Kind: "http", Url: "https://other.example.com", Secret: "token"}, sandbox.ErrDenied},
		{boss, "mine", &covev1.ShipmentSink{Kind: "http", Url: "https://records.example.com", Secret: "nosuch"}, sandbox.ErrNotFound},
		{boss, "mine", &covev1.ShipmentSink{Kind: "http", Url: "https://records.example.com", Secret: "token"}, nil},
		{boss, "mine", &covev1.ShipmentSink{Kind: "s3", Url: "https://records.example.com", Path: "bucket/x", AccessKey: "id"}, sandbox.ErrInvalid},
		{boss, "mine", &covev1.ShipmentSink{Kind: "s3", Url: "https://records.example.com", Path: "Bucket/../x", AccessKey: "id", Secret: "token"}, sandbox.ErrInvalid},
		{boss, "mine", &covev1.ShipmentSink{Kind: "pull", Format: "parquet"}, sandbox.ErrInvalid},
		{w.client, "r", sink("directory", "", "../../etc"), sandbox.ErrInvalid},
		{w.client, "r", sink("directory", "", "/etc"), sandbox.ErrInvalid},
		{w.client, "r", sink("directory", "", ""), sandbox.ErrInvalid},
		{w.client, "r", sink("directory", "", "fine"), nil},
	} {
		r, err := c.by.Shipments.Create(t.Context(), connect.NewRequest(&covev1.CreateShipmentRequest{Name: fmt.Sprint("s", i), Run: c.run, Sink: c.sink}))
		switch {
		case c.want == nil && err != nil:
			t.Errorf("%d: %v", i, err)
		case c.want != nil:
			wantError(t, err, c.want)
		case strings.Contains(r.Msg.String(), "hunter2"):
			t.Errorf("%d tells the secret: %v", i, r.Msg)
		}
	}
	list, err := boss.Shipments.List(t.Context(), connect.NewRequest(&covev1.ListShipmentsRequest{}))
	if err != nil || len(list.Msg.Shipments) != 4 {
		t.Error(list, err)
	}
	// The same key gives the same one, a name twice is refused.
	again := &covev1.CreateShipmentRequest{Name: "once", Run: "mine", Sink: sink("pull", "", ""), IdempotencyKey: "k1"}
	var ids []string
	for range 2 {
		r, err := hand.Shipments.Create(t.Context(), connect.NewRequest(again))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.Msg.Shipment.Id)
	}
	again.IdempotencyKey = "k2"
	_, err = hand.Shipments.Create(t.Context(), connect.NewRequest(again))
	if wantError(t, err, sandbox.ErrAlreadyExists); ids[0] != ids[1] {
		t.Error(ids)
	}
	// A developer does not stop what an admin set up.
	_, err = hand.Shipments.Delete(t.Context(), connect.NewRequest(&covev1.DeleteShipmentRequest{Shipment: "s4"}))
	wantError(t, err, sandbox.ErrDenied)
	_, err = hand.Shipments.Pause(t.Context(), connect.NewRequest(&covev1.PauseShipmentRequest{Shipment: "s4"}))
	wantError(t, err, sandbox.ErrDenied)
}

// A paused shipment delivers nothing, a resumed one all.
func TestShipmentPaused(t *testing.T) {
	e := newEndpoint(t)
	w, sb := stepping(t, e.allowed(t))
	w.ship(&covev1.CreateShipmentRequest{Name: "out", Run: "r", Linger: durationpb.New(15 * time.Minute), Sink: &covev1.ShipmentSink{Kind: "http", Url: e.URL}})
	if r, err := w.client.Shipments.Pause(t.Context(), connect.NewRequest(&covev1.PauseShipmentRequest{Shipment: "out"})); err != nil || r.Msg.Shipment.State != "paused" {
		t.Fatal(r, err)
	}
	w.step(sb.Id, "a", "true")
	w.reload() // it stays so
	if sh := w.shipment("out"); sh.State != "paused" || sh.Lag == 0 || sh.Records != 0 {
		t.Errorf("%v", sh)
	}
	_, err := w.client.Runs.Reap(t.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: "r"}))
	if err == nil {
		_, err = w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"}))
	}
	wantError(t, err, sandbox.ErrPrecondition, "out")
	if e.asked != 0 {
		t.Error("it was delivered")
	}
	if _, err := w.client.Shipments.Resume(t.Context(), connect.NewRequest(&covev1.ResumeShipmentRequest{Shipment: "out"})); err != nil {
		t.Fatal(err)
	}
	// Deleting the run has what waits delivered first, whatever the linger is.
	if _, err := w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if _, ids := e.records(t); len(ids) != 2 {
		t.Errorf("%q", ids)
	}
}

// A run as a file: lines from a cursor on, Parquet, and ATIF.
func TestExportRun(t *testing.T) {
	w, sb := stepping(t)
	w.step(sb.Id, "a", "echo hello; echo oops >&2; exit 3")
	if _, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: sb.Id})); err != nil {
		t.Fatal(err)
	}
	w.step(sb.Id, "b", "true")
	all := w.lines("/v1/runs/r/export")
	if len(all) != 3 || all[0].Kind != "step" || *all[0].ExitCode != 3 {
		t.Fatalf("%+v", all)
	}
	if rest := w.lines("/v1/runs/r/export?format=jsonl&cursor=" + all[1].Cursor); len(rest) != 1 || rest[0].ID != all[2].ID {
		t.Errorf("%+v", rest)
	}
	resp, body := w.http("GET", "/v1/runs/r/export?format=parquet", nil)
	if rows := shiptest.ParseParquet(t, []byte(body)); len(rows) != 3 || resp.Header.Get("Content-Type") != "application/vnd.apache.parquet" {
		t.Errorf("%d rows, %v", len(rows), resp.Header)
	}
	_, body = w.http("GET", "/v1/runs/r/export?format=atif", nil)
	var trajectories []ship.Trajectory
	for line := range bytes.Lines([]byte(body)) {
		var tr ship.Trajectory
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&tr); err != nil {
			t.Fatal(err)
		}
		trajectories = append(trajectories, tr)
	}
	if len(trajectories) != 2 || trajectories[0].TrajectoryID != sb.Id+".1" || len(trajectories[0].Steps) != 1 || trajectories[0].Steps[0].Observation.Results[0].Content != "hello\noops\n" {
		t.Errorf("%s", body)
	}
	for path, status := range map[string]int{"/v1/runs/nope/export": 404, "/v1/runs/nope/export?format=parquet": 404, "/v1/runs/r/export?format=csv": 400, "/v1/runs/r/export?cursor=x": 400} {
		if resp, body := w.http("GET", path, nil); resp.StatusCode != status {
			t.Errorf("%s: %s %s", path, resp.Status, body)
		}
	}
}

// BenchmarkExport sends 100,000 steps as Parquet, from the log on.
func BenchmarkExport(b *testing.B) {
	w, _ := stepping(b)
	run := w.getRun("r").Id
	of, err := w.server.stepsOf(sandbox.DefaultTenant, run)
	if err != nil {
		b.Fatal(err)
	}
	out := []byte(strings.Repeat("a line of what a command has printed\n", 15)[:541])
	for i := range 100_000 {
		st := sandbox.Step{ID: fmt.Sprintf("%s-%d", run, i), Seq: int64(i), Rollout: sandbox.Rollout{Run: run, Group: fmt.Sprint("g", i/160)}, Sandbox: fmt.Sprintf("sb%d", i/20), Reset: 1, ExecID: fmt.Sprint("x", i),
			Command: fmt.Sprintf("cd /work/repo && python -m pytest -x tests/test_module_%04d.py 2>&1 | tail", i%1000), StartedAt: time.Now(), EndedAt: time.Now(), End: &sandbox.End{Cause: sandbox.Exited},
			Stdout: sandbox.StepOutput{Head: out}}
		record, err := encodeRecord(stepEnded, int64(i), stepKey{st.Sandbox, st.ExecID}, st)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := of.log.Append(record); err != nil {
			b.Fatal(err)
		}
	}
	for _, format := range []string{"parquet", "jsonl", "atif"} {
		b.Run(format, func(b *testing.B) {
			for b.Loop() {
				body, err := w.client.ExportRun(b.Context(), "r", format, "", false)
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.Copy(io.Discard, body)
				body.Close()
				if err != nil || n < 1<<20 {
					b.Fatal(n, err)
				}
				b.ReportMetric(float64(n)/(1<<20), "MiB")
			}
		})
	}
}

// A verdict that no record could hold is there without its tests: a log that does not
// take one record takes no step.
func TestLoggedGradeFits(t *testing.T) {
	reward := 1.0
	g := sandbox.Grade{Verdict: sandbox.Verdict{Reward: &reward, Log: strings.Repeat("\x00", 64<<10)}}
	for range 20_000 {
		g.Verdict.Tests = append(g.Verdict.Tests, sandbox.TestResult{ID: strings.Repeat("\x01", 300), Message: strings.Repeat("\x02", 1000)})
	}
	record, err := encodeRecord(gradeOver, 0, stepKey{sandbox: "x"}, loggedGrade(g))
	if err != nil || len(record) > 5<<20 {
		t.Fatal(len(record), err)
	}
	if r, ok, err := shippedRecord("t", record); err != nil || !ok || *r.Reward != 1 {
		t.Error(r, ok, err)
	}
	g.Verdict.Tests = g.Verdict.Tests[:3]
	if got := loggedGrade(g).Verdict; len(got.Tests) != 3 || len(got.Tests[0].Message) > 300 || len(g.Verdict.Tests[0].Message) != 1000 {
		t.Errorf("%d tests of %d bytes", len(got.Tests), len(got.Tests[0].Message))
	}
}
