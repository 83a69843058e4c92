package pki

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Renewing is a certificate that is replaced when two thirds of its life are
// over, on the next connection. Safe for concurrent use.
type Renewing struct {
	issue func() (tls.Certificate, error)
	clock func() time.Time

	mu struct {
		sync.Mutex
		current *tls.Certificate
	}
}

// Renewing issues now and again when it is time.
func (a *InstallationCA) Renewing(kind Kind, name string, hosts ...string) (*Renewing, error) {
	r := &Renewing{clock: a.clock, issue: func() (tls.Certificate, error) { return a.Issue(kind, name, hosts...) }}
	_, err := r.get()
	return r, err
}

func (r *Renewing) get() (*tls.Certificate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.mu.current; c != nil {
		life := c.Leaf.NotAfter.Sub(c.Leaf.NotBefore)
		if r.clock().Before(c.Leaf.NotBefore.Add(life * 2 / 3)) {
			return c, nil
		}
	}
	c, err := r.issue()
	if err != nil {
		if r.mu.current != nil && r.clock().Before(r.mu.current.Leaf.NotAfter) {
			return r.mu.current, nil // still good, and the next connection tries again
		}
		return nil, err
	}
	r.mu.current = &c
	return r.mu.current, nil
}

// ServerTLS is for a listener that anybody may connect to: TLS 1.3 and a
// certificate of the authority.
func (r *Renewing) ServerTLS() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return r.get() }}
}

// MutualTLS is for connections between a server and its nodes, for either side:
// both show a certificate of the authority, and the other end's is of the kind
// wanted. It is looked at in every handshake, resumed ones too; what an
// authority that was rolled trusts is asked each time.
func (a *InstallationCA) MutualTLS(own *Renewing, want Kind) *tls.Config {
	check := func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return &sandbox.Error{Class: sandbox.Unauthenticated, Op: "pki.peer", Msg: "the other end has shown no certificate"}
		}
		opts := x509.VerifyOptions{Roots: a.Pool(), CurrentTime: a.clock(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
		if _, err := cs.PeerCertificates[0].Verify(opts); err != nil {
			return &sandbox.Error{Class: sandbox.Unauthenticated, Op: "pki.peer", Msg: "the other end's certificate is not of this installation", Err: err}
		}
		kind, name, err := whose(cs.PeerCertificates[0])
		if err == nil && kind != want {
			err = &sandbox.Error{Class: sandbox.Denied, Op: "pki.peer", Msg: "the other end is " + string(kind) + " " + name + ", not a " + string(want)}
		}
		return err
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own.get() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own.get() },
		ClientAuth:           tls.RequireAnyClientCert,
		// The chain and the kind are checked in VerifyConnection, on both sides:
		// names of hosts say nothing here.
		InsecureSkipVerify: true, //nolint:gosec // see VerifyConnection
		VerifyConnection:   check,
	}
}

// PeerOf is who the other end of a connection made with MutualTLS is.
func PeerOf(cs tls.ConnectionState) (Kind, string, error) {
	if !cs.HandshakeComplete || len(cs.PeerCertificates) == 0 {
		return "", "", &sandbox.Error{Class: sandbox.Unauthenticated, Op: "pki.peer", Msg: "the other end has shown no certificate"}
	}
	return whose(cs.PeerCertificates[0])
}

// Files is a certificate and key in files that somebody else renews: they are
// read again when they change. Safe for concurrent use.
type Files struct {
	cert, key string
	clock     func() time.Time

	mu struct {
		sync.Mutex
		current *tls.Certificate
		stamp   [2]time.Time
		looked  time.Time
	}
}

// lookEvery is how often files are looked at.
const lookEvery = 10 * time.Second

// OpenFiles reads them once, so that a mistake shows at the start.
func OpenFiles(cert, key string, clock func() time.Time) (*Files, error) {
	if clock == nil {
		clock = time.Now
	}
	f := &Files{cert: cert, key: key, clock: clock}
	_, err := f.get()
	return f, err
}

// Leaf is the certificate that is used now.
func (f *Files) Leaf() (*x509.Certificate, error) {
	c, err := f.get()
	if err != nil {
		return nil, err
	}
	return c.Leaf, nil
}

func (f *Files) get() (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.clock()
	if f.mu.current != nil && now.Sub(f.mu.looked) < lookEvery && !now.Before(f.mu.looked) {
		return f.mu.current, nil
	}
	f.mu.looked = now
	var stamp [2]time.Time
	for i, name := range []string{f.cert, f.key} {
		info, err := os.Stat(name)
		if err != nil {
			return f.orOld(problem(err, "the certificate or its key cannot be read"))
		}
		stamp[i] = info.ModTime()
	}
	if f.mu.current != nil && stamp == f.mu.stamp {
		return f.mu.current, nil
	}
	c, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil { // half replaced, perhaps: the old one goes on
		return f.orOld(&sandbox.Error{Class: sandbox.Invalid, Op: "pki", Field: "tls-cert", Msg: "the certificate and its key do not read or do not fit", Err: err})
	}
	f.mu.current, f.mu.stamp = &c, stamp
	return f.mu.current, nil
}

func (f *Files) orOld(err error) (*tls.Certificate, error) {
	if f.mu.current != nil {
		return f.mu.current, nil
	}
	return nil, err
}

// ServerTLS is TLS 1.3 with the files' certificate.
func (f *Files) ServerTLS() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.get() }}
}
