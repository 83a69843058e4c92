package sshd

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/cove-sandbox/cove/sandbox"
)

func authority(t *testing.T) *LoginCA {
	t.Helper()
	a, err := OpenLoginCA(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// One address that never logs in keeps a share of the places, no more, and gives
// them back.
func TestStrangersOfOneAddress(t *testing.T) {
	s := New(Config{CA: authority(t), MaxConns: 8, MaxStrangers: 2})
	defer s.Close()
	from := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }
	var leave []func()
	admit := func(ip string) (known func(), ok bool) {
		known, out, ok := s.admit(from(ip))
		if ok {
			leave = append(leave, out)
		}
		return known, ok
	}
	known, _ := admit("192.0.2.1")
	if _, ok := admit("192.0.2.1"); !ok {
		t.Fatal("the second of two is refused")
	}
	if _, ok := admit("192.0.2.1"); ok {
		t.Error("a third stranger of one address is let in")
	}
	if _, ok := admit("192.0.2.2"); !ok {
		t.Error("another address is refused")
	}
	known()
	known() // once
	if _, ok := admit("192.0.2.1"); !ok {
		t.Error("who logged in still counts as a stranger")
	}
	if _, ok := admit("192.0.2.1"); ok {
		t.Error("a third stranger of one address is let in")
	}
	for _, f := range leave {
		f()
	}
	if s.mu.conns != 0 || len(s.mu.strangers) != 0 {
		t.Errorf("left: %d connections, %v", s.mu.conns, s.mu.strangers)
	}
}

// A connection beyond the bound is closed before a word is said.
func TestStrangerBeyondTheBoundIsClosed(t *testing.T) {
	s := New(Config{CA: authority(t), MaxStrangers: 1})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	defer func() { s.Close(); <-served }()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		return c
	}
	first := dial()
	if _, err := io.ReadFull(first, make([]byte, 4)); err != nil { // "SSH-"
		t.Fatal(err)
	}
	if n, err := dial().Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("a second stranger reads %d bytes, %v", n, err)
	}
}

// revocable is a backend whose one API key can be revoked.
type revocable struct {
	Backend
	revoked atomic.Bool
}

func (b *revocable) Login(ctx context.Context, _, _, _ string) (context.Context, error) {
	return ctx, b.KeyLives(ctx, "key")
}

func (b *revocable) KeyLives(_ context.Context, key string) error {
	if b.revoked.Load() || key != "key" {
		return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "revoked"}
	}
	return nil
}

// A connection that is there when its API key is revoked opens nothing any more.
func TestConnectionEndsWithItsKey(t *testing.T) {
	ca, b := authority(t), &revocable{}
	s := New(Config{CA: ca, Backend: b, KeyLook: time.Millisecond})
	defer s.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = s.Serve(ln) }()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	id := sandbox.NewID(rand.Reader)
	line, err := ca.Sign(id, "key", strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	public, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ssh.NewCertSigner(public.(*ssh.Certificate), signer)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ssh.Dial("tcp", ln.Addr().String(), &ssh.ClientConfig{User: id, Auth: []ssh.AuthMethod{ssh.PublicKeys(cert)},
		HostKeyCallback: ssh.FixedHostKey(ca.host.PublicKey()), Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, _, err := c.SendRequest("keepalive@openssh.com", true, nil); err != nil {
		t.Fatal("it is not there:", err)
	}
	over := make(chan error, 1)
	go func() { over <- c.Wait() }()
	b.revoked.Store(true)
	select {
	case <-over:
	case <-time.After(10 * time.Second):
		t.Error("a connection outlives its API key")
	}
}
