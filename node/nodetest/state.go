package nodetest

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) prepare(t *testing.T, id string, r node.SnapshotRequest) node.Prepared {
	t.Helper()
	p, err := s.Node.PrepareSnapshot(t.Context(), id, r)
	if err != nil || p.Token == "" || time.Until(p.Until) <= 0 {
		t.Fatalf("prepare: %+v, %v", p, err)
	}
	return p
}

// take prepares and commits.
func (s *suite) take(t *testing.T, id string, r node.SnapshotRequest) sandbox.Snapshot {
	t.Helper()
	p := s.prepare(t, id, r)
	must(t, "commit", s.Node.CommitSnapshot(t.Context(), p.Token))
	sb, _ := s.live(t, id)
	return sandbox.Snapshot{ID: "snap" + id, Kind: r.Kind, Path: r.Path, Sandbox: id, Spec: sb.Spec, ImageID: sb.ImageID, Content: p.Content}
}

var memory = node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true}

func (s *suite) testSnapshot(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "f", "then")
	snap := s.take(t, id, memory)
	if snap.Content.Manifest == "" || snap.Content.Size <= 0 {
		t.Errorf("%+v", snap.Content)
	}
	s.write(t, id, "f", "now")
	child := s.newID()
	took, err := s.Node.CreateFrom(ctx, sandbox.Sandbox{ID: child, Spec: snap.Spec}, s.Image, snap)
	if err != nil || took <= 0 {
		t.Fatalf("create from: %s, %v", took, err)
	}
	s.endWith(t, child)
	s.expectFile(t, child, "f", "then")
	s.expectFile(t, id, "f", "now")
	episode, took, err := s.Node.Restore(ctx, id, s.Image, snap)
	if err != nil || episode != 2 || took <= 0 {
		t.Errorf("restore: %d, %s, %v", episode, took, err)
	}
	s.expectFile(t, id, "f", "then")
	_, err = s.Node.PrepareSnapshot(ctx, id, node.SnapshotRequest{Kind: "no kind"})
	expect(t, "no kind", err, sandbox.ErrInvalid)
	expect(t, "no token", s.Node.CommitSnapshot(ctx, "none"), sandbox.ErrNotFound)
	must(t, "abort of nothing", s.Node.AbortSnapshot(ctx, "none"))
	p := s.prepare(t, id, memory)
	must(t, "abort", s.Node.AbortSnapshot(ctx, p.Token))
	s.expectFile(t, id, "f", "then")
}

func (s *suite) testSnapshotStop(t *testing.T) {
	for _, r := range []node.SnapshotRequest{
		{Kind: sandbox.MemorySnapshot, Keep: true, Stop: true},
		{Kind: sandbox.FilesystemSnapshot, Keep: true, Stop: true},
	} {
		ctx, id := t.Context(), s.box(t)
		s.write(t, id, "f", "content")
		p := s.prepare(t, id, r)
		s.standby(t, id, sandbox.Hot) // it stands still
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		_, err := s.Node.StatFile(short, id, "f")
		cancel()
		expect(t, "a call meanwhile", err, sandbox.ErrDeadline)
		for range 2 {
			must(t, "abort", s.Node.AbortSnapshot(ctx, p.Token))
		}
		expect(t, "commit of what was aborted", s.Node.CommitSnapshot(ctx, p.Token), sandbox.ErrConflict)
		s.expectFile(t, id, "f", "content")

		p = s.prepare(t, id, r)
		for range 2 { // an answer may get lost
			must(t, "commit", s.Node.CommitSnapshot(ctx, p.Token))
		}
		expect(t, "abort of what was committed", s.Node.AbortSnapshot(ctx, p.Token), sandbox.ErrConflict)
		if end := s.end(t, id); end.Cause != sandbox.KilledByUser || !strings.Contains(end.Detail, "snapshot") {
			t.Errorf("end %+v", end)
		}
		if _, err := s.Node.Verify(ctx, p.Content); err != nil {
			t.Error(err)
		}
	}
}

// What nobody commits is aborted, and the sandbox goes on by itself.
func (s *suite) testSnapshotLapses(t *testing.T) {
	id := s.box(t)
	s.write(t, id, "f", "content")
	r := memory
	r.Stop, r.TTL = true, 200*time.Millisecond
	p := s.prepare(t, id, r)
	if left := time.Until(p.Until); left > time.Second {
		t.Errorf("it waits for %s", left)
	}
	s.expectFile(t, id, "f", "content") // the call waits until then
	expect(t, "commit", s.Node.CommitSnapshot(t.Context(), p.Token), sandbox.ErrConflict)
	r.TTL = -1
	_, err := s.Node.PrepareSnapshot(t.Context(), id, r)
	expect(t, "a time that is none", err, sandbox.ErrInvalid)
}

