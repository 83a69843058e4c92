package sandbox

import (
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"
)

// Shipment carries the records of a run, or of all runs of a tenant, out of the
// platform: a place in the log of each run, and where what follows goes.
type Shipment struct {
	ID     string        `json:"id"`
	Tenant string        `json:"tenant,omitempty"`
	Name   string        `json:"name"`          // one of a tenant's shipments has it
	Run    string        `json:"run,omitempty"` // id of the only run; "" = all of the tenant's
	Sink   ShipmentSink  `json:"sink"`
	MaxLag int64         `json:"max_lag"` // bytes of the log that may wait; beyond it no step begins
	Linger time.Duration `json:"linger"`  // how long a record may wait for others to go with
	Paused bool          `json:"paused,omitempty"`
	// Key is the one it was made with: a request that is sent again finds it.
	Key       string    `json:"key,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// SinkKind is what takes the records of a shipment.
type SinkKind string

const (
	PullSink      SinkKind = "pull"      // a consumer reads them and says how far it is
	HTTPSink      SinkKind = "http"      // POST of JSON lines to URL
	DirectorySink SinkKind = "directory" // files on the server's disk, for its operator
	S3Sink        SinkKind = "s3"        // objects of a bucket
)

// ShipFormat is how records are written.
type ShipFormat string

const (
	JSONLines ShipFormat = "jsonl"
	Parquet   ShipFormat = "parquet"
)

// ShipmentSink is where records go.
type ShipmentSink struct {
	Kind   SinkKind   `json:"kind"`
	Format ShipFormat `json:"format"`
	URL    string     `json:"url,omitempty"`  // of HTTPSink; of S3Sink the endpoint
	Path   string     `json:"path,omitempty"` // of DirectorySink, below the operator's directory; of S3Sink BUCKET/PREFIX
	// Secret names the one whose value opens the way: the header of HTTPSink, the
	// secret key of S3Sink. Its hosts must have that of URL.
	Secret    string `json:"secret,omitempty"`
	AccessKey string `json:"access_key,omitempty"` // of S3Sink
	Region    string `json:"region,omitempty"`     // of S3Sink
}

// ShipmentPosition is how far a shipment is in the log of a run. What is between At
// and Pending was about to be delivered: after a crash the same bytes are again, so
// that a batch that is delivered twice is the same batch.
type ShipmentPosition struct {
	Run     string `json:"run"`
	At      int64  `json:"at"`
	Pending int64  `json:"pending,omitempty"` // 0 = none
	Records int64  `json:"records"`           // delivered so far
}

// Bounds of shipments.
const (
	MaxShipments      = 100 // of one tenant
	MinLag            = 1 * MiB
	DefaultLag        = 1 * GiB
	MaxLinger         = 15 * time.Minute
	DefaultLinger     = time.Second
	DefaultFileLinger = time.Minute // of Parquet and objects: few large ones
)

// WithDefaults fills in what was not asked for.
func (s Shipment) WithDefaults() Shipment {
	if s.Sink.Format == "" {
		s.Sink.Format = JSONLines
	}
	if s.MaxLag == 0 {
		s.MaxLag = DefaultLag
	}
	if s.Linger == 0 {
		s.Linger = DefaultLinger
		if s.Sink.Format == Parquet || s.Sink.Kind == S3Sink {
			s.Linger = DefaultFileLinger
		}
	}
	return s
}

var (
	bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	pathPart   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._=-]*$`)
	plainToken = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
)

