package cli

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// fakePorts gives every port an address.
type fakePorts struct {
	covev1.UnimplementedPortsHandler
}

func (fakePorts) Url(context.Context, *connect.Request[covev1.PortUrlRequest]) (*connect.Response[covev1.PortUrlResponse], error) {
	return connect.NewResponse(&covev1.PortUrlResponse{Url: "/p/x/1/"}), nil
}

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
	for _, err := range []error{nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no gateway"}} {
		f.fail["Ports/Url"] = err
		if c, says := forward(); c.code != 0 || !strings.Contains(says, "-> abc:80") {
			t.Errorf("%v: exit %d, %s", err, c.code, says)
		}
	}
	for _, err := range []*sandbox.Error{{Class: sandbox.Denied, Msg: "this key may only look"}, {Class: sandbox.Ended, Msg: "abc has ended"}} {
		f.fail["Ports/Url"] = err
		if c, says := forward(); c.code != 1 || says != "cove: "+err.Msg+"\n" {
			t.Errorf("%v: exit %d, %s", err, c.code, says)
		}
	}
}
