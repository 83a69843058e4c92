package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// addServeFlags are the flags of what works on a server's own machine.
func (a *app) addServeFlags(cmd *cobra.Command, c *ServeConfig) {
	fs := cmd.Flags()
	fs.StringVar(&c.Data, "data", a.dataDir(), "state directory ($COVE_DATA)")
	fs.StringVar(&c.RunscPath, "runsc", a.Getenv("COVE_RUNSC"), "runsc binary ($COVE_RUNSC; default: beside cove, then $PATH)")
	fs.StringVar(&c.GuestPath, "guest", a.Getenv("COVE_GUEST"), "cove-guest binary ($COVE_GUEST; default: beside cove)")
	fs.StringVar(&c.Runtime, "runtime", "gvisor", "gvisor, or fake: the API without isolation, for trying it out")
	_ = fs.MarkHidden("runtime")
	_ = cmd.MarkFlagDirname("data")
}

func (a *app) serveCmd() *cobra.Command {
	var c ServeConfig
	var config string
	var save bool
	life := lifetime{duration: duration(24 * time.Hour)}
	var stepBytes size
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the server on this machine",
		Long: `Run the server on this machine. The first start makes an API key and writes it
to DATA/key, readable by you alone.

SIGTERM and Ctrl-C let calls under way finish, then end the server; sandboxes
live on and the next start finds them. A second signal ends it at once.`,
		Annotations: map[string]string{ownSignals: "1"},
		Args:        cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.Serve == nil {
				return a.notBuiltIn("serve")
			}
			if save {
				return saveFile(cmd, cmp.Or(config, c.Data+"/cove.toml"))
			}
			if config == "" {
				config = defaultConfig(c.Data)
			}
			if config != "" {
				if err := applyFile(cmd, config); err != nil {
					return err
				}
			}
			c.DefaultTimeout, c.MaxStepBytes = time.Duration(life.duration), int64(stepBytes)
			if c.RunRetention < 0 {
				return usagef("0 keeps them for ever", "--run-retention %s is not accepted", c.RunRetention)
			}
			return a.Serve(cmd.Context(), c)
		},
	}
	a.addServeFlags(cmd, &c)
	fs := cmd.Flags()
	fs.StringVar(&config, "config", "", "TOML file with options: every flag by its name; flags here come first (default: DATA/cove.toml, if it is there)")
	_ = cmd.MarkFlagFilename("config", "toml")
	fs.BoolVar(&save, "save-config", false, "write the other flags given here to that file, for every later start, and do nothing else")
	fs.StringVar(&c.Listen, "listen", defaultListen, "address to listen on")
	fs.StringVar(&c.Node, "node", "", "name of this node (default: the host's)")
	fs.StringVar(&c.StateKeys, "state-keys", a.Getenv("COVE_STATE_KEYS"), "file with the keys that encrypt snapshots, newest first ($COVE_STATE_KEYS; default: DATA/state.keys, if it is there)")
	fs.StringVar(&c.TLSCert, "tls-cert", "", "file with the certificate of the public listener; read again when it changes")
	fs.StringVar(&c.TLSKey, "tls-key", "", "file with its key")
	fs.BoolVar(&c.TLSSelf, "tls-self", false, "TLS with an authority made in DATA/tls, for trying it out; clients trust it with COVE_CA")
	fs.StringVar(&c.TLSACME, "tls-acme", "", "domain to get certificates for from Let's Encrypt; port 443 of it must lead here")
	fs.StringVar(&c.TLSACMEFrom, "tls-acme-directory", "", "directory URL of another ACME server than Let's Encrypt")
	fs.StringVar(&c.TLSACMECA, "tls-acme-ca", "", "file with the CA certificate of that server, if the system does not know it")
	fs.DurationVar(&c.QueueWait, "queue-wait", 2*time.Second, "how long a create waits for room on a full node, in turn between tenants; 0 = not at all")
	fs.Var(&life, "default-timeout", "how long a sandbox lives that was created without a timeout and a lease; none = until it is killed")
	fs.DurationVar(&c.AuditRetention, "audit-retention", 90*24*time.Hour, "how long the audit log is kept")
	fs.DurationVar(&c.RunRetention, "run-retention", 90*24*time.Hour, "how long a run is kept after its end, with its steps and checkpoints; 0 = until somebody removes it")
	fs.Var(&stepBytes, "max-step-bytes", "bytes that the steps of a tenant's runs may take on disk (default 16GiB)")
	fs.StringVar(&c.GatewayDomain, "gateway-domain", a.Getenv("COVE_GATEWAY_DOMAIN"), "domain of ports, as http://PORT-SANDBOX.DOMAIN ($COVE_GATEWAY_DOMAIN; https://DOMAIN behind a TLS proxy; default: only /p/SANDBOX/PORT/)")
	fs.StringVar(&c.SSH, "ssh", a.Getenv("COVE_SSH"), "address of an SSH server for sandboxes, like 127.0.0.1:7722 ($COVE_SSH; default: none)")
	fs.BoolVar(&c.NoBase, "no-base", false, "do not make the base image when it is missing")
	fs.StringVar(&c.Network, "network-default", "public", "network of sandboxes that do not say: none or public")
	fs.StringVar(&c.EgressRoots, "egress-roots", "", "file of certificates (PEM) that servers are believed by, beside the host's, where secrets are put into requests")
	fs.StringVar(&c.SandboxCA, "sandbox-ca", a.Getenv("COVE_SANDBOX_CA"), "file of certificates (PEM) that every sandbox trusts, and the server for image pulls and requests with secrets: for networks that look into TLS ($COVE_SANDBOX_CA)")
	fs.StringSliceVar(&c.RegistryAllow, "registry-allow", nil, "registry of the own network that may be pulled from: HOST, HOST:PORT or a CIDR (default: none; loopback, private and metadata addresses are refused)")
	fs.StringVar(&c.ShipDir, "ship-dir", "", "directory below which shipments of root keys may write (default: none may)")
	fs.StringSliceVar(&c.ShipAllow, "ship-allow", nil, "host of the own network, or without TLS, that shipments may go to: HOST, HOST:PORT or a CIDR (default: none)")
	fs.StringSliceVar(&c.Resolvers, "dns", nil, "resolvers that names of sandboxes are asked of, ADDRESS[:PORT] (default: those of /etc/resolv.conf)")
	fs.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
	fs.BoolVar(&c.LogJSON, "log-json", false, "log as JSON")
	return cmd
}

