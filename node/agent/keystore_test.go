package agent

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Java reads what we write.
func TestKeystore(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var bundle []byte
	for i := range 3 {
		c := &x509.Certificate{SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		bundle = append(append(bundle, "# a comment\n"...), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	store := filepath.Join(t.TempDir(), "cove.jks")
	if err := os.WriteFile(store, keystore(bundle), 0o600); err != nil {
		t.Fatal(err)
	}
	keytool, err := exec.LookPath("keytool")
	if err != nil {
		t.Skip("no Java here")
	}
	out, err := exec.CommandContext(t.Context(), keytool, "-list", "-keystore", store, "-storepass", keystorePassword).CombinedOutput()
	if err != nil || strings.Count(string(out), "trustedCertEntry") != 3 {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), keytool, "-list", "-keystore", store, "-storepass", "another").CombinedOutput(); err == nil {
		t.Errorf("read with another password:\n%s", out)
	}
}
