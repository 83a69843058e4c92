package proxy_test

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"testing"
)

// echConfig is a list of one config for encrypted ClientHellos whose outer name
// is public. Nobody can decrypt what is made with it.
func echConfig(t *testing.T, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	b = append(b, 7)                                                        // config id
	b = binary.BigEndian.AppendUint16(b, 0x20)                              // DHKEM(X25519, HKDF-SHA256)
	b = binary.BigEndian.AppendUint16(b, 32)                                // public key
	b = append(b, key.PublicKey().Bytes()...)                               //
	b = append(b, 0, 4, 0, 1, 0, 1)                                         // HKDF-SHA256, AES-128-GCM
	b = append(b, 0, byte(len(public)))                                     // maximum name length, length
	b = append(append(b, public...), 0, 0)                                  // no extensions
	b = append([]byte{0xfe, 0x0d, 0, byte(len(b))}, b...)                   // version
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) // list
}
