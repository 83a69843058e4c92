package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func parsePort(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 65535 {
		return 0, sandbox.InvalidField("port", "%q is no TCP port; 1 to 65535 are", s)
	}
	return n, nil
}

func (a *app) urlCmd() *cobra.Command {
	var ttl duration
	var public, private, asJSON bool
	cmd := &cobra.Command{
		Use:   "url ID PORT",
		Short: "Print where a port of a sandbox is reached from outside",
		Long: `Print where a port of a sandbox is reached from outside, with a token that opens
it for a while. --public makes the port open to anyone who knows the address,
until --private.`,
		Example: `  curl "$(cove url $id 8080)"
  cove url --public $id 8080`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			port, err := parsePort(args[1])
			if err != nil {
				return err
			}
			if public && private {
				return usage(cmd, fmt.Errorf("--public or --private, not both"))
			}
			id, err := a.resolveID(ctx, args[0])
			if err != nil {
				return err
			}
			if public || private {
				_, err := a.api.Ports.Set(ctx, connect.NewRequest(&covev1.SetPortRequest{SandboxId: id, Port: int32(port), Public: public}))
				if err != nil {
					return err
				}
			}
			resp, err := a.api.Ports.Url(ctx, connect.NewRequest(&covev1.PortUrlRequest{SandboxId: id, Port: int32(port), Ttl: ttl.proto()}))
			if err != nil {
				return err
			}
			u := a.api.PortURL(resp.Msg)
			if !asJSON {
				_, err = fmt.Fprintln(a.Stdout, u)
				return err
			}
			return a.printJSON(portJSON{URL: u, Token: resp.Msg.Token, Public: resp.Msg.Public, ExpiresAt: resp.Msg.ExpiresAt.AsTime().Format(time.RFC3339)})
		},
	}
	fs := cmd.Flags()
	fs.Var(&ttl, "ttl", "how long the token opens it (default: 1h; at most 24h)")
	fs.BoolVar(&public, "public", false, "make the port public first")
	fs.BoolVar(&private, "private", false, "make the port private first")
	fs.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// portJSON is a promise: see docs/cli-json.md.
type portJSON struct {
	URL       string `json:"url"`
	Token     string `json:"token"`
	Public    bool   `json:"public"`
	ExpiresAt string `json:"expires_at"`
}

func (a *app) waitCmd() *cobra.Command {
	var timeout duration
	var line string
	cmd := &cobra.Command{
		Use:   "wait ID [PORT]",
		Short: "Wait until a port of a sandbox listens, or a command in it succeeds",
		Example: `  cove wait $id 8080
  cove wait $id -c 'test -f /ready' --timeout 5m`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m := &covev1.WaitReadyRequest{Command: line, Timeout: timeout.proto()}
			if (len(args) == 2) == (line != "") {
				return usage(cmd, fmt.Errorf("wait for what? give a port, or a command with -c"))
			}
			if len(args) == 2 {
				port, err := parsePort(args[1])
				if err != nil {
					return err
				}
				m.Port = int32(port)
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			m.SandboxId = id
			_, err = a.api.Ports.WaitReady(cmd.Context(), connect.NewRequest(m))
			return err
		},
	}
	cmd.Flags().Var(&timeout, "timeout", "give up after this long (default: 1m; at most 1h)")
	cmd.Flags().StringVarP(&line, "command", "c", "", "a line for the sandbox's shell that must exit with 0")
	return cmd
}

func (a *app) portForwardCmd() *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "port-forward ID [LOCAL:]PORT...",
		Short: "Show ports of a sandbox on this machine, until Ctrl-C",
		Long: `Listen on this machine and carry every connection to a port inside a sandbox,
over the API. Any TCP protocol works. LOCAL 0 takes a free port.`,
		Example: `  cove port-forward $id 8080
  cove port-forward $id 15432:5432 9000`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			var pairs [][2]int
			for _, s := range args[1:] {
				local, inside, ok := strings.Cut(s, ":")
				if !ok {
					inside = local
				}
				to, err := parsePort(inside)
				if err != nil {
					return err
				}
				from := 0
				if local != "0" {
					if from, err = parsePort(local); err != nil {
						return err
					}
				}
				pairs = append(pairs, [2]int{from, to})
			}
			id, err := a.resolveID(ctx, args[0])
			if err != nil {
				return err
			}
			// A key that may not is told now, not whoever connects later.
			if err := a.api.CheckPort(ctx, id, pairs[0][1]); err != nil {
				return err
			}
			return a.forward(ctx, id, address, pairs)
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address of this machine to listen on")
	return cmd
}

// forward serves local listeners until ctx ends, and then waits for what they
// began.
func (a *app) forward(ctx context.Context, id, address string, pairs [][2]int) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, p := range pairs {
		ln, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(p[0])))
		if err != nil {
			return &sandbox.Error{Class: sandbox.Precondition, Err: err, Hint: "LOCAL:PORT takes another local port, 0:PORT a free one"}
		}
		defer context.AfterFunc(ctx, func() { ln.Close() })()
		defer ln.Close()
		fmt.Fprintf(a.Stderr, "%s -> %s:%d\n", ln.Addr(), id, p[1])
		wg.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { a.carry(ctx, c, id, p[1]) })
			}
		})
	}
	<-ctx.Done()
	return nil
}

// carry joins one local connection with the port. What goes wrong is told, and
// the next connection is tried afresh: a server inside may yet come up.
func (a *app) carry(ctx context.Context, c net.Conn, id string, port int) {
	defer c.Close()
	s, err := a.api.ConnectPort(ctx, id, port)
	if err != nil {
		if ctx.Err() == nil {
			fmt.Fprintf(a.Stderr, "port %d: %v\n", port, err)
		}
		return
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { c.Close(); s.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(s, c); err != nil || s.CloseWrite() != nil {
			c.Close()
			s.Close()
		}
	})
	wg.Go(func() {
		_, err := io.Copy(c, s)
		if tc, ok := c.(*net.TCPConn); err != nil || !ok || tc.CloseWrite() != nil {
			c.Close()
			s.Close()
		}
	})
	wg.Wait()
}
