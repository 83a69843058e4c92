package cli

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
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

// ownLease is a lease of this process: renewed as long as it lives, so that what
// was created with it does not outlive it, however it goes.
type ownLease struct {
	app  *app
	id   string
	stop context.CancelFunc
	beat sync.WaitGroup
}

func (a *app) holdLease(ctx context.Context, name string, ttl time.Duration) (*ownLease, error) {
	d := duration(ttl)
	resp, err := a.api.Leases.Create(ctx, connect.NewRequest(&covev1.CreateLeaseRequest{Ttl: d.proto(), Name: name}))
	if err != nil {
		return nil, err
	}
	l := &ownLease{app: a, id: resp.Msg.GetLease().GetId()}
	bctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = stop
	l.beat.Go(func() { l.renew(bctx, ttl/6) })
	return l, nil
}

func (l *ownLease) renew(ctx context.Context, every time.Duration) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			// One that fails is followed by others before the lease is lost, and one
			// that hangs does not hold them up for long.
			bctx, cancel := context.WithTimeout(ctx, 2*every)
			_, _ = l.app.api.Leases.Heartbeat(bctx, connect.NewRequest(&covev1.HeartbeatRequest{Id: l.id}))
			cancel()
		}
	}
}

// end ends the lease, and with it whatever might be left.
func (l *ownLease) end() error {
	l.stop()
	l.beat.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	_, err := l.app.api.Leases.End(ctx, connect.NewRequest(&covev1.EndLeaseRequest{Id: l.id}))
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}
