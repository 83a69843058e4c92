package wire

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const nonceSize = 32

// ErrAuth is any failure of the handshake. It says nothing more on purpose.
var ErrAuth = errors.New("guest handshake failed")

// mac binds both nonces and the role, so that neither side's answer can be
// played back to the other.
func mac(secret []byte, role string, agentNonce, clientNonce []byte) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("cove-guest/1 " + role))
	h.Write(agentNonce)
	h.Write(clientNonce)
	return h.Sum(nil)
}

// AcceptAuth is the agent's half: it challenges, checks the answer and queues
// the proof in front of the first reply. The caller closes the connection on
// error, having sent nothing but the nonce.
func (c *Conn) AcceptAuth(secret []byte) error {
	nonce := make([]byte, nonceSize)
	rand.Read(nonce)
	c.SetDeadline(time.Now().Add(HandshakeTimeout))
	if err := c.WriteFrame(Hello, nonce); err != nil {
		return ErrAuth
	}
	k, p, err := c.ReadFrame(nonceSize + sha256.Size)
	if err != nil || k != Auth || len(p) != nonceSize+sha256.Size || len(secret) == 0 {
		return ErrAuth
	}
	if !hmac.Equal(p[nonceSize:], mac(secret, "client", nonce, p[:nonceSize])) {
		return ErrAuth
	}
	c.SetDeadline(time.Time{})
	c.setID(p[:nonceSize])
	return c.Queue(Proof, mac(secret, "agent", nonce, p[:nonceSize]))
}

// Prover checks the agent's half once the first answer arrives.
type Prover struct{ want []byte }

// OfferAuth is the client's half: it waits for the challenge and queues the
// answer in front of the first request, so the handshake costs no round trip
// of its own.
func (c *Conn) OfferAuth(secret []byte) (*Prover, error) {
	k, hello, err := c.ReadFrame(nonceSize)
	if err != nil {
		return nil, err
	}
	if k != Hello || len(hello) != nonceSize {
		return nil, ErrAuth
	}
	nonce := make([]byte, nonceSize)
	rand.Read(nonce)
	c.setID(nonce)
	if err := c.Queue(Auth, nonce, mac(secret, "client", hello, nonce)); err != nil {
		return nil, err
	}
	return &Prover{want: mac(secret, "agent", hello, nonce)}, nil
}

// Check reads the proof. Nothing that came before it may be believed.
func (p *Prover) Check(c *Conn) error {
	k, got, err := c.ReadFrame(sha256.Size)
	if err != nil {
		return err
	}
	if k != Proof || !hmac.Equal(got, p.want) {
		return ErrAuth
	}
	return nil
}

func asSandboxError(err error) (*sandbox.Error, bool) {
	var e *sandbox.Error
	ok := errors.As(err, &e)
	return e, ok
}
