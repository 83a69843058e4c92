package gvisor

import (
	"errors"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// What a checkpoint may go on in: the same code, a CPU with all it has seen, and
// a reader of its form.
func TestWhichBuildsRestore(t *testing.T) {
	here := build{gvisor: "v1", form: 2, guest: "g", arch: "amd64", line: "64", cpu: []string{"avx", "sse"}}
	for _, tt := range []struct {
		name, was, says string // no says: it restores
	}{
		{"itself", here.String(), ""},
		{"an earlier form", "gvisor=v1;form=1;guest=g;arch=amd64;line=64;cpu=avx,sse", ""},
		{"from before forms were counted", "gvisor=v1;guest=g;arch=amd64;line=64;cpu=avx", ""},
		{"a later form", "gvisor=v1;form=3;guest=g;arch=amd64;line=64;cpu=avx", "form 3"},
		{"a form that is no number", "gvisor=v1;form=new;guest=g;arch=amd64;line=64;cpu=avx", "later"},
		{"another gVisor", "gvisor=v0;form=2;guest=g;arch=amd64;line=64;cpu=avx", "gVisor \"v0\""},
		{"another guest", "gvisor=v1;form=2;guest=h;arch=amd64;line=64;cpu=avx", "guest \"h\""},
		{"another architecture", "gvisor=v1;form=2;guest=g;arch=arm64;line=64;cpu=avx", "arm64"},
		{"a CPU with more", "gvisor=v1;form=2;guest=g;arch=amd64;line=64;cpu=amx,avx", "amx"},
		{"other cache lines", "gvisor=v1;form=2;guest=g;arch=amd64;line=128;cpu=avx", "128"},
	} {
		err := here.restores(parseBuild(tt.was))
		if tt.says == "" {
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		}
		if !errors.Is(err, sandbox.ErrPrecondition) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
}