// reapCmd leaves the machine as it was before the first start; "make down"
// calls it.
func (a *app) reapCmd() *cobra.Command {
	var c ServeConfig
	cmd := &cobra.Command{
		Use: "reap", Hidden: true, Short: "Remove every kernel of a server that is not running",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.Reap == nil {
				return a.notBuiltIn("reap")
			}
			removed, err := a.Reap(cmd.Context(), c)
			if len(removed) > 0 {
				fmt.Fprintf(a.Stderr, "removed %d kernels\n", len(removed))
			}
			return err
		},
	}
	a.addServeFlags(cmd, &c)
	return cmd
}

func (a *app) doctorCmd() *cobra.Command {
	var c ServeConfig
	var asJSON, preflight bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check that this machine can run a server, and say how to fix what is missing",
		Args:  cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			conf, err := a.config()
			if err != nil {
				return err
			}
			p := a.Probes
			p.Server = func(ctx context.Context) error {
				if _, err := a.client(); err != nil {
					return err
				}
				_, err := a.api.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
				if sandbox.ClassOf(err) == sandbox.Unavailable && a.nobodyListens() {
					return doctor.ErrNoServer
				}
				return err
			}
			if preflight {
				p.Server = nil
			}
			results := doctor.Run(cmd.Context(), p, doctor.Config{Data: c.Data, Runsc: c.RunscPath, Guest: c.GuestPath, URL: conf.url})
			bad := 0
			for _, r := range results {
				if r.Status == doctor.Fail {
					bad++
				}
			}
			if asJSON {
				if err := a.printJSON(results); err != nil {
					return err
				}
			} else {
				a.printDoctor(results)
			}
			if bad > 0 {
				return &ExitError{Code: exitFailed}
			}
			return nil
		},
	}
	a.addServeFlags(cmd, &c)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().BoolVar(&preflight, "preflight", false, "only whether a server could start, not whether one runs")
	return cmd
}

func (a *app) printDoctor(results []doctor.Result) {
	t := &table{}
	for _, r := range results {
		t.row(strings.ToUpper(string(r.Status)), r.Name, r.Detail)
	}
	_ = t.print(a.Stdout)
	first := true
	for _, r := range results {
		if r.Status == doctor.OK || r.Fix == "" {
			continue
		}
		if first {
			fmt.Fprintln(a.Stdout)
			first = false
		}
		fmt.Fprintf(a.Stdout, "%s: %s\n", r.Name, r.Fix)
	}
}

// localServer is how the server of a state directory is reached, whatever is
// exported already.
func (a *app) localServer(data string) (c config, err error) {
	getenv := a.Getenv
	a.Getenv = func(k string) string {
		switch k {
		case "COVE_DATA":
			return data
		case "COVE_URL", "COVE_KEY", "COVE_CA":
			return ""
		}
		return getenv(k)
	}
	a.toShell = true
	if c, err = a.config(); err == nil && c.key == "" {
		err = usagef("start the server with 'make start' or 'cove serve', or run this as the user who did", "cannot read %s", filepath.Join(data, "key"))
	}
	return c, err
}

