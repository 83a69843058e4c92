package server

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Config is what a server is made of. Store and Node are required; the zero
// value of everything else is a good default.
type Config struct {
	Store   store.Store
	Node    node.Node
	Logger  *slog.Logger
	Version string

	Ports PortGate  // what shows ports to the outside; nil = nothing does
	SSH   SSHSigner // nil = there is no SSH server

	Clock func() time.Time // time.Now
	Rand  io.Reader        // crypto/rand.Reader

	Limits   sandbox.Limits   // what a spec may ask for
	Defaults sandbox.Defaults // what it gets where it asks for nothing

	// SecretKeys seal the values of secrets in the store; nil = there can be none.
	SecretKeys *seal.Keyring

	// KeyRotated, if set, is told of every rotation: the hash of the secret before
	// and the new secret.
	KeyRotated func(old []byte, secret string)
	// AuditRetention is how long entries of the audit log are kept; 90 days.
	AuditRetention time.Duration
	// QueueWait is how long a create waits for room on a full node, in turn
	// with those of other tenants; 0 = not at all.
	QueueWait time.Duration

	// StepDir is where the steps of runs are kept; "" = they are not. A tenant's may
	// take MaxStepBytes; 16 GiB.
	StepDir      string
	MaxStepBytes int64
	// ShipDir is below what shipments to directories go; "" = there are none. ShipTo
	// makes connections of the others. ShipWait is how long a step waits for a shipment
	// that is behind; 10 s.
	ShipDir  string
	ShipTo   inward.Allowed
	ShipCA   *x509.CertPool // nil = the host's
	ShipWait time.Duration
	// RunRetention is how long runs that have ended stay, with steps and checkpoints;
	// 90 days, negative for ever.
	RunRetention time.Duration

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
	GroupGrace  time.Duration // how long a group under way does; 5 s
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
	setDefault(&c.MaxStepBytes, 16*sandbox.GiB)
	setDefault(&c.ShipWait, 10*time.Second)
	setDefault(&c.RunRetention, 90*24*time.Hour)
	setDefault(&c.KeepAlive, 15*time.Second)
	setDefault(&c.EndWait, 5*time.Second)
	setDefault(&c.CancelGrace, 30*time.Second)
	setDefault(&c.ForkGrace, forkGrace)
	setDefault(&c.GroupGrace, 5*time.Second)
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
	node  node.Node
	about node.Info // of the node; without what changes
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
	builds   buildBook

	secretTurn sync.Mutex // held from a change of secrets in the store until the node has it
	vault      vault

	audit        auditor
	quotas       quotaBook
	reservations reservations
	queue        createQueue
	holdings     holdings

	leases   leaseBook
	members  memberBook
	busy     busyBook
	steps    stepBook
	ships    shipBook
	spends   spendBook
	shipTurn sync.Mutex // held while a shipment is made, paused or deleted
	runTurn  sync.Mutex // held while a run is begun or deleted
	strays   strayBook
	grades   gradeBook
	sendings sendingBook // of tests
	setups   turnstile   // of grades
	plans    planBook
}

// New makes a server; nothing runs until Run.
func New(cfg Config) (*Server, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: cfg.Logger, vault: vault{cfg.SecretKeys}}
	s.store = counted{cfg.Store, &s.reservations, &s.queue, &s.leases, &s.members, s.leftRun, s.plans.took, &s.holdings}
	var err error
	if s.about, err = meet(cfg.Node); err != nil {
		return nil, err
	}
	s.node = newGuard(cfg.Node, s.store)
	s.reservations.init()
	s.holdings.init(cfg.Store, s.node.Blobs)
	s.leases.init()
	s.members.init()
	s.busy.init()
	s.ships.init(s)
	s.steps.init(cfg.StepDir, s.ships.appended)
	s.spends.init()
	s.strays.init()
	s.grades.init()
	s.sendings.init()
	s.setups.init(gradeWidth)
	s.plans.init()
	s.queue.init(s.node.Capacity)
	s.quotas.init(cfg.Store, cfg.Clock)
	s.audit.init(cfg.Store, cfg.Clock, cfg.Logger)
	s.keys.init(cfg.Store)
	s.images.init(cfg.Store, cfg.Node, s.imageBound, func() { s.content.wantImages() })
	s.creates.init()
	s.ends.init()
	s.calls.init()
	s.callbacks.init(s)
	s.content.init()
	s.prepares.init()
	s.builds.init()
	return s, nil
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
	wg.Go(s.stagePlans)
	if s.steps.logs.Load() != nil {
		wg.Go(func() { s.steps.logs.Load().Run(ctx, s.log) })
		wg.Go(func() { s.spendLoop(ctx) })
		s.ships.start()
	}
	wg.Wait()
	s.ships.stop()
	s.steps.stop()
	s.steps.work.Wait()
	if s.steps.logs.Load() != nil {
		if err := s.steps.logs.Load().Close(); err != nil {
			s.log.Warn("cannot close the logs of steps", "err", err)
		}
	}
	s.plans.stop()
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
	s.forgetBuilds(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-minute.C:
			s.keys.flush(ctx, s.log)
			s.expireSnapshots(ctx)
		case <-hour.C:
			s.forgetOld(ctx)
			s.forgetBuilds(ctx)
		}
	}
}

// forgetOld deletes in small transactions, so that a writer never waits long.
func (s *Server) forgetOld(ctx context.Context) {
	const batch = 500
	ctx = asServer(ctx)
	defer s.audit.forget(ctx, s.cfg.AuditRetention)
	defer s.forgetGrades(ctx)
	defer s.forgetRuns(ctx)
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
