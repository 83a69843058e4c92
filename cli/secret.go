package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) secretCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "secret", Aliases: []string{"secrets"}, Short: "Keep values that requests of sandboxes leave with and no sandbox sees"}
	cmd.AddCommand(a.secretSetCmd(), a.secretLsCmd(), a.secretRmCmd(), a.secretUseCmd())
	return cmd
}

// secretFlags are all but the value, which is never an argument: those are
// readable by every user of the machine and stay in the shell's history.
type secretFlags struct {
	hosts                            []string
	header, format, env, placeholder string
	url, body, allowHTTP             bool
	valueFile, valueEnv              string
	keepValue                        bool
	labels                           keyValues
	noLabels                         bool
}

func (a *app) secretSetCmd() *cobra.Command {
	var f secretFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Make a secret, or change one; running sandboxes use it at once",
		Long: `Make a secret, or change one. The value is read from a terminal without echo,
from stdin, a file or a variable. Of a secret that is there already only what is
given changes; running sandboxes use it with their next request.

A request of a sandbox to one of its hosts leaves with the value: in --header, or
without one wherever the placeholder stands in a header, and with --url-too or
--body there too. Inside, --env names a variable that holds the placeholder.`,
		Example: `  cove secret set openai --host api.openai.com --header Authorization --format 'Bearer {}' --env OPENAI_API_KEY
  pass show github | cove secret set github --host api.github.com --host github.com --env GITHUB_TOKEN
  cove secret set openai --value-env NEW_KEY      # rotate
  cove secret set openai --keep-value --label team=rl
  cove run --secret openai --network public -- python3 agent.py`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.secretNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			var value *string
			if !f.keepValue {
				v, err := a.readValue(cmd.Context(), f)
				if err != nil {
					return err
				}
				value = &v
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			given := cmd.Flags().Changed
			var out *covev1.Secret
			u := &covev1.UpdateSecretRequest{Name: args[0], Value: value, Hosts: f.hosts, Labels: f.labels.m, ClearLabels: f.noLabels}
			optional(given("header"), &u.Header, f.header)
			optional(given("format"), &u.Format, f.format)
			optional(given("env"), &u.Env, f.env)
			optional(given("url-too"), &u.Url, f.url)
			optional(given("body"), &u.Body, f.body)
			optional(given("allow-http"), &u.AllowHttp, f.allowHTTP)
			err = sandbox.ErrNotFound
			if !given("placeholder") { // which is for a new one: it is in files and memory of sandboxes
				var resp *connect.Response[covev1.UpdateSecretResponse]
				if resp, err = api.Secrets.Update(cmd.Context(), connect.NewRequest(u)); err == nil {
					out = resp.Msg.GetSecret()
				}
			}
			switch {
			case err == nil:
			case errors.Is(err, sandbox.ErrNotFound) && value != nil:
				made, err := api.Secrets.Create(cmd.Context(), connect.NewRequest(&covev1.CreateSecretRequest{Name: args[0], Value: *value, Hosts: f.hosts,
					Header: f.header, Format: f.format, Env: f.env, Url: f.url, Body: f.body, AllowHttp: f.allowHTTP, Placeholder: f.placeholder, Labels: f.labels.m}))
				if err != nil {
					return err
				}
				out = made.Msg.GetSecret()
			default:
				return err
			}
			if asJSON {
				return a.printJSON(toSecretJSON(out))
			}
			_, err = fmt.Fprintln(a.Stdout, out.GetPlaceholder())
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringSliceVar(&f.hosts, "host", nil, "host it is sent to, api.example.com or '*.example.com' (repeatable)")
	fs.StringVar(&f.header, "header", "", "header that every request to its hosts gets, like Authorization")
	fs.StringVar(&f.format, "format", "", "value of the header, {} is the secret's, like 'Bearer {}'")
	fs.StringVar(&f.env, "env", "", "variable that holds the placeholder inside")
	fs.BoolVar(&f.url, "url-too", false, "replace the placeholder in path and query of URLs too")
	fs.BoolVar(&f.body, "body", false, "replace the placeholder in bodies too")
	fs.BoolVar(&f.allowHTTP, "allow-http", false, "send it over connections without TLS too, where anybody can read it")
	fs.StringVar(&f.placeholder, "placeholder", "", "what stands for a new secret inside, for programs that want a certain form (default: made up)")
	fs.VarP(&f.labels, "label", "l", "label, in place of all before (repeatable)")
	fs.BoolVar(&f.noLabels, "no-labels", false, "it has no labels any more")
	fs.StringVar(&f.valueFile, "value-file", "", "file that holds the value")
	fs.StringVar(&f.valueEnv, "value-env", "", "local variable that holds the value")
	fs.BoolVar(&f.keepValue, "keep-value", false, "change the rest and leave the value")
	cmd.MarkFlagsMutuallyExclusive("value-file", "value-env", "keep-value")
	cmd.MarkFlagsMutuallyExclusive("label", "no-labels")
	fs.BoolVar(&asJSON, "json", false, "print the secret, without its value, as JSON")
	return cmd
}

func optional[T any](given bool, to **T, v T) {
	if given {
		*to = &v
	}
}

// readValue reads the value of a secret; one line feed at its end is not part of
// it.
func (a *app) readValue(ctx context.Context, f secretFlags) (string, error) {
	const most = 1 << 20
	var b []byte
	var err error
	in, isFile := a.Stdin.(*os.File)
	switch {
	case f.valueEnv != "":
		v := a.Getenv(f.valueEnv)
		if v == "" {
			return "", usagef("export it first", "the variable %s is not set", f.valueEnv)
		}
		return v, nil
	case f.valueFile != "":
		b, err = os.ReadFile(f.valueFile)
	case isFile && term.IsTerminal(int(in.Fd())):
		state, serr := term.GetState(int(in.Fd()))
		if serr != nil {
			return "", serr
		}
		fmt.Fprint(a.Stderr, "value: ")
		b, err = untilDone(ctx, func() ([]byte, error) { return term.ReadPassword(int(in.Fd())) })
		fmt.Fprintln(a.Stderr)
		if ctx.Err() != nil {
			_ = term.Restore(int(in.Fd()), state) // the read that was left would have
		}
	default:
		b, err = untilDone(ctx, func() ([]byte, error) { return io.ReadAll(io.LimitReader(a.Stdin, most)) })
	}
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"), nil
}

// untilDone leaves a read of stdin when ctx is over: nothing interrupts it, and
// it ends with our process.
func untilDone(ctx context.Context, read func() ([]byte, error)) ([]byte, error) {
	type result struct {
		b   []byte
		err error
	}
	got := make(chan result, 1)
	go func() { b, err := read(); got <- result{b, err} }()
	select {
	case r := <-got:
		return r.b, r.err
	case <-ctx.Done():
		return nil, &sandbox.Error{Class: sandbox.Canceled, Err: ctx.Err()}
	}
}

func (a *app) secretLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List secrets, without their values", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Secrets.List(cmd.Context(), connect.NewRequest(&covev1.ListSecretsRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetSecrets(), toSecretJSON))
			}
			t := &table{}
			t.row("NAME", "HOSTS", "WHERE", "ENV", "PLACEHOLDER", "UPDATED", "LABELS")
			for _, s := range resp.Msg.GetSecrets() {
				t.row(s.GetName(), cut(strings.Join(s.GetHosts(), ","), 40), where(s), s.GetEnv(), s.GetPlaceholder(), age(timeOf(s.GetUpdatedAt()))+" ago", cut(formatLabels(s.GetLabels()), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

// where says in a word or two where a value goes.
func where(s *covev1.Secret) string {
	places := []string{"headers"}
	if s.GetHeader() != "" {
		places[0] = s.GetHeader()
	}
	if s.GetUrl() {
		places = append(places, "url")
	}
	if s.GetBody() {
		places = append(places, "body")
	}
	if s.GetAllowHttp() {
		places = append(places, "http")
	}
	return strings.Join(places, ",")
}

func (a *app) secretRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"delete"}, Short: "Delete secrets; sandboxes that have them lose them at once", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.secretNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(n string) error {
				_, err := api.Secrets.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteSecretRequest{Name: n}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

func (a *app) secretUseCmd() *cobra.Command {
	var none bool
	cmd := &cobra.Command{
		Use: "use ID NAME...", Short: "Say which secrets a running sandbox has, in place of those before", Args: cobra.MinimumNArgs(1),
		Example: "  cove secret use $id openai github\n  cove secret use $id --none",
		RunE: func(cmd *cobra.Command, args []string) error {
			if none == (len(args) > 1) {
				return usagef("cove secret use ID NAME..., or --none", "name secrets, or say --none")
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			_, err = api.Sandboxes.SetSecrets(cmd.Context(), connect.NewRequest(&covev1.SetSecretsRequest{Id: id, Secrets: args[1:]}))
			return err
		},
	}
	cmd.Flags().BoolVar(&none, "none", false, "it has none any more")
	return cmd
}

// secretNames completes.
func (a *app) secretNames(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if api, err := a.client(); err == nil {
		if resp, err := api.Secrets.List(cmd.Context(), connect.NewRequest(&covev1.ListSecretsRequest{})); err == nil {
			for _, s := range resp.Msg.GetSecrets() {
				out = append(out, s.GetName())
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

type secretJSON struct {
	Name        string            `json:"name"`
	Hosts       []string          `json:"hosts"`
	Header      string            `json:"header,omitempty"`
	Format      string            `json:"format,omitempty"`
	URL         bool              `json:"url,omitempty"`
	Body        bool              `json:"body,omitempty"`
	AllowHTTP   bool              `json:"allow_http,omitempty"`
	Env         string            `json:"env,omitempty"`
	Placeholder string            `json:"placeholder"`
	Labels      map[string]string `json:"labels,omitempty"`
	Version     int64             `json:"version"`
	CreatedAt   time.Time         `json:"created_at"`
	UpdatedAt   time.Time         `json:"updated_at"`
}

func toSecretJSON(s *covev1.Secret) secretJSON {
	return secretJSON{Name: s.GetName(), Hosts: append([]string{}, s.GetHosts()...), Header: s.GetHeader(), Format: s.GetFormat(), URL: s.GetUrl(), Body: s.GetBody(), AllowHTTP: s.GetAllowHttp(),
		Env: s.GetEnv(), Placeholder: s.GetPlaceholder(), Labels: s.GetLabels(), Version: s.GetVersion(), CreatedAt: timeOf(s.GetCreatedAt()), UpdatedAt: timeOf(s.GetUpdatedAt())}
}
