package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// Deps are what the commands need of the process they run in. Main fills in
// what is nil with the process's own, except the three functions at the top:
// a command whose function is missing says that this build lacks it.
type Deps struct {
	Serve     func(context.Context, ServeConfig) error
	Reap      func(context.Context, ServeConfig) (removed []string, err error)
	Bootstrap func(context.Context, ServeConfig, func(sandbox.Progress)) (sandbox.Image, error)

	// Probes look at the machine for doctor.
	Probes doctor.Probes

	Version string // "v0.1.0 (abc1234)"

	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Getenv         func(string) string

	// Notify is signal.Notify with its undo.
	Notify func(...os.Signal) (<-chan os.Signal, func())

	// Backoff is the pause before the n-th attempt (from 1) to get a broken
	// stream back.
	Backoff func(n int) time.Duration
}

// Binaries and places of a server; the flags of serve, image bootstrap and
// doctor.
type ServeConfig struct {
	Data   string // state directory
	Listen string // host:port
	// Runtime is "gvisor" or, for trying the API without root, "fake".
	Runtime   string
	RunscPath string // "" = beside this executable, then $PATH
	GuestPath string
	Node      string // name of this node; "" = host name
	StateKeys string // file with the keys state is encrypted with; "" = state.keys in Data, if there
	// GatewayDomain is below what ports have their hosts; "" = only the path form.
	GatewayDomain string
	SSH           string // host:port of the SSH server; "" = none
	NoBase        bool   // do not make the base image when it is missing
	LogLevel      string // debug, info, warn, error
	LogJSON       bool

	TLSCert, TLSKey string        // files; both or neither
	TLSSelf         bool          // with an authority in Data/tls
	TLSACME         string        // domain to get certificates for
	TLSACMEFrom     string        // directory URL; "" = Let's Encrypt
	TLSACMECA       string        // file with the CA of that directory; "" = the system's
	QueueWait       time.Duration // how long a create waits on a full node
	AuditRetention  time.Duration
	RunRetention    time.Duration // how long ended runs are kept; 0 = for ever
	MaxStepBytes    int64         // of a tenant's steps
	DefaultTimeout  time.Duration // of sandboxes that say nothing about their end; 0 = never

	Network   string   // of sandboxes that ask for none: none or public
	Resolvers []string // that names are asked of; none = those of /etc/resolv.conf
	// SandboxCA is a file of certificates that sandboxes trust, and the server
	// where it speaks for them.
	SandboxCA string
	// RegistryAllow are registries of the server's own network that may be
	// pulled from.
	RegistryAllow []string
	// ShipDir is below what shipments to directories go; "" = there are none. ShipAllow
	// are hosts of the own network, or without TLS, that shipments may go to.
	ShipDir   string
	ShipAllow []string
	// EgressRoots is a file of certificates to believe beside the host's where
	// requests of sandboxes are looked into.
	EgressRoots string
}

// ExitError ends the process with a code. A command that has printed all there
// is to say leaves Err nil.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return "exit"
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// Main runs one command line (without the program's name) and returns the
// process's exit code.
func Main(ctx context.Context, d Deps, args []string) int {
	a := &app{Deps: d}
	a.fill()
	root := a.root()
	root.SetArgs(args)

	// Ctrl-C cancels the call under way, so that temp files are removed and
	// the server hears of it. serve, run and exec do better on their own.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if cmd, _, err := root.Find(args); err == nil && cmd.Annotations[ownSignals] == "" {
		sigs, stop := a.Notify(os.Interrupt, syscall.SIGTERM)
		defer stop()
		done := make(chan struct{})
		defer close(done)
		go func() {
			select {
			case <-sigs:
				cancel()
			case <-done:
			}
		}()
	}

	cmd, err := root.ExecuteContextC(ctx)
	if a.api != nil {
		a.api.Close()
	}
	return a.report(cmd, err)
}

// ownSignals marks commands that handle SIGINT and SIGTERM themselves, and
// ownCode those that end with the code of a command they ran.
const (
	ownSignals = "own-signals"
	ownCode    = "own-code"
)

// app is one run of the command.
type app struct {
	Deps
	url     string // --url
	keyFile string // --key-file
	toShell bool   // the local key is only printed, for whoever can read it anyway
	api     *wire.Client
}