func (a *app) envCmd() *cobra.Command {
	var data string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "env",
		Short:   "Print shell exports of COVE_URL and COVE_KEY for the local server",
		Example: `  eval "$(cove env)"`,
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.localServer(data)
			if err != nil {
				return err
			}
			if asJSON {
				env := map[string]string{"COVE_URL": c.url, "COVE_KEY": c.key}
				if c.ca != "" {
					env["COVE_CA"] = c.ca
				}
				return a.printJSON(env)
			}
			_, err = fmt.Fprintf(a.Stdout, "export COVE_URL=%s\nexport COVE_KEY=%s\n", shellQuote(c.url), shellQuote(c.key))
			if err == nil && c.ca != "" {
				_, err = fmt.Fprintf(a.Stdout, "export COVE_CA=%s\n", shellQuote(c.ca))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&data, "data", a.dataDir(), "state directory of the server ($COVE_DATA)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func shellQuote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

type versionJSON struct {
	Version  string `json:"version"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (a *app) versionCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version of this binary", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if asJSON {
				return a.printJSON(versionJSON{a.Version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
			}
			_, err := fmt.Fprintln(a.Stdout, "cove "+a.Version)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) infoCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "info", Short: "Show the server's version, capacity and warm kernels", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.System.Info(cmd.Context(), connect.NewRequest(&covev1.InfoRequest{}))
			if err != nil {
				return err
			}
			i := resp.Msg
			if asJSON {
				return a.printJSON(infoJSON{URL: api.URL(), Version: i.GetVersion(), Runtime: i.GetRuntime(), Total: toCapacityJSON(i.GetTotal()),
					Used: toCapacityJSON(i.GetUsed()), WarmKernels: i.GetWarmKernels(), WarmTarget: i.GetWarmTarget(), HeldKernels: i.GetHeldKernels(), HeldTarget: i.GetHeldTarget(), LostCalls: i.GetLostCalls(), Full: i.GetFull(),
					Snapshots: toTotalsJSON(i.GetSnapshots())})
			}
			t := &table{}
			t.row("server", api.URL()+", "+i.GetVersion()+", "+i.GetRuntime())
			t.row("sandboxes", fmt.Sprintf("%d of %d", i.GetUsed().GetSandboxes(), i.GetTotal().GetSandboxes()))
			t.row("cpu", fmt.Sprintf("%g cores asked for, %g there", i.GetUsed().GetCpu(), i.GetTotal().GetCpu()))
			t.row("memory", formatSize(i.GetUsed().GetMemory())+" of "+formatSize(i.GetTotal().GetMemory())+" reserved")
			t.row("disk", formatSize(i.GetUsed().GetDisk())+" of "+formatSize(i.GetTotal().GetDisk()))
			t.row("warm kernels", fmt.Sprintf("%d of %d", i.GetWarmKernels(), i.GetWarmTarget()))
			if i.GetHeldTarget() > 0 || i.GetHeldKernels() > 0 {
				t.row("restored ahead", fmt.Sprintf("%d of %d", i.GetHeldKernels(), i.GetHeldTarget()))
			}
			t.row("snapshots", describeSnapshots(toTotalsJSON(i.GetSnapshots())))
			if full := i.GetFull(); full != "" {
				t.row("full", full)
			}
			if n := i.GetLostCalls(); n > 0 {
				t.row("lost calls", fmt.Sprintf("%d, sent again: a fault of Cove's, please report it with the server's log", n))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// describeSnapshots has the sum of ages as an average beside it: a sum alone
// tells nobody anything.
func describeSnapshots(t totalsJSON) string {
	s := fmt.Sprintf("%d, %s", t.Count, formatSize(t.Bytes))
	if t.Count > 0 {
		s += fmt.Sprintf(", %s old on average (%.1f days in all), the oldest %s", formatDuration(time.Duration(t.AgeS/t.Count)*time.Second),
			float64(t.AgeS)/(24*3600), age(t.Oldest))
	}
	return s
}

// healthCmd waits for a server: what scripts need between starting it and
// using it.
func (a *app) healthCmd() *cobra.Command {
	var wait duration
	cmd := &cobra.Command{
		Use: "health", Hidden: true, Short: "Ask the server whether it is healthy", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.config()
			if err != nil {
				return err
			}
			tr := &http.Transport{DisableKeepAlives: true}
			if c.ca != "" {
				pool, err := wire.LoadCA(c.ca)
				if err != nil {
					return err
				}
				tr.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
			}
			until := time.Now().Add(time.Duration(wait))
			for {
				err = healthy(cmd.Context(), tr, c.url)
				if err == nil || time.Now().After(until) {
					break
				}
				select {
				case <-time.After(100 * time.Millisecond):
				case <-cmd.Context().Done():
					return cmd.Context().Err()
				}
			}
			if err != nil {
				return fmt.Errorf("no healthy server at %s: %w", c.url, err)
			}
			_, err = fmt.Fprintln(a.Stdout, "ok")
			return err
		},
	}
	cmd.Flags().Var(&wait, "wait", "keep asking for this long")
	return cmd
}

func healthy(ctx context.Context, tr *http.Transport, url string) error {
	ctx, cancel := context.WithTimeout(ctx, probeWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 256))
	if resp.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(string(b)))
	}
	return nil
}
