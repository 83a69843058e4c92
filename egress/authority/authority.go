// Package authority makes the certificates that a node answers its sandboxes
// with, where it ends their TLS in place of the server they mean.
//
// Each sandbox has an authority of its own, so that what one trusts says
// nothing to another. Its key follows from the node's master key and the
// authority's id: nothing is stored for a sandbox, a restart finds the same key
// again, and neither the sandbox nor its snapshots hold anything but the
// certificate. Forks and sandboxes from snapshots have that certificate in their
// files, and maybe in the memory of their processes; they keep the authority.
package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// MasterSize is the length of a node's master key.
const MasterSize = 32

// A certificate of an authority must be as good on the day a snapshot is
// restored as on the day it was taken, whichever that is. Fixed dates also make
// it the same bytes each time, so that installing it twice changes nothing.
var (
	notBefore = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)
	notAfter  = time.Date(2124, 1, 1, 0, 0, 0, 0, time.UTC)
)

const (
	leafLife   = 30 * 24 * time.Hour
	leafRenew  = 24 * time.Hour // before its end
	backdate   = 24 * time.Hour
	leavesKept = 256 // of one authority; a leaf is made in 60 µs
)

// Master derives authorities.
type Master struct{ key []byte }

// Open reads a master key, making it if there is none. Only its owner may read
// it: who has it can pretend to be any server to any sandbox of the node.
func Open(path string) (*Master, error) {
	const op = "egress.authority"
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, MasterSize)
		rand.Read(key)
		if err = durable.Create(path, key, 0o600); errors.Is(err, fs.ErrExist) {
			key, err = os.ReadFile(path)
		}
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "the master key of sandboxes' authorities: %w", err)
	}
	m, err := New(key)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "%s: %w", path, err).
			WithHint("restore it from a backup; without it sandboxes that trust its authorities cannot use secrets")
	}
	return m, nil
}

// New makes a master of a key.
func New(key []byte) (*Master, error) {
	if len(key) != MasterSize {
		return nil, sandbox.Errorf(sandbox.Corrupt, "egress.authority", "a master key has %d bytes, this has %d", MasterSize, len(key))
	}
	return &Master{key: key}, nil
}

// Authority signs for the servers that one sandbox and its descendants mean to
// talk to. Safe for concurrent use.
type Authority struct {
	id   string
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
	leaf *ecdsa.PrivateKey // of every leaf; made anew by each process

	mu struct {
		sync.Mutex
		leaves map[string]*tls.Certificate
	}
}

// Authority derives the one of an id.
func (m *Master) Authority(id string) (*Authority, error) {
	const op = "egress.authority"
	key, err := derive(m.key, "cove sandbox authority v1 "+id)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	serial := sha256.Sum256([]byte("cove sandbox authority " + id))
	serial[0] = serial[0]&0x7f | 0x40 // positive, and no leading zeros
	tmpl := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial[:16]),
		Subject:      pkix.Name{Organization: []string{"Cove"}, CommonName: "Cove sandbox " + id},
		NotBefore:    notBefore, NotAfter: notAfter, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	// Without a source of randomness ECDSA signs the same bytes the same way.
	der, err := x509.CreateCertificate(nil, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	leaf, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	a := &Authority{id: id, cert: cert, key: key, leaf: leaf,
		pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	a.mu.leaves = map[string]*tls.Certificate{}
	return a, nil
}

// derive makes a P-256 key: 128 bits more than the order has make the bias of
// taking them modulo it too small to matter (FIPS 186-5, A.2.1).
func derive(secret []byte, info string) (*ecdsa.PrivateKey, error) {
	b, err := hkdf.Key(sha256.New, secret, nil, info, 48)
	if err != nil {
		return nil, err
	}
	less := new(big.Int).Sub(elliptic.P256().Params().N, big.NewInt(1))
	d := new(big.Int).SetBytes(b)
	d.Mod(d, less).Add(d, big.NewInt(1))
	return ecdsa.ParseRawPrivateKey(elliptic.P256(), d.FillBytes(make([]byte, 32)))
}

// ID is what the authority was derived by.
func (a *Authority) ID() string { return a.id }

// PEM is the certificate that sandboxes are to trust.
func (a *Authority) PEM() []byte { return a.pem }

// Leaf is a certificate for a server's name, as package policy writes names.
func (a *Authority) Leaf(name string) (*tls.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if c := a.mu.leaves[name]; c != nil && now.Before(c.Leaf.NotAfter.Add(-leafRenew)) {
		return c, nil
	}
	serial := make([]byte, 16)
	rand.Read(serial)
	serial[0] = serial[0]&0x7f | 0x40
	tmpl := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), Subject: pkix.Name{Organization: []string{"Cove"}},
		DNSNames: []string{name}, NotBefore: now.Add(-backdate), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, a.leaf.Public(), a.key)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "egress.authority", "a certificate for %s: %w", name, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "egress.authority", "a certificate for %s: %w", name, err)
	}
	for old := range a.mu.leaves { // any: the names are the sandbox's to choose
		if len(a.mu.leaves) < leavesKept {
			break
		}
		delete(a.mu.leaves, old)
	}
	c := &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: a.leaf, Leaf: parsed}
	a.mu.leaves[name] = c
	return c, nil
}
