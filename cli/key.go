package cli

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) keyCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "key", Aliases: []string{"keys"}, Short: "Manage API keys"}
	cmd.AddCommand(a.keyCreateCmd(), a.keyLsCmd(), a.keyRotateCmd(), a.keyRevokeCmd())
	return cmd
}

func (a *app) keyCreateCmd() *cobra.Command {
	var asJSON bool
	m := &covev1.CreateKeyRequest{}
	var expires duration
	cmd := &cobra.Command{
		Example: `  cove key create ci --role developer --expires 30d
  cove key create dashboard --role readonly --scope sandboxes:read
  cove key create alice --tenant research --role admin`,
		Use: "create NAME", Short: "Make an API key and print its secret, which is never shown again", Args: cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			m.Name = args[0]
			if cmd.Flags().Changed("expires") {
				if expires == 0 {
					return usagef("a duration like 30d", "--expires 0 is now; a key without it never expires")
				}
				m.Expires = expires.proto()
			}
			resp, err := api.Keys.Create(cmd.Context(), connect.NewRequest(m))
			if err != nil {
				return err
			}
			if asJSON {
				j := toKeyJSON(resp.Msg.GetKey())
				j.Secret = resp.Msg.GetSecret()
				return a.printJSON(j)
			}
			fmt.Fprintf(a.Stderr, "key %s; keep the secret, only its hash is stored\n", resp.Msg.GetKey().GetId())
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetSecret())
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&m.Tenant, "tenant", "", "name or id of its tenant (default: your own)")
	fs.StringVar(&m.Role, "role", "", "admin, developer, readonly, or root for the installation (default: your own)")
	fs.StringSliceVar(&m.Scopes, "scope", nil, "part of the API it is for, like sandboxes or images:read (repeatable; default: all)")
	fs.Var(&expires, "expires", "after which time it is worthless, like 30d (default: never)")
	fs.BoolVar(&asJSON, "json", false, "print the key and its secret as JSON")
	return cmd
}

func (a *app) keyLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List API keys", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Keys.List(cmd.Context(), connect.NewRequest(&covev1.ListKeysRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetKeys(), toKeyJSON))
			}
			t := &table{}
			t.row("ID", "NAME", "TENANT", "ROLE", "SCOPES", "AGE", "LAST USED", "EXPIRES")
			for _, k := range resp.Msg.GetKeys() {
				used := "never"
				if k.GetLastUsedAt() != nil {
					used = age(timeOf(k.GetLastUsedAt())) + " ago"
				}
				expires := "never"
				if k.GetExpiresAt() != nil {
					expires = timeOf(k.GetExpiresAt()).UTC().Format(time.RFC3339)
				}
				scopes := cmp.Or(strings.Join(k.GetScopes(), ","), "all")
				t.row(k.GetId(), cut(k.GetName(), 40), k.GetTenant(), k.GetRole(), scopes, age(timeOf(k.GetCreatedAt())), used, expires)
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) keyRotateCmd() *cobra.Command {
	var asJSON bool
	grace := duration(time.Hour)
	cmd := &cobra.Command{
		Use: "rotate ID", Short: "Give a key a new secret and print it; the old one stays good for a while", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Keys.Rotate(cmd.Context(), connect.NewRequest(&covev1.RotateKeyRequest{Id: args[0], Grace: durationpb.New(time.Duration(grace))}))
			if err != nil {
				return err
			}
			if asJSON {
				j := toKeyJSON(resp.Msg.GetKey())
				j.Secret = resp.Msg.GetSecret()
				return a.printJSON(j)
			}
			fmt.Fprintf(a.Stderr, "key %s; its old secret is good until %s\n", resp.Msg.GetKey().GetId(), timeOf(resp.Msg.GetKey().GetOldSecretUntil()).Local().Format(time.RFC3339))
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetSecret())
			return err
		},
	}
	cmd.Flags().Var(&grace, "grace", "how long the old secret stays good")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the key and its secret as JSON")
	return cmd
}

func (a *app) keyRevokeCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "revoke ID...", Aliases: []string{"rm"}, Short: "Make keys worthless at once", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			var out []string
			if api, err := a.client(); err == nil {
				if resp, err := api.Keys.List(cmd.Context(), connect.NewRequest(&covev1.ListKeysRequest{})); err == nil {
					for _, k := range resp.Msg.GetKeys() {
						out = append(out, k.GetId()+"\t"+escape(k.GetName()))
					}
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(id string) error {
				_, err := api.Keys.Revoke(cmd.Context(), connect.NewRequest(&covev1.RevokeKeyRequest{Id: id}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of ids")
	return cmd
}
