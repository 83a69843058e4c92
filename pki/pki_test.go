package pki

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

type clock struct{ now time.Time }

func (c *clock) get() time.Time { return c.now }

func open(t *testing.T, dir string, c *clock) *InstallationCA {
	t.Helper()
	a, err := Open(dir, c.get)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func renewing(t *testing.T, a *InstallationCA, kind Kind, name string) *Renewing {
	t.Helper()
	r, err := a.Renewing(kind, name, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// shake connects two ends and returns what each thought of it.
func shake(t *testing.T, server, client *tls.Config) (state tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		defer c.Close()
		s := tls.Server(c, server)
		if err = s.Handshake(); err == nil {
			state = s.ConnectionState()
			_, err = s.Write([]byte("x"))
		}
		done <- err
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), client)
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1)) // in TLS 1.3 a refused client hears it here
		c.Close()
	}
	return state, <-done, err
}

func TestMutualTLS(t *testing.T) {
	c := &clock{time.Now()}
	a, other := open(t, t.TempDir(), c), open(t, t.TempDir(), c)
	srv, n1, n2 := renewing(t, a, Server, "main"), renewing(t, a, Node, "n1"), renewing(t, a, Node, "n2")

	state, serr, cerr := shake(t, a.MutualTLS(srv, Node), a.MutualTLS(n1, Server))
	if serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	if kind, name, err := PeerOf(state); kind != Node || name != "n1" || err != nil || state.Version != tls.VersionTLS13 {
		t.Error(kind, name, err, state.Version)
	}
	for name, ends := range map[string][2]*tls.Config{
		"a node of another installation":   {a.MutualTLS(srv, Node), other.MutualTLS(renewing(t, other, Node, "n1"), Server)},
		"a server of another installation": {other.MutualTLS(renewing(t, other, Server, "main"), Node), a.MutualTLS(n1, Server)},
		"a node that plays the server":     {a.MutualTLS(n2, Node), a.MutualTLS(n1, Server)},
		"a server that plays a node":       {a.MutualTLS(srv, Node), a.MutualTLS(srv, Server)},
		"no certificate":                   {a.MutualTLS(srv, Node), {InsecureSkipVerify: true}},
		"an old protocol":                  {a.MutualTLS(srv, Node), {InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}},
	} {
		if _, serr, cerr := shake(t, ends[0], ends[1]); serr == nil && cerr == nil {
			t.Errorf("%s got in", name)
		}
	}
}

func TestRenewal(t *testing.T) {
	c := &clock{time.Now()}
	a := open(t, t.TempDir(), c)
	r := renewing(t, a, Node, "n1")
	serial := func() string {
		cert, err := r.get()
		if err != nil {
			t.Fatal(err)
		}
		return cert.Leaf.SerialNumber.String()
	}
	first := serial()
	c.now = c.now.Add(leafLife / 2)
	if serial() != first {
		t.Error("renewed at half its life")
	}
	c.now = c.now.Add(leafLife / 4)
	second := serial()
	if second == first {
		t.Error("not renewed at three quarters of its life")
	}
	// A failure to renew keeps the one there is, as long as it is good.
	issue := r.issue
	r.issue = func() (tls.Certificate, error) { return tls.Certificate{}, errors.New("no") }
	c.now = c.now.Add(leafLife * 3 / 4)
	if serial() != second {
		t.Error("lost a good certificate")
	}
	c.now = c.now.Add(leafLife)
	if _, err := r.get(); err == nil {
		t.Error("an ended certificate is shown")
	}
	r.issue = issue
	if serial() == second {
		t.Error("not renewed when it could be again")
	}
}

// After a roll, what the old authority signed goes on, across a restart too,
// until it ends.
func TestRoll(t *testing.T) {
	c, dir := &clock{time.Now()}, t.TempDir()
	a := open(t, dir, c)
	node, print := renewing(t, a, Node, "n1"), a.Fingerprint()
	if err := a.Roll(); err != nil {
		t.Fatal(err)
	}
	if a.Fingerprint() == print || len(print) != 32*3-1 {
		t.Error("the same authority:", print)
	}
	a = open(t, dir, c)
	srv := renewing(t, a, Server, "main")
	if _, serr, cerr := shake(t, a.MutualTLS(srv, Node), a.MutualTLS(node, Server)); serr != nil || cerr != nil {
		t.Error("the old one's node:", serr, cerr)
	}
	c.now = c.now.Add(caLife - time.Hour)
	if err := a.Roll(); err != nil {
		t.Fatal(err)
	}
	c.now = c.now.Add(2 * time.Hour)
	a = open(t, dir, c)
	if len(a.mu.trusted) != 1 {
		t.Errorf("%d are trusted, two of them have ended", len(a.mu.trusted))
	}
}

func TestFilesOnDisk(t *testing.T) {
	c, dir := &clock{time.Now()}, t.TempDir()
	a := open(t, dir, c)
	for name, mode := range map[string]os.FileMode{keyFile: 0o600, certFile: 0o644} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	if b := open(t, dir, c); b.Fingerprint() != a.Fingerprint() {
		t.Error("opened again it is another")
	}
	other := t.TempDir()
	open(t, other, c)
	for name, harm := range map[string]func(dir string) error{
		"no key":        func(d string) error { return os.Remove(filepath.Join(d, keyFile)) },
		"no cert":       func(d string) error { return os.Remove(filepath.Join(d, certFile)) },
		"another's key": func(d string) error { return os.Rename(filepath.Join(other, keyFile), filepath.Join(d, keyFile)) },
		"half a key":    func(d string) error { return os.Truncate(filepath.Join(d, keyFile), 40) },
		"empty":         func(d string) error { return os.Truncate(filepath.Join(d, certFile), 0) },
	} {
		d := t.TempDir()
		open(t, d, c)
		if err := harm(d); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(d, c.get); err == nil {
			t.Errorf("%s: opened", name)
		} else if class := sandbox.ClassOf(err); class != sandbox.Corrupt && class != sandbox.Precondition {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, bad := range []string{"", "a/b", "a b", strings.Repeat("x", 300)} {
		if _, err := a.Issue(Node, bad); err == nil {
			t.Errorf("issued for %q", bad)
		}
	}
}

// A certificate in files is read again when it changes, and a half-written one
// does not take the old one away.
func TestFilesAreReadAgain(t *testing.T) {
	c := &clock{time.Now()}
	a, b := t.TempDir(), t.TempDir()
	open(t, a, c)
	open(t, b, c)
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "c"), filepath.Join(dir, "k")
	copyFrom := func(from string, names ...string) {
		t.Helper()
		for _, n := range names {
			data, err := os.ReadFile(filepath.Join(from, map[string]string{"c": certFile, "k": keyFile}[n]))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, n), data, 0o600)
			}
			if err == nil {
				err = os.Chtimes(filepath.Join(dir, n), c.now, c.now)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := OpenFiles(cert, key, c.get); err == nil {
		t.Error("opened nothing")
	}
	copyFrom(a, "c", "k")
	f, err := OpenFiles(cert, key, c.get)
	if err != nil {
		t.Fatal(err)
	}
	first, _ := f.Leaf()
	c.now = c.now.Add(time.Minute)
	copyFrom(b, "c") // half of a renewal
	if leaf, err := f.Leaf(); err != nil || !leaf.Equal(first) {
		t.Error("a half-replaced pair:", err)
	}
	c.now = c.now.Add(time.Minute)
	copyFrom(b, "k")
	if leaf, err := f.Leaf(); err != nil || leaf.Equal(first) {
		t.Error("not read again:", err)
	}
}
