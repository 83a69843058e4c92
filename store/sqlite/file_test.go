package sqlite

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newSandbox(id string) sandbox.Sandbox {
	return sandbox.Sandbox{ID: id, State: sandbox.Running, Episode: 1, ImageID: "sha256:1", CreatedAt: time.Unix(1700000000, 0),
		Spec: sandbox.Spec{Image: "base", Labels: map[string]string{"run": "r1"}}}
}

func create(t testing.TB, s *Store, sb sandbox.Sandbox) {
	t.Helper()
	if _, _, err := s.CreateSandbox(everywhere(), sb, store.Idempotency{}); err != nil {
		t.Fatal(err)
	}
}

// class checks an error's class and that it says a way out.
func class(t *testing.T, what string, err error, want *sandbox.Error, hint bool) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || !errors.Is(err, want) || hint && e.Hint == "" {
		t.Errorf("%s: %v, want %s with a hint", what, err, want.Class)
	}
}

func TestFilesAreTheOwnersOnly(t *testing.T) {
	s := open(t)
	create(t, s, newSandbox("a"))
	var path string
	if err := s.read.QueryRow("SELECT file FROM pragma_database_list").Scan(&path); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-wal", "-shm"} {
		info, err := os.Stat(path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", filepath.Base(path+suffix), info.Mode().Perm())
		}
	}
}

