package secret

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
)

// hidingValues takes values out; the first has the placeholder X0X, and so on.
func hidingValues(values ...string) hiding {
	var b []*bound
	for i, v := range values {
		b = append(b, &bound{is: sandbox.Secret{Placeholder: fmt.Sprintf("X%dX", i)}, value: v})
	}
	return hidingOf(b)
}

func TestReplacer(t *testing.T) {
	h := hidingValues("sk-secretvalue", "secretother", "key-1234", "key-12345", "abab-abab")
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"nothing here", "nothing here"},
		{"sk-secretvalue", "X0X"},
		{"a sk-secretvalue b secretother c", "a X0X b X1X c"},
		{"sk-secretvaluesk-secretvalue", "X0XX0X"},
		{"sk-sk-secretvalue", "sk-X0X"},
		{"sk-secretval", "sk-secretval"},
		{"sk-secretother", "sk-X1X"},      // begins as one and is another
		{"key-1234 key-12345", "X2X X3X"}, // begins as one and is longer
		{"abab-abab-abab", "X4X"},         // the second overlaps the first
		{"%sk-secretvalue", "%X0X"},       // would be an escape if it began otherwise
		{"%2%73k-secretvalue", "%2X0X"},   // and inside of one
		{`\u00sk-secretvalue`, `\u00X0X`}, //
		{`\\u0073k-secretvalue`, `X0X`},   // JSON in JSON
		{"&#1&#115;k-secretvalue", "&#1X0X"},
	} {
		if got := h.all(c.in); got != c.want {
			t.Errorf("%q: got %q, want %q", c.in, got, c.want)
		}
	}
}

// What encoders make of a value is found. Each of these came through once.
func TestValuesAreFoundAsTheyAreWritten(t *testing.T) {
	const value = `aB3/x+y=z&"q<\%é 7`
	h := hidingValues(value)
	units := func(format string) (s string) { // of runes
		for _, r := range value {
			s += fmt.Sprintf(format, r)
		}
		return s
	}
	hexed := func(format string) (s string) { // of bytes
		for _, c := range []byte(value) {
			s += fmt.Sprintf(format, c)
		}
		return s
	}
	for _, in := range []string{
		value,
		url.QueryEscape(value), url.PathEscape(value), url.QueryEscape(url.QueryEscape(value)),
		strings.ReplaceAll(url.PathEscape(value), "%2F", "/"), // Python's quote
		strings.ToLower(hexed("%%%02x")), hexed("%%%02X"),
		`aB3\/x+y=z&\"q<\\%é 7`, `aB3\/x+y=z&\"q<\\%\u00e9 7`, // PHP's JSON
		`aB3\u002fx\u002By\u003dz\u0026\u0022q\u003C\u005c%\u00E9 7`,
		`aB3\\\/x+y=z&\\\"q<\\\\%é 7`, // in JSON again
		html.EscapeString(value), `aB3&#x2F;x&#43;y&#61;z&amp;&quot;q&lt;&#92;&percnt;&#xe9; 7`, `aB3&sol;x&plus;y&equals;z&#038;&#x0022;q&LT;&bsol;&#0037;&#233;&#x20;7`,
		units("&#%d;"), units("&#X%x;"), units("\\u%04x"), units("\\u{%x}"), units("\\U%08X"), hexed("\\x%02X"), units("%%u%04x"),
		fmt.Sprintf("%x", value), fmt.Sprintf("%X", value),
	} {
		if got := h.all("(" + in + ")"); got != "(X0X)" && got != fmt.Sprintf("(%x)", "X0X") && got != fmt.Sprintf("(%X)", "X0X") {
			t.Errorf("%q became %q", in, got)
		}
	}
	for before := range 5 {
		for after := range 4 {
			for _, e := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding, base64.RawStdEncoding} {
				plain := strings.Repeat("u", before) + value + strings.Repeat("v", after)
				in := e.EncodeToString([]byte(plain))
				for _, in := range []string{in, url.QueryEscape(in), strings.ReplaceAll(in, "/", `\/`)} {
					got := h.all(in)
					got = strings.ReplaceAll(got, `\/`, "/")
					if s, err := url.QueryUnescape(strings.ReplaceAll(got, "+", "%2B")); err == nil {
						got = s
					}
					text, err := e.DecodeString(got)
					if err != nil || len(text) != len(plain) || strings.Contains(string(text), value[1:len(value)-1]) || !strings.Contains(string(text), "X0XX0X") {
						t.Errorf("%q became %q, of %q, %v", in, text, got, err)
					}
				}
			}
		}
	}
}

