package cli

import (
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

type leaseJSON struct {
	ID        string    `json:"id"`
	Name      string    `json:"name,omitempty"`
	TTLS      float64   `json:"ttl_s"`
	CreatedAt time.Time `json:"created_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	Sandboxes int32     `json:"sandboxes"`
}

func toLeaseJSON(l *covev1.Lease) leaseJSON {
	return leaseJSON{ID: l.GetId(), Name: l.GetName(), TTLS: l.GetTtl().AsDuration().Seconds(),
		CreatedAt: timeOf(l.GetCreatedAt()), ExpiresAt: timeOf(l.GetExpiresAt()), Sandboxes: l.GetSandboxes()}
}

func (a *app) leaseCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lease",
		Short: "Sandboxes that end when their client is gone",
		Long: `A lease lasts as long as somebody renews it. Sandboxes created with it end when
it was not renewed for its ttl, or is removed. The Python SDK makes one for each
process and renews it; in a shell, "cove lease renew" does.`,
		Example: `  lease=$(cove lease create --ttl 10m)
  cove create --lease $lease
  cove lease renew $lease     # at least every ten minutes
  cove lease rm $lease        # and its sandboxes are gone`,
	}
	cmd.AddCommand(a.leaseLsCmd(), a.leaseCreateCmd(), a.leaseRenewCmd(), a.leaseRmCmd())
	return cmd
}

func (a *app) leaseLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List leases, oldest first",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Leases.List(cmd.Context(), connect.NewRequest(&covev1.ListLeasesRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetLeases(), toLeaseJSON))
			}
			t := &table{}
			t.row("ID", "SANDBOXES", "TTL", "EXPIRES", "AGE", "NAME")
			now := time.Now()
			for _, l := range resp.Msg.GetLeases() {
				t.row(l.GetId(), fmt.Sprint(l.GetSandboxes()), formatDuration(l.GetTtl().AsDuration()),
					"in "+formatDuration(timeOf(l.GetExpiresAt()).Sub(now)), age(timeOf(l.GetCreatedAt())), cut(l.GetName(), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) leaseCreateCmd() *cobra.Command {
	var ttl duration
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create", Short: "Make a lease and print its id",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Leases.Create(cmd.Context(), connect.NewRequest(&covev1.CreateLeaseRequest{Ttl: ttl.proto(), Name: name}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toLeaseJSON(resp.Msg.GetLease()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetLease().GetId())
			return err
		},
	}
	cmd.Flags().Var(&ttl, "ttl", "how long it lasts without being renewed, 1s to 7d (default 5m)")
	cmd.Flags().StringVar(&name, "name", "", "who holds it, for people")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the lease as JSON")
	return cmd
}

func (a *app) leaseRenewCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "renew ID", Short: "Let a lease last for its ttl from now on",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Leases.Heartbeat(cmd.Context(), connect.NewRequest(&covev1.HeartbeatRequest{Id: args[0]}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toLeaseJSON(resp.Msg.GetLease()))
			}
			_, err = fmt.Fprintln(a.Stdout, timeOf(resp.Msg.GetLease().GetExpiresAt()).Local().Format(time.RFC3339))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the lease as JSON")
	return cmd
}

func (a *app) leaseRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm ID...", Short: "End leases with their sandboxes, whose ids are printed",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var gone []string
			failed := a.forEach(cmd.Context(), args, func(id string) error {
				resp, err := api.Leases.End(cmd.Context(), connect.NewRequest(&covev1.EndLeaseRequest{Id: id}))
				if err != nil {
					return err
				}
				gone = append(gone, resp.Msg.GetIds()...)
				return nil
			})
			return a.printGone(gone, asJSON, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of ids")
	return cmd
}
