package agent

import (
	"bytes"
	"crypto/sha1"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"unicode/utf16"
)

// keystorePassword is Java's for stores that hold nothing secret.
const keystorePassword = "changeit"

// keystore puts certificates in PEM form into a store that Java trusts by: JKS,
// which every version reads, where PKCS #12 without a password needs a new one.
// It is nothing but a list with a digest over it that keeps mistakes away.
func keystore(bundle []byte) []byte {
	var certs [][]byte
	for rest := bundle; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == "CERTIFICATE" {
			certs = append(certs, block.Bytes)
		}
	}
	var b bytes.Buffer
	number := func(v any) { _ = binary.Write(&b, binary.BigEndian, v) } // a Buffer takes everything
	text := func(s string) { number(uint16(len(s))); b.WriteString(s) }
	number(uint32(0xfeedfeed))
	number(uint32(2)) // version
	number(uint32(len(certs)))
	for i, der := range certs {
		number(uint32(2)) // a certificate that is trusted
		text(fmt.Sprintf("cove-%d", i))
		number(uint64(0)) // when it was added: the same bytes each time
		text("X.509")
		number(uint32(len(der)))
		b.Write(der)
	}
	sum := sha1.New() // the format's
	_ = binary.Write(sum, binary.BigEndian, utf16.Encode([]rune(keystorePassword)))
	sum.Write([]byte("Mighty Aphrodite")) // the format's, too
	sum.Write(b.Bytes())
	return sum.Sum(b.Bytes())
}
