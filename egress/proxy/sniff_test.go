package proxy

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
)

// spoken is what a client says in pieces, and then: an end, or a deadline.
type spoken struct {
	pieces [][]byte
	then   error
}

func (s *spoken) Read(p []byte) (int, error) {
	if len(s.pieces) == 0 {
		return 0, s.then
	}
	n := copy(p, s.pieces[0])
	if s.pieces[0] = s.pieces[0][n:]; len(s.pieces[0]) == 0 {
		s.pieces = s.pieces[1:]
	}
	return n, nil
}

func hear(then error, pieces ...string) protocol {
	s := &spoken{then: then}
	for _, p := range pieces {
		s.pieces = append(s.pieces, []byte(p))
	}
	return sniff(bufio.NewReaderSize(s, sniffBytes)).kind
}

func TestSniff(t *testing.T) {
	late := os.ErrDeadlineExceeded
	for _, c := range []struct {
		name   string
		want   protocol
		then   error
		pieces []string
	}{
		{"a request", isHTTP, late, []string{"GET / HTTP/1.1\r\n"}},
		{"in pieces", isHTTP, late, []string{"G", "ET /", " HTTP/1.", "1\r", "\n"}},
		{"a method nobody knows", isHTTP, late, []string{"X-1 / HTTP/1.1\n"}},
		{"a long line", isHTTP, late, []string{"GET /", strings.Repeat("x", 20<<10), " HTTP/1.1\r\n"}},
		{"HTTP/2", isHTTP, late, []string{"PRI * HTTP/2.0\r\n\r\n"}},

		{"a word, slowly", isLikeHTTP, late, []string{"GET"}},
		{"a part of a line, slowly", isLikeHTTP, late, []string{"GET / HT"}},
		{"blank lines, slowly", isLikeHTTP, late, []string{"\r\n", "\r\n"}},
		{"a line without end", isLikeHTTP, late, []string{"GET /", strings.Repeat("x", 64<<10)}},
		{"blanks without end", isLikeHTTP, late, []string{strings.Repeat("\r\n", 32<<10)}},
		{"the end in place of a newline", isLikeHTTP, io.EOF, []string{"GET / HTTP/1.1"}},
		{"a bare CR", isLikeHTTP, late, []string{"GET / HTTP/1.1\rHost: co.test\r\r"}},
		{"NUL in the path, slowly", isLikeHTTP, late, []string{"GET /\x00"}},
		{"no space after the method", isLikeHTTP, late, []string{"GET/ / HTTP/1.1 \r\n"}},
		{"a digit first", isLikeHTTP, late, []string{"1GET / HTTP/1.1 \r\n"}},
		{"a digit first, slowly", isLikeHTTP, late, []string{"1GET / "}},
		{"RTSP", isLikeHTTP, late, []string{"OPTIONS rtsp://good.test/ RTSP/1.0\r\n"}},
		{"PROXY 2", isLikeHTTP, late, []string{"\r\n\r\n\x00\r\nQUIT\n"}},

		{"a word and the end", isOther, io.EOF, []string{"hello"}},
		{"a word on a line", isOther, late, []string{"QUIT\r\n"}},
		{"SSH", isOther, late, []string{"SSH-2.0-x\r\n"}},
		{"XMPP", isOther, late, []string{"<?xml version='1.0'?>"}},
		{"JSON", isOther, late, []string{`{"method": "x"}`}},
		{"rsync", isOther, late, []string{"@RSYNCD: 31.0\n"}},
		{"VNC", isOther, late, []string{"RFB 003.008\n"}},
		{"MySQL", isOther, late, []string{"\x54\x00\x00\x01"}},
		{"MySQL of a length that is a blank", isOther, late, []string{"\x20\x00\x00\x01"}},
		{"AMQP", isOther, late, []string{"AMQP\x00\x00\x09\x01"}},
		{"MQTT", isOther, late, []string{"\x10\x0c\x00\x04MQTT"}},
		{"not TLS after all", isTLS, late, []string{"\x16\x03\x01\x00"}},
	} {
		if got := hear(c.then, c.pieces...); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// lenient writes a request the way that some server still takes.
func lenient(r *rand.Rand) string {
	any := func(of ...string) string { return of[r.IntN(len(of))] }
	blank := func(least int) (s string) {
		for range least + r.IntN(3) {
			s += any(" ", " ", "\t", "\r", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0")
		}
		return s
	}
	mixed := func(s string) string {
		b := []byte(s)
		for i := range b {
			if (b[i]|0x20) >= 'a' && (b[i]|0x20) <= 'z' && r.IntN(3) == 0 {
				b[i] ^= 0x20
			}
		}
		return string(b)
	}
	path := any("/", "*", "http://co.test/", "//co.test", "?", "x", "/\x00", "/\x01\x7f", "/\xff\xfe", "/"+strings.Repeat("a", r.IntN(2*sniffBytes)))
	front := ""
	for range r.IntN(4) {
		front += any("\r\n", "\n", blank(1))
	}
	line := front + mixed(any("GET", "POST", "get", "X", "M-SEARCH", "Version_Control")) + blank(1) + path + blank(1) + mixed(any("HTTP", "http")) + "/" + any("1.1", "1.0", "1", "01.1", "2.0", "", "x") + blank(0)
	return line + any("\r\n", "\n", "\r\r\n") + any("Host: co.test", "host:co.test", "Host : co.test") + "\r\n\r\n"
}

// However a request is written and sent, the name that was looked up does not
// stand for it.
func TestNoLenientRequestIsTakenForSomethingElse(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 4_000 {
		text := lenient(r)
		said := text
		if r.IntN(4) == 0 { // the rest comes after the deadline
			said = text[:1+r.IntN(min(len(text), 40))]
		}
		var pieces []string
		for rest := said; rest != ""; {
			n := min(len(rest), 1+r.IntN(len(rest)))
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		if got := hear(os.ErrDeadlineExceeded, pieces...); got != isHTTP && got != isLikeHTTP {
			t.Fatalf("%d for %.200q of %.200q (seed %d)", got, said, text, seed)
		}
	}
}

// FuzzSniff looks for what our own reader of requests takes, or would after
// leading blanks, and sniff does not.
func FuzzSniff(f *testing.F) {
	for _, s := range []string{"GET / HTTP/1.1\r\n", "\r\nGET / HTTP/1.1\r\n", "EHLO x\r\n", "0032git-upload-pack /\x00host=x\x00", "\x16\x03\x01\x00\x01x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := sniff(bufio.NewReaderSize(bytes.NewReader(b), sniffBytes)).kind
		line, _, ok := bytes.Cut(bytes.TrimLeft(b, "\r\n\t "), []byte("\n"))
		if words := bytes.Fields(line); ok && len(b) < sniffBytes && len(words) == 3 && bytes.HasPrefix(bytes.ToUpper(words[2]), []byte("HTTP/")) &&
			len(bytes.Trim(bytes.ToUpper(words[0]), "ABCDEFGHIJKLMNOPQRSTUVWXYZ-_")) == 0 && words[0][0] > '@' && got == isOther {
			t.Errorf("%q", b)
		}
	})
}
