package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/gateway/sshd"
	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

func (p places) gatewayKey() string { return filepath.Join(p.dir, "gateway.key") }

// portGate is what the server tells about addresses of ports.
type portGate struct {
	secret []byte // of the tokens
	tokens *gateway.Tokens
	domain gateway.Domain
}

func (g portGate) URL(id string, port int) string {
	return g.domain.URL(gateway.Target{Sandbox: id, Port: port})
}

func (g portGate) Domain() string {
	if g.domain.Name == "" {
		return ""
	}
	return g.domain.Scheme + "://" + g.domain.Host()
}

func (g portGate) Token(id string, port int, key string, until time.Time) string {
	return g.tokens.Mint(gateway.Target{Sandbox: id, Port: port}, key, until)
}

// openGate reads the key of tokens, or makes one on a first start, and the
// domain.
func openGate(c cli.ServeConfig, at places, ln net.Listener, secure bool) (portGate, error) {
	key, err := secretFile(at.gatewayKey(), gateway.TokenKeySize)
	if err != nil {
		return portGate{}, err
	}
	g := portGate{secret: key, tokens: gateway.NewTokens(key, nil)}
	if c.GatewayDomain != "" {
		scheme, port := "http", ""
		if secure {
			scheme = "https"
		}
		if tcp, ok := ln.Addr().(*net.TCPAddr); ok {
			port = strconv.Itoa(tcp.Port)
		}
		g.domain, err = gateway.ParseDomain(c.GatewayDomain, scheme, port)
	}
	return g, err
}

// sshSigner is the authority with where its server listens.
type sshSigner struct {
	*sshd.LoginCA
	ln net.Listener
}

func (s sshSigner) Port() int {
	if tcp, ok := s.ln.Addr().(*net.TCPAddr); ok {
		return tcp.Port
	}
	return 0
}

// openSSH listens where the SSH server is to be; nil where there is none.
func openSSH(c cli.ServeConfig, at places) (*sshSigner, error) {
	if c.SSH == "" {
		return nil, nil
	}
	a, err := sshd.OpenLoginCA(at.dir)
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", c.SSH)
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Field: "ssh", Err: err, Hint: "--ssh takes an address like 127.0.0.1:7722"}
	}
	return &sshSigner{LoginCA: a, ln: ln}, nil
}

// sshBackend is the server as the SSH server sees it.
type sshBackend struct {
	server.Reach
	operations *server.Server
}

func (b sshBackend) Machine(ctx context.Context, id string) (sshd.Machine, func(), error) {
	release, err := b.Hold(ctx, id, true)
	if err != nil {
		return nil, nil, err
	}
	return sshMachine{b.operations, id}, release, nil
}

// sshMachine is a sandbox in which SSH runs processes, by the operations that every
// other dialect uses.
type sshMachine struct {
	operations *server.Server
	sandbox    string
}

func (m sshMachine) Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error {
	return m.operations.StartProcess(ctx, server.StartRequest{Sandbox: m.sandbox, Process: spec, Offset: offset}, func(evs []sandbox.ProcessEvent, _ bool) error {
		for _, ev := range evs {
			if err := sink(ev); err != nil {
				return err
			}
		}
		return nil
	})
}

func (m sshMachine) SendInput(ctx context.Context, exec string, data []byte) error {
	return m.operations.SendInput(ctx, m.sandbox, exec, data)
}

func (m sshMachine) CloseInput(ctx context.Context, exec string) error {
	return m.operations.CloseInput(ctx, m.sandbox, exec)
}

func (m sshMachine) Signal(ctx context.Context, exec, signal string, processOnly bool) error {
	return m.operations.SignalProcess(ctx, m.sandbox, exec, signal, processOnly)
}

func (m sshMachine) Resize(ctx context.Context, exec string, size sandbox.TermSize) error {
	return m.operations.ResizeTerminal(ctx, m.sandbox, exec, &size)
}

// sftpProgram is what a driver brings into every sandbox; nil for none.
func sftpProgram(d runtime.Driver) []string {
	if p, ok := d.(interface{ SFTP() []string }); ok {
		return p.SFTP()
	}
	return nil
}

// secretFile holds size random bytes in hexadecimal, made where it is missing.
func secretFile(name string, size int) ([]byte, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		key := make([]byte, size)
		_, _ = rand.Read(key) // never fails
		return key, durable.Write(name, []byte(hex.EncodeToString(key)+"\n"), 0o600)
	}
	if err != nil {
		return nil, err
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(key) != size {
		return nil, (&sandbox.Error{Class: sandbox.Corrupt, Msg: name + " holds no key"}).
			WithHint("remove it: the next start makes another, and what the old one signed is void")
	}
	return key, nil
}