// written draws a way to write one byte.
func written(c byte) *rapid.Generator[string] {
	forms := []string{string(c), fmt.Sprintf("%%%02x", c), fmt.Sprintf("%%%02X", c), fmt.Sprintf("%%25%02X", c), fmt.Sprintf(`\x%02x`, c)}
	if c < 0x80 {
		forms = append(forms, fmt.Sprintf(`\u%04x`, c), fmt.Sprintf(`\u%04X`, c), fmt.Sprintf("&#%d;", c), fmt.Sprintf("&#%06d;", c), fmt.Sprintf("&#x%x;", c), fmt.Sprintf("&#X%04X;", c), fmt.Sprintf(`\\u%04x`, c))
		if !alphanumeric(c) {
			forms = append(forms, `\`+string(c), `\\\`+string(c))
		}
		if e := html.EscapeString(string(c)); len(e) > 1 {
			forms = append(forms, e)
		}
	}
	return rapid.SampledFrom(forms)
}

// pieces feeds a text in pieces, with silence between some.
func pieces(t *rapid.T, r *replacer, in string, silence bool) string {
	var out []byte
	for rest := in; ; {
		n := rapid.IntRange(0, len(rest)).Draw(t, "n")
		end := n == len(rest) && rapid.Bool().Draw(t, "end")
		out = r.feed(out, []byte(rest[:n]), end)
		if rest = rest[n:]; end {
			return string(out)
		}
		if silence && rapid.Bool().Draw(t, "silence") {
			out = r.flush(out)
		}
	}
}

// However a value is written, what stands around it and however the stream is
// cut, nothing of it comes out.
func TestValuesNeverComeOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		value := rapid.StringMatching(`[ -~]{8,20}`).Draw(t, "value")
		// What a value is made of could be around it by chance.
		around := rapid.StringMatching(`([%\\&#ux;\n]|%2|\\u00|&#x|&am){0,6}`)
		before, after := around.Draw(t, "before"), around.Draw(t, "after")
		form := value
		switch rapid.IntRange(0, 3).Draw(t, "form") {
		case 1:
			form = fmt.Sprintf("%x", value)
		case 2:
			form = base64.RawStdEncoding.EncodeToString([]byte(value))[:len(value)*8/6]
		}
		in := before
		for _, c := range []byte(form) {
			in += written(c).Draw(t, "c")
		}
		in += after
		h := hidingValues(value)
		r := h.replacer()
		r.mask = rapid.Bool().Draw(t, "mask")
		whole := h.replacer()
		whole.mask = r.mask
		want := string(whole.feed(nil, []byte(in), true))
		if got := pieces(t, &r, in, false); got != want {
			t.Fatalf("%q in pieces is %q, whole %q", in, got, want)
		}
		if readable(form).MatchString(want) || r.mask && len(want) != len(in) || !r.mask && len(want) > len(before)+len(after)+2*max(len(form), 6) {
			t.Fatalf("%q became %q", in, want)
		}
	})
}

// readable matches a text however it is written.
func readable(text string) *regexp.Regexp {
	var b strings.Builder
	for _, c := range []byte(text) {
		fmt.Fprintf(&b, `(?:\\*%s|%%(?:25)?(?i:%02x)|\\+u00(?i:%02x)|\\+x(?i:%02x)|&#0*%d;|&#[xX]0*(?i:%x);|%s)`, regexp.QuoteMeta(string(rune(c))), c, c, c, c, c, regexp.QuoteMeta(html.EscapeString(string(rune(c)))))
	}
	return regexp.MustCompile(b.String())
}

// What has no value in it stays as it is, held back or let go at any time.
func TestOtherTextStays(t *testing.T) {
	const value = "aab-aabc"
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.StringMatching(`(a|b|-|\n|%61|\\u0062|&#x63;|aab-aab|aab-aab%6|\\|&|%){0,30}`).Draw(t, "in")
		r := hidingValues(value).replacer()
		whole := hidingValues(value).all(in)
		silence := !strings.Contains(whole, "X0X")
		r.mask = rapid.Bool().Draw(t, "mask")
		got := pieces(t, &r, in, silence)
		if silence && got != in || !silence && !r.mask && got != whole {
			t.Fatalf("%q became %q", in, got)
		}
	})
}

// Where the beginning of a value was let go, its rest is still replaced.
func TestTheRestOfAValueIsReplaced(t *testing.T) {
	r := hidingValues("sk-secretvalue").replacer()
	out := r.flush(r.feed(nil, []byte("a sk-se"), false))
	if string(out) != "a sk-se" {
		t.Errorf("after silence %q", out)
	}
	if out = r.feed(out, []byte("cretvalue!"), true); string(out) != "a sk-seX0X!" {
		t.Errorf("then %q", out)
	}
}

// timed is when which bytes came out of a body.
type timed struct {
	at  time.Duration
	out string
}

// through sends pieces through a body, 20 ms apart and then longer, in virtual
// time.
func through(t *testing.T, h hiding, mask bool, parts ...string) []timed {
	t.Helper()
	return throughMessages(t, h, mask, nil, parts...)
}

func throughMessages(t *testing.T, h hiding, mask bool, m *messages, parts ...string) (seen []timed) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		in, w := io.Pipe()
		b := &body{ReadCloser: in, r: h.replacer(), live: true, quiet: quiet}
		b.r.mask, b.r.messages = mask, m
		start := time.Now()
		go func() {
			for i, p := range parts {
				io.WriteString(w, p)
				time.Sleep(20*time.Millisecond + time.Duration(i)*(quiet+10*time.Millisecond))
			}
			w.Close()
		}()
		buf := make([]byte, 64<<10)
		for {
			n, err := b.Read(buf)
			if n > 0 {
				seen = append(seen, timed{time.Since(start), string(buf[:n])})
			}
			if err != nil {
				return
			}
		}
	})
	return seen
}

