package cli

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// specFlags are what a sandbox can be asked for; create and run share them.
type specFlags struct {
	image       string
	cpu         float64
	memory      size
	memoryLimit size
	disk        size
	pids        int64
	timeout     lifetime
	lease       string
	reuse       string
	idle        duration
	env         keyValues
	labels      keyValues
	idem        string
	onIdle      string
	onTimeout   string
	publicPorts bool
	portHost    string
	tlsPorts    []int32
	snapshot    string
	template    string
	volumes     volumeMounts
	net         networkFlags
	secrets     []string

	deterministic bool
	seed          int64
}

// addMachineFlags are those of the machine itself, which a template has too.
func (a *app) addMachineFlags(cmd *cobra.Command, f *specFlags) {
	f.env.bare = func(k string) (string, bool) { v := a.Getenv(k); return v, v != "" }
	fs := cmd.Flags()
	fs.StringVar(&f.image, "image", "", "image name or reference (default base)")
	_ = cmd.RegisterFlagCompletionFunc("image", a.imageNames)
	fs.Float64Var(&f.cpu, "cpu", 0, "cores, e.g. 0.5 (server default 1)")
	fs.Var(&f.memory, "memory", "memory, e.g. 1GiB; reserved if --memory-limit is given too (server default 512MiB)")
	fs.Var(&f.memoryLimit, "memory-limit", "memory above which the largest process ends with oom (default: --memory)")
	fs.Var(&f.disk, "disk", "size of the writable layer (server default 10GiB)")
	fs.Int64Var(&f.pids, "pids", 0, "processes and threads inside (server default 1024)")
	fs.VarP(&f.env, "env", "e", "variable for every process; KEY alone takes the local value (repeatable)")
	fs.VarP(&f.labels, "label", "l", "label to find it by (repeatable)")
	fs.StringVar(&f.snapshot, "snapshot", "", "start from this snapshot instead of an image: name or id")
	_ = cmd.RegisterFlagCompletionFunc("snapshot", a.snapshotNames(0))
}

func (a *app) addSpecFlags(cmd *cobra.Command, f *specFlags) {
	a.addMachineFlags(cmd, f)
	fs := cmd.Flags()
	fs.StringVar(&f.template, "template", "", "start from this template instead of an image: NAME or NAME@VERSION")
	_ = cmd.RegisterFlagCompletionFunc("template", a.templateNames)
	fs.Var(&f.volumes, "volume", "put a volume into it: NAME:PATH[:rw|ro|shared] (repeatable)")
	fs.StringVar(&f.net.mode, "network", "", "what it may reach: none, public, or rules (only what --allow says) (default: the server's)")
	_ = cmd.RegisterFlagCompletionFunc("network", cobra.FixedCompletions([]string{"none", "public", "rules"}, cobra.ShellCompDirectiveNoFileComp))
	f.net.add(cmd)
	_ = cmd.RegisterFlagCompletionFunc("replay", a.recordingNames(0))
	fs.StringSliceVar(&f.secrets, "secret", nil, "secret that its requests leave with, by name (repeatable)")
	_ = cmd.RegisterFlagCompletionFunc("secret", a.secretNames)
	fs.Var(&f.timeout, "timeout", "end the sandbox this long after creation, e.g. 1h, or none (default: the server's, without --lease)")
	fs.Var(&f.idle, "idle-timeout", "end or pause it after this long with no call and no process (default: never)")
	fs.StringVar(&f.onIdle, "on-idle", "", "what --idle-timeout does: kill (default) or pause")
	_ = cmd.RegisterFlagCompletionFunc("on-idle", cobra.FixedCompletions([]string{"kill", "pause"}, cobra.ShellCompDirectiveNoFileComp))
	fs.StringVar(&f.onTimeout, "on-timeout", "", "what --timeout does: kill (default) or pause")
	_ = cmd.RegisterFlagCompletionFunc("on-timeout", cobra.FixedCompletions([]string{"kill", "pause"}, cobra.ShellCompDirectiveNoFileComp))
	fs.BoolVar(&f.publicPorts, "public-ports", false, "show every port through the gateway without a token")
	fs.StringVar(&f.portHost, "port-host", "", "what servers inside are told as Host of requests through the gateway, e.g. 'localhost:${PORT}' (default: what the client said)")
	fs.Int32SliceVar(&f.tlsPorts, "tls-port", nil, "port whose server speaks TLS itself (repeatable)")
	fs.StringVar(&f.lease, "lease", "", "end it when this lease is not renewed any more: see cove lease")
	fs.BoolVar(&f.deterministic, "deterministic", false, "fix what can be fixed: clock, seeds, names, no network; the sandbox says what cannot (not_fixed)")
	fs.Int64Var(&f.seed, "seed", 0, "of --deterministic: PYTHONHASHSEED, PERL_HASH_SEED and COVE_SEED")
	fs.StringVar(&f.idem, "idempotency-key", "", "the same key returns the same sandbox, however often it is sent")
}

