package wire

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxMessage bounds one message a client accepts: a file of 16 MiB, the most
// one call reads, with room around it. The server's limit is the same.
const maxMessage = 24 << 20

// Options of a client. The zero value is right.
type Options struct {
	UserAgent string
	// Transport carries every request instead of the two that NewClient makes.
	Transport http.RoundTripper
	// CA is what to trust instead of the system's authorities, for a server
	// with a certificate of its own.
	CA *x509.CertPool
}

// LoadCA reads a file of PEM certificates to trust.
func LoadCA(path string) (*x509.CertPool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Invalid, Field: "COVE_CA", Msg: "the authority to trust cannot be read", Err: err}
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, &sandbox.Error{Class: sandbox.Invalid, Field: "COVE_CA", Msg: path + " has no certificate in PEM form", Hint: "it is the server's DATA/tls/ca.crt"}
	}
	return pool, nil
}

// Client talks to one server. Its errors are *sandbox.Error. Safe for
// concurrent use.
type Client struct {
	Sandboxes covev1.SandboxesClient
	Processes covev1.ProcessesClient
	Files     covev1.FilesClient
	Images    covev1.ImagesClient
	Keys      covev1.KeysClient
	System    covev1.SystemClient
	Snapshots covev1.SnapshotsClient
	Templates covev1.TemplatesClient
	Volumes   covev1.VolumesClient

	Recordings covev1.RecordingsClient
	Tenants    covev1.TenantsClient
	Ports      covev1.PortsClient
	Secrets    covev1.SecretsClient
	Leases     covev1.LeasesClient
	Runs       covev1.RunsClient
	Shipments  covev1.ShipmentsClient
	Grades     covev1.GradesClient
	Callbacks  covev1.CallbacksClient

	url, key, agent string
	rpc, bulk       *http.Client
}

// NewClient makes a client of the server at url ("http://127.0.0.1:7777");
// it dials on first use.
//
// Calls share one HTTP/2 connection: over http:// with prior knowledge, since
// an upgrade costs a round trip and HTTP/1.1 a connection per open stream.
// Bulk content goes over HTTP/1.1, where no flow-control window slows it.
func NewClient(url, key string, opts Options) *Client {
	if opts.UserAgent == "" {
		opts.UserAgent = "cove-go"
	}
	c := &Client{url: strings.TrimRight(url, "/"), key: key, agent: opts.UserAgent}
	if opts.Transport != nil {
		c.rpc, c.bulk = &http.Client{Transport: opts.Transport}, &http.Client{Transport: opts.Transport}
	} else {
		c.rpc = &http.Client{Transport: trusting(rpcTransport(strings.HasPrefix(url, "https://")), opts.CA)}
		c.bulk = &http.Client{Transport: trusting(bulkTransport(), opts.CA)}
	}
	o := connect.WithClientOptions(
		connect.WithInterceptors(caller{key: key, agent: opts.UserAgent}),
		connect.WithReadMaxBytes(maxMessage),
		// gzip costs more than a loopback or a data-centre link.
		connect.WithAcceptCompression("gzip", nil, nil),
	)
	c.Sandboxes = covev1.NewSandboxesClient(c.rpc, c.url, o)
	c.Processes = covev1.NewProcessesClient(c.rpc, c.url, o)
	c.Files = covev1.NewFilesClient(c.rpc, c.url, o)
	c.Images = covev1.NewImagesClient(c.rpc, c.url, o)
	c.Keys = covev1.NewKeysClient(c.rpc, c.url, o)
	c.System = covev1.NewSystemClient(c.rpc, c.url, o)
	c.Snapshots = covev1.NewSnapshotsClient(c.rpc, c.url, o)
	c.Templates = covev1.NewTemplatesClient(c.rpc, c.url, o)
	c.Volumes = covev1.NewVolumesClient(c.rpc, c.url, o)
	c.Recordings = covev1.NewRecordingsClient(c.rpc, c.url, o)
	c.Tenants = covev1.NewTenantsClient(c.rpc, c.url, o)
	c.Ports = covev1.NewPortsClient(c.rpc, c.url, o)
	c.Secrets = covev1.NewSecretsClient(c.rpc, c.url, o)
	c.Grades = covev1.NewGradesClient(c.rpc, c.url, o)
	c.Leases = covev1.NewLeasesClient(c.rpc, c.url, o)
	c.Runs = covev1.NewRunsClient(c.rpc, c.url, o)
	c.Shipments = covev1.NewShipmentsClient(c.rpc, c.url, o)
	c.Callbacks = covev1.NewCallbacksClient(c.rpc, c.url, o)
	return c
}

// URL is the server's, without a trailing slash.
func (c *Client) URL() string { return c.url }

// Close drops idle connections.
func (c *Client) Close() {
	c.rpc.CloseIdleConnections()
	c.bulk.CloseIdleConnections()
}

// trusting makes a transport believe one authority only.
func trusting(t *http.Transport, ca *x509.CertPool) *http.Transport {
	if ca != nil {
		t.TLSClientConfig = &tls.Config{RootCAs: ca, MinVersion: tls.VersionTLS13}
	}
	return t
}

func rpcTransport(tls bool) *http.Transport {
	var p http.Protocols
	p.SetHTTP2(true)
	if tls {
		p.SetHTTP1(true) // a proxy in front may speak nothing else
	} else {
		p.SetUnencryptedHTTP2(true) // without HTTP1 beside it: prior knowledge
	}
	return &http.Transport{
		Proxy:              http.ProxyFromEnvironment,
		Protocols:          &p,
		DisableCompression: true,
		IdleConnTimeout:    90 * time.Second,
		HTTP2: &http.HTTP2Config{
			// Streams of output: the default window of 4 MiB a stream is kept,
			// the connection's is raised so that one reader that rests does not
			// stop the others.
			MaxReceiveBufferPerConnection: 1 << 30,
			MaxReceiveBufferPerStream:     4 << 20,
			SendPingTimeout:               30 * time.Second,
			PingTimeout:                   15 * time.Second,
		},
	}
}

func bulkTransport() *http.Transport {
	var p http.Protocols
	p.SetHTTP1(true)
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		Protocols:             &p,
		DisableCompression:    true,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
		WriteBufferSize:       256 << 10,
		ReadBufferSize:        256 << 10,
	}
}

// caller is the client's interceptor: it puts the key on every request and
// makes domain errors of what comes back.
type caller struct{ key, agent string }

func (c caller) sign(h http.Header) {
	if c.key != "" {
		h.Set("Authorization", "Bearer "+c.key)
	}
	h.Set("User-Agent", c.agent)
}

func (c caller) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		c.sign(req.Header())
		resp, err := next(ctx, req)
		return resp, FromConnect(err)
	}
}

func (c caller) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		c.sign(conn.RequestHeader())
		return stream{conn}
	}
}

func (c caller) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// stream maps the errors of one streaming call. io.EOF passes: FromConnect
// leaves what is no *connect.Error alone.
type stream struct{ connect.StreamingClientConn }

func (s stream) Send(m any) error     { return FromConnect(s.StreamingClientConn.Send(m)) }
func (s stream) Receive(m any) error  { return FromConnect(s.StreamingClientConn.Receive(m)) }
func (s stream) CloseRequest() error  { return FromConnect(s.StreamingClientConn.CloseRequest()) }
func (s stream) CloseResponse() error { return FromConnect(s.StreamingClientConn.CloseResponse()) }
