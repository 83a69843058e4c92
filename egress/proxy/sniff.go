package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"regexp"
	"time"
)

const (
	// sniffBytes hold the largest ClientHello there is reason for: post-quantum
	// keys and session tickets make 2 to 4 KiB.
	sniffBytes = 32 << 10
	sniffTime  = 10 * time.Second
	silence    = time.Second // of a client, after which it may be one that speaks second
)

type sniffed struct {
	kind      protocol
	name      string // of TLS, as it was sent
	encrypted bool   // there is an inner ClientHello that we cannot read
}

type protocol int

const (
	isOther protocol = iota
	isTLS
	isHTTP
)

// requestLine of any HTTP version, known method or not.
var requestLine = regexp.MustCompile(`^[!-~]+ +[^\r\n]* HTTP/[0-9.]+\r?\n$`)

// sniff looks at what a client says first, without consuming it. What cannot be
// told within sniffBytes, or before the read deadline, is isOther, or TLS
// without a name.
func sniff(r *bufio.Reader) sniffed {
	first, err := r.Peek(1)
	if err != nil {
		return sniffed{}
	}
	if first[0] == 0x16 {
		hello, ok := clientHello(r)
		if !ok {
			return sniffed{kind: isTLS}
		}
		return hello
	}
	// Up to the end of the first line. Bytes that a request line cannot have
	// end the search.
	for n := 1; n <= 8<<10; n++ {
		b, err := r.Peek(max(n, min(r.Buffered(), 8<<10)))
		if err != nil {
			return sniffed{}
		}
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			if requestLine.Match(b[:i+1]) {
				return sniffed{kind: isHTTP}
			}
			return sniffed{}
		}
		for _, c := range b {
			if c < ' ' && c != '\r' && c != '\t' || c == 0x7f {
				return sniffed{}
			}
		}
		n = len(b)
	}
	return sniffed{}
}

// clientHello reads the handshake message out of its records, of which there
// may be several, and finds the server name in it.
func clientHello(r *bufio.Reader) (sniffed, bool) {
	var message []byte
	for at := 0; ; {
		head, err := r.Peek(at + 5)
		if err != nil {
			return sniffed{}, false
		}
		if head[at] != 0x16 || head[at+1] != 3 {
			return sniffed{}, false
		}
		n := int(binary.BigEndian.Uint16(head[at+3:]))
		if n == 0 || at+5+n > sniffBytes {
			return sniffed{}, false
		}
		all, err := r.Peek(at + 5 + n)
		if err != nil {
			return sniffed{}, false
		}
		message = append(message, all[at+5:]...)
		at += 5 + n
		if len(message) < 4 {
			continue
		}
		if message[0] != 1 { // client_hello
			return sniffed{}, false
		}
		if want := 4 + int(message[1])<<16 + int(message[2])<<8 + int(message[3]); len(message) >= want {
			return parseHello(message[4:want])
		} else if want > sniffBytes {
			return sniffed{}, false
		}
	}
}

func parseHello(m []byte) (s sniffed, ok bool) {
	s.kind = isTLS
	p := fields(m)
	p.skip(2 + 32) // version, random
	p.skip(int(p.number(1)))
	p.skip(int(p.number(2)))
	p.skip(int(p.number(1)))
	exts := fields(p.take(int(p.number(2))))
	if p == nil {
		return s, false
	}
	named := false
	for len(exts) > 0 {
		kind := exts.number(2)
		body := fields(exts.take(int(exts.number(2))))
		if exts == nil {
			return s, false
		}
		switch kind {
		case 0: // server_name
			if named {
				return s, false // twice: which would the server take?
			}
			named = true
			list := fields(body.take(int(body.number(2))))
			if list == nil || len(body) > 0 {
				return s, false
			}
			for len(list) > 0 {
				typ := list.number(1)
				name := list.take(int(list.number(2)))
				if list == nil || typ != 0 || s.name != "" {
					return s, false
				}
				s.name = string(name)
			}
		case 0xfe0d: // encrypted_client_hello
			s.encrypted = true
		}
	}
	return s, true
}

// fields is what is left to parse; nil after what was not there.
type fields []byte

func (f *fields) take(n int) []byte {
	if n < 0 || n > len(*f) || *f == nil {
		*f = nil
		return nil
	}
	b := (*f)[:n:n]
	*f = (*f)[n:]
	return b
}

func (f *fields) skip(n int) { f.take(n) }

func (f *fields) number(n int) (v uint32) {
	for _, b := range f.take(n) {
		v = v<<8 | uint32(b)
	}
	return v
}
