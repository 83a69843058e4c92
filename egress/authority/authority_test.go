package authority

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestAnAuthorityIsFoundAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.key")
	first, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", info, err)
	}
	if left, _ := filepath.Glob(path + ".*"); len(left) > 0 {
		t.Errorf("left %q", left)
	}
	second, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	one, err := first.Authority("abc")
	if err != nil {
		t.Fatal(err)
	}
	again, err := second.Authority("abc")
	if err != nil {
		t.Fatal(err)
	}
	other, err := second.Authority("abd")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.PEM(), again.PEM()) {
		t.Error("the certificate of an authority is not the same after a restart")
	}
	if one.key.Equal(other.key) || bytes.Equal(one.PEM(), other.PEM()) {
		t.Error("two sandboxes share an authority")
	}
	verify := func(a, trusts *Authority, name string, at time.Time) error {
		leaf, err := a.Leaf(name)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(trusts.PEM()) {
			t.Fatal("no certificate in PEM")
		}
		_, err = leaf.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: at})
		return err
	}
	if err := verify(again, one, "good.test", time.Now()); err != nil {
		t.Error(err)
	}
	if err := verify(other, one, "good.test", time.Now()); err == nil {
		t.Error("what one sandbox trusts, another's authority signs")
	}
	block, _ := pem.Decode(one.PEM())
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if cert.NotAfter.Before(time.Now().AddDate(50, 0, 0)) {
		t.Errorf("a snapshot cannot be used after %v", cert.NotAfter)
	}
}

func TestLeavesAreKeptAndBounded(t *testing.T) {
	m, err := New(make([]byte, MasterSize))
	if err != nil {
		t.Fatal(err)
	}
	a, err := m.Authority("abc")
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := a.Leaf("good.test")
	if again, _ := a.Leaf("good.test"); again != leaf {
		t.Error("a leaf was made twice")
	}
	for i := range leavesKept + 50 {
		if _, err := a.Leaf(fmt.Sprintf("n%d.test", i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(a.mu.leaves) > leavesKept {
		t.Errorf("%d leaves", len(a.mu.leaves))
	}
}

func TestADamagedMasterKeyIsNotUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.key")
	if err := os.WriteFile(path, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errors.Is(err, sandbox.ErrCorrupt) {
		t.Errorf("%v", err)
	}
}
