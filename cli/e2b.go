package cli

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) e2bCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "e2b", Short: "Run code that is written for E2B", Args: cobra.NoArgs}
	cmd.AddCommand(a.e2bEnvCmd())
	return cmd
}

func (a *app) e2bEnvCmd() *cobra.Command {
	var data string
	var asJSON, domain bool
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print shell exports that have E2B's SDKs use the local server",
		Long: `Print shell exports that have E2B's SDKs use the local server.

Plain mode, the default: one address for everything, and no name to resolve.
Domain mode (--domain): the API is api.DOMAIN and a port of a sandbox PORT-ID.DOMAIN,
as with E2B, so that getHost works in browsers too. It takes a server with
a gateway domain and TLS, and DNS that leads *.DOMAIN to it.`,
		Example: `  eval "$(cove e2b env)"
  eval "$(cove e2b env --domain)"`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.localServer(data)
			if err != nil {
				return err
			}
			key, err := e2bKey(c.key)
			if err != nil {
				return err
			}
			env := []variable{{"E2B_API_URL", c.url}, {"E2B_SANDBOX_URL", c.url}, {"E2B_VOLUME_API_URL", c.url}}
			if domain {
				if env, err = a.e2bDomain(cmd.Context(), c); err != nil {
					return err
				}
			} else if c.ca != "" {
				if env, err = trusting(env, c.ca); err != nil {
					return err
				}
			}
			return a.printVariables(append(env, variable{"E2B_API_KEY", key}), asJSON)
		},
	}
	cmd.Flags().StringVar(&data, "data", a.dataDir(), "state directory of the server ($COVE_DATA)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&domain, "domain", false, "for domain mode: E2B_DOMAIN, and how to trust the server's authority")
	return cmd
}

// variable of an environment.
type variable struct{ name, value string }

func (a *app) printVariables(env []variable, asJSON bool) error {
	if asJSON {
		all := map[string]string{}
		for _, v := range env {
			all[v.name] = v.value
		}
		return a.printJSON(all)
	}
	for _, v := range env {
		if _, err := fmt.Fprintf(a.Stdout, "export %s=%s\n", v.name, shellQuote(v.value)); err != nil {
			return err
		}
	}
	return nil
}

// e2bDomain is what domain mode takes: that the server has a domain and TLS, the
// SDKs speak nothing else to one.
func (a *app) e2bDomain(ctx context.Context, c config) ([]variable, error) {
	api, err := a.client()
	if err != nil {
		return nil, err
	}
	info, err := api.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil {
		return nil, err
	}
	domain, ok := strings.CutPrefix(info.Msg.GetGateway(), "https://")
	if !ok {
		return nil, usagef("start it with 'cove serve --gateway-domain cove.example.com --tls-self', or a certificate of your own for that and *.cove.example.com",
			"domain mode needs a server with --gateway-domain and TLS")
	}
	env := []variable{{"E2B_DOMAIN", domain}}
	if c.ca == "" {
		return env, nil
	}
	return trusting(env, c.ca)
}

// roots is where systems keep what they trust, in one file.
var roots = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}

// trusting adds how an authority of the server's own is trusted. Node.js takes it
// beside what it trusts; Python takes one file instead of the system's, so that one
// is made of both, beside the authority: what is asked for at other places would
// fail without.
func trusting(env []variable, ca string) ([]variable, error) {
	own, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	all := own
	for _, name := range roots {
		if b, err := os.ReadFile(name); err == nil {
			all = append(append(b, '\n'), own...)
			break
		}
	}
	bundle := filepath.Join(filepath.Dir(ca), "bundle.crt")
	if have, err := os.ReadFile(bundle); err != nil || !bytes.Equal(have, all) {
		if err := os.WriteFile(bundle+".new", all, 0o644); err != nil {
			return nil, err
		}
		if err := os.Rename(bundle+".new", bundle); err != nil {
			return nil, err
		}
	}
	return append(env, variable{"SSL_CERT_FILE", bundle}, variable{"NODE_EXTRA_CA_CERTS", ca}), nil
}

// e2bKey spells a key as E2B's SDKs want one: e2b_ and hexadecimal digits. They are
// the same 256 bits.
func e2bKey(key string) (string, error) {
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(key, "cove_"))
	if err != nil || !strings.HasPrefix(key, "cove_") {
		return "", usagef("a key of this server begins with cove_", "the key is not one of Cove's")
	}
	return "e2b_" + hex.EncodeToString(b), nil
}