// A sandbox that stands still can end, and its state is good all the same.
func (s *suite) testSnapshotOfWhatEnds(t *testing.T) {
	id := s.box(t)
	r := memory
	r.Stop = true
	p := s.prepare(t, id, r)
	must(t, "kill", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.Evicted}))
	must(t, "commit", s.Node.CommitSnapshot(t.Context(), p.Token))
	if end := s.end(t, id); end.Cause != sandbox.Evicted {
		t.Errorf("end %+v", end)
	}
	_, err := s.Node.Verify(t.Context(), p.Content)
	must(t, "verify", err)
}

func (s *suite) testSnapshotFiles(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "f", "content")
	snap := s.take(t, id, node.SnapshotRequest{Kind: sandbox.FilesystemSnapshot, Keep: true})
	img, err := s.Node.PrepareImage(ctx, snap, s.Image, "")
	if err != nil || img.ID == "" || img.ID == s.Image.ID {
		t.Fatalf("%+v, %v", img, err)
	}
	if again, err := s.Node.PrepareImage(ctx, snap, s.Image, ""); err != nil || again.ID != img.ID {
		t.Errorf("again: %+v, %v", again, err)
	}
	episode, _, err := s.Node.Restore(ctx, id, img, snap)
	if sb, _ := s.live(t, id); err != nil || episode != 2 || sb.ImageID != img.ID {
		t.Errorf("restored: %d, %+v, %v", episode, sb, err)
	}
	var tar bytes.Buffer
	must(t, "tar", s.Node.Tar(ctx, snap.Content, &tar))
	if !bytes.Contains(tar.Bytes(), []byte("content")) {
		t.Errorf("%d bytes of tar without the content", tar.Len())
	}
	if err := s.Node.Tar(ctx, sandbox.Content{Manifest: "sha256:" + strings.Repeat("0", 64)}, io.Discard); err == nil {
		t.Error("a tar of what is not there")
	}
}

func (s *suite) testSnapshotDirectory(t *testing.T) {
	ctx, from, to := t.Context(), s.box(t), s.box(t)
	s.write(t, from, "dir/f", "content")
	dir, err := s.Node.StatFile(ctx, from, "dir")
	must(t, "stat", err)
	snap := s.take(t, from, node.SnapshotRequest{Kind: sandbox.DirectorySnapshot, Path: dir.Path, Keep: true})
	here, err := s.Node.StatFile(ctx, to, ".")
	must(t, "stat", err)
	must(t, "mount", s.Node.Mount(ctx, to, snap, strings.TrimSuffix(here.Path, "/")+"/here", true))
	s.expectFile(t, to, "here/f", "content")
	_, err = s.Node.PrepareSnapshot(ctx, from, node.SnapshotRequest{Kind: sandbox.DirectorySnapshot, Path: dir.Path + "/none", Keep: true})
	expect(t, "no directory", err, sandbox.ErrNotFound)
}

// Content that is not kept is there until it is released.
func (s *suite) testFork(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "f", "content")
	snap := s.take(t, id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot})
	if snap.Content.Manifest != "" {
		t.Errorf("%+v", snap.Content)
	}
	for range 2 {
		child := s.newID()
		_, err := s.Node.CreateFrom(ctx, sandbox.Sandbox{ID: child, Spec: snap.Spec}, s.Image, snap)
		must(t, "create", err)
		s.endWith(t, child)
		s.expectFile(t, child, "f", "content")
	}
	must(t, "release", s.Node.Release(ctx, snap.Content))
	_, err := s.Node.CreateFrom(ctx, sandbox.Sandbox{ID: s.newID(), Spec: snap.Spec}, s.Image, snap)
	expect(t, "after its release", err, sandbox.ErrNotFound)
}