// A guess that a server echoes comes out when and as any other does, however
// much of it is right: else each byte of a value could be tried by itself.
func TestAGuessShowsNothing(t *testing.T) {
	const value = "sk-live-fedcba9876543210"
	h := hidingValues(value)
	encoded := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, mask := range []bool{false, true} {
		for n := 1; n < len(value); n++ {
			right, wrong := value[:n], value[:n-1]+"!"
			for what, f := range map[string]func(string) []string{
				"at an end":  func(s string) []string { return []string{"you said " + s} },
				"in pieces":  func(s string) []string { return []string{"you said ", s[:len(s)/2], s[len(s)/2:], " so", " there"} },
				"then more":  func(s string) []string { return []string{s, strings.Repeat("x", 4*h.hold)} },
				"in a line":  func(s string) []string { return []string{"data: " + s, "\n", "data: " + s + "\n\n", "x"} },
				"in base64":  func(s string) []string { return []string{encoded(s + s)[:4*n/3], "."} },
				"in URLs":    func(s string) []string { return []string{"%" + fmt.Sprintf("%02x", s[0]) + s[1:], "%2"} },
				"in hex":     func(s string) []string { return []string{fmt.Sprintf("%x", s)} },
				"many times": func(s string) []string { return []string{strings.Repeat(s, 200), s} },
			} {
				a, b := through(t, h, mask, f(right)...), through(t, h, mask, f(wrong)...)
				for i := range b {
					// The guesses differ, and are let through as they are.
					b[i].out = fmt.Sprint(len(b[i].out))
				}
				var texts string
				for i := range a {
					texts += a[i].out
					a[i].out = fmt.Sprint(len(a[i].out))
				}
				if !slices.Equal(a, b) || texts != strings.Join(f(right), "") {
					t.Fatalf("%s: %q comes out as %v, %q as %v", what, right, a, wrong, b)
				}
			}
		}
	}
}

func TestStreamsFlow(t *testing.T) {
	h := hidingValues("sk-live-fedcba9876543210")
	ms := time.Millisecond
	if got, want := through(t, h, false, "data: one\n\n", "data: two\n\n"), []timed{{0, "data: one\n\n"}, {20 * ms, "data: two\n\n"}}; !slices.Equal(got, want) {
		t.Errorf("events: %v", got)
	}
	// The end of a line that is not whole waits until nothing comes for a while.
	if got, want := through(t, h, false, "one\nTell me", ": ", "?"), []timed{{0, "one\n"}, {20*ms + quiet, "Tell me: "}, {50*ms + 2*quiet, "?"}}; !slices.Equal(got, want) {
		t.Errorf("a prompt: %v", got)
	}
	// What a message ends does not.
	short := "\x81\x02hi"
	long := "\x01\x7e\x01\x00" + strings.Repeat("a", 256) // not its message's last frame
	got := throughMessages(t, h, true, &messages{header: webSocketFrame}, short+"\x89\x00", long, "\x80\x01b", "\x81")
	want := []timed{{0, short + "\x89\x00"}, {20*ms + quiet, long}, {50*ms + quiet, "\x80\x01b"}, {90*ms + 4*quiet, "\x81"}}
	if !slices.Equal(got, want) {
		t.Errorf("frames: %v", got)
	}
	if got := through(t, h, false, "is sk-live-fed", "cba9876543210."); len(got) != 1 || got[0].out != "is X0X." {
		t.Errorf("a value in two pieces: %v", got)
	}
	// A read that is under way when nobody wants it any more ends with the body.
	synctest.Test(t, func(t *testing.T) {
		in, w := io.Pipe()
		b := &body{ReadCloser: in, r: h.replacer(), live: true, quiet: quiet}
		go io.WriteString(w, "held")
		buf := make([]byte, 100)
		if n, err := b.Read(buf); string(buf[:n]) != "held" || err != nil {
			t.Errorf("%q %v", buf[:n], err)
		}
		b.Close()
	})
}

