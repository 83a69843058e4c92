package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// What cannot fit is refused in words of its own, before anything is made.
func TestAVolumeTooSmallForASnapshot(t *testing.T) {
	v := Volumes{n: &Node{states: &contents{}}}
	err := v.CreateFrom(t.Context(), "data", 16<<20, sandbox.Content{Manifest: "m", Size: 40 << 20})
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != sandbox.DiskFull || !strings.Contains(e.Error(), "volume of 16MiB") || !strings.Contains(e.Hint, "40MiB") {
		t.Errorf("%v, hint %q", err, e.Hint)
	}
}

// Memory has the mounts it was saved with: what is added is mounted after, what is missing refused.
func TestVolumesOverMemory(t *testing.T) {
	had := []sandbox.VolumeMount{{Volume: "a", Path: "/a"}}
	got, err := volumesOver(had, []runtime.Volume{{Source: "other", Target: "/a"}, {Source: "b", Target: "/b"}})
	if err != nil || got[0].Added || !got[1].Added {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = volumesOver(had, []runtime.Volume{{Source: "b", Target: "/b"}})
	if e := sandbox.AsError(err); e.Class != sandbox.Precondition || !strings.Contains(e.Error(), "/a") || e.Hint == "" {
		t.Errorf("%v, hint %q", err, e.Hint)
	}
}
