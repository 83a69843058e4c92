package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// networkFlags are a network policy; create, run and net set share them.
type networkFlags struct {
	mode        string
	rules       []sandbox.NetworkRule
	bandwidth   size
	connections int32
	rec         recordingFlags
}

func (f *networkFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.Var(ruleFlag{sandbox.NetworkAllow, &f.rules}, "allow", "let it reach TARGET [PROTOCOL] [PORTS], e.g. pypi.org, '*.example.com tcp 443', 203.0.113.0/24 (repeatable)")
	fs.Var(ruleFlag{sandbox.NetworkDeny, &f.rules}, "deny", "do not let it reach TARGET [PROTOCOL] [PORTS], e.g. '* tcp 25' (repeatable)")
	fs.Var(&f.bandwidth, "bandwidth", "bytes a second in and out of it, e.g. 10MiB (default: no limit)")
	fs.Int32Var(&f.connections, "connections", 0, "open at a time (server default 1024)")
	f.rec.add(cmd)
}

// network is nil if nothing was asked for.
func (f *networkFlags) network() *covev1.Network {
	n := sandbox.Network{Mode: sandbox.NetworkMode(f.mode), Rules: f.rules,
		Limits: sandbox.NetworkLimits{BytesPerSecond: int64(f.bandwidth), Connections: int(f.connections)}}
	f.rec.into(&n)
	return wire.Network(n)
}

// ruleFlag is a repeated flag of rules with one action.
type ruleFlag struct {
	action sandbox.NetworkAction
	list   *[]sandbox.NetworkRule
}

func (r ruleFlag) Set(s string) error {
	rule, err := policy.ParseRule(string(r.action) + " " + s)
	if err == nil {
		*r.list = append(*r.list, rule)
	}
	return err
}
func (r ruleFlag) Type() string { return "RULE" }
func (r ruleFlag) String() string {
	if r.list == nil {
		return ""
	}
	return strings.Join(each(*r.list, policy.FormatRule), ", ")
}

func (a *app) netCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "net", Aliases: []string{"network"}, Short: "See and change what a sandbox may reach"}
	cmd.AddCommand(a.netSetCmd(), a.netGetCmd(), a.netFlowsCmd())
	return cmd
}

