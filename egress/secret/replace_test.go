package secret

import (
	"bytes"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

func pairsOf(kv ...string) (out []pair) {
	for i := 0; i < len(kv); i += 2 {
		out = append(out, pair{[]byte(kv[i]), []byte(kv[i+1])})
	}
	return out
}

func TestReplacer(t *testing.T) {
	pairs := pairsOf("sk-secretvalue", "PLACEHOLDER", "secretother", "OTHER")
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"nothing here", "nothing here"},
		{"sk-secretvalue", "PLACEHOLDER"},
		{"a sk-secretvalue b secretother c", "a PLACEHOLDER b OTHER c"},
		{"sk-secretvaluesk-secretvalue", "PLACEHOLDERPLACEHOLDER"},
		{"sk-sk-secretvalue", "sk-PLACEHOLDER"},
		{"sk-secretval", "sk-secretval"},
		{"sk-secretother", "sk-OTHER"}, // begins as one and is another
	} {
		r := replacer{pairs: pairs}
		if got := string(r.feed(nil, []byte(c.in), true)); got != c.want {
			t.Errorf("%q: got %q, want %q", c.in, got, c.want)
		}
	}
}

// However a stream is cut, the value is not in what comes out, and what comes
// out differs from the whole by at most the bytes that may not be held back.
func TestReplacerInPieces(t *testing.T) {
	const value = "aab-aabc"
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.StringMatching(`(a|b|-|c|aab-aabc|aab-){0,30}`).Draw(t, "in")
		mask := rapid.Bool().Draw(t, "mask")
		r := replacer{pairs: pairsOf(value, "<X>"), mask: mask}
		var out []byte
		for rest := in; ; {
			n := rapid.IntRange(0, len(rest)).Draw(t, "n")
			end := n == len(rest) && rapid.Bool().Draw(t, "end")
			out = r.feed(out, []byte(rest[:n]), end)
			if rest = rest[n:]; end {
				break
			}
		}
		if mask && len(out) != len(in) {
			t.Fatalf("%q has another length than %q", out, in)
		}
		to := "<X>"
		if mask {
			to = strings.Repeat("*", len(value))
		}
		// Take away what was let through before each replacement.
		whole := strings.ReplaceAll(in, value, to)
		if mask {
			for i := range out {
				if out[i] != whole[i] && !(whole[i] == '*' && strings.HasPrefix(value[:holdFrom-1], lead(whole, out, i))) {
					t.Fatalf("%q became %q, want %q", in, out, whole)
				}
			}
			return
		}
		got := string(out)
		for n := holdFrom - 1; n > 0; n-- {
			got = strings.ReplaceAll(got, value[:n]+to, to)
		}
		want := whole
		for n := holdFrom - 1; n > 0; n-- {
			want = strings.ReplaceAll(want, value[:n]+to, to)
		}
		if got != want {
			t.Fatalf("%q became %q, want %q", in, out, whole)
		}
	})
}

// lead is what of a masked value was let through up to i.
func lead(whole string, out []byte, i int) string {
	from := i
	for from > 0 && whole[from-1] == '*' && out[from-1] != '*' {
		from--
	}
	return string(out[from : i+1])
}

func TestBodyInPieces(t *testing.T) {
	const value = "a-long-secret-value-0123456789"
	text := strings.Repeat("x", 20_000) + value + strings.Repeat("y", 20_000) + value
	for name, r := range map[string]io.Reader{
		"whole": strings.NewReader(text), "bytes": iotest.OneByteReader(strings.NewReader(text)), "halves": iotest.HalfReader(strings.NewReader(text)),
		"with its end": iotest.DataErrReader(strings.NewReader(text)),
	} {
		b, err := io.ReadAll(newBody(io.NopCloser(r), pairsOf(value, "P"), nil))
		if err != nil || bytes.Contains(b, []byte(value)) || bytes.Contains(b, []byte(value[holdFrom:])) {
			t.Errorf("%s: %v, or the value is in it", name, err)
		}
	}
	b, err := io.ReadAll(newBody(io.NopCloser(iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader("ab")))), pairsOf(value, "P"), nil))
	if err == nil || string(b) != "a" {
		t.Errorf("%q %v", b, err)
	}
}

// What could be a value's beginning by chance is not waited for.
func TestAReplacerDoesNotStall(t *testing.T) {
	r := replacer{pairs: pairsOf("}}}-secret-value", "P")}
	if got := string(r.feed(nil, []byte(`{"a":{"b":{}}}`), false)); got != `{"a":{"b":{}}}` {
		t.Errorf("held back: %q", got)
	}
	if got := string(r.feed(nil, []byte("-secret-value!"), true)); got != "P!" {
		t.Errorf("then %q", got)
	}
}

func BenchmarkReplacer(b *testing.B) {
	data := make([]byte, 16<<10)
	for i := range data {
		data[i] = byte(rand.IntN(256))
	}
	r := replacer{pairs: hides("sk-0123456789abcdef0123456789abcdef", "cove-secret-x-0123456789abcdef")}
	var out []byte
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		out = r.feed(out[:0], data, false)
	}
}
