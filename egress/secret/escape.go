package secret

import (
	"encoding/binary"
	"unicode/utf16"
	"unicode/utf8"
)

// token is an escape: so many bytes of a stream that mean others.
type token struct {
	size int
	text uint32 // the first is the lowest
	n    int
}

func byteToken(size int, c byte) token { return token{size, uint32(c), 1} }

func runeToken(size int, v uint32) token {
	if v < utf8.RuneSelf {
		return token{size, v, 1}
	}
	var text [utf8.UTFMax]byte
	n := utf8.EncodeRune(text[:], rune(min(v, utf8.MaxRune+1)))
	return token{size, binary.LittleEndian.Uint32(text[:]), n}
}

const (
	escapers  = `%\&` // begin one
	maxEscape = 12    // bytes of the longest, two halves of a rune in JSON
	// maxWritten is how many bytes of a stream one byte of a value may take.
	maxWritten = 10
	maxSlashes = 4 // JSON in JSON in JSON
)

func escaper(c byte) bool { return c == '%' || c == '\\' || c == '&' }

// escapes appends what s may begin with other than its first byte as it is: as
// URLs (%2F, %252F, %u002F), JSON and programs (\/ \u002F \u{2F} \x2F \U0000002F,
// with more backslashes where one stands in the other) and HTML (&#47; &#x2F;
// &sol;) have it, in either case. Backslashes make letters and digits something
// else, so those do not mean themselves; what of has 0 for is in no text, and left
// out. whole is false if more of s could be another.
func escapes(to []token, s []byte, of *[256]uint32) (_ []token, whole bool) {
	switch s[0] {
	case '%':
		return percent(to, s)
	case '&':
		return entity(to, s)
	}
	for n := 1; n <= maxSlashes; n++ {
		if n == len(s) {
			return to, false
		}
		var ok bool
		switch c := s[n]; {
		case c == 'u' && n+1 < len(s) && s[n+1] == '{':
			to, ok = braced(to, s, n)
		case c == 'u':
			to, ok = unicode(to, s, n, 4)
		case c == 'U' && n == 1:
			to, ok = unicode(to, s, n, 8)
		case c == 'x':
			to, ok = unicode(to, s, n, 2)
		default:
			if ok = true; !alphanumeric(c) && of[c] != 0 {
				to = append(to, byteToken(n+1, c))
			}
		}
		if !ok {
			return to, false
		}
		if s[n] != '\\' {
			break
		}
	}
	return to, true
}

func percent(to []token, s []byte) ([]token, bool) {
	if len(s) > 1 && s[1] == 'u' {
		return unicode(to, s, 1, 4)
	}
	v, n := hex(s[1:], 2)
	if n < 2 {
		return to, n+1 < len(s)
	}
	to = append(to, byteToken(3, byte(v)))
	if v != '%' {
		return to, true
	}
	v, n = hex(s[3:], 2)
	if n < 2 {
		return to, n+3 < len(s)
	}
	return append(to, byteToken(5, byte(v))), true
}

// unicode reads so many hexadecimal digits after s[at].
func unicode(to []token, s []byte, at, digits int) ([]token, bool) {
	v, n := hex(s[at+1:], digits)
	if n < digits {
		return to, at+1+n < len(s)
	}
	size := at + 1 + digits
	if digits == 2 { // a byte to some, a rune to others
		to = append(to, byteToken(size, byte(v)))
		if v < utf8.RuneSelf {
			return to, true
		}
	}
	if digits == 4 && utf16.IsSurrogate(rune(v)) {
		if size > 6 { // only as JSON has it
			return to, true
		}
		for i, c := range s[:2] { // the same again: \u or %u
			if size+i == len(s) {
				return to, false
			}
			if s[size+i] != c {
				return to, true
			}
		}
		low, n := hex(s[size+2:], 4)
		if n < 4 {
			return to, size+2+n < len(s)
		}
		v, size = uint32(utf16.DecodeRune(rune(v), rune(low))), size+6
	}
	return append(to, runeToken(size, v)), true
}

// braced reads \u{2F}.
func braced(to []token, s []byte, at int) ([]token, bool) {
	v, n := hex(s[at+2:], 6)
	switch end := at + 2 + n; {
	case end == len(s):
		return to, false
	case n > 0 && s[end] == '}' && end+1 <= maxWritten:
		to = append(to, runeToken(end+1, v))
	}
	return to, true
}

func entity(to []token, s []byte) ([]token, bool) {
	if len(s) == 1 {
		return to, false
	}
	end, v := 0, uint32(0)
	switch {
	case s[1] != '#':
		for end = 1; end < len(s) && end < maxWritten-1 && letter(s[end]); end++ {
		}
		v = uint32(named(s[1:end]))
	case len(s) == 2:
		return to, false
	case s[2]|' ' == 'x':
		var n int
		v, n = hex(s[3:], 6)
		end = 3 + n
	default:
		for end = 2; end < len(s) && end < maxWritten-1 && s[end] >= '0' && s[end] <= '9'; end++ {
			v = v*10 + uint32(s[end]-'0')
		}
	}
	switch {
	case end == len(s):
		return to, false
	case s[end] == ';' && v != 0:
		to = append(to, runeToken(end+1, v))
	}
	return to, true
}

// hex reads at most n hexadecimal digits.
func hex(s []byte, n int) (v uint32, read int) {
	for read < n && read < len(s) {
		switch c := s[read]; {
		case c >= '0' && c <= '9':
			v = v<<4 | uint32(c-'0')
		case c|' ' >= 'a' && c|' ' <= 'f':
			v = v<<4 | uint32(c|' '-'a'+10)
		default:
			return v, read
		}
		read++
	}
	return v, read
}

func letter(c byte) bool       { return c|' ' >= 'a' && c|' ' <= 'z' }
func alphanumeric(c byte) bool { return letter(c) || c >= '0' && c <= '9' }

// named is what HTML calls so, of what ASCII has; 0 = none of it.
func named(name []byte) byte {
	switch string(name) {
	case "excl":
		return '!'
	case "quot", "QUOT":
		return '"'
	case "num":
		return '#'
	case "dollar":
		return '$'
	case "percnt":
		return '%'
	case "amp", "AMP":
		return '&'
	case "apos":
		return '\''
	case "lpar":
		return '('
	case "rpar":
		return ')'
	case "ast", "midast":
		return '*'
	case "plus":
		return '+'
	case "comma":
		return ','
	case "period":
		return '.'
	case "sol":
		return '/'
	case "colon":
		return ':'
	case "semi":
		return ';'
	case "lt", "LT":
		return '<'
	case "equals":
		return '='
	case "gt", "GT":
		return '>'
	case "quest":
		return '?'
	case "commat":
		return '@'
	case "lsqb", "lbrack":
		return '['
	case "bsol":
		return '\\'
	case "rsqb", "rbrack":
		return ']'
	case "Hat":
		return '^'
	case "lowbar", "UnderBar":
		return '_'
	case "grave":
		return '`'
	case "lcub", "lbrace":
		return '{'
	case "verbar", "vert":
		return '|'
	case "rcub", "rbrace":
		return '}'
	}
	return 0
}
