// Package pki makes the certificates of an installation: an authority of its
// own in a directory, certificates for its server and its nodes, and their
// renewal before they end. With it two parts that hold the same authority trust
// each other over TLS 1.3 and nobody else (mTLS), and a server can be tried with
// TLS before it has a certificate of the public kind.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// Lives of certificates. Backdate is for machines whose clocks are a little
// behind.
const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	backdate = time.Hour
)

// Kind is whose a certificate is.
type Kind string

const (
	Server Kind = "server"
	Node   Kind = "node"
)

// InstallationCA signs the certificates of the parts of an installation. Safe for concurrent use.
type InstallationCA struct {
	dir   string
	clock func() time.Time

	mu struct {
		sync.RWMutex
		cert    *x509.Certificate
		key     crypto.Signer
		trusted []*x509.Certificate // cert first, then those before it that have not ended
	}
}

const (
	certFile = "ca.crt" // the current one first, older ones that are still trusted after it
	keyFile  = "ca.key"
)

// Open reads the authority of a directory, making both if they are not there.
// The key is readable by its owner only.
func Open(dir string, clock func() time.Time) (*InstallationCA, error) {
	if clock == nil {
		clock = time.Now
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, problem(err, "the directory of the authority cannot be made")
	}
	a := &InstallationCA{dir: dir, clock: clock}
	_, certErr := os.Stat(a.path(certFile))
	_, keyErr := os.Stat(a.path(keyFile))
	if errors.Is(certErr, fs.ErrNotExist) && errors.Is(keyErr, fs.ErrNotExist) {
		return a, a.Roll()
	}
	return a, a.load()
}

func (a *InstallationCA) path(name string) string { return filepath.Join(a.dir, name) }

// CertFile is what whoever is to trust the authority is given.
func (a *InstallationCA) CertFile() string { return a.path(certFile) }

func (a *InstallationCA) load() error {
	certs, err := ReadCertificates(a.path(certFile))
	if err != nil {
		return err
	}
	b, err := os.ReadFile(a.path(keyFile))
	if err != nil {
		return problem(err, "the key of the authority cannot be read")
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return damaged(keyFile, nil)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return damaged(keyFile, err)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(certs[0].PublicKey) {
		return damaged(keyFile, errors.New("it is not the key of "+certFile))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.cert, a.mu.key, a.mu.trusted = certs[0], key, a.still(certs)
	return nil
}

// still are those of certs that have not ended; the first is always kept.
func (a *InstallationCA) still(certs []*x509.Certificate) []*x509.Certificate {
	out := certs[:1:1]
	for _, c := range certs[1:] {
		if a.clock().Before(c.NotAfter) {
			out = append(out, c)
		}
	}
	return out
}

// Roll makes a new authority that signs from now on. The one before stays
// trusted until it ends, so that what it signed goes on; give the new file out
// before the last certificate of the old one ends.
func (a *InstallationCA) Roll() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	now := a.clock()
	tmpl := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "Cove " + now.UTC().Format("2006-01-02 15:04:05")},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	trusted := a.still(append([]*x509.Certificate{cert}, a.mu.trusted...))
	var certs bytes.Buffer
	for _, c := range trusted {
		_ = pem.Encode(&certs, &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
	}
	// The key first: a crash between the two leaves a key that does not fit,
	// which the next Open says, and never a certificate that nobody can use.
	if err := writeFile(a.path(keyFile), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return err
	}
	if err := writeFile(a.path(certFile), certs.Bytes(), 0o644); err != nil {
		return err
	}
	a.mu.cert, a.mu.key, a.mu.trusted = cert, key, trusted
	return nil
}

// Pool is what to trust.
func (a *InstallationCA) Pool() *x509.CertPool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	pool := x509.NewCertPool()
	for _, c := range a.mu.trusted {
		pool.AddCert(c)
	}
	return pool
}

// Fingerprint is the SHA-256 of the authority's certificate, for people to
// compare.
func (a *InstallationCA) Fingerprint() string {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return Fingerprint(a.mu.cert)
}

// Fingerprint of a certificate: "AB:CD:…".
func Fingerprint(c *x509.Certificate) string {
	sum := sha256.Sum256(c.Raw)
	text := strings.ToUpper(hex.EncodeToString(sum[:]))
	var b strings.Builder
	for i := 0; i < len(text); i += 2 {
		if i > 0 {
			b.WriteByte(':')
		}
		b.WriteString(text[i : i+2])
	}
	return b.String()
}

// Issue signs a certificate for a server or node with a name of its own, good
// for the host names and addresses given.
func (a *InstallationCA) Issue(kind Kind, name string, hosts ...string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	id, err := identity(kind, name)
	if err != nil {
		return tls.Certificate{}, err
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	now := a.clock()
	tmpl := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: string(kind) + " " + name}, URIs: []*url.URL{id},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(leafLife), BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else if h != "" {
			tmpl.DNSNames = append(tmpl.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.mu.cert, key.Public(), a.mu.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// identity is how a certificate says whose it is: cove://node/NAME. Host names
// say where something is reached, which may change.
func identity(kind Kind, name string) (*url.URL, error) {
	if kind != Server && kind != Node || name == "" || len(name) > 253 || strings.ContainsAny(name, "/?#%\x00 ") {
		return nil, sandbox.InvalidField("name", "%.80q is no name of a %s", name, kind)
	}
	return &url.URL{Scheme: "cove", Host: string(kind), Path: "/" + name}, nil
}

func whose(c *x509.Certificate) (Kind, string, error) {
	if len(c.URIs) == 1 && c.URIs[0].Scheme == "cove" {
		kind, name := Kind(c.URIs[0].Host), strings.TrimPrefix(c.URIs[0].Path, "/")
		if _, err := identity(kind, name); err == nil {
			return kind, name, nil
		}
	}
	return "", "", &sandbox.Error{Class: sandbox.Unauthenticated, Op: "pki.peer", Msg: "the certificate is of neither a server nor a node"}
}

func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // crypto/rand never fails
	}
	return n.Add(n, big.NewInt(1))
}

// ReadCertificates reads a file of PEM certificates, at least one.
func ReadCertificates(path string) (certs []*x509.Certificate, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, problem(err, "a certificate cannot be read")
	}
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, damaged(path, err)
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, damaged(path, errors.New("it has no certificate in PEM form"))
	}
	return certs, nil
}

func damaged(what string, err error) error {
	return &sandbox.Error{Class: sandbox.Corrupt, Op: "pki", Msg: what + " is damaged", Err: err, Hint: "restore it, or remove ca.crt and ca.key to begin anew and give the new ca.crt out"}
}

func problem(err error, msg string) error {
	return &sandbox.Error{Class: sandbox.Precondition, Op: "pki", Msg: msg, Err: err}
}

func writeFile(name string, content []byte, mode fs.FileMode) error {
	if err := durable.Write(name, content, mode); err != nil {
		return problem(fmt.Errorf("%s: %w", name, err), "cannot write a file of the authority")
	}
	return nil
}
