package server

import (
	"context"
	"crypto/rand"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Config is what a server is made of. Store and Node are required; the zero
// value of everything else is a good default.
type Config struct {
	Store   store.Store
	Node    Node
	Logger  *slog.Logger
	Version string

	Ports PortGate  // what shows ports to the outside; nil = nothing does
	SSH   SSHSigner // nil = there is no SSH server

	Clock func() time.Time // time.Now
	Rand  io.Reader        // crypto/rand.Reader

	Limits   sandbox.Limits   // what a spec may ask for
	Defaults sandbox.Defaults // what it gets where it asks for nothing

	// SecretKeys seal the values of secrets in the store; nil = there can be none.
	SecretKeys *cas.Keyring

	// KeyRotated, if set, is told of every rotation: the hash of the secret before
	// and the new secret.
	KeyRotated func(old []byte, secret string)
	// AuditRetention is how long entries of the audit log are kept; 90 days.
	AuditRetention time.Duration
	// QueueWait is how long a create waits for room on a full node, in turn
	// with those of other tenants; 0 = not at all.
	QueueWait time.Duration

	Retention time.Duration // how long ended sandboxes stay readable; 7 days
	MaxUpload int64         // bytes of one PUT of a file or tar; 64 GiB
	MaxImage  int64         // bytes of one imported image tar; 64 GiB
	KeepAlive time.Duration // quiet time after which a process stream says it is alive; 15 s
	// CallbackGrace is how long requests from inside wait for who served their
	// name to come back; 5 s. CallbackLinger is how long code inside is then
	// told so before its connections are refused; 1 minute.
	CallbackGrace, CallbackLinger time.Duration
	// CancelGrace is how long a process that is to be killed with its caller waits
	// for the caller to come back on another connection; 30 s, as long as the SDK
	// tries to.
	CancelGrace time.Duration
	EndWait     time.Duration // how long a broken stream waits to learn that the sandbox ended; 5 s
	ForkGrace   time.Duration // how long children wait for a caller that left to ask again; 1 min
}

func (c *Config) fill() error {
	if c.Store == nil || c.Node == nil {
		return &sandbox.Error{Class: sandbox.Internal, Op: "server.new", Msg: "a server needs a store and a node"}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	if c.Limits == (sandbox.Limits{}) {
		c.Limits = sandbox.StandardLimits()
	}
	if c.Defaults == (sandbox.Defaults{}) {
		c.Defaults = sandbox.StandardDefaults()
	}
	setDefault(&c.Retention, 7*24*time.Hour)
	setDefault(&c.AuditRetention, 90*24*time.Hour)
	setDefault(&c.MaxUpload, 64*sandbox.GiB)
	setDefault(&c.MaxImage, 64*sandbox.GiB)
	setDefault(&c.KeepAlive, 15*time.Second)
	setDefault(&c.EndWait, 5*time.Second)
	setDefault(&c.CancelGrace, 30*time.Second)
	setDefault(&c.ForkGrace, forkGrace)
	setDefault(&c.CallbackGrace, 5*time.Second)
	setDefault(&c.CallbackLinger, time.Minute)
	return nil
}

func setDefault[T ~int64](p *T, v T) {
	if *p == 0 {
		*p = v
	}
}

// Server is the control plane over one node. Its order of life: New,
// Reconcile, serve Handler while Run runs, Drain, end Run. Safe for concurrent
// use.
type Server struct {
	cfg   Config
	store store.Store
	node  Node
	log   *slog.Logger

	keys    keyring
	images  imageBook
	creates creates
	forks   forks
	ends    endBook
	calls   callBook

	callbacks callbackBook

	content  contentBook
	prepares prepareBook

	secrets secretBook
	vault   vault

	rights *rights
	audit  auditor
	quotas quotaBook
	ledger ledger
	room   waitingRoom

	volumeTurn sync.Mutex // one volume is admitted at a time
	leases     leaseBook
	strays     strayBook

	handler http.Handler
}

// New makes a server; nothing runs until Run.
func New(cfg Config) (*Server, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: cfg.Logger, rights: newRights(), vault: vault{cfg.SecretKeys}}
	s.store = counted{cfg.Store, &s.ledger, &s.room, &s.leases}
	s.node = newGuard(cfg.Node, s.store)
	s.ledger.init()
	s.leases.init()
	s.strays.init()
	s.room.init(s.node.Capacity)
	s.quotas.init(cfg.Store, cfg.Clock)
	s.audit.init(cfg.Store, cfg.Clock, cfg.Logger)
	s.keys.init(cfg.Store)
	s.images.init(cfg.Store, cfg.Node.Images(), func() { s.content.wantImages() })
	s.creates.init()
	s.ends.init()
	s.calls.init()
	s.callbacks.init(s)
	s.content.init()
	s.prepares.init()
	s.handler = s.routes()
	return s, nil
}

// Handler serves the whole API: Connect, plain HTTP and /healthz.
func (s *Server) Handler() http.Handler { return s.handler }

// HTTPServer is an http.Server set up as the API needs it: HTTP/1.1 and
// HTTP/2, the latter without TLS too, because a client holds one stream per
// running process and HTTP/1.1 would cost it a connection each.
func HTTPServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	s := &http.Server{
		Handler:           h,
		Protocols:         &p,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		HTTP2: &http.HTTP2Config{
			// The usual 250 would stop a trainer that watches a thousand
			// processes over one connection. Who has shown no key has far fewer.
			MaxConcurrentStreams:          100_000,
			MaxReceiveBufferPerStream:     4 << 20,
			MaxReceiveBufferPerConnection: 64 << 20,
			// A client machine that vanished is noticed within a minute.
			SendPingTimeout: 30 * time.Second,
			PingTimeout:     30 * time.Second,
		},
	}
	strangers.New(strangers.Limits{}).Guard(s)
	return s
}

