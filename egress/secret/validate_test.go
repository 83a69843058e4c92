package secret

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

const testValue, testPlaceholder = `sk-live-0123/456+789"abc`, "cove-secret-api-0123456789abcdef"

func good() sandbox.Secret {
	return sandbox.Secret{Name: "api", Hosts: []string{"good.test"}, Placeholder: testPlaceholder, Value: sandbox.NewSecretValue(testValue)}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*sandbox.Secret)
		field  string // "" = accepted
	}{
		{"good", func(s *sandbox.Secret) {}, ""},
		{"header", func(s *sandbox.Secret) { s.Header, s.Format = "Authorization", "Bearer {}" }, ""},
		{"odd header", func(s *sandbox.Secret) { s.Header = "x-api-key" }, ""},
		{"wildcard", func(s *sandbox.Secret) { s.Hosts = []string{"*.good.test", "bücher.test"} }, ""},
		{"no name", func(s *sandbox.Secret) { s.Name = "" }, "name"},
		{"name with a slash", func(s *sandbox.Secret) { s.Name = "a/b" }, "name"},
		{"no hosts", func(s *sandbox.Secret) { s.Hosts = nil }, "hosts"},
		{"too many hosts", func(s *sandbox.Secret) { s.Hosts = make([]string, 33) }, "hosts"},
		{"every host", func(s *sandbox.Secret) { s.Hosts = []string{"good.test", "*"} }, "hosts[1]"},
		{"a whole domain", func(s *sandbox.Secret) { s.Hosts = []string{"*.com"} }, "hosts[0]"},
		{"a host with a port", func(s *sandbox.Secret) { s.Hosts = []string{"good.test:443"} }, "hosts[0]"},
		{"a URL", func(s *sandbox.Secret) { s.Hosts = []string{"https://good.test"} }, "hosts[0]"},
		{"an address", func(s *sandbox.Secret) { s.Hosts = []string{"10.0.0.1"} }, "hosts[0]"},
		{"an empty host", func(s *sandbox.Secret) { s.Hosts = []string{""} }, "hosts[0]"},
		{"a star within", func(s *sandbox.Secret) { s.Hosts = []string{"a.*.test"} }, "hosts[0]"},
		{"header with a colon", func(s *sandbox.Secret) { s.Header = "X:" }, "header"},
		{"header with a line feed", func(s *sandbox.Secret) { s.Header = "X\r\nY" }, "header"},
		{"header with a space", func(s *sandbox.Secret) { s.Header = "X Y" }, "header"},
		{"host header", func(s *sandbox.Secret) { s.Header = "hOST" }, "header"},
		{"length", func(s *sandbox.Secret) { s.Header = "Content-Length" }, "header"},
		{"encoding", func(s *sandbox.Secret) { s.Header = "Transfer-Encoding" }, "header"},
		{"connection", func(s *sandbox.Secret) { s.Header = "Connection" }, "header"},
		{"upgrade", func(s *sandbox.Secret) { s.Header = "Upgrade" }, "header"},
		{"trailer", func(s *sandbox.Secret) { s.Header = "Trailer" }, "header"},
		{"range", func(s *sandbox.Secret) { s.Header = "range" }, "header"},
		{"if-range", func(s *sandbox.Secret) { s.Header = "If-Range" }, "header"},
		{"a socket's key", func(s *sandbox.Secret) { s.Header = "Sec-WebSocket-Key" }, "header"},
		{"keep-alive", func(s *sandbox.Secret) { s.Header = "Keep-Alive" }, "header"},
		{"a socket's protocol, which may be a token", func(s *sandbox.Secret) { s.Header = "Sec-WebSocket-Protocol" }, ""},
		{"an IPv6 address", func(s *sandbox.Secret) { s.Hosts = []string{"fd00::1"} }, "hosts[0]"},
		{"format without header", func(s *sandbox.Secret) { s.Format = "Bearer {}" }, "format"},
		{"format without a place", func(s *sandbox.Secret) { s.Header, s.Format = "X", "Bearer" }, "format"},
		{"format with two", func(s *sandbox.Secret) { s.Header, s.Format = "X", "{}{}" }, "format"},
		{"format with a line", func(s *sandbox.Secret) { s.Header, s.Format = "X", "a\r\nHost: evil {}" }, "format"},
		{"env", func(s *sandbox.Secret) { s.Env = "A-B" }, "env"},
		{"empty value", func(s *sandbox.Secret) { s.Value = sandbox.SecretValue{} }, "value"},
		{"short value", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue("1234567") }, "value"},
		{"long value", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue(strings.Repeat("x", 4097)) }, "value"},
		{"value with a line feed", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue("12345678\n") }, "value"},
		{"value with a NUL", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue("1234\x005678") }, "value"},
		{"value with a space", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue("12345678 ") }, "value"},
		{"value that is the placeholder", func(s *sandbox.Secret) { s.Value = sandbox.NewSecretValue(testPlaceholder) }, "value"},
		{"short placeholder", func(s *sandbox.Secret) { s.Placeholder = "short" }, "placeholder"},
		{"placeholder with a space", func(s *sandbox.Secret) { s.Placeholder = "sixteen or more characters" }, "placeholder"},
	} {
		s := good()
		c.change(&s)
		_, err := Compile([]sandbox.Secret{s})
		var e *sandbox.Error
		errors.As(err, &e)
		switch {
		case c.field == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.field != "" && (e == nil || e.Class != sandbox.Invalid || e.Field != c.field):
			t.Errorf("%s: %v (field %v), want field %s", c.name, err, e, c.field)
		case err != nil && strings.Contains(fmt.Sprint(err, e.Hint), "cidr"):
			t.Errorf("%s: secrets have no cidr: %v (%s)", c.name, err, e.Hint)
		case err != nil && len(s.Value.Reveal()) > 6 && strings.Contains(err.Error(), s.Value.Reveal()):
			t.Errorf("%s: the error shows the value: %v", c.name, err)
		}
	}
}

func TestValuesHide(t *testing.T) {
	s := good()
	set, err := Compile([]sandbox.Secret{s})
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	l := slog.New(slog.NewJSONHandler(&log, nil))
	l.Info("x", "s", s, "p", &s, "v", s.Value, "set", set)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "s", s, "v", s.Value, "set", set)
	j, err := json.Marshal(map[string]any{"s": s, "v": s.Value})
	if err != nil {
		t.Fatal(err)
	}
	shown := fmt.Sprintf("%v %+v %#v %s %q %x %v %+v %#v %v", s, s, s, s.Value, s.Value, s.Value, &s, set, set, []any{s, set}) + log.String() + string(j)
	if strings.Contains(shown, "live-0123") || strings.Contains(shown, fmt.Sprintf("%x", "live-0123")) {
		t.Errorf("shown: %s", shown)
	}
}
