package cli

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) sshCmd() *cobra.Command {
	var ttl duration
	var dir string
	var forwards, options []string
	var noCommand bool
	cmd := &cobra.Command{
		Use:   "ssh [flags] ID [-- COMMAND [ARG...]]",
		Short: "A shell in a sandbox over SSH, or one command",
		Long: `Run the system's ssh into a sandbox, with a key made for this once and certified
by the server for a few minutes. The server must run as "cove serve --ssh ADDR".

--write leaves key, certificate and an ssh configuration in a directory instead,
for editors, scp, sftp and rsync:
  cove ssh --write ~/.cove-ssh --ttl 12h $id
  rsync -e 'ssh -F ~/.cove-ssh/config' -a src/ $id:/work/`,
		Example: `  cove ssh $id
  cove ssh $id -- make test
  cove ssh -L 8080:localhost:80 -N $id`,
		Annotations: map[string]string{ownSignals: "1", ownCode: "1"},
		Args:        cobra.MinimumNArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			command, err := commandOf(cmd, args[1:])
			if err != nil {
				return err
			}
			id, err := a.resolveID(ctx, args[0])
			if err != nil {
				return err
			}
			l, err := a.sshLogin(ctx, id, ttl)
			if err != nil {
				return err
			}
			if dir != "" {
				return a.writeSSH(l, dir)
			}
			for _, f := range forwards {
				options = append(options, "LocalForward="+f)
			}
			return a.runSSH(ctx, l, options, noCommand, command)
		},
	}
	fs := cmd.Flags()
	fs.SetInterspersed(false)
	fs.Var(&ttl, "ttl", "how long the certificate is good for a login (default: 5m; at most 24h)")
	fs.StringVar(&dir, "write", "", "write key, certificate and config into this directory instead")
	fs.StringArrayVarP(&forwards, "local", "L", nil, "forward a local port, as \"8080 localhost:80\" (repeatable)")
	fs.StringArrayVarP(&options, "option", "o", nil, "option for ssh (repeatable)")
	fs.BoolVarP(&noCommand, "no-command", "N", false, "only forward ports")
	return cmd
}

// sshLogin is a key with what the server says of it.
type sshLogin struct {
	key  ed25519.PrivateKey
	cert *covev1.SignSshResponse
	host string
}

func (a *app) sshLogin(ctx context.Context, id string, ttl duration) (sshLogin, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return sshLogin{}, err
	}
	sp, err := ssh.NewPublicKey(pub)
	if err != nil {
		return sshLogin{}, err
	}
	resp, err := a.api.Ports.SignSsh(ctx, connect.NewRequest(&covev1.SignSshRequest{
		SandboxId: id, PublicKey: string(ssh.MarshalAuthorizedKey(sp)), Ttl: ttl.proto()}))
	if err != nil {
		return sshLogin{}, err
	}
	u, err := url.Parse(a.api.URL())
	if err != nil {
		return sshLogin{}, sandbox.InvalidField("url", "%v", err)
	}
	return sshLogin{key: key, cert: resp.Msg, host: u.Hostname()}, nil
}

// options are how ssh is told to trust this server and nothing else.
func (l sshLogin) options(knownHosts string) []string {
	return []string{"User=" + l.cert.User, "HostName=" + l.host, "Port=" + strconv.Itoa(int(l.cert.Port)), "HostKeyAlias=cove",
		"UserKnownHostsFile=" + strconv.Quote(knownHosts), "GlobalKnownHostsFile=/dev/null", "StrictHostKeyChecking=yes", "UpdateHostKeys=no",
		"PreferredAuthentications=publickey", "ServerAliveInterval=30"}
}

func (l sshLogin) knownHosts() []byte { return []byte("cove " + l.cert.HostKey + "\n") }

// runSSH runs ssh with an agent of our own: the private key stays in this
// process.
func (a *app) runSSH(ctx context.Context, l sshLogin, options []string, noCommand bool, command []string) error {
	bin, err := exec.LookPath("ssh")
	if err != nil {
		return (&sandbox.Error{Class: sandbox.Precondition, Msg: "there is no ssh on this machine"}).WithHint("apt-get install openssh-client; 'cove exec -it' needs none")
	}
	dir, err := os.MkdirTemp("", "cove-ssh-") // 0700
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	hosts := filepath.Join(dir, "known_hosts")
	if err := os.WriteFile(hosts, l.knownHosts(), 0o600); err != nil {
		return err
	}
	ln, err := l.serveAgent(filepath.Join(dir, "agent"))
	if err != nil {
		return err
	}
	defer ln.Close()
	args := []string{"-F", "none"}
	for _, o := range append(append(l.options(hosts), "IdentityAgent="+strconv.Quote(ln.Addr().String()), "IdentityFile=none"), options...) {
		args = append(args, "-o", o)
	}
	if noCommand {
		args = append(args, "-N")
	}
	args = append(args, l.cert.User)
	if len(command) > 0 {
		args = append(args, "--")
		args = append(args, command...)
	}
	c := exec.CommandContext(ctx, bin, args...)
	c.Stdin, c.Stdout, c.Stderr = a.Stdin, a.Stdout, a.Stderr
	err = c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return &ExitError{Code: exit.ExitCode()}
	}
	return err
}

func (l sshLogin) serveAgent(socket string) (net.Listener, error) {
	parsed, _, _, _, err := ssh.ParseAuthorizedKey([]byte(l.cert.Certificate))
	if err != nil {
		return nil, err
	}
	cert, ok := parsed.(*ssh.Certificate)
	if !ok {
		return nil, errors.New("the server sent no certificate")
	}
	ring := agent.NewKeyring()
	if err := ring.Add(agent.AddedKey{PrivateKey: l.key, Certificate: cert, Comment: "cove"}); err != nil {
		return nil, err
	}
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	go func() { // ends with the listener; what it serves, with ssh
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = agent.ServeAgent(ring, c) // io.EOF when ssh is done
			}()
		}
	}()
	return ln, nil
}

// writeSSH leaves what ssh needs in a directory.
func (a *app) writeSSH(l sshLogin, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	block, err := ssh.MarshalPrivateKey(l.key, "cove")
	if err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	config := "# until " + l.cert.ExpiresAt.AsTime().Local().Format("2006-01-02 15:04") + "\nHost " + l.cert.User + "\n"
	for _, o := range append(l.options(at("known_hosts")), "IdentityFile="+strconv.Quote(at("id")), "CertificateFile="+strconv.Quote(at("id-cert.pub")), "IdentitiesOnly=yes", "IdentityAgent=none") {
		config += "  " + o + "\n"
	}
	for name, b := range map[string][]byte{"id": pem.EncodeToMemory(block), "id-cert.pub": []byte(l.cert.Certificate + "\n"), "known_hosts": l.knownHosts(), "config": []byte(config)} {
		if err := os.WriteFile(at(name), b, 0o600); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(a.Stdout, "ssh -F %s %s\n", at("config"), l.cert.User)
	return err
}
