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
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

func (p places) gatewayKey() string { return filepath.Join(p.dir, "gateway.key") }

// portGate is what the server tells about addresses of ports.
type portGate struct {
	tokens *gateway.Tokens
	domain gateway.Domain
}

func (g portGate) URL(id string, port int) string {
	return g.domain.URL(gateway.Target{Sandbox: id, Port: port})
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
	g := portGate{tokens: gateway.NewTokens(key, nil)}
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
	*sshd.Authority
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
	a, err := sshd.OpenAuthority(at.dir)
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", c.SSH)
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Field: "ssh", Err: err, Hint: "--ssh takes an address like 127.0.0.1:7722"}
	}
	return &sshSigner{Authority: a, ln: ln}, nil
}

// sshBackend is the server as the SSH server sees it.
type sshBackend struct{ server.Reach }

func (b sshBackend) Machine(ctx context.Context, id string) (sshd.Machine, func(), error) {
	g, release, err := b.Guest(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	return g, release, nil
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
		return key, writeWhole(name, hex.EncodeToString(key)+"\n", 0o600)
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
