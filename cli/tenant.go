package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/wire"
)

func (a *app) tenantCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "tenant", Aliases: []string{"tenants"}, Short: "Manage who shares this installation"}
	cmd.AddCommand(a.tenantCreateCmd(), a.tenantLsCmd(), a.tenantGetCmd(), a.tenantQuotaCmd(), a.tenantRmCmd())
	return cmd
}

// quotaFlags are those of a quota. What is not given is not touched, so that
// set-quota changes one bound and keeps the rest.
type quotaFlags struct{ set []func(*covev1.Quota) }

func (f *quotaFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	whole := func(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) }
	real := func(s string) (float64, error) { return strconv.ParseFloat(s, 64) }
	fs.Var(bounds("number", f, whole, func(q *covev1.Quota, n int64) { q.Sandboxes = n }), "sandboxes", "most live sandboxes; none = no bound, as of each of these")
	fs.Var(bounds("number", f, real, func(q *covev1.Quota, n float64) { q.Cpu = n }), "cpu", "most cores they ask for")
	fs.Var(bounds("size", f, parseSize, func(q *covev1.Quota, n int64) { q.Memory = n }), "memory", "most memory they ask for, like 64GiB")
	fs.Var(bounds("size", f, parseSize, func(q *covev1.Quota, n int64) { q.Disk = n }), "disk", "most disk of sandboxes and volumes, like 1TiB")
	fs.Var(bounds("size", f, parseSize, func(q *covev1.Quota, n int64) { q.SnapshotBytes = n }), "snapshot-bytes", "most bytes of snapshots, like 100GiB")
	fs.Var(bounds("size", f, parseSize, func(q *covev1.Quota, n int64) { q.ImageBytes = n }), "image-bytes", "most bytes of images with names of its own, like 50GiB")
	fs.Var(bounds("number", f, real, func(q *covev1.Quota, n float64) { q.CreatesPerSecond = n }), "creates-per-second", "most creates per second")
	fs.Var(bounds("number", f, func(s string) (int64, error) { return strconv.ParseInt(s, 10, 32) }, func(q *covev1.Quota, n int64) { q.Weight = int32(n) }),
		"weight", "share of a full node against other tenants (default 1)")
}

// on is q with what was given.
func (f *quotaFlags) on(q *covev1.Quota) *covev1.Quota {
	if q == nil {
		q = &covev1.Quota{}
	}
	for _, set := range f.set {
		set(q)
	}
	return q
}

// boundFlag is a bound, or "none" and 0, which the API reads as none.
type boundFlag struct {
	kind, text string
	take       func(string) error
}

func bounds[T int64 | float64](kind string, f *quotaFlags, parse func(string) (T, error), set func(*covev1.Quota, T)) *boundFlag {
	return &boundFlag{kind: kind, take: func(s string) error {
		var n T
		if s != "none" {
			var err error
			if n, err = parse(s); err != nil {
				if kind == "number" { // strconv's error names its function
					err = fmt.Errorf("%q is neither a number nor none", s)
				}
				return err
			}
		}
		f.set = append(f.set, func(q *covev1.Quota) { set(q, n) })
		return nil
	}}
}

func (b *boundFlag) Set(s string) error { b.text = s; return b.take(s) }
func (b *boundFlag) Type() string       { return b.kind }
func (b *boundFlag) String() string     { return b.text }

type quotaJSON struct {
	Sandboxes        int64   `json:"sandboxes"`
	CPU              float64 `json:"cpu"`
	Memory           int64   `json:"memory"`
	Disk             int64   `json:"disk"`
	SnapshotBytes    int64   `json:"snapshot_bytes"`
	CreatesPerSecond float64 `json:"creates_per_second,omitempty"`
	Weight           int32   `json:"weight,omitempty"`
	ImageBytes       int64   `json:"image_bytes"`
}

type tenantJSON struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Quota     quotaJSON         `json:"quota"`
	Used      *quotaJSON        `json:"used,omitempty"` // only from get
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at,omitzero"`
}

