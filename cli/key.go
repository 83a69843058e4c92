package cli

import (
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) keyCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "key", Aliases: []string{"keys"}, Short: "Manage API keys", Args: knownCommand, RunE: func(cmd *cobra.Command, args []string) error { return cmd.Help() }}
	cmd.AddCommand(a.keyCreateCmd(), a.keyLsCmd(), a.keyRevokeCmd())
	return cmd
}

func (a *app) keyCreateCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make an API key and print its secret, which is never shown again", Args: cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Keys.Create(cmd.Context(), connect.NewRequest(&covev1.CreateKeyRequest{Name: args[0]}))
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
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the key and its secret as JSON")
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
			t.row("ID", "NAME", "AGE", "LAST USED")
			for _, k := range resp.Msg.GetKeys() {
				used := "never"
				if k.GetLastUsedAt() != nil {
					used = age(timeOf(k.GetLastUsedAt())) + " ago"
				}
				t.row(k.GetId(), cut(k.GetName(), 40), age(timeOf(k.GetCreatedAt())), used)
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) keyRevokeCmd() *cobra.Command {
	return &cobra.Command{
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
			for _, id := range args {
				if _, err := api.Keys.Revoke(cmd.Context(), connect.NewRequest(&covev1.RevokeKeyRequest{Id: id})); err != nil {
					return err
				}
				fmt.Fprintln(a.Stdout, id)
			}
			return nil
		},
	}
}
