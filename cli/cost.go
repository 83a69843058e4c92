package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type costJSON struct {
	Run                   string   `json:"run,omitempty"`
	Group                 string   `json:"group,omitempty"`
	Episode               string   `json:"episode,omitempty"`
	Sandbox               string   `json:"sandbox,omitempty"`
	Reset                 int64    `json:"reset,omitempty"`
	Step                  string   `json:"step,omitempty"`
	Sandboxes             int64    `json:"sandboxes"`
	Episodes              int64    `json:"episodes"`
	Steps                 int64    `json:"steps"`
	CPUS                  float64  `json:"cpu_s"`
	StepCPUS              float64  `json:"step_cpu_s"`
	MemoryGiBS            float64  `json:"memory_gib_s"`
	ReservedGiBS          float64  `json:"memory_reserved_gib_s"`
	DiskGiBS              float64  `json:"disk_gib_s"`
	SnapshotGiB           float64  `json:"snapshot_gib"`
	Seconds               float64  `json:"seconds"`
	StepSeconds           float64  `json:"step_seconds"`
	IdleSeconds           float64  `json:"idle_seconds"`
	StandbySeconds        float64  `json:"standby_seconds"`
	EgressSent            int64    `json:"egress_sent"`
	EgressReceived        int64    `json:"egress_received"`
	Money                 *float64 `json:"money,omitempty"`
	PerMillionTrajectores *float64 `json:"money_per_million_trajectories,omitempty"`
}

type costsJSON struct {
	Costs    []costJSON `json:"costs"`
	Total    costJSON   `json:"total"`
	Currency string     `json:"currency,omitempty"`
}

func toCostJSON(c *covev1.Cost) costJSON {
	return costJSON{Run: c.GetRun(), Group: c.GetGroup(), Episode: c.GetEpisode(), Sandbox: c.GetSandbox(), Reset: c.GetReset_(), Step: c.GetStep(), Sandboxes: c.GetSandboxes(), Episodes: c.GetEpisodes(),
		Steps: c.GetSteps(), CPUS: c.GetCpuSeconds(), StepCPUS: c.GetStepCpuSeconds(), MemoryGiBS: c.GetMemoryGibSeconds(), ReservedGiBS: c.GetMemoryReservedGibSeconds(),
		DiskGiBS: c.GetDiskGibSeconds(), SnapshotGiB: c.GetSnapshotGib(), Seconds: c.GetSeconds(), StepSeconds: c.GetStepSeconds(), IdleSeconds: c.GetIdleSeconds(),
		StandbySeconds: c.GetStandbySeconds(), EgressSent: c.GetEgressSent(), EgressReceived: c.GetEgressReceived()}
}

// prices turn what was used into money. What is left out costs nothing.
type prices struct {
	Currency        string  `json:"currency"`
	CPUSecond       float64 `json:"cpu_second"`
	MemorySecond    float64 `json:"memory_gib_second"`          // of what was used
	ReservedSecond  float64 `json:"memory_reserved_gib_second"` // of what was reserved
	DiskSecond      float64 `json:"disk_gib_second"`
	SnapshotGiB     float64 `json:"snapshot_gib"` // of what is stored now
	SandboxSecond   float64 `json:"sandbox_second"`
	StandbySecond   float64 `json:"standby_second"`
	IdleSecond      float64 `json:"idle_second"`
	EgressGiB       float64 `json:"egress_gib"`  // of what left
	IngressGiB      float64 `json:"ingress_gib"` // of what came in answer
	SandboxStarted  float64 `json:"sandbox"`
	StepCPUSecondly float64 `json:"step_cpu_second"`
}

func (p prices) price(c *costJSON) {
	m := c.CPUS*p.CPUSecond + c.MemoryGiBS*p.MemorySecond + c.ReservedGiBS*p.ReservedSecond + c.DiskGiBS*p.DiskSecond + c.SnapshotGiB*p.SnapshotGiB +
		c.Seconds*p.SandboxSecond + c.StandbySeconds*p.StandbySecond + float64(c.Sandboxes)*p.SandboxStarted + c.StepCPUS*p.StepCPUSecondly + c.IdleSeconds*p.IdleSecond +
		gib(c.EgressSent)*p.EgressGiB + gib(c.EgressReceived)*p.IngressGiB
	c.Money = &m
	if c.Episodes > 0 {
		per := m / float64(c.Episodes) * 1e6
		c.PerMillionTrajectores = &per
	}
}

