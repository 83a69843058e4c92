package wire

import (
	"encoding/hex"
	"net"
	"sync/atomic"
)

// Progress is how far one side of a connection has come. Both sides count the
// same bytes, so that comparing tells silence from loss.
type Progress struct {
	Received int64 `json:"received"`
	Sent     int64 `json:"sent"`
	Reading  bool  `json:"reading,omitempty"` // it waits for bytes, and holds none back
}

// Missing says whether bytes that one side has sent have not come to the other, given
// that they had time to arrive. A side that does not know the connection any more
// (nil) will not answer on it.
func Missing(ours Progress, theirs *Progress) bool {
	return theirs == nil || theirs.Sent > ours.Received || theirs.Reading && ours.Sent > theirs.Received
}

// Progress is this side's. Safe at any time.
func (c *Conn) Progress() Progress {
	// In this order: a reader that waits has counted all it got.
	reading := c.in.waiting.Load()
	return Progress{Reading: reading, Received: c.in.n.Load(), Sent: c.sent.Load()}
}

// ID names the connection on both sides, once the handshake was begun.
func (c *Conn) ID() string { return c.id }

func (c *Conn) setID(clientNonce []byte) { c.id = hex.EncodeToString(clientNonce[:16]) }

// counter counts what is read.
type counter struct {
	net.Conn
	n       atomic.Int64
	waiting atomic.Bool
}

func (c *counter) Read(p []byte) (int, error) {
	c.waiting.Store(true)
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	c.waiting.Store(false)
	return n, err
}
