package nodetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testImages(t *testing.T) {
	ctx, images := t.Context(), s.Node.Images()
	img, err := images.Pull(ctx, sandbox.RegistryAccess{Username: "u", Password: "p"}, s.Remote, "", "")
	if err != nil || img.ID == "" {
		t.Fatalf("pull: %+v, %v", img, err)
	}
	_, err = images.Pull(ctx, sandbox.RegistryAccess{}, "docker.io/library/none", "", "")
	expect(t, "pull", err, sandbox.ErrImageNotFound)
	r, _ := random(10 << 20)
	made, err := images.Import(ctx, unsized{r}, "")
	if err != nil || made.Size < 10<<20 {
		t.Fatalf("import: %+v, %v", made, err)
	}
	if got, err := images.Get(ctx, made.ID); err != nil || got.ID != made.ID {
		t.Errorf("get: %+v, %v", got, err)
	}
	all, err := images.Contents(ctx)
	if err != nil || all[made.ID] != made.Size || all[img.ID] == 0 {
		t.Errorf("contents: %v, %v", all, err)
	}
	must(t, "delete", images.Delete(ctx, made.ID))
	_, err = images.Get(ctx, made.ID)
	expect(t, "get", err, sandbox.ErrImageNotFound)
	reason := &sandbox.Error{Class: sandbox.TooLarge, Msg: "more than is accepted"}
	if _, err = images.Import(ctx, &breaking{100, reason}, ""); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("import of what breaks off: %v", err)
	}
}

func (s *suite) testRecordings(t *testing.T) {
	ctx, recs := t.Context(), s.Node.Recordings()
	info, err := s.Node.Info(ctx)
	must(t, "info", err)
	calls := map[string]func() error{
		"Delete":    func() error { return recs.Delete(ctx, "none") },
		"Exchanges": func() error { _, err := recs.Exchanges(ctx, "none", 0, 1); return err },
		"Export":    func() error { return recs.Export(ctx, "none", false, io.Discard) },
	}
	want := sandbox.ErrNotFound
	if !info.Recordings {
		want = sandbox.ErrUnsupported
	}
	for name, call := range calls {
		expect(t, name, call(), want)
	}
	id := s.newID()
	archive := emptyRecording(t)
	rec, err := recs.Import(ctx, id, bytes.NewReader(archive))
	if !info.Recordings {
		expect(t, "import", err, sandbox.ErrUnsupported)
		return
	}
	if err != nil || rec.ID != id {
		t.Fatalf("import: %+v, %v", rec, err)
	}
	if got, err := recs.Status(ctx, []string{id, "none"}); err != nil || len(got) != 1 || got[id].State != sandbox.RecordingFinished {
		t.Errorf("status: %+v, %v", got, err)
	}
	if all, err := recs.List(ctx); err != nil || len(all) != 1 {
		t.Errorf("list: %+v, %v", all, err)
	}
	if ex, err := recs.Exchanges(ctx, id, 0, 10); err != nil || len(ex) != 0 {
		t.Errorf("exchanges: %+v, %v", ex, err)
	}
	var out bytes.Buffer
	if err := recs.Export(ctx, id, true, &out); err != nil || !strings.Contains(out.String(), `"1.2"`) {
		t.Errorf("export: %.100q, %v", out.String(), err)
	}
	must(t, "delete", recs.Delete(ctx, id))
	if _, err := recs.Import(ctx, s.newID(), strings.NewReader("no archive")); err == nil {
		t.Error("what is no archive is taken in")
	}
}

// emptyRecording is an archive with nothing on it.
func emptyRecording(t *testing.T) []byte {
	t.Helper()
	l, err := recording.OpenLibrary(recording.Config{Dir: t.TempDir()})
	must(t, "library", err)
	defer l.Close()
	_, err = l.Record(recording.Header{ID: "made"})
	must(t, "record", err)
	must(t, "finish", l.Finish("made"))
	var b bytes.Buffer
	must(t, "export", l.Export(t.Context(), "made", false, &b))
	return b.Bytes()
}