func (a *app) netSetCmd() *cobra.Command {
	var f networkFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "set ID [none|public|rules]",
		Short: "Put another network policy in force",
		Long: `Put another network policy in force, in place of the one before. When it
returns, no connection that the policy denies is open any more. Prints the
generation of the policy. What it does not name ends: a recording goes on if
--record names it again.`,
		Example: `  cove net set ID public
  cove net set ID rules --allow pypi.org --allow '*.pythonhosted.org tcp 443'
  cove net set ID public --deny '* tcp 25' --bandwidth 10MiB
  cove net set ID public --record ep1        # until the next set without it
  cove net set ID --replay ep1`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 2 {
				f.mode = args[1]
			}
			n := f.network()
			if n == nil {
				return usage(cmd, errors.New("name a mode, or give --allow, --deny, --record or --replay"))
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Sandboxes.SetNetwork(cmd.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: id, Network: n}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toNetworkJSON(resp.Msg.GetNetwork(), resp.Msg.GetGeneration()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetGeneration())
			return err
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the policy as JSON")
	return cmd
}

func (a *app) netGetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get ID", Short: "Show the network policy in force",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := a.network(cmd, args[0], 0)
			if err != nil {
				return err
			}
			j := toNetworkJSON(m.GetNetwork(), m.GetGeneration())
			j.Allowed, j.Denied = m.GetAllowed(), m.GetDenied()
			if r := m.GetRecording(); r != nil {
				is := toRecordingJSON(r)
				j.Recording = &is
			}
			j.Replay = toReplayJSON(m.GetReplay())
			if asJSON {
				return a.printJSON(j)
			}
			fmt.Fprintf(a.Stdout, "mode        %s\ngeneration  %d\nallowed     %d\ndenied      %d\n", escape(j.Mode), j.Generation, j.Allowed, j.Denied)
			if j.BytesPerSecond > 0 {
				fmt.Fprintf(a.Stdout, "bandwidth   %s/s\n", formatSize(j.BytesPerSecond))
			}
			if j.Connections > 0 {
				fmt.Fprintf(a.Stdout, "connections %d\n", j.Connections)
			}
			for i, r := range j.Rules {
				fmt.Fprintf(a.Stdout, "rule %-6d %s\n", i, escape(r))
			}
			if r := j.Recording; r != nil {
				fmt.Fprintf(a.Stdout, "recording   %s, %d exchanges, %s\n", escape(r.ref()), r.Exchanges, formatSize(r.Bytes))
			}
			if r := j.Replay; r != nil {
				fmt.Fprintf(a.Stdout, "replay      %s, %d answered, %d missed, %d not asked for\n", escape(r.Recording), r.Answered, r.Missed, r.Unused)
				for _, m := range r.Misses {
					fmt.Fprintf(a.Stdout, "missed      %s %s %s\n", escape(m.Method), escape(m.URL), escape(m.Hint))
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the policy as JSON")
	return cmd
}

func (a *app) netFlowsCmd() *cobra.Command {
	var asJSON, denied bool
	var last int32
	cmd := &cobra.Command{
		Use: "flows ID", Short: "List what a sandbox tried to reach, oldest first",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := a.network(cmd, args[0], last)
			if err != nil {
				return err
			}
			flows := []flowJSON{}
			for _, f := range m.GetFlows() {
				if !denied || !f.GetAllowed() {
					flows = append(flows, toFlowJSON(f))
				}
			}
			if asJSON {
				return a.printJSON(flows)
			}
			var t table
			t.row("TIME", "VERDICT", "PROTOCOL", "NAME", "ADDRESS", "PORT", "SENT", "RECEIVED", "WHY")
			for _, f := range flows {
				verdict, why := "allowed", f.Reason
				if !f.Allowed {
					verdict = "denied"
				}
				if f.Rule >= 0 {
					why = "rule " + strconv.Itoa(f.Rule)
				}
				t.row(f.Start.Local().Format(time.TimeOnly), verdict, f.Protocol, f.Name, f.Address, strconv.Itoa(int(f.Port)), formatSize(f.Sent), formatSize(f.Received), why)
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().BoolVar(&denied, "denied", false, "only what was denied")
	cmd.Flags().Int32VarP(&last, "last", "n", 100, "how many, at most 512")
	return cmd
}

func (a *app) network(cmd *cobra.Command, ref string, flows int32) (*covev1.GetNetworkResponse, error) {
	id, err := a.resolveID(cmd.Context(), ref)
	if err != nil {
		return nil, err
	}
	api, err := a.client()
	if err != nil {
		return nil, err
	}
	resp, err := api.Sandboxes.GetNetwork(cmd.Context(), connect.NewRequest(&covev1.GetNetworkRequest{Id: id, Flows: flows}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

type networkJSON struct {
	Mode           string   `json:"mode"`
	Rules          []string `json:"rules,omitempty"` // as --allow and --deny take them, the action first
	BytesPerSecond int64    `json:"bytes_per_second,omitempty"`
	Connections    int32    `json:"connections,omitempty"`
	Generation     int64    `json:"generation,omitempty"`
	Allowed        int64    `json:"allowed,omitempty"`
	Denied         int64    `json:"denied,omitempty"`

	Record    string         `json:"record,omitempty"` // id of the recording
	Recording *recordingJSON `json:"recording,omitempty"`
	Replay    *replayJSON    `json:"replay,omitempty"`
}

func toNetworkJSON(n *covev1.Network, generation int64) networkJSON {
	j := networkJSON{Mode: n.GetMode(), BytesPerSecond: n.GetLimits().GetBytesPerSecond(), Connections: n.GetLimits().GetConnections(), Generation: generation, Record: n.GetRecord().GetId()}
	if r := n.GetReplay(); r != nil {
		j.Replay = &replayJSON{Recording: r.GetRecording()}
	}
	if s, err := wire.NetworkFrom(n); err == nil {
		for _, r := range s.Rules {
			j.Rules = append(j.Rules, policy.FormatRule(r))
		}
	}
	return j
}

type flowJSON struct {
	Start    time.Time `json:"start"`
	End      time.Time `json:"end,omitzero"`
	Name     string    `json:"name,omitempty"`
	Address  string    `json:"address,omitempty"`
	Port     uint32    `json:"port"`
	Protocol string    `json:"protocol"`
	Sent     int64     `json:"sent"`
	Received int64     `json:"received"`
	Allowed  bool      `json:"allowed"`
	Rule     int       `json:"rule"` // -1 = none of them
	Reason   string    `json:"reason"`
}

func toFlowJSON(f *covev1.NetworkFlow) flowJSON {
	return flowJSON{Start: timeOf(f.GetStart()), End: timeOf(f.GetEnd()), Name: f.GetName(), Address: f.GetAddress(), Port: f.GetPort(), Protocol: strings.ToLower(f.GetProtocol()),
		Sent: f.GetSent(), Received: f.GetReceived(), Allowed: f.GetAllowed(), Rule: int(f.GetRule()), Reason: f.GetReason()}
}
