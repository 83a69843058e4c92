package sshd

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// LoginCA signs certificates that let a key log in to one sandbox. It also holds
// the server's host key: both are made on a first start and kept.
type LoginCA struct {
	ca, host ssh.Signer
}

// Files of a LoginCA in its directory, mode 0600.
const caFile, hostFile = "ssh_ca.key", "ssh_host.key"

// OpenLoginCA reads the keys in dir, or makes them.
func OpenLoginCA(dir string) (*LoginCA, error) {
	ca, err := openKey(filepath.Join(dir, caFile))
	if err != nil {
		return nil, err
	}
	host, err := openKey(filepath.Join(dir, hostFile))
	return &LoginCA{ca: ca, host: host}, err
}

func openKey(name string) (ssh.Signer, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		b, err = makeKey(name)
	}
	if err != nil {
		return nil, err
	}
	s, err := ssh.ParsePrivateKey(b)
	if err != nil {
		return nil, (&sandbox.Error{Class: sandbox.Corrupt, Msg: name + " holds no key", Err: err}).
			WithHint("remove it: the next start makes another")
	}
	return s, nil
}

// makeKey writes a key whole or not at all.
func makeKey(name string) ([]byte, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(key, "cove")
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(block)
	return b, durable.Write(name, b, 0o600)
}

// skew is how much earlier than now a certificate begins: clocks differ.
const skew = time.Minute

// Sign certifies a public key for one sandbox, for the API key called by.
func (a *LoginCA) Sign(id, by, publicKey string, until time.Time) (string, error) {
	if len(publicKey) > 16<<10 {
		return "", sandbox.InvalidField("public_key", "is longer than a key can be")
	}
	key, _, _, rest, err := ssh.ParseAuthorizedKey([]byte(publicKey))
	if err != nil || len(bytes.TrimSpace(rest)) > 0 {
		return "", sandbox.InvalidField("public_key", "not one line like 'ssh-ed25519 AAAA…'")
	}
	if _, isCert := key.(*ssh.Certificate); isCert {
		return "", sandbox.InvalidField("public_key", "is a certificate already; a bare key is accepted")
	}
	if ck, ok := key.(ssh.CryptoPublicKey); !ok || ck == nil {
		return "", sandbox.InvalidField("public_key", "%s keys are not accepted", key.Type())
	}
	cert := &ssh.Certificate{
		Key: key, CertType: ssh.UserCert, KeyId: by, ValidPrincipals: []string{id},
		ValidAfter: uint64(time.Now().Add(-skew).Unix()), ValidBefore: uint64(until.Unix()),
		Permissions: ssh.Permissions{Extensions: map[string]string{"permit-pty": "", "permit-port-forwarding": ""}},
	}
	if err := cert.SignCert(rand.Reader, a.ca); err != nil {
		return "", err
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(cert))), nil
}

// HostKey is the server's public key, one line.
func (a *LoginCA) HostKey() string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(a.host.PublicKey())))
}

// config takes nothing but a certificate of this authority for the sandbox that
// is logged in to.
func (a *LoginCA) config() *ssh.ServerConfig {
	check := &ssh.CertChecker{
		IsUserAuthority: func(k ssh.PublicKey) bool { return bytes.Equal(k.Marshal(), a.ca.PublicKey().Marshal()) },
	}
	c := &ssh.ServerConfig{
		ServerVersion: "SSH-2.0-Cove",
		MaxAuthTries:  6,
		PublicKeyCallback: func(m ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
			cert, ok := k.(*ssh.Certificate)
			// A certificate without principals is good for every user to OpenSSH;
			// this server makes none.
			if !ok || len(cert.ValidPrincipals) != 1 || !sandbox.ValidID(m.User()) {
				return nil, errNoCertificate
			}
			if _, err := check.Authenticate(m, k); err != nil {
				return nil, err
			}
			return &ssh.Permissions{Extensions: map[string]string{signedBy: cert.KeyId}}, nil
		},
	}
	c.AddHostKey(a.host)
	return c
}

// signedBy is where a connection remembers whose certificate it came with.
const signedBy = "cove-key"

var errNoCertificate = errors.New("a certificate for this sandbox is needed; 'cove ssh' makes one")