func (s *suite) testContent(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "f", strings.Repeat("content of this test ", 1000))
	kept := s.take(t, id, memory).Content
	s.write(t, id, "g", strings.Repeat("and more of it ", 1000))
	given := s.prepare(t, id, memory)
	blobs, err := s.Node.Blobs(ctx, []string{kept.Manifest, given.Content.Manifest, "sha256:" + strings.Repeat("0", 64)})
	if err != nil || len(blobs) < 2 || len(blobs[kept.Manifest]) == 0 || blobs[kept.Manifest][0].Sum == [32]byte{} || blobs[kept.Manifest][0].Stored <= 0 {
		t.Errorf("%d contents, %v", len(blobs), err)
	}
	must(t, "abort", s.Node.AbortSnapshot(ctx, given.Token))
	if info, err := s.Node.Info(ctx); err != nil || !info.Litter {
		t.Errorf("%+v, %v", info, err)
	}
	freed, err := s.Node.Collect(ctx, []string{kept.Manifest})
	if err != nil || freed <= 0 {
		t.Errorf("freed %d, %v", freed, err)
	}
	if n, err := s.Node.Verify(ctx, kept); err != nil || n != kept.Size {
		t.Errorf("verified %d of %d, %v", n, kept.Size, err)
	}
	if _, err := s.Node.Verify(ctx, given.Content); err == nil {
		t.Error("what was given up is still there")
	}
	// What was committed and is not named goes too, however young it is.
	s.write(t, id, "g", strings.Repeat("something else ", 1000))
	young := s.take(t, id, memory).Content
	freed, err = s.Node.Collect(ctx, []string{kept.Manifest})
	if _, verr := s.Node.Verify(ctx, young); err != nil || freed <= 0 || verr == nil {
		t.Errorf("freed %d, %v; what nobody names is there: %v", freed, err, verr)
	}
}

// Whoever looks sees the latest, and nobody waits for who does not look.
func (s *suite) testProgress(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id := s.box(t)
	r := memory
	r.Op = s.newID()
	looking, took := make(chan struct{}), make(chan struct{})
	seen := make(chan []sandbox.Progress, 1)
	go func() {
		var all []sandbox.Progress
		close(looking)
		for p, err := range s.Node.Progress(ctx, r.Op) {
			if err != nil {
				t.Errorf("progress: %v", err)
				break
			}
			all = append(all, p)
			if len(all) == 1 {
				<-took // as slow as can be
			}
		}
		seen <- all
	}()
	<-looking
	// The reader joins when it joins: until it was seen, there is more to see.
	var all []sandbox.Progress
	for all == nil {
		s.take(t, id, r)
		select {
		case took <- struct{}{}:
			all = <-seen
		case all = <-seen:
		default:
		}
	}
	if len(all) == 0 || all[len(all)-1].Step != "done" {
		t.Errorf("seen: %+v", all)
	}
	leaving, leave := context.WithCancel(ctx)
	leave()
	expect(t, "leaving", last(s.Node.Progress(leaving, "never begun")), sandbox.ErrCanceled)
}

func (s *suite) testNetwork(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	st, err := s.Node.NetworkStatus(ctx, id, 10)
	if err != nil || st.Generation != 1 || st.Network.Mode != sandbox.NetworkNone {
		t.Errorf("%+v, %v", st, err)
	}
	g, err := s.Node.SetNetwork(ctx, id, sandbox.Network{Mode: sandbox.NetworkNone})
	if err != nil || g != 2 {
		t.Errorf("generation %d, %v", g, err)
	}
	_, err = s.Node.SetNetwork(ctx, id, sandbox.Network{Mode: "no mode"})
	expect(t, "no mode", err, sandbox.ErrInvalid)
	if st, err = s.Node.NetworkStatus(ctx, id, 10); err != nil || st.Generation != 2 {
		t.Errorf("%+v, %v", st, err)
	}
}

func (s *suite) testSecrets(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	_, err := s.Node.UseSecrets(ctx, id, []string{"never"})
	expect(t, "a secret that is not there", err, sandbox.ErrNotFound)
	good := sandbox.Secret{Tenant: "default", Name: "token", Hosts: []string{"example.com"}, Header: "Authorization", Placeholder: "cove-secret-0123456789abcdef",
		Value: sandbox.NewSecretValue("s3cret-value-that-is-long")}
	must(t, "put", s.Node.PutSecrets(ctx, "default", []sandbox.Secret{good}))
	bad := good
	bad.Hosts = []string{"not a host"}
	if err := s.Node.PutSecrets(ctx, "default", []sandbox.Secret{bad}); err == nil {
		t.Error("a secret for no host is taken")
	}
	if _, err := s.Node.UseSecrets(ctx, id, []string{"token"}); err != nil { // or it has networks
		expect(t, "use", err, sandbox.ErrUnsupported)
	}
	must(t, "put", s.Node.PutSecrets(ctx, "default", nil))
	_, err = s.Node.UseSecrets(ctx, id, []string{"token"})
	expect(t, "a secret that is gone", err, sandbox.ErrNotFound)
}
