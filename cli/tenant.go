package cli

import (
	"encoding/json"
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
	cmd := &cobra.Command{Use: "tenant", Aliases: []string{"tenants"}, Short: "Manage who shares this installation", Args: knownCommand,
		RunE: func(cmd *cobra.Command, args []string) error { return cmd.Help() }}
	cmd.AddCommand(a.tenantCreateCmd(), a.tenantLsCmd(), a.tenantGetCmd(), a.tenantQuotaCmd(), a.tenantRmCmd())
	return cmd
}

// quotaFlags are those of a quota; each that is not given is 0, no bound.
type quotaFlags struct {
	memory, disk, snapshots string
	q                       covev1.Quota
}

func (f *quotaFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.Int64Var(&f.q.Sandboxes, "sandboxes", 0, "most live sandboxes")
	fs.Float64Var(&f.q.Cpu, "cpu", 0, "most cores they ask for")
	fs.StringVar(&f.memory, "memory", "", "most memory they ask for, like 64GiB")
	fs.StringVar(&f.disk, "disk", "", "most disk of sandboxes and volumes, like 1TiB")
	fs.StringVar(&f.snapshots, "snapshot-bytes", "", "most bytes of snapshots, like 100GiB")
	fs.Float64Var(&f.q.CreatesPerSecond, "creates-per-second", 0, "most creates per second")
	fs.Int32Var(&f.q.Weight, "weight", 0, "share of a full node against other tenants (default 1)")
}

func (f *quotaFlags) quota() (*covev1.Quota, error) {
	for _, s := range []struct {
		flag, text string
		to         *int64
	}{{"memory", f.memory, &f.q.Memory}, {"disk", f.disk, &f.q.Disk}, {"snapshot-bytes", f.snapshots, &f.q.SnapshotBytes}} {
		if s.text == "" {
			continue
		}
		n, err := parseSize(s.text)
		if err != nil {
			return nil, usagef("a size like 64GiB", "--%s: %v", s.flag, err)
		}
		*s.to = n
	}
	return &f.q, nil
}

type quotaJSON struct {
	Sandboxes        int64   `json:"sandboxes"`
	CPU              float64 `json:"cpu"`
	Memory           int64   `json:"memory"`
	Disk             int64   `json:"disk"`
	SnapshotBytes    int64   `json:"snapshot_bytes"`
	CreatesPerSecond float64 `json:"creates_per_second,omitempty"`
	Weight           int32   `json:"weight,omitempty"`
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
	return quotaJSON{q.GetSandboxes(), q.GetCpu(), q.GetMemory(), q.GetDisk(), q.GetSnapshotBytes(), q.GetCreatesPerSecond(), q.GetWeight()}
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
			q, err := f.quota()
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			r, err := api.Tenants.Create(cmd.Context(), connect.NewRequest(&covev1.CreateTenantRequest{Name: args[0], Quota: q, Labels: labels.m}))
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
			t.row("ID", "NAME", "SANDBOXES", "CPU", "MEMORY", "DISK", "SNAPSHOTS", "CREATES/S")
			for _, tn := range r.Msg.GetTenants() {
				q := tn.GetQuota()
				t.row(tn.GetId(), cut(tn.GetName(), 40), bound(q.GetSandboxes()), bound(q.GetCpu()), boundSize(q.GetMemory()), boundSize(q.GetDisk()),
					boundSize(q.GetSnapshotBytes()), bound(q.GetCreatesPerSecond()))
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
		Use: "set-quota NAME", Short: "Replace a tenant's quota; what is not given has no bound", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := f.quota()
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			r, err := api.Tenants.SetQuota(cmd.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: args[0], Quota: q}))
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
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove tenants that have nothing left, with their keys", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			failed := a.forEach(cmd.Context(), args, func(name string) error {
				if _, err := api.Tenants.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteTenantRequest{Name: name})); err != nil {
					return err
				}
				fmt.Fprintln(a.Stdout, name)
				return nil
			})
			return failed
		},
	}
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
	var since time.Duration
	var after int64
	cmd := &cobra.Command{
		Use: "audit", Short: "Print who did what to which thing, oldest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Example: `  cove audit --since 24h
  cove audit --all --json > audit.jsonl
  cove audit --follow`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if since < 0 {
				return usagef("a duration like 24h", "--since %s is in the future", since)
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			m := &covev1.AuditRequest{Follow: follow, All: all, After: after}
			if since > 0 {
				m.Since = timestamppb.New(time.Now().Add(-since))
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
	fs.DurationVar(&since, "since", 0, "only what happened in this time, like 24h")
	fs.Int64Var(&after, "after", 0, "only entries after this sequence number")
	fs.BoolVar(&follow, "follow", false, "go on with what is added")
	fs.BoolVar(&all, "all", false, "of every tenant; needs a key of an installation's admin")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object per line, with the hashes that chain them")
	return cmd
}
