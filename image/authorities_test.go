package image

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// certificate is one of an authority, and its key.
func certificate(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder})
}

// An image brings authorities in /etc/cove/ca.d; what is none, or too much, is
// noted and left out.
func TestAuthoritiesOfAnImage(t *testing.T) {
	l, err := Open(t.TempDir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	dir := t.TempDir()
	at := filepath.Join(dir, "etc/cove/ca.d")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	one, key := certificate(t, "one")
	two, _ := certificate(t, "two")
	for name, b := range map[string][]byte{
		"a.crt":      append([]byte("# a comment\n"), one...),
		"b.pem":      two,
		"junk.crt":   []byte("no certificate"),
		"key.pem":    append(bytes.Clone(two), key...),
		"many.crt":   bytes.Repeat(two, maxAuthorities/len(two)),
		"readme.txt": one,
	} {
		if err := os.WriteFile(filepath.Join(at, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	img, err := l.ImportDir(t.Context(), dir, sandbox.ImageConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := append(bytes.Clone(one), two...); !bytes.Equal(img.Config.Authorities, want) {
		t.Errorf("the image trusts\n%s\nwant\n%s", img.Config.Authorities, want)
	}
	notes, err := l.Notes(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(notes.Authorities); got != "[junk.crt key.pem many.crt]" {
		t.Errorf("left out: %s", got)
	}
}
