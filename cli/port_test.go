package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// interrupts sends Ctrl-C when something is written to it.
type interrupts struct {
	bytes.Buffer
	sigs chan os.Signal
}

func (i *interrupts) Write(p []byte) (int, error) {
	select {
	case i.sigs <- os.Interrupt:
	default:
	}
	return i.Buffer.Write(p)
}

func TestPortForwardListensOnlyIfItMayConnect(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	forward := func() (call, string) {
		says := &interrupts{sigs: make(chan os.Signal, 1)}
		c := f.cove(t, settings{sigs: says.sigs, deps: func(d *Deps) { d.Stderr = says }}, "port-forward", "abc", "0:80")
		return c, says.String()
	}
	if c, says := forward(); c.code != 0 || !strings.Contains(says, "-> abc:80") {
		t.Errorf("exit %d, %s", c.code, says)
	}
	for _, err := range []*sandbox.Error{{Class: sandbox.Denied, Msg: "this key may only look"}, {Class: sandbox.Ended, Msg: "abc has ended"}} {
		f.fail["connect"] = err
		if c, says := forward(); c.code != 1 || says != "cove: "+err.Msg+"\n" {
			t.Errorf("%v: exit %d, %s", err, c.code, says)
		}
	}
}