// addReuseFlag is of commands that make sandboxes for themselves; a batch resets its own.
func addReuseFlag(cmd *cobra.Command, f *specFlags) {
	cmd.Flags().StringVar(&f.reuse, "reuse", "", "trust group whose sandboxes may have one kernel one after another, reset in between; needs --network none (default: a kernel of its own)")
}

func (f *specFlags) request() *covev1.CreateSandboxRequest {
	var fixed *covev1.Deterministic
	if f.deterministic || f.seed != 0 {
		fixed = &covev1.Deterministic{Seed: f.seed}
	}
	var ingress *covev1.Ingress // nil: a fork and a snapshot have that of their source
	if f.publicPorts || f.portHost != "" || len(f.tlsPorts) > 0 {
		ingress = &covev1.Ingress{Public: f.publicPorts, Host: f.portHost, Tls: f.tlsPorts}
	}
	return &covev1.CreateSandboxRequest{
		IdempotencyKey: f.idem,
		Spec: &covev1.SandboxSpec{
			Image: f.image,
			Resources: &covev1.Resources{
				Cpu: f.cpu, Memory: int64(f.memory), MemoryLimit: int64(f.memoryLimit), Disk: int64(f.disk), Pids: f.pids,
			},
			Env: f.env.m, Labels: f.labels.m, Timeout: f.timeout.proto(), IdleTimeout: f.idle.proto(),
			OnIdle: f.onIdle, OnTimeout: f.onTimeout, Snapshot: f.snapshot, Template: f.template, Volumes: f.volumes.list,
			Network: f.net.network(), Secrets: f.secrets, Lease: f.lease, Reuse: f.reuse, Ingress: ingress, Deterministic: fixed,
		},
	}
}

func (a *app) createCmd() *cobra.Command {
	var f specFlags
	var asJSON bool
	var count int
	cmd := &cobra.Command{
		Use:   "create [IMAGE]",
		Short: "Create a sandbox and print its id",
		Example: `  id=$(cove create --memory 1GiB --timeout 1h --label run=7)
  cove create python:3.12 --json
  cove create --count 256 --label step=12
  cove create --snapshot warm --volume data:/data --idle-timeout 10m --on-idle pause`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.imageNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if f.image != "" && f.image != args[0] {
					return usagef("", "two images: %s and --image %s", args[0], f.image)
				}
				f.image = args[0]
			}
			if _, err := a.client(); err != nil {
				return err
			}
			if cmd.Flags().Changed("count") {
				return a.createMany(cmd.Context(), f, count, asJSON)
			}
			resp, err := a.createSandbox(cmd.Context(), f.request())
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(createdJSON(resp.Msg))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetSandbox().GetId())
			return err
		},
	}
	a.addSpecFlags(cmd, &f)
	addReuseFlag(cmd, &f)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	cmd.Flags().IntVarP(&count, "count", "n", 1, "make so many alike, and print each as it is there")
	return cmd
}

func createdJSON(r *covev1.CreateSandboxResponse) sandboxJSON {
	j := toSandboxJSON(r.GetSandbox())
	j.Existed, j.NodeTimeS = r.GetExisted(), r.GetNodeTime().AsDuration().Seconds()
	return j
}

// createSandbox is the call, with nothing left of it when ctx ends first. A
// server that hears of that in time leaves nothing anyway; for the answer that
// was already on its way the sandbox is ended by the key of the request. A key of
// the user's own may stand for a sandbox of before, so that is left alone.
func (a *app) createSandbox(ctx context.Context, req *covev1.CreateSandboxRequest) (*connect.Response[covev1.CreateSandboxResponse], error) {
	ours := req.IdempotencyKey == ""
	if ours {
		req.IdempotencyKey = newKey()
	}
	resp, err := a.api.Sandboxes.Create(ctx, connect.NewRequest(req))
	if ours && ctx.Err() != nil {
		err = a.takeBack(ctx, req.IdempotencyKey, err)
	}
	return resp, err
}

// takeBack ends what a call with a key of ours may have made before ctx ended.
func (a *app) takeBack(ctx context.Context, key string, err error) error {
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	_, kerr := a.api.Sandboxes.Kill(rctx, connect.NewRequest(&covev1.KillRequest{IdempotencyKey: key}))
	if kerr != nil && !errors.Is(kerr, sandbox.ErrNotFound) {
		a.warnf("a sandbox may have been created and could not be removed: %v", kerr)
	}
	if err == nil {
		err = &sandbox.Error{Class: sandbox.Canceled, Err: ctx.Err()}
	}
	return err
}
