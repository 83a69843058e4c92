package cli

import (
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) registryCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "registry", Aliases: []string{"registries"}, Short: "Keep credentials of private registries, for pulls of your tenant"}
	cmd.AddCommand(a.registryLoginCmd(), a.registryLsCmd(), a.registryLogoutCmd())
	return cmd
}

func (a *app) registryLoginCmd() *cobra.Command {
	var username string
	var passwordStdin, asJSON bool
	cmd := &cobra.Command{
		Use:   "login HOST --username U [--password-stdin]",
		Short: "Keep who you are to a registry; pulls of your tenant use it",
		Long: `Keep a user name and password, or a token, of a registry: sealed, on the server,
for every pull of your tenant that names no credentials. Again, it replaces what
is there. The password is read from a terminal without echo, or from stdin. Whether
the registry takes them shows with the first pull.`,
		Example: "  pass show ghcr | cove registry login ghcr.io --username me --password-stdin\n  cove image pull ghcr.io/org/private:v1",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.registryHosts,
		RunE: func(cmd *cobra.Command, args []string) error {
			if username == "" {
				return usagef("for example: pass show ghcr | cove registry login ghcr.io --username me --password-stdin", "--username is missing")
			}
			if _, tty := terminal(a.Stdin); !tty && !passwordStdin {
				return usagef("pipe it in with --password-stdin", "there is no terminal to ask for the password on")
			}
			password, err := a.readValue(cmd.Context(), secretFlags{})
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Images.Login(cmd.Context(), connect.NewRequest(&covev1.LoginRegistryRequest{Registry: args[0], Username: username, Password: password}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toRegistryJSON(resp.Msg.GetLogin()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetLogin().GetRegistry())
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVarP(&username, "username", "u", "", "user of the registry; with a token alone, any")
	fs.BoolVar(&passwordStdin, "password-stdin", false, "read the password or token from stdin")
	fs.BoolVar(&asJSON, "json", false, "print the login, without the password, as JSON")
	return cmd
}

func (a *app) registryLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the registries that your tenant has credentials for", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Images.Logins(cmd.Context(), connect.NewRequest(&covev1.ListLoginsRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetLogins(), toRegistryJSON))
			}
			t := &table{}
			t.row("REGISTRY", "USERNAME", "UPDATED")
			for _, l := range resp.Msg.GetLogins() {
				t.row(l.GetRegistry(), l.GetUsername(), age(timeOf(l.GetUpdatedAt()))+" ago")
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) registryLogoutCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "logout HOST...", Aliases: []string{"rm"}, Short: "Forget credentials of registries", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.registryHosts,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(host string) error {
				_, err := api.Images.Logout(cmd.Context(), connect.NewRequest(&covev1.LogoutRegistryRequest{Registry: host}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of hosts")
	return cmd
}

// registryHosts completes.
func (a *app) registryHosts(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if api, err := a.client(); err == nil {
		if resp, err := api.Images.Logins(cmd.Context(), connect.NewRequest(&covev1.ListLoginsRequest{})); err == nil {
			for _, l := range resp.Msg.GetLogins() {
				out = append(out, l.GetRegistry())
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

type registryJSON struct {
	Registry  string    `json:"registry"`
	Username  string    `json:"username"`
	UpdatedAt time.Time `json:"updated_at"`
}

func toRegistryJSON(l *covev1.RegistryLogin) registryJSON {
	return registryJSON{l.GetRegistry(), l.GetUsername(), timeOf(l.GetUpdatedAt())}
}