func TestBodyInPieces(t *testing.T) {
	const value = "a-long-secret-value-0123456789"
	text := strings.Repeat("x", 20_000) + value + strings.Repeat("y", 20_000) + value
	h := hidingValues(value)
	for name, r := range map[string]io.Reader{
		"whole": strings.NewReader(text), "bytes": iotest.OneByteReader(strings.NewReader(text)), "halves": iotest.HalfReader(strings.NewReader(text)),
		"with its end": iotest.DataErrReader(strings.NewReader(text)),
	} {
		b, err := io.ReadAll(&body{ReadCloser: io.NopCloser(r), r: h.replacer()})
		if err != nil || string(b) != strings.ReplaceAll(text, value, "X0X") {
			t.Errorf("%s: %v, or the value is in it", name, err)
		}
	}
	b, err := io.ReadAll(&body{ReadCloser: io.NopCloser(iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader("ab")))), r: h.replacer()})
	if err == nil || string(b) != "a" {
		t.Errorf("%q %v", b, err)
	}
}

// What could be a placeholder's beginning by chance is not waited for.
func TestARequestDoesNotStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in, w := io.Pipe()
		b := &body{ReadCloser: in, r: replacer{search: search{a: newAutomaton([]pair{{[]byte("}}}-placeholder"), []byte("V")}}, false)}}, live: true, quiet: quietRequest}
		go func() {
			io.WriteString(w, `{"a":{"b":{}}}`)
			time.Sleep(2 * quietRequest) // until the answer
			io.WriteString(w, "then }")  // a placeholder in pieces
			io.WriteString(w, "}}-place")
			io.WriteString(w, "holder!")
			w.Close()
		}()
		start, buf := time.Now(), make([]byte, 100)
		n, err := io.ReadFull(b, buf[:14])
		if string(buf[:n]) != `{"a":{"b":{}}}` || err != nil || time.Since(start) > quietRequest {
			t.Errorf("%q %v after %v", buf[:n], err, time.Since(start))
		}
		if rest, err := io.ReadAll(b); string(rest) != "then V!" || err != nil {
			t.Errorf("then %q %v", rest, err)
		}
	})
}

// The states of long values are not all in the table, and are found as well. What
// is one byte many times is searched in time that its length does not multiply.
func TestLongValues(t *testing.T) {
	random := make([]byte, maxValue)
	for i := range random {
		random[i] = ' ' + byte(rand.IntN(95))
	}
	random[0], random[maxValue-1] = 'x', 'y'
	h := hidingValues(string(random), strings.Repeat("a", maxValue))
	if uint32(len(h.char)) <= h.rows {
		t.Fatal("all states are in the table")
	}
	for in, want := range map[string]string{
		string(random): "X0X", url.QueryEscape(string(random)): "X0X", string(random[:maxValue-1]) + "!": string(random[:maxValue-1]) + "!",
		string(random[:maxValue-1]) + string(random): string(random[:maxValue-1]) + "X0X",
		strings.Repeat("a", 1<<18):                   "X1X",
		strings.Repeat("%61", 2*maxValue):            "X1X",
	} {
		if got := h.all(in); got != want {
			t.Errorf("%.20q… became %.40q…", in, got)
		}
	}
}

// An answer of 100 MB for a sandbox with three secrets.
func BenchmarkReplacer(b *testing.B) {
	h := hidingValues("sk-live-0123/456+789abcdefghijklmnopqrst", "ghp_0123456789abcdefABCDEF0123456789abcd", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
	random := rand.New(rand.NewPCG(1, 2))
	binary := make([]byte, 1<<20)
	for i := range binary {
		binary[i] = byte(random.IntN(256))
	}
	var text strings.Builder
	for text.Len() < 1<<20 {
		fmt.Fprintf(&text, `{"id":%d,"name":"user \"%x\"","url":"https:\/\/example.com\/a?b=%%2F&amp;c","text":"the quick brown fox jumps over the lazy dog"},`, random.IntN(1e9), random.IntN(1e9))
	}
	for name, data := range map[string][]byte{
		"binary": binary, "json": []byte(text.String()[:1<<20]), "escapes": bytes.Repeat([]byte("%2F%41"), 1<<20/6), "slashes": bytes.Repeat([]byte(`\`), 1<<20),
		"guesses": bytes.Repeat([]byte("sk-live-0123"), 1<<20/12), "values": bytes.Repeat([]byte("sk-live-0123/456+789abcdefghijklmnopqrst"), 1<<20/40),
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(100 * int64(len(data)))
			for b.Loop() {
				var all []io.Reader
				for range 100 {
					all = append(all, bytes.NewReader(data))
				}
				io.Copy(io.Discard, struct{ io.Reader }{&body{ReadCloser: io.NopCloser(io.MultiReader(all...)), r: h.replacer(), live: true, quiet: quiet}})
			}
		})
	}
}
