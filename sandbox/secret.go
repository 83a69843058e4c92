package sandbox

import (
	"fmt"
	"log/slog"
	"time"
)

// Secret is a value that requests of sandboxes leave with and no sandbox ever
// holds. Inside there is its Placeholder. Package egress/secret says how the one
// becomes the other, and what of it may not be.
type Secret struct {
	Tenant string   `json:"tenant,omitempty"`
	Name   string   `json:"name"`  // unique within its tenant
	Hosts  []string `json:"hosts"` // domains that it is sent to, "*.example.com" for every name below
	// Floating has no hosts of its own: it goes where a header of a sandbox's network
	// has its placeholder in it, so that who makes sandboxes says where.
	Floating bool `json:"floating,omitempty"`
	// Header that every request to Hosts gets, made of Format, in which "{}" is
	// the value; "" = "{}". Without a header the placeholder is replaced wherever
	// it stands in a request's headers.
	Header    string `json:"header,omitempty"`
	Format    string `json:"format,omitempty"`
	URL       bool   `json:"url,omitempty"`        // the placeholder is replaced in path and query too
	Body      bool   `json:"body,omitempty"`       // and in the body
	AllowHTTP bool   `json:"allow_http,omitempty"` // also over connections that anybody can read
	Env       string `json:"env,omitempty"`        // variable that holds the placeholder inside

	Placeholder string            `json:"placeholder"`
	Labels      map[string]string `json:"labels,omitempty"`
	Version     int               `json:"version,omitempty"` // of the value, 1 at first; 0 is of before there were any
	Value       SecretValue       `json:"-"`
	CreatedAt   time.Time         `json:"created_at"`
	UpdatedAt   time.Time         `json:"updated_at"` // of the value or of anything else
}

// SecretValue shows itself to nobody but who asks for it by name: not to fmt,
// not to slog, not to encoding/json.
type SecretValue struct{ v string }

// NewSecretValue hides a string.
func NewSecretValue(v string) SecretValue { return SecretValue{v} }

// Reveal returns what is hidden.
func (v SecretValue) Reveal() string { return v.v }

// IsZero says that there is nothing.
func (v SecretValue) IsZero() bool { return v.v == "" }

const hidden = "[hidden]"

func (v SecretValue) String() string               { return hidden }
func (v SecretValue) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte(hidden)) }
func (v SecretValue) LogValue() slog.Value         { return slog.StringValue(hidden) }
func (v SecretValue) MarshalJSON() ([]byte, error) { return []byte(`"` + hidden + `"`), nil }
func (v SecretValue) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// SecretUpdate changes a secret. nil leaves what is there.
type SecretUpdate struct {
	Value                *SecretValue
	Hosts                []string          // nil = as they are
	Labels               map[string]string // likewise
	Header, Format, Env  *string
	URL, Body, AllowHTTP *bool
}

// Apply returns s as changed.
func (u SecretUpdate) Apply(s Secret) Secret {
	if u.Hosts != nil {
		s.Hosts = u.Hosts
	}
	if u.Labels != nil {
		s.Labels = u.Labels
	}
	if u.Value != nil {
		s.Value, s.Version = *u.Value, max(1, s.Version)+1
	}
	set(&s.Header, u.Header)
	set(&s.Format, u.Format)
	set(&s.Env, u.Env)
	set(&s.URL, u.URL)
	set(&s.Body, u.Body)
	set(&s.AllowHTTP, u.AllowHTTP)
	return s
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
