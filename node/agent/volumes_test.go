package agent

import (
	"errors"
	"strings"
	"testing"

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
