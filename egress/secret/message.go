package secret

import (
	"encoding/binary"
	"net/http"
	"strings"
)

// messages follows a stream of messages that say their length, and knows where
// one ends. What a message ends is not held back: whoever waits for it acts on
// it, and where messages end everybody can see.
type messages struct {
	header func(h []byte) (n int, payload uint64, last bool) // n = 0: more of it must come

	head []byte // of a header that has not come whole
	left uint64 // of the payload
	last bool   // the message ends with it
}

// feed returns where in p the last message ends that does; 0 = nowhere.
func (m *messages) feed(p []byte) (end int) {
	for at := 0; at < len(p); {
		if m.left == 0 {
			m.head = append(m.head, p[at])
			at++
			n, payload, last := m.header(m.head)
			if n == 0 {
				continue
			}
			m.head, m.left, m.last = m.head[:0], payload, last
		}
		n := min(m.left, uint64(len(p)-at))
		m.left -= n
		at += int(n)
		if m.left == 0 && m.last {
			end = at
		}
	}
	return end
}

// messagesOf an answer; nil where it is no stream of any that we know. Not those
// of gRPC: code inside can have a server that echoes call its own bytes that, with
// a message that ends amid a value.
func messagesOf(res *http.Response) *messages {
	if res.StatusCode == http.StatusSwitchingProtocols && strings.EqualFold(res.Header.Get("Upgrade"), "websocket") {
		return &messages{header: webSocketFrame}
	}
	return nil
}

// webSocketFrame is RFC 6455, 5.2. A frame of control may stand between those of
// a message, and is one by itself.
func webSocketFrame(h []byte) (n int, payload uint64, last bool) {
	if len(h) < 2 {
		return 0, 0, false
	}
	n = 2
	switch payload = uint64(h[1] & 0x7f); payload {
	case 126:
		n += 2
	case 127:
		n += 8
	}
	size := n
	if h[1]&0x80 != 0 {
		n += 4 // a mask
	}
	if len(h) < n {
		return 0, 0, false
	}
	switch size {
	case 4:
		payload = uint64(binary.BigEndian.Uint16(h[2:]))
	case 10:
		payload = binary.BigEndian.Uint64(h[2:])
	}
	return n, payload, h[0]&0x80 != 0
}