func (s *suite) testVolumes(t *testing.T) {
	ctx, vols := t.Context(), s.Node.Volumes()
	info, err := s.Node.Info(ctx)
	must(t, "info", err)
	want := sandbox.ErrNotFound
	if !info.Volumes {
		want = sandbox.ErrUnsupported
	}
	for name, call := range map[string]func() error{
		"Delete":    func() error { return vols.Delete(ctx, "none") },
		"Resize":    func() error { _, err := vols.Resize(ctx, "none", 1<<30); return err },
		"Clone":     func() error { return vols.Clone(ctx, "none", "b") },
		"Snapshot":  func() error { _, err := vols.Snapshot(ctx, "none"); return err },
		"ListFiles": func() error { _, _, err := vols.ListFiles(ctx, "none", "/", 1); return err },
		"ReadFile":  func() error { _, _, err := vols.ReadFile(ctx, "none", "/f"); return err },
		"WriteFile": func() error {
			_, err := vols.WriteFile(ctx, "none", "/f", strings.NewReader("x"), sandbox.VolumeFile{})
			return err
		},
		"MakeDirectory": func() error { _, err := vols.MakeDirectory(ctx, "none", "/d", false, sandbox.VolumeFile{}); return err },
		"ChangeFile":    func() error { _, err := vols.ChangeFile(ctx, "none", "/f", sandbox.VolumeFile{}); return err },
		"RemoveFile":    func() error { return vols.RemoveFile(ctx, "none", "/f", false) },
	} {
		expect(t, name, call(), want)
	}
	vol, from, clone := s.newID(), s.newID(), s.newID()
	err = vols.Create(ctx, vol, 32<<20)
	if !info.Volumes {
		expect(t, "Create", err, want)
		_, err = vols.List(ctx)
		expect(t, "List", err, want)
		return
	}
	must(t, "create", err)
	expect(t, "the same again", vols.Create(ctx, vol, 32<<20), sandbox.ErrAlreadyExists)
	if got, err := vols.Status(ctx, []string{vol, "none"}); err != nil || len(got) != 1 || got[vol].Size != 32<<20 {
		t.Errorf("status: %+v, %v", got, err)
	}
	mode, owner := uint32(0o640), uint32(1000)
	f, err := vols.WriteFile(ctx, vol, "/d/f", unsized{strings.NewReader(strings.Repeat("x", 2<<20))}, sandbox.VolumeFile{Mode: &mode, GID: &owner})
	if err != nil || f.Size != 2<<20 || f.Mode != 0o640 || f.UID != 0 || f.GID != owner {
		t.Errorf("write: %+v, %v", f, err)
	}
	setuid := uint32(0o4755)
	if f, err := vols.ChangeFile(ctx, vol, "/d/f", sandbox.VolumeFile{Mode: &setuid, UID: &owner}); err != nil || f.Mode != setuid || f.UID != owner || f.GID != owner {
		t.Errorf("change: %+v, %v", f, err)
	}
	_, err = vols.ChangeFile(ctx, vol, "/d/none", sandbox.VolumeFile{})
	expect(t, "a change of nothing", err, sandbox.ErrNotFound)
	_, err = vols.MakeDirectory(ctx, vol, "/a/b", false, sandbox.VolumeFile{})
	expect(t, "a directory below none", err, sandbox.ErrNotFound)
	if f, err := vols.MakeDirectory(ctx, vol, "/a/b", true, sandbox.VolumeFile{Mode: &mode, UID: &owner}); err != nil || f.Type != sandbox.Directory || f.Mode != mode || f.UID != owner {
		t.Errorf("a directory: %+v, %v", f, err)
	}
	if f, err := vols.MakeDirectory(ctx, vol, "/a/b", true, sandbox.VolumeFile{}); err != nil || f.Mode != mode {
		t.Errorf("a directory that is there: %+v, %v", f, err)
	}
	for path, parents := range map[string]bool{"/a/b": false, "/d/f": true} {
		_, err = vols.MakeDirectory(ctx, vol, path, parents, sandbox.VolumeFile{})
		expect(t, "where something is", err, sandbox.ErrAlreadyExists)
	}
	r, f, err := vols.ReadFile(ctx, vol, "/d/f")
	must(t, "read", err)
	got, err := io.ReadAll(r)
	if r.Close(); err != nil || len(got) != 2<<20 || f.Size != 2<<20 {
		t.Errorf("read: %d bytes, %+v, %v", len(got), f, err)
	}
	if files, more, err := vols.ListFiles(ctx, vol, "/", 2); err != nil || more || len(files) < 2 {
		t.Errorf("list: %+v, %v, %v", files, more, err)
	}
	c, err := vols.Snapshot(ctx, vol)
	if err != nil || c.Manifest == "" {
		t.Errorf("snapshot: %+v, %v", c, err)
	}
	must(t, "create from", vols.CreateFrom(ctx, from, 32<<20, c))
	must(t, "clone", vols.Clone(ctx, vol, clone))
	must(t, "remove", vols.RemoveFile(ctx, vol, "/d", true))
	for _, id := range []string{from, clone} {
		r, _, err := vols.ReadFile(ctx, id, "/d/f")
		must(t, "read", err)
		must(t, "close", r.Close()) // before its end
	}
	_, _, err = vols.ReadFile(ctx, vol, "/d/f")
	expect(t, "what was removed", err, sandbox.ErrNotFound)
	if size, err := vols.Resize(ctx, vol, 64<<20); err != nil || size != 64<<20 {
		t.Errorf("resize: %d, %v", size, err)
	}
	for _, id := range []string{vol, from, clone} {
		must(t, "delete", vols.Delete(ctx, id))
	}
	if all, err := vols.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("list: %+v, %v", all, err)
	}
	must(t, "release", s.Node.Release(ctx, c))
}

// Many callers do many things at once, and each sees its own.
func (s *suite) testConcurrent(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 12 {
		id := s.newID()
		wg.Go(func() {
			if err := s.episode(ctx, id, fmt.Sprint("mine", i)); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		})
	}
	wg.Wait()
}

// episode is the life of a sandbox.
func (s *suite) episode(ctx context.Context, id, word string) error {
	if _, err := s.Node.Create(ctx, sandbox.Sandbox{ID: id, Spec: spec()}, s.Image); err != nil {
		return err
	}
	if err := s.Node.Upload(ctx, id, node.Upload{Path: "f"}, unsized{strings.NewReader(word)}); err != nil {
		return err
	}
	var out bytes.Buffer
	for ev, err := range s.Node.Start(ctx, id, s.script("cat f; echo; ls"), 0) {
		if err != nil {
			return err
		}
		if ev.Output != nil {
			out.Write(ev.Output.Data)
		}
	}
	if !strings.HasPrefix(out.String(), word+"\n") {
		return fmt.Errorf("it wrote %q", out.String())
	}
	var file bytes.Buffer
	if err := s.Node.Download(ctx, id, node.Download{Path: "f"}, &file); err != nil || file.String() != word {
		return fmt.Errorf("its file is %q, %w", file.String(), err)
	}
	if err := s.Node.Kill(ctx, id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		return err
	}
	return s.Node.AckEnd(ctx, id)
}