func TestOpenTakesRightsAwayFromOthers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := Open(everywhere(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestSettingsHoldOnEveryConnection(t *testing.T) {
	s := open(t)
	check := func(name string, row func(query string, dest any) error) {
		for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "5000"} {
			var got string
			if err := row("PRAGMA "+pragma, &got); err != nil || got != want {
				t.Errorf("%s: %s is %s, %v, want %s", name, pragma, got, err, want)
			}
		}
	}
	for i := range 3 {
		conn, err := s.read.Conn(everywhere())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		check(fmt.Sprint("reader ", i), func(q string, dest any) error { return conn.QueryRowContext(everywhere(), q).Scan(dest) })
		if _, err := conn.ExecContext(everywhere(), "DELETE FROM sandboxes"); err == nil {
			t.Error("a reader may write")
		}
	}
	err := s.write(everywhere(), "test", func(tx *tx) error {
		check("writer", func(q string, dest any) error { return tx.row(q, nil, dest) })
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestOddPaths(t *testing.T) {
	for _, name := range []string{"a b", "100%", "what?x=1", "a#b", "żółw", "%20", "a&_pragma=x"} {
		dir := t.TempDir()
		s, err := Open(everywhere(), filepath.Join(dir, name))
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		create(t, s, newSandbox("a"))
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 || entries[0].Name() != name {
			t.Errorf("%q: the directory holds %v, %v", name, entries, err)
		}
	}
}

func TestOpenSaysWhatIsWrongWithThePath(t *testing.T) {
	dir := t.TempDir()
	_, err := Open(everywhere(), dir)
	class(t, "a directory", err, sandbox.ErrPrecondition, true)
	if _, err = Open(everywhere(), filepath.Join(dir, "nosuch", "cove.db")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing directory: %v", err)
	}
	class(t, "a missing directory", err, sandbox.ErrInternal, false)
}

func TestRecordSurvivesReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	for i := range 3 {
		s, err := Open(everywhere(), path)
		if err != nil {
			t.Fatal(err)
		}
		create(t, s, newSandbox(fmt.Sprint("a", i)))
		sbs, _, err := s.ListSandboxes(everywhere(), store.Filter{})
		if len(sbs) != i+1 || err != nil {
			t.Errorf("%d sandboxes after %d reopenings, %v", len(sbs), i, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNewerSchemaIsRefusedAndLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	s, err := Open(everywhere(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.write(everywhere(), "test", func(tx *tx) error {
		_, err := tx.exec("INSERT INTO schema_version (version) VALUES (999)")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(everywhere(), path)
	class(t, "open", err, sandbox.ErrPrecondition, true)
	if err == nil || !strings.Contains(err.Error(), "999") {
		t.Errorf("the versions are not told: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file was changed (%v)", err)
	}
}

func TestDamagedFileIsCorrupt(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "cove.db")
	s, err := Open(everywhere(), whole)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		create(t, s, newSandbox(fmt.Sprint("a", i)))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"text":           []byte(strings.Repeat("this is no database\n", 500)),
		"a torn header":  append(bytes.Repeat([]byte{0xff}, 100), good[100:]...),
		"a torn schema":  append(append(bytes.Clone(good[:100]), bytes.Repeat([]byte{0xff}, 3996)...), good[4096:]...),
		"torn content":   append(bytes.Clone(good[:4096]), bytes.Repeat([]byte{0xff}, len(good)-4096)...),
		"half of it":     good[:len(good)/2/4096*4096],
		"random flips":   flip(good),
		"a short header": good[:50],
	} {
		path := filepath.Join(t.TempDir(), "cove.db")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(everywhere(), path)
		if err == nil {
			// It opens; then whatever reads the damage says so.
			if _, _, err = s.ListSandboxes(everywhere(), store.Filter{PageSize: 1000}); err == nil {
				_, err = s.EndSandbox(everywhere(), "a77", sandbox.End{Cause: sandbox.TTL})
			}
			s.Close()
		}
		class(t, name, err, sandbox.ErrCorrupt, true)
	}
}

// flip spoils one byte in each kilobyte after the first page.
func flip(b []byte) []byte {
	b = bytes.Clone(b)
	for i := 4096; i < len(b); i += 1024 {
		b[i] ^= 0xff
	}
	return b
}

func TestDamagedRecordIsCorrupt(t *testing.T) {
	s := open(t)
	create(t, s, newSandbox("a"))
	if err := s.PutImage(everywhere(), sandbox.Image{ID: "sha256:1"}, "base"); err != nil {
		t.Fatal(err)
	}
	if err := s.write(everywhere(), "test", func(tx *tx) error {
		_, err := tx.exec("UPDATE sandboxes SET record = '{'")
		if err == nil {
			_, err = tx.exec("UPDATE images SET record = '[]'")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	_, err := s.GetSandbox(everywhere(), "a")
	class(t, "get", err, sandbox.ErrCorrupt, true)
	_, _, err = s.ListSandboxes(everywhere(), store.Filter{})
	class(t, "list", err, sandbox.ErrCorrupt, true)
	_, err = s.EndSandbox(everywhere(), "a", sandbox.End{Cause: sandbox.TTL})
	class(t, "end", err, sandbox.ErrCorrupt, true)
	_, err = s.GetImage(everywhere(), "base")
	class(t, "image", err, sandbox.ErrCorrupt, true)
	_, err = s.RemoveImageName(everywhere(), "base")
	class(t, "remove name", err, sandbox.ErrCorrupt, true)
	var names int
	if err := s.read.QueryRow("SELECT count(*) FROM image_names").Scan(&names); err != nil || names != 1 {
		t.Errorf("a refused removal left %d names, %v", names, err)
	}
}

func TestFullDiskChangesNothingAndGoesAway(t *testing.T) {
	s := open(t)
	create(t, s, newSandbox("a"))
	limit := func(pages int) {
		t.Helper()
		if err := s.write(everywhere(), "test", func(tx *tx) error {
			var got int
			return tx.row(fmt.Sprintf("PRAGMA max_page_count = %d", pages), nil, &got)
		}); err != nil {
			t.Fatal(err)
		}
	}
	limit(1) // SQLite makes it the present size
	big := newSandbox("big")
	big.Spec.Env = map[string]string{"BIG": strings.Repeat("x", 1<<20)}
	_, _, err := s.CreateSandbox(everywhere(), big, store.Idempotency{Key: "k", Hash: "h"})
	class(t, "create", err, sandbox.ErrDiskFull, true)
	_, err = s.GetSandbox(everywhere(), "big")
	class(t, "get", err, sandbox.ErrNotFound, false)

	// The small ones beside a big one must not fail with it.
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			sb := big
			sb.ID = fmt.Sprint("big", i)
			_, _, err := s.CreateSandbox(everywhere(), sb, store.Idempotency{})
			class(t, "a big one", err, sandbox.ErrDiskFull, true)
		})
		wg.Go(func() {
			if _, err := s.UpdateSandbox(everywhere(), "a", func(sb *sandbox.Sandbox) error { sb.Episode++; return nil }); err != nil {
				t.Errorf("a small one: %v", err)
			}
		})
	}
	wg.Wait()

	limit(1 << 20)
	create(t, s, big)
	if sb, err := s.GetSandbox(everywhere(), "a"); err != nil || sb.Episode != 17 {
		t.Errorf("episode %d, %v", sb.Episode, err)
	}
}

func TestBatchBrokenByOneFailsOnlyThatOne(t *testing.T) {
	s := open(t)
	// Stop the writer inside a change, so that the ones below share a batch.
	inside, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s.write(everywhere(), "test", func(*tx) error { close(inside); <-release; return nil })
	})
	<-inside
	batch := []*change{}
	for i := range 5 {
		c := &change{result: make(chan error, 1)}
		c.do = func(tx *tx) error {
			if _, err := tx.exec(`INSERT INTO images (id, created_at, record) VALUES (?, 0, '{}')`, fmt.Sprint(i)); err != nil {
				return err
			}
			if i == 2 {
				_, err := tx.exec(`INSERT INTO image_names (name, image_id) VALUES ('x', 'nosuch')`) // a foreign key to nothing
				return err
			}
			return nil
		}
		batch = append(batch, c)
	}
	close(release)
	wg.Wait()
	if err := s.writer.close(); err != nil { // its goroutine has ended: the connection is ours
		t.Fatal(err)
	}
	w, err := startWriter(everywhere(), s.writeDB)
	if err != nil {
		t.Fatal(err)
	}
	s.writer = w
	done := make(chan struct{})
	go func() { defer close(done); w.commit(batch) }()
	for i, c := range batch {
		if err := <-c.result; (err != nil) != (i == 2) {
			t.Errorf("change %d: %v", i, err)
		}
	}
	<-done
	var n int
	if err := s.read.QueryRow("SELECT count(*) FROM images").Scan(&n); err != nil || n != 4 {
		t.Errorf("%d of 4 images, %v", n, err)
	}
}

func TestLockHeldByAnotherProcessIsUnavailable(t *testing.T) {
	s := open(t)
	var path string
	if err := s.read.QueryRow("SELECT file FROM pragma_database_list").Scan(&path); err != nil {
		t.Fatal(err)
	}
	if err := s.write(everywhere(), "test", func(tx *tx) error {
		_, err := tx.w.conn.ExecContext(everywhere(), "PRAGMA busy_timeout = 1") // not the 5 s
		return err
	}); err != nil {
		t.Fatal(err)
	}
	other, err := openDB(path, "_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	tx, err := other.Begin()
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = s.CreateSandbox(everywhere(), newSandbox("a"), store.Idempotency{})
	class(t, "create", err, sandbox.ErrUnavailable, true)
	if _, _, err := s.ListSandboxes(everywhere(), store.Filter{}); err != nil {
		t.Errorf("readers do not wait for it: %v", err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	create(t, s, newSandbox("a"))
}

func TestQueuedWriteIsWithdrawnWithItsCaller(t *testing.T) {
	s := open(t)
	inside, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.write(everywhere(), "test", func(*tx) error { close(inside); <-release; return nil }); err != nil {
			t.Error(err)
		}
	})
	<-inside
	ctx, cancel := context.WithCancel(everywhere())
	result := make(chan error)
	go func() {
		_, _, err := s.CreateSandbox(ctx, newSandbox("a"), store.Idempotency{})
		result <- err
	}()
	cancel()
	class(t, "the queued create", <-result, sandbox.ErrCanceled, false) // answered while the writer is busy
	close(release)
	wg.Wait()
	_, err := s.GetSandbox(everywhere(), "a")
	class(t, "what it would have made", err, sandbox.ErrNotFound, false)
}

func TestUpdateThatWasOvertakenRunsAgain(t *testing.T) {
	s := open(t)
	create(t, s, newSandbox("a"))
	calls := 0
	got, err := s.UpdateSandbox(everywhere(), "a", func(sb *sandbox.Sandbox) error {
		if calls++; calls == 1 {
			if _, err := s.UpdateSandbox(everywhere(), "a", func(sb *sandbox.Sandbox) error { sb.Episode += 10; return nil }); err != nil {
				return err
			}
		}
		sb.Episode++
		return nil
	})
	if err != nil || calls != 2 || got.Episode != 12 {
		t.Errorf("episode %d after %d calls, %v", got.Episode, calls, err)
	}
	calls = 0
	_, err = s.UpdateSandbox(everywhere(), "a", func(sb *sandbox.Sandbox) error {
		if calls++; calls == 1 {
			if _, err := s.EndSandbox(everywhere(), "a", sandbox.End{Cause: sandbox.TTL}); err != nil {
				return err
			}
		}
		sb.Episode++
		return nil
	})
	class(t, "an update overtaken by the end", err, sandbox.ErrEnded, false)
}

// Every request touches its key: within a minute of the last touch that must
// not wait for the disk.
func TestTouchWithinAMinuteWritesNothing(t *testing.T) {
	s := open(t)
	used := time.Unix(1700000000, 0)
	if err := s.CreateKey(everywhere(), store.Key{ID: "k", Hash: []byte{1}, LastUsedAt: used, Role: sandbox.DeveloperRole}); err != nil {
		t.Fatal(err)
	}
	inside, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s.write(everywhere(), "test", func(*tx) error { close(inside); <-release; return nil })
	})
	<-inside // the writer is busy: whoever needs it waits
	if err := s.TouchKey(everywhere(), "k", used.Add(59*time.Second)); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(everywhere())
	late := make(chan error)
	go func() { late <- s.TouchKey(ctx, "k", used.Add(61*time.Second)) }()
	cancel()
	class(t, "a touch after a minute, withdrawn", <-late, sandbox.ErrCanceled, false)
	close(release)
	wg.Wait()
}

func TestClosedStoreIsUnavailable(t *testing.T) {
	defer goleak.VerifyNone(t)
	s, err := Open(everywhere(), filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	create(t, s, newSandbox("a"))
	if _, err := s.GetSandbox(everywhere(), "a"); err != nil {
		t.Fatal(err)
	}
	// Writers that are under way either succeed or are told.
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := 0; ; j++ {
				if _, _, err := s.CreateSandbox(everywhere(), newSandbox(fmt.Sprintf("w%dn%d", i, j)), store.Idempotency{}); err != nil {
					class(t, "a writer", err, sandbox.ErrUnavailable, false)
					return
				}
			}
		})
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	_, err = s.GetSandbox(everywhere(), "a")
	class(t, "get", err, sandbox.ErrUnavailable, false)
	_, _, err = s.ListSandboxes(everywhere(), store.Filter{})
	class(t, "list", err, sandbox.ErrUnavailable, false)
	class(t, "touch", s.TouchKey(everywhere(), "k", time.Unix(1, 0)), sandbox.ErrUnavailable, false)
}

func TestOpenedByManyAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s, err := Open(everywhere(), path)
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if _, _, err := s.CreateSandbox(everywhere(), newSandbox(fmt.Sprint("a", i)), store.Idempotency{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestForgedTokens(t *testing.T) {
	s := open(t)
	create(t, s, newSandbox("a"))
	for _, raw := range []string{"1.x.a", "1.1", "9.1.a", "1.1.A;--", "1.99999999999999999999.a", "1..a", "..", "1.1."} {
		_, _, err := s.ListSandboxes(everywhere(), store.Filter{PageToken: base64.RawURLEncoding.EncodeToString([]byte(raw))})
		class(t, raw, err, sandbox.ErrInvalid, false)
	}
}

// The list must find its page in an index: a scan or a sort would read every
// sandbox that ever was.
func TestListUsesItsIndexes(t *testing.T) {
	s := open(t)
	after := &position{1, "a"}
	for name, c := range map[string]struct {
		labels map[string]string
		states []sandbox.State
	}{
		"all":       {nil, nil},
		"running":   {nil, []sandbox.State{sandbox.Running}},
		"one label": {map[string]string{"run": "r"}, nil},
		"two":       {map[string]string{"run": "r", "group": "g"}, nil},
		"three":     {map[string]string{"run": "r", "group": "g", "x": "y"}, []sandbox.State{sandbox.Running}},
	} {
		query, args := pageQuery(everybody, 0, c.states, store.Filter{Labels: c.labels}, after, 100)
		rows, err := s.read.Query("EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		var plan []string
		for rows.Next() {
			var id, parent, unused int
			var detail string
			if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
				t.Fatal(err)
			}
			plan = append(plan, detail)
		}
		rows.Close()
		text := strings.Join(plan, "; ")
		if strings.Contains(text, "SCAN") || strings.Contains(text, "TEMP B-TREE") || !strings.Contains(plan[0], "_by_age") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// A database of the first release opens with all it holds.
func TestSchemaOneIsBroughtUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	db, err := openDB(path, "_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	text, err := migrations.ReadFile("migrations/0001_init.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		string(text), `CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY)`, `INSERT INTO schema_version (version) VALUES (1)`,
		`INSERT INTO sandboxes (id, ended, state, image_id, created_at, ended_at, version, record)
			VALUES ('old', 0, 'running', 'sha256:1', 1, 0, 1, '{"id":"old","state":"running","image_id":"sha256:1","spec":{"image":"base"}}')`,
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(everywhere(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if sb, err := s.GetSandbox(everywhere(), "old"); err != nil || sb.Spec.Image != "base" || sb.Lineage.Parent != "" {
		t.Errorf("%+v, %v", sb, err)
	}
	snap := sandbox.Snapshot{ID: "s", Kind: sandbox.MemorySnapshot, Sandbox: "old", Content: sandbox.Content{Manifest: "m"}}
	if _, err := s.CreateSnapshot(everywhere(), snap); err != nil {
		t.Error(err)
	}
	if _, err := s.UpdateSandbox(everywhere(), "old", func(sb *sandbox.Sandbox) error { sb.Lineage = sb.Lineage.Below("s"); return nil }); err != nil {
		t.Error(err)
	}
	if tree, err := s.Tree(everywhere(), "s"); err != nil || len(tree.Sandboxes) != 1 {
		t.Errorf("%+v, %v", tree, err)
	}
}