// ValidateShipment checks what one is asked for with; whether its run, its secret
// and its host may be used is the server's to say.
func ValidateShipment(s Shipment) error {
	k := s.Sink
	switch {
	case s.MaxLag < MinLag:
		return InvalidField("max_lag", "%d is not accepted; %s and more is, or none for %s", s.MaxLag, bytesText(MinLag), bytesText(DefaultLag))
	case s.Linger < 0 || s.Linger > MaxLinger:
		return InvalidField("linger", "%s is not accepted; up to %s is", s.Linger, MaxLinger)
	case k.Format != JSONLines && k.Format != Parquet:
		return InvalidField("sink.format", "%.40q is not accepted; jsonl and parquet are", k.Format)
	case k.Format == Parquet && (k.Kind == PullSink || k.Kind == HTTPSink):
		return InvalidField("sink.format", "parquet goes to directory and s3; %s takes jsonl", k.Kind)
	case k.Kind != S3Sink && (k.AccessKey != "" || k.Region != ""):
		return InvalidField("sink.access_key", "access_key and region are of s3")
	case k.Secret != "" && k.Kind != HTTPSink && k.Kind != S3Sink:
		return InvalidField("sink.secret", "%s needs none", k.Kind)
	}
	if err := ValidateName("name", s.Name); err != nil {
		return err
	}
	switch k.Kind {
	case PullSink:
		if k.URL != "" || k.Path != "" {
			return InvalidField("sink.url", "a shipment that is pulled goes nowhere by itself")
		}
		return nil
	case HTTPSink:
		if k.Path != "" {
			return InvalidField("sink.path", "the path of http is in its url")
		}
		return validSinkURL(k.URL, false)
	case DirectorySink:
		if k.URL != "" {
			return InvalidField("sink.url", "a directory has a path")
		}
		return validSinkPath(k.Path)
	case S3Sink:
		bucket, prefix, _ := strings.Cut(k.Path, "/")
		switch {
		case !bucketName.MatchString(bucket) || strings.Contains(bucket, ".."):
			return InvalidField("sink.path", "%.80q does not begin with the name of a bucket; BUCKET or BUCKET/PREFIX is accepted", k.Path)
		case !plainToken.MatchString(k.AccessKey):
			return InvalidField("sink.access_key", "is missing or odd; the id of an access key is accepted")
		case k.Secret == "":
			return InvalidField("sink.secret", "is missing; the name of the secret that has the secret key is accepted")
		case k.Region != "" && !plainToken.MatchString(k.Region):
			return InvalidField("sink.region", "%.80q is no region", k.Region)
		}
		if prefix != "" {
			if err := validSinkPath(prefix); err != nil {
				return err
			}
		}
		return validSinkURL(k.URL, true)
	}
	return InvalidField("sink.kind", "%.40q is not accepted; pull, http, directory and s3 are", k.Kind)
}

func validSinkURL(s string, bare bool) error {
	u, err := url.Parse(s)
	switch {
	case err != nil || len(s) > 2048 || u.Host == "" || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http" || u.Opaque != "":
		return InvalidField("sink.url", "is not like https://host/path")
	case u.User != nil:
		return InvalidField("sink.url", "has a password in it; name a secret instead")
	case u.Fragment != "":
		return InvalidField("sink.url", "has a fragment, which no server sees")
	case bare && (u.Path != "" && u.Path != "/" || u.RawQuery != ""):
		return InvalidField("sink.url", "is the endpoint alone, like https://s3.eu-central-1.amazonaws.com; bucket and prefix are the path")
	}
	return nil
}

// validSinkPath takes a relative path that leads nowhere but down.
func validSinkPath(p string) error {
	if p == "" || len(p) > 512 || p != path.Clean(p) {
		return InvalidField("sink.path", "%.80q is not accepted; a relative path like runs/grpo is", p)
	}
	for _, part := range strings.Split(p, "/") {
		if !pathPart.MatchString(part) {
			return InvalidField("sink.path", "%.80q is not accepted; parts of letters, digits and ._=- are, such as runs/grpo", p)
		}
	}
	return nil
}

// NoSuchShipment is the refusal of one that never was, or was deleted.
func NoSuchShipment(ref string) *Error {
	return &Error{Class: NotFound, Field: "shipment", Msg: "no shipment '" + clip(ref) + "'", Hint: `"cove ship ls" lists them`}
}

// ShipmentIsBehind is the refusal of a step whose record would have to wait behind
// too many others.
func ShipmentIsBehind(s Shipment, lag int64) *Error {
	why := "its sink does not take them fast enough"
	if s.Paused {
		why = "it is paused"
	}
	return &Error{Class: NoCapacity, Reason: ShipmentBehind, RetryAfter: 5 * time.Second,
		Msg:  "shipment '" + s.Name + "' has " + bytesText(lag) + " of records that were not shipped, as much as it may: " + why,
		Hint: "\"cove ship show " + s.Name + "\" says what it waits for; resume it, give it a larger max_lag, or delete it"}
}
