package sshd

import (
	"io"
	"net"
	"testing"
	"time"
)

func authority(t *testing.T) *Authority {
	t.Helper()
	a, err := OpenAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// One address that never logs in keeps a share of the places, no more, and gives
// them back.
func TestStrangersOfOneAddress(t *testing.T) {
	s := New(Config{Authority: authority(t), MaxConns: 8, MaxStrangers: 2})
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
	if s.conns != 0 || len(s.strangers) != 0 {
		t.Errorf("left: %d connections, %v", s.conns, s.strangers)
	}
}

// A connection beyond the bound is closed before a word is said.
func TestStrangerBeyondTheBoundIsClosed(t *testing.T) {
	s := New(Config{Authority: authority(t), MaxStrangers: 1})
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