func (a *app) fill() {
	if a.Stdin == nil {
		a.Stdin = os.Stdin
	}
	if a.Stdout == nil {
		a.Stdout = os.Stdout
	}
	if a.Stderr == nil {
		a.Stderr = os.Stderr
	}
	if a.Getenv == nil {
		a.Getenv = os.Getenv
	}
	if a.Version == "" {
		a.Version = "dev"
	}
	if a.Notify == nil {
		a.Notify = func(s ...os.Signal) (<-chan os.Signal, func()) {
			c := make(chan os.Signal, 4)
			signal.Notify(c, s...)
			return c, func() { signal.Stop(c) }
		}
	}
	if a.Backoff == nil {
		// 0.1, 0.2, 0.4 … 2 s: with maxBroken attempts this bridges a server
		// restart of about 30 s.
		a.Backoff = func(n int) time.Duration {
			return min(100*time.Millisecond<<min(n-1, 10), 2*time.Second)
		}
	}
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cove",
		Short: "Isolated Linux sandboxes in milliseconds",
		Long: `Cove gives out isolated Linux machines: create one, run code nobody has read
in it, reset it, throw it away.

  COVE_URL   the server (default ` + defaultURL + `)
  COVE_KEY   the API key (default: the file $COVE_DATA/key, else ` + defaultData + `/key)
  COVE_CA    file with the authority to trust, for a server with a certificate of its own

Sandbox ids may be shortened to any prefix that only one live sandbox has.`,
		Example: `  cove run -- python3 -c 'print(6*7)'
  id=$(cove create --memory 1GiB --timeout 1h)
  cove exec -it $id -- bash
  cove cp ./src $id:/work && cove exec $id -- make -C /work
  cove rm $id`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       a.Version,
	}
	root.SetVersionTemplate("cove {{.Version}}\n")
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetIn(a.Stdin)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		// The flags of a command that does not exist are unknown too, and said
		// first they hide which word was wrong.
		if words := cmd.Flags().Args(); cmd.HasSubCommands() && len(words) > 0 {
			return knownCommand(cmd, words)
		}
		return usage(cmd, err)
	})
	root.CompletionOptions.HiddenDefaultCmd = false
	pf := root.PersistentFlags()
	pf.StringVar(&a.url, "url", "", "server, instead of $COVE_URL")
	// There is no --key: arguments are readable by every user of the machine.
	pf.StringVar(&a.keyFile, "key-file", "", "file holding the API key, instead of $COVE_KEY")

	root.AddGroup(
		&cobra.Group{ID: "sandbox", Title: "Sandboxes:"},
		&cobra.Group{ID: "network", Title: "Network:"},
		&cobra.Group{ID: "state", Title: "Snapshots, templates and volumes:"},
		&cobra.Group{ID: "rl", Title: "Runs of trainers:"},
		&cobra.Group{ID: "admin", Title: "Images, keys and tenants:"},
		&cobra.Group{ID: "server", Title: "This machine:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("sandbox", a.createCmd(), a.runCmd(), a.execCmd(), a.codeCmd(), a.cpCmd(), a.lsCmd(), a.psCmd(), a.logsCmd(),
		a.statsCmd(), a.diffCmd(), a.inspectCmd(), a.resetCmd(), a.batchCmd(), a.timeoutCmd(), a.leaseCmd(), a.rmCmd())
	add("rl", a.runsCmd(), a.shipCmd(), a.replayCmd(), a.costCmd(), a.gradeCmd(), a.gradesCmd())
	add("network", a.netCmd(), a.secretCmd(), a.recordingCmd(), a.urlCmd(), a.callbackCmd(), a.portForwardCmd(), a.sshCmd(), a.waitCmd())
	add("state", a.forkCmd(), a.snapshotCmd(), a.restoreCmd(), a.pauseCmd(), a.resumeCmd(), a.treeCmd(), a.templateCmd(), a.volumeCmd())
	add("admin", a.imageCmd(), a.registryCmd(), a.keyCmd(), a.tenantCmd(), a.auditCmd())
	add("server", a.serveCmd(), a.doctorCmd(), a.envCmd(), a.e2bCmd(), a.infoCmd(), a.versionCmd())
	root.AddCommand(a.reapCmd(), a.tourCmd(), a.healthCmd())
	argErrors(root)
	return root
}

// argErrors makes every command's complaint about its arguments a usage error
// that shows how the command is called. One that only has subcommands knows them.
func argErrors(cmd *cobra.Command) {
	if cmd.HasSubCommands() && !cmd.Runnable() {
		cmd.Args, cmd.RunE = knownCommand, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				var own *usageError
				if errors.As(err, &own) {
					return err
				}
				return usage(cmd, err)
			}
			return nil
		}
	}
	for _, c := range cmd.Commands() {
		argErrors(c)
	}
}
