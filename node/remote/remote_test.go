package remote_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/node/nodetest"
	"github.com/cove-sandbox/cove/node/remote"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/volume"
)

// nodeEnv makes the test binary a node: DIR of the authority, and of its things.
const nodeEnv = "COVE_TEST_NODE"

func TestMain(m *testing.M) {
	if dirs := os.Getenv(nodeEnv); dirs != "" {
		if err := runNode(dirs); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// runNode is an agent that is served until its stdin ends. It says its address.
func runNode(dirs string) error {
	authority, dir, _ := strings.Cut(dirs, ":")
	m, err := agenttest.Open(context.Background(), dir, agenttest.Options{Volumes: volume.Supported() == nil})
	if err != nil {
		return err
	}
	ca, err := pki.Open(authority, nil)
	if err != nil {
		return err
	}
	own, err := ca.Renewing(pki.Node, "n1")
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	srv := remote.Server(m.Node, ca.MutualTLS(own, pki.Server), slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	fmt.Println(ln.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = srv.Close()
	<-served
	return m.Close()
}

// startNode starts one in another process, which ends with the test.
func startNode(t testing.TB, ca *pki.InstallationCA) (address string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), nodeEnv+"="+strings.TrimSuffix(ca.CertFile(), "/ca.crt")+":"+t.TempDir())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the node's process: %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the node does not start: %v", err)
	}
	return strings.TrimSpace(line)
}

// installation is an authority and a server of it.
func installation(t testing.TB) (*pki.InstallationCA, *pki.Renewing) {
	t.Helper()
	ca, err := pki.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := ca.Renewing(pki.Server, "s1")
	if err != nil {
		t.Fatal(err)
	}
	return ca, own
}

func dial(t testing.TB, ca *pki.InstallationCA, own *pki.Renewing, name, address string) *remote.Client {
	c := remote.Dial(remote.Config{Name: name, Address: address, TLS: ca.MutualTLS(own, pki.Node)})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestContract(t *testing.T) {
	ca, own := installation(t)
	nodetest.Run(t, func(t *testing.T) nodetest.World {
		w := nodetest.World{Node: dial(t, ca, own, "n1", startNode(t, ca)), Image: agenttest.Image, Remote: "docker.io/library/tiny"}
		w.Loopback()
		return w
	})
}
