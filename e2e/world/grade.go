package world

import (
	"archive/tar"
	"bytes"
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

// Tests makes a directory of tests for grades, and returns its snapshot.
func (w *World) Tests(t testing.TB, files map[string]string) string {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for name, text := range files {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	id, err := w.Client().PutTests(t.Context(), "", &b, int64(b.Len()))
	if err != nil {
		t.Fatalf("tests: %v", err)
	}
	return id
}

// Grade grades the sandbox and returns the verdict.
func (b *Box) Grade(t testing.TB, r *covev1.CreateGradeRequest) *covev1.Grade {
	t.Helper()
	g, err := b.TryGrade(t.Context(), r)
	if err != nil {
		t.Fatalf("grade %s: %v", b.ID, err)
	}
	return b.W.WaitGrade(t, g.Id)
}

// TryGrade begins a grade.
func (b *Box) TryGrade(ctx context.Context, r *covev1.CreateGradeRequest) (*covev1.Grade, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r.Sandbox = b.ID
	got, err := b.W.Client().Grades.Create(ctx, connect.NewRequest(r))
	if err != nil {
		return nil, err
	}
	return got.Msg.Grade, nil
}

// WaitGrade waits for a verdict.
func (w *World) WaitGrade(t testing.TB, id string) *covev1.Grade {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callWithin)
	defer cancel()
	for {
		got, err := w.Client().Grades.Wait(ctx, connect.NewRequest(&covev1.WaitGradeRequest{Id: id, MaxWait: durationpb.New(time.Minute)}))
		if err != nil {
			t.Fatalf("grade %s: %v", id, err)
		}
		if got.Msg.Grade.State != "running" {
			return got.Msg.Grade
		}
	}
}
