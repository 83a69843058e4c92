package agent_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestACertificateIsTrusted(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	const own, first, second, other = "/usr/share/own.crt", "/etc/ssl/bundle.crt", "/etc/pki/bundle.crt", "/etc/pki/name.pem"
	stores := []string{first, second, other}
	read := func(p string) string {
		data, _, err := b.ReadFile(ctx, p, 0, 0)
		if err != nil {
			return err.Error()
		}
		return string(data)
	}
	if missing, err := b.Trust(ctx, own, stores, []byte("CERT\n")); !missing || err != nil {
		t.Fatalf("without a store: %v, %v", missing, err)
	}
	if _, err := os.Stat(filepath.Join(b.root, own)); err == nil {
		t.Error("written without a store")
	}
	// The first is made of the second, and one file with two names is extended once.
	if _, err := b.WriteFile(ctx, second, []byte("ROOTS\n"), sandbox.WriteOptions{Parents: true, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("bundle.crt", filepath.Join(b.root, other)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time nothing is done
		if missing, err := b.Trust(ctx, own, stores, []byte("CERT\n")); missing || err != nil {
			t.Fatalf("%v, %v", missing, err)
		}
		for _, p := range []string{first, second} {
			if got := read(p); got != "ROOTS\n\nCERT\n" {
				t.Errorf("%s: %q", p, got)
			}
		}
		if got := read(own); got != "CERT\n" {
			t.Errorf("own: %q", got)
		}
	}
	if info, err := b.Stat(ctx, second); err != nil || info.Mode != 0o600 {
		t.Errorf("%+v, %v", info, err)
	}
	// A store that is no file is an error and not waited for.
	if err := b.Remove(ctx, own, false); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(filepath.Join(b.root, first)), os.Mkdir(filepath.Join(b.root, first), 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Trust(ctx, own, stores, []byte("CERT\n")); err == nil || !strings.Contains(err.Error(), first) {
		t.Errorf("a directory for a store: %v", err)
	}
	if _, err := b.Trust(ctx, own, nil, []byte("CERT\n")); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no stores: %v", err)
	}
}

func TestTheEnvironmentOfProcessesToCome(t *testing.T) {
	b := newBox(t)
	if err := b.SetEnv(t.Context(), []string{"NEW=1", "PATH=/usr/bin:/bin"}); err != nil {
		t.Fatal(err)
	}
	if got := b.sh(t, "e1", "echo $NEW").stdout.String(); got != "1\n" {
		t.Errorf("%q", got)
	}
	if err := b.SetEnv(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := b.sh(t, "e2", "echo $NEW").stdout.String(); got != "\n" {
		t.Errorf("%q", got)
	}
}