// Run does the server's own work until ctx ends, and waits for it: it records
// the ends the node reports, ends what its lease has left, repays what failed the first time, forgets what
// is older than the retention, deletes snapshots that expired, removes content that nothing refers to any more
// and writes down when keys were used. Reconcile
// comes first, before anything is served.
func (s *Server) Run(ctx context.Context) error {
	ctx = asServer(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { s.receiveEnds(ctx) })
	wg.Go(func() { s.settleLoop(ctx) })
	wg.Go(func() { s.housekeeping(ctx) })
	wg.Go(func() { s.collectLoop(ctx) })
	wg.Go(func() { s.audit.run(ctx) })
	wg.Go(func() { s.leaseLoop(ctx) })
	wg.Wait()
	s.strays.stop()
	s.callbacks.stop()

	// One last time, so that a stop does not lose the minute.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	s.keys.flush(last, s.log)
	s.audit.flush(last)
	return ctx.Err()
}

func (s *Server) housekeeping(ctx context.Context) {
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	hour := time.NewTicker(time.Hour)
	defer hour.Stop()
	s.forgetOld(ctx)
	s.expireSnapshots(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-minute.C:
			s.keys.flush(ctx, s.log)
			s.expireSnapshots(ctx)
		case <-hour.C:
			s.forgetOld(ctx)
		}
	}
}

// forgetOld deletes in small transactions, so that a writer never waits long.
func (s *Server) forgetOld(ctx context.Context) {
	const batch = 500
	ctx = asServer(ctx)
	defer s.audit.forget(ctx, s.cfg.AuditRetention)
	before := s.cfg.Clock().Add(-s.cfg.Retention)
	for total := 0; ; {
		n, err := s.store.ForgetEnded(ctx, before, batch)
		total += n
		if err != nil {
			if ctx.Err() == nil {
				s.log.Warn("cannot forget old sandboxes", "err", err)
			}
			return
		}
		if n < batch {
			if total > 0 {
				s.log.Info("forgot old sandboxes", "count", total, "ended_before", before)
			}
			return
		}
	}
}