func gib(n int64) float64 { return float64(n) / float64(sandbox.GiB) }

// readPrices reads a price file, and refuses what it does not know.
func readPrices(path string) (p prices, err error) {
	f, err := os.Open(path)
	if err != nil {
		return p, &sandbox.Error{Class: sandbox.Invalid, Field: "prices", Msg: "cannot be read", Err: err}
	}
	defer f.Close()
	dec := json.NewDecoder(f)
	dec.DisallowUnknownFields()
	if err = dec.Decode(&p); err == nil && dec.More() {
		err = errors.New("there is more than one value in it")
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("it is empty")
	}
	if err != nil {
		return p, &sandbox.Error{Class: sandbox.Invalid, Field: "prices", Msg: path + " is no file of prices", Err: err,
			Hint: `such as {"currency": "USD", "cpu_second": 0.00001, "memory_reserved_gib_second": 0.000002}; docs/rl.md lists the names`}
	}
	return p, nil
}

func (a *app) costCmd() *cobra.Command {
	var asJSON bool
	var by, run, file string
	cmd := &cobra.Command{
		Use:   "cost",
		Short: "Show what runs used, and with a price file what that costs",
		Example: `  cove cost --by run
  cove cost --by group --run grpo-7 --json
  cove cost --prices prices.json`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			var p *prices
			if file != "" {
				read, err := readPrices(file)
				if err != nil {
					return err
				}
				p = &read
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Runs.Cost(cmd.Context(), connect.NewRequest(&covev1.CostRequest{By: by, Run: run}))
			if err != nil {
				return err
			}
			out := costsJSON{Costs: each(resp.Msg.GetCosts(), toCostJSON), Total: toCostJSON(resp.Msg.GetTotal())}
			if p != nil {
				out.Currency = p.Currency
				for i := range out.Costs {
					p.price(&out.Costs[i])
				}
				p.price(&out.Total)
			}
			if asJSON {
				return a.printJSON(out)
			}
			return a.printCosts(out, by)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&by, "by", "run", "run, group, episode, sandbox, step (of one run) or tenant")
	fs.StringVar(&run, "run", "", "only of this run, by name or id")
	fs.StringVar(&file, "prices", "", "a JSON file of prices")
	fs.BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func (a *app) printCosts(out costsJSON, by string) error {
	t := &table{}
	head := []string{strings.ToUpper(by), "SANDBOXES", "EPISODES", "STEPS", "CPU S", "MEM GIB S", "RESERVED GIB S", "DISK GIB S", "SNAPSHOT GIB", "EGRESS", "IDLE S", "STANDBY S"}
	if out.Total.Money != nil {
		head = append(head, strings.TrimSpace("MONEY "+out.Currency), "PER MILLION TRAJECTORIES")
	}
	t.row(head...)
	number := func(f float64) string { return fmt.Sprintf("%.2f", f) }
	for i, c := range append(out.Costs, out.Total) {
		var name []string
		for _, part := range []string{c.Run, c.Group, c.Episode, c.Sandbox, c.Step} {
			if part != "" {
				name = append(name, part)
			}
		}
		if c.Reset > 0 {
			name = append(name, fmt.Sprint(c.Reset))
		}
		row := []string{cutFront(strings.Join(name, " / "), 60), fmt.Sprint(c.Sandboxes), fmt.Sprint(c.Episodes), fmt.Sprint(c.Steps), number(c.CPUS), number(c.MemoryGiBS),
			number(c.ReservedGiBS), number(c.DiskGiBS), number(c.SnapshotGiB), formatSize(c.EgressSent + c.EgressReceived), number(c.IdleSeconds), number(c.StandbySeconds)}
		if i == len(out.Costs) {
			row[0] = "total"
		}
		if c.Money != nil {
			per := ""
			if c.PerMillionTrajectores != nil {
				per = number(*c.PerMillionTrajectores)
			}
			row = append(row, fmt.Sprintf("%.6f", *c.Money), per)
		}
		t.row(row...)
	}
	return t.print(a.Stdout)
}
