package cli

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (s fakeSandboxes) SetNetwork(_ context.Context, r *connect.Request[covev1.SetNetworkRequest]) (*connect.Response[covev1.SetNetworkResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.network = r.Msg.GetNetwork()
	return connect.NewResponse(&covev1.SetNetworkResponse{Generation: 2, Network: s.network}), nil
}

func (s fakeSandboxes) GetNetwork(_ context.Context, r *connect.Request[covev1.GetNetworkRequest]) (*connect.Response[covev1.GetNetworkResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &covev1.GetNetworkResponse{Network: s.network, Generation: 2, Allowed: 1, Denied: 1}
	if r.Msg.GetFlows() > 0 {
		at := timestamppb.New(time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC))
		out.Flows = []*covev1.NetworkFlow{
			{Start: at, Name: "pypi.org", Address: "203.0.113.5", Port: 443, Protocol: "tcp", Sent: 2048, Received: 10, Allowed: true, Rule: 0, Reason: "rule"},
			{Start: at, Address: "10.0.0.1\x1b[2J", Port: 80, Protocol: "tcp", Rule: -1, Reason: "builtin_private"},
		}
	}
	return connect.NewResponse(out), nil
}

func TestNet(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("sb1", nil)
	f.cove(t, settings{}, "net", "set", "sb1", "rules", "--allow", "pypi.org", "--allow", "*.example.com tcp 80,443", "--deny", "203.0.113.0/24 udp 1-9", "--bandwidth", "1MiB").want(t, 0, "2\n")
	if got := f.network.String(); len(f.network.GetRules()) != 3 || f.network.GetRules()[1].GetPorts()[1].GetFrom() != 443 || f.network.GetLimits().GetBytesPerSecond() != 1<<20 || f.network.GetRules()[2].GetAction() != "deny" {
		t.Errorf("sent %s", got)
	}
	f.cove(t, settings{}, "net", "get", "sb1").want(t, 0, `mode        rules
generation  2
allowed     1
denied      1
bandwidth   1MiB/s
rule 0      allow pypi.org
rule 1      allow *.example.com tcp 80,443
rule 2      deny 203.0.113.0/24 udp 1-9
`)
	out := f.cove(t, settings{}, "net", "flows", "sb1").stdout
	if !strings.Contains(out, "pypi.org") || !strings.Contains(out, "rule 0") || !strings.Contains(out, "builtin_private") || strings.Contains(out, "\x1b") {
		t.Errorf("flows:\n%q", out)
	}
	if out := f.cove(t, settings{}, "net", "flows", "sb1", "--denied", "--json").stdout; strings.Contains(out, "pypi") || !strings.Contains(out, `"allowed": false`) {
		t.Errorf("denied flows:\n%s", out)
	}
	f.cove(t, settings{}, "net", "set", "sb1").want(t, 2, "", "name a mode")
	f.cove(t, settings{}, "net", "set", "sb1", "rules", "--allow", "a.org tcp 80 x").want(t, 2, "", "what is")
	f.cove(t, settings{}, "create", "--allow", "https://pypi.org/simple").want(t, 2, "", `"https://pypi.org/simple" is a URL`, "hint: write pypi.org, or 'pypi.org tcp 443' for this port alone")
	f.cove(t, settings{}, "create", "--network", "public", "--deny", "* tcp 25").want(t, 0, "sb1\n")
	if n := f.created[0].GetSpec().GetNetwork(); n.GetMode() != "public" || len(n.GetRules()) != 1 {
		t.Errorf("created with %v", n)
	}
}
