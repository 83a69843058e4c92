package pki

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"strings"
)

// Certificates are those in b (PEM), in the form that every program reads. A
// private key among them is an error: whoever is to trust them could read it.
func Certificates(b []byte) ([]byte, error) {
	var out []byte
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			return out, nil
		}
		if block.Type == "PRIVATE KEY" || strings.HasSuffix(block.Type, " PRIVATE KEY") {
			return nil, errors.New("a private key is in it, which every sandbox could read")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return nil, err
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})...)
	}
}
