package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

type planJSON struct {
	Version      int64          `json:"version"`
	State        string         `json:"state"`
	CreatedAt    time.Time      `json:"created_at,omitzero"`
	Items        []planItemJSON `json:"items"`
	Kernels      int32          `json:"kernels"`
	KernelsAim   int32          `json:"kernels_aim"`
	KernelsReady int32          `json:"kernels_ready"`
}

type planItemJSON struct {
	Image    string     `json:"image,omitempty"`
	Template string     `json:"template,omitempty"`
	Snapshot string     `json:"snapshot,omitempty"`
	Count    int32      `json:"count"`
	State    string     `json:"state"`
	Step     string     `json:"step,omitempty"`
	Done     int64      `json:"done,omitempty"`
	Total    int64      `json:"total,omitempty"`
	Error    *errorJSON `json:"error,omitempty"`
}

// planOriginJSON is an item as a plan's file has it.
type planOriginJSON struct {
	Image    string `json:"image,omitempty"`
	Template string `json:"template,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Count    int32  `json:"count"`
}

func toPlanJSON(p *covev1.Plan) planJSON {
	j := planJSON{Version: p.GetVersion(), State: p.GetState(), CreatedAt: timeOf(p.GetCreatedAt()), Items: []planItemJSON{},
		Kernels: p.GetKernels(), KernelsAim: p.GetKernelsAim(), KernelsReady: p.GetKernelsReady()}
	for _, it := range p.GetItems() {
		o := it.GetItem()
		item := planItemJSON{Image: o.GetImage(), Template: o.GetTemplate(), Snapshot: o.GetSnapshot(), Count: o.GetCount(), State: it.GetState(),
			Step: it.GetStep(), Done: it.GetDone(), Total: it.GetTotal()}
		if e := it.GetError(); e != nil {
			item.Error = &errorJSON{Code: e.GetCode(), Message: it.GetMessage(), Hint: e.GetHint()}
		}
		j.Items = append(j.Items, item)
	}
	return j
}

// maxPlanFile is many times what 256 items take.
const maxPlanFile = 1 << 20

func (a *app) runsPlanCmd() *cobra.Command {
	var show, wait, cancel, asJSON bool
	cmd := &cobra.Command{
		Use: "plan RUN [FILE]", Short: "Say what a run will start from next, so that the node has it ready",
		Long: `FILE (- for stdin) is a JSON array of what the run will start sandboxes from, each
with one of image, template and snapshot, and a count. The node pulls images,
reads checkpoints and boots kernels for them, as far as its memory allows. What
the run said before is replaced; a plan ends with its run.`,
		Example: `  echo '[{"image": "python:3.12", "count": 256}, {"snapshot": "warm", "count": 8}]' | cove runs plan grpo-7 - --wait
  cove runs plan grpo-7 --show --json
  cove runs plan grpo-7 --cancel`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			given := 0
			for _, b := range []bool{len(args) == 2, show || wait && len(args) == 1, cancel} {
				if b {
					given++
				}
			}
			if given != 1 {
				return usagef("cove runs plan RUN FILE, --show or --cancel", "a plan is set by a file, shown, or cancelled")
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			req := &covev1.SetPlanRequest{Run: args[0]}
			if len(args) == 2 {
				if req.Items, err = a.readPlan(args[1]); err != nil {
					return err
				}
			}
			var p *covev1.Plan
			if show || wait && len(args) == 1 {
				resp, gerr := api.Runs.GetPlan(cmd.Context(), connect.NewRequest(&covev1.GetPlanRequest{Run: args[0]}))
				if err = gerr; err == nil {
					p = resp.Msg.GetPlan()
				}
			} else {
				resp, serr := api.Runs.SetPlan(cmd.Context(), connect.NewRequest(req))
				if err = serr; err == nil {
					p = resp.Msg.GetPlan()
				}
			}
			for err == nil && wait && p.GetState() == "staging" {
				err = a.again(cmd.Context(), func() error {
					resp, err := api.Runs.GetPlan(cmd.Context(), connect.NewRequest(&covev1.GetPlanRequest{Run: args[0], Wait: durationpb.New(20 * time.Second)}))
					if err == nil {
						p = resp.Msg.GetPlan()
					}
					return err
				})
			}
			if err != nil {
				return err
			}
			if err := a.printPlan(p, asJSON); err != nil {
				return err
			}
			if p.GetState() == "failed" {
				return &ExitError{Code: exitFailed}
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.BoolVar(&show, "show", false, "only show what is ready")
	fs.BoolVar(&wait, "wait", false, "until all is ready, or will not be")
	fs.BoolVar(&cancel, "cancel", false, "the run says nothing any more")
	fs.BoolVar(&asJSON, "json", false, "print the plan as JSON")
	return cmd
}

func (a *app) readPlan(path string) (items []*covev1.PlanItem, err error) {
	b, err := a.readBounded(path, maxPlanFile)
	if err != nil {
		return nil, err
	}
	var list []planOriginJSON
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&list); err != nil || dec.More() {
		return nil, usagef(`[{"image": "base", "count": 8}]`, "%s is no plan: %v", path, err)
	}
	if len(list) == 0 {
		return nil, usagef("--cancel ends a plan", "%s has no items", path)
	}
	for _, o := range list {
		items = append(items, &covev1.PlanItem{Image: o.Image, Template: o.Template, Snapshot: o.Snapshot, Count: o.Count})
	}
	return items, nil
}

func (a *app) printPlan(p *covev1.Plan, asJSON bool) error {
	j := toPlanJSON(p)
	if asJSON {
		return a.printJSON(j)
	}
	if j.State == "none" {
		_, err := fmt.Fprintln(a.Stdout, "no plan")
		return err
	}
	t := &table{}
	t.row("STATE", "COUNT", "FROM", "")
	for _, it := range j.Items {
		detail := it.Step
		if it.Error != nil {
			detail = it.Error.Message
		}
		t.row(it.State, fmt.Sprint(it.Count), cut(it.Image+it.Template+it.Snapshot, 60), cut(detail, 100))
	}
	if err := t.print(a.Stdout); err != nil {
		return err
	}
	_, err := fmt.Fprintf(a.Stdout, "%s: %d of %d kernels are warm, for %d sandboxes to come\n", j.State, j.KernelsReady, j.KernelsAim, j.Kernels)
	return err
}
