package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"regexp"
	"strings"
	"time"
)

const (
	// sniffBytes hold the largest ClientHello there is reason for: post-quantum
	// keys and session tickets make 2 to 4 KiB. And the longest request line.
	sniffBytes = 32 << 10
	sniffTime  = 10 * time.Second
	// strange is how long one may be silent that connects to an address nobody
	// looked up, where only a name could let it through. Whoever has one to say
	// says it at once.
	strange = 3 * time.Second
	silence = time.Second // of a client, after which it may be one that speaks second
)

type sniffed struct {
	kind      protocol
	name      string // of TLS, as it was sent
	encrypted bool   // there is an inner ClientHello that we cannot read
}

type protocol int

const (
	isOther protocol = iota // what no server takes for HTTP or TLS
	isTLS
	isHTTP
	isLikeHTTP // what some server may take for a request, and we cannot read
)

// requestLine of any HTTP version, known method or not.
var requestLine = regexp.MustCompile(`^[!-~]+ +[^\r\n]* HTTP/[0-9.]+\r?\n$`)

// sniff looks at what a client says first, without consuming it. What cannot be
// told within sniffBytes, or before the read deadline, is not isOther: TLS
// without a name, or isLikeHTTP.
func sniff(r *bufio.Reader) sniffed {
	first, err := r.Peek(1)
	if err != nil {
		return sniffed{}
	}
	if head, _ := r.Peek(min(2, r.Buffered())); first[0] == 0x16 && (len(head) < 2 || head[1] == 3) {
		hello, ok := clientHello(r)
		if !ok {
			return sniffed{kind: isTLS}
		}
		return hello
	}
	var l firstLine
	for read := 0; read < sniffBytes; {
		b, err := r.Peek(max(read+1, r.Buffered()))
		for i, c := range b[read:] {
			if kind, ok := l.next(c, b[:read+i+1]); ok {
				return sniffed{kind: kind}
			}
		}
		read = len(b)
		if errors.Is(err, io.EOF) { // no more will come that could make a request of it
			return sniffed{kind: l.end(b)}
		}
		if err != nil {
			break
		}
	}
	return sniffed{kind: isLikeHTTP}
}

// firstLine reads a line the way the most lenient of servers would: any blanks
// in front, blank lines too, and between the words; any version. It errs towards
// HTTP where a line begins with a letter, as every method does. What begins
// otherwise (lengths, brackets) is judged early: many such protocols have no
// lines, and their clients wait for an answer.
type firstLine struct {
	begun    bool
	letter   bool // it begins with one
	from, to int  // of the first word; to is 0 until it is over
	rest     int  // where the second begins; 0 = there is none
}

// next takes the last byte of line. ok says that the kind is known.
func (l *firstLine) next(c byte, line []byte) (kind protocol, ok bool) {
	at := len(line) - 1
	switch {
	case !l.begun && isBlank(c):
	case !l.begun && c == 0 && string(line[:at]) == "\r\n\r\n": // PROXY, version 2: a request may follow
		return isLikeHTTP, true
	case !l.begun:
		l.begun, l.from, l.letter = true, at, c|0x20 >= 'a' && c|0x20 <= 'z'
		return isOther, !isToken(c)
	case c == '\n':
		return l.end(line), true
	case isBlank(c):
		if l.to == 0 {
			l.to = at
		}
	case l.to == 0:
		return isOther, !isToken(c) && !(l.letter && c > ' ' && c < 0x7f)
	case !l.letter && c < ' ': // LDAP, git
		return isOther, true
	case l.rest == 0:
		l.rest = at
	}
	return isOther, false
}

// end judges a line to which nothing will be added.
func (l *firstLine) end(line []byte) protocol {
	switch {
	case requestLine.Match(line):
		return isHTTP
	case bytes.Contains(bytes.ToLower(line), []byte("http/")):
		return isLikeHTTP
	case l.rest == 0:
		return isOther
	}
	// Without a version it is HTTP/0.9: a whole URL has a host, and some servers
	// read headers after it all the same. A line of PROXY has the request after it.
	word, rest := string(line[l.from:l.to]), line[l.rest:]
	if word == "GET" || word == "PROXY" || rest[0] == '/' || rest[0] == '*' || bytes.Contains(rest, []byte("://")) {
		return isLikeHTTP
	}
	return isOther // EHLO, USER, NICK
}

// isBlank says what separates words: what Python's split takes, which has the
// most.
func isBlank(c byte) bool {
	return c == ' ' || c >= '\t' && c <= '\r' || c >= 0x1c && c <= 0x1f || c == 0x85 || c == 0xa0
}

// isToken says what methods are made of.
func isToken(c byte) bool {
	return c > ' ' && c < 0x7f && !strings.ContainsRune(`"(),/:;<=>?@[\]{}`, rune(c))
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