func toQuotaJSON(q *covev1.Quota) quotaJSON {
	return quotaJSON{q.GetSandboxes(), q.GetCpu(), q.GetMemory(), q.GetDisk(), q.GetSnapshotBytes(), q.GetCreatesPerSecond(), q.GetWeight(), q.GetImageBytes()}
}

// printTenant prints one that was made or changed.
func (a *app) printTenant(t *covev1.Tenant, asJSON bool) error {
	if asJSON {
		return a.printJSON(toTenantJSON(t))
	}
	_, err := fmt.Fprintln(a.Stdout, t.GetId())
	return err
}

func toTenantJSON(t *covev1.Tenant) tenantJSON {
	j := tenantJSON{ID: t.GetId(), Name: t.GetName(), Quota: toQuotaJSON(t.GetQuota()), Labels: t.GetLabels(), CreatedAt: timeOf(t.GetCreatedAt())}
	if t.GetUsed() != nil {
		u := toQuotaJSON(t.GetUsed())
		j.Used = &u
	}
	return j
}

func (a *app) tenantCreateCmd() *cobra.Command {
	var asJSON bool
	var labels keyValues
	var f quotaFlags
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a tenant and print its id", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		Example: `  cove tenant create research --sandboxes 200 --memory 256GiB
  cove key create --tenant research --role admin alice`,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			r, err := api.Tenants.Create(cmd.Context(), connect.NewRequest(&covev1.CreateTenantRequest{Name: args[0], Quota: f.on(nil), Labels: labels.m}))
			if err != nil {
				return err
			}
			return a.printTenant(r.Msg.GetTenant(), asJSON)
		},
	}
	f.add(cmd)
	cmd.Flags().VarP(&labels, "label", "l", "label (repeatable)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the tenant as JSON")
	return cmd
}

func (a *app) tenantLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List tenants", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			r, err := api.Tenants.List(cmd.Context(), connect.NewRequest(&covev1.ListTenantsRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(r.Msg.GetTenants(), toTenantJSON))
			}
			t := &table{}
			t.row("ID", "NAME", "SANDBOXES", "CPU", "MEMORY", "DISK", "SNAPSHOTS", "IMAGES", "CREATES/S")
			for _, tn := range r.Msg.GetTenants() {
				q := tn.GetQuota()
				t.row(tn.GetId(), cut(tn.GetName(), 40), bound(q.GetSandboxes()), bound(q.GetCpu()), boundSize(q.GetMemory()), boundSize(q.GetDisk()),
					boundSize(q.GetSnapshotBytes()), boundSize(q.GetImageBytes()), bound(q.GetCreatesPerSecond()))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func bound[T int64 | float64](n T) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatFloat(float64(n), 'g', -1, 64)
}

func boundSize(n int64) string {
	if n == 0 {
		return "-"
	}
	return formatSize(n)
}

func (a *app) tenantGetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get [NAME]", Short: "Show a tenant, its quota and what it uses (default: your own)", Args: cobra.MaximumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			r, err := api.Tenants.Get(cmd.Context(), connect.NewRequest(&covev1.GetTenantRequest{Name: strings.Join(args, "")}))
			if err != nil {
				return err
			}
			tn := r.Msg.GetTenant()
			if asJSON {
				return a.printJSON(toTenantJSON(tn))
			}
			q, u, t := tn.GetQuota(), tn.GetUsed(), &table{}
			fmt.Fprintf(a.Stdout, "%s %s\n", tn.GetId(), escape(tn.GetName()))
			t.row("THING", "USED", "QUOTA")
			t.row("sandboxes", fmt.Sprint(u.GetSandboxes()), bound(q.GetSandboxes()))
			t.row("cpu", fmt.Sprint(u.GetCpu()), bound(q.GetCpu()))
			t.row("memory", formatSize(u.GetMemory()), boundSize(q.GetMemory()))
			t.row("disk", formatSize(u.GetDisk()), boundSize(q.GetDisk()))
			t.row("snapshots", formatSize(u.GetSnapshotBytes()), boundSize(q.GetSnapshotBytes()))
			t.row("images", formatSize(u.GetImageBytes()), boundSize(q.GetImageBytes()))
			t.row("creates/s", "", bound(q.GetCreatesPerSecond()))
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) tenantQuotaCmd() *cobra.Command {
	var asJSON bool
	var f quotaFlags
	cmd := &cobra.Command{
		Use: "set-quota NAME", Short: "Change bounds of a tenant; those not given stay", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		Long: `Change bounds of a tenant. Those that are not given stay as they are; "none" or
0 lifts one. Nothing that runs is ended.`,
		Example: `  cove tenant set-quota research --sandboxes 400
  cove tenant set-quota research --memory none`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(f.set) == 0 {
				return usage(cmd, errors.New("which bound? give --sandboxes, --cpu, --memory, --disk, --snapshot-bytes, --image-bytes, --creates-per-second or --weight"))
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			// The API replaces a quota whole. Two who change it at once can
			// undo each other, as they could before.
			was, err := api.Tenants.Get(cmd.Context(), connect.NewRequest(&covev1.GetTenantRequest{Name: args[0]}))
			if err != nil {
				return err
			}
			r, err := api.Tenants.SetQuota(cmd.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: args[0], Quota: f.on(was.Msg.GetTenant().GetQuota())}))
			if err != nil {
				return err
			}
			return a.printTenant(r.Msg.GetTenant(), asJSON)
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the tenant as JSON")
	return cmd
}

func (a *app) tenantRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Remove tenants that have nothing left, with their keys", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(n string) error {
				_, err := api.Tenants.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteTenantRequest{Name: n}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

type auditJSON struct {
	Seq     int64     `json:"seq"`
	At      time.Time `json:"at"`
	Tenant  string    `json:"tenant"`
	Key     string    `json:"key"`
	KeyName string    `json:"key_name"`
	Remote  string    `json:"remote"`
	Op      string    `json:"op"`
	Things  []string  `json:"things"`
	Outcome string    `json:"outcome"`
	Prev    string    `json:"prev"`
	Hash    string    `json:"hash"`
}

func (a *app) auditCmd() *cobra.Command {
	var asJSON, follow, all bool
	var since duration
	var after int64
	cmd := &cobra.Command{
		Use: "audit", Short: "Print who did what to which thing, oldest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Example: `  cove audit --since 24h
  cove audit --all --json > audit.jsonl
  cove audit --follow`,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			m := &covev1.AuditRequest{Follow: follow, All: all, After: after}
			if since > 0 {
				m.Since = timestamppb.New(time.Now().Add(-time.Duration(since)))
			}
			st, err := api.System.Audit(cmd.Context(), connect.NewRequest(m))
			if err != nil {
				return err
			}
			defer st.Close()
			for st.Receive() {
				e := st.Msg()
				if asJSON {
					err = json.NewEncoder(a.Stdout).Encode(auditJSON{e.GetSeq(), timeOf(e.GetAt()), e.GetTenant(), e.GetKey(), e.GetKeyName(), e.GetRemote(), e.GetOp(), each(e.GetThings(), func(s string) string { return s }), e.GetOutcome(), e.GetPrev(), e.GetHash()})
				} else {
					_, err = io.WriteString(a.Stdout, fmt.Sprintf("%s %-16s %-16s %-20s %-18s %s\n", timeOf(e.GetAt()).UTC().Format(time.RFC3339), e.GetTenant(), cut(escape(e.GetKeyName()), 16), e.GetOp(), e.GetOutcome(), escape(strings.Join(e.GetThings(), " "))))
				}
				if err != nil {
					return err
				}
			}
			return wire.FromConnect(st.Err())
		},
	}
	fs := cmd.Flags()
	fs.Var(&since, "since", "only what happened in this time, like 24h or 7d")
	fs.Int64Var(&after, "after", 0, "only entries after this sequence number")
	fs.BoolVar(&follow, "follow", false, "go on with what is added")
	fs.BoolVar(&all, "all", false, "of every tenant; needs a key of an installation's admin")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object per line, with the hashes that chain them")
	return cmd
}
