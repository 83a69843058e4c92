package server

import (
	"context"
	"errors"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/store"
)

// ShipmentStatus is a shipment with what only a running server knows.
type ShipmentStatus struct {
	sandbox.Shipment
	Lag       int64 // bytes of logs that wait
	Records   int64 // delivered
	LastAt    time.Time
	Failed    *sandbox.Error // of the last delivery; nil = it was taken
	FailedAt  time.Time
	Positions []sandbox.ShipmentPosition // of one that is pulled: where each of its runs goes on
}

func (p *shipping) status() ShipmentStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := ShipmentStatus{Shipment: p.mu.Shipment, Lag: p.mu.lag, Records: p.mu.records, LastAt: p.mu.took}
	if p.mu.failed != nil {
		st.Failed, st.FailedAt = p.mu.failed, p.mu.failedAt
	}
	return st
}

// partsOfShipment is what a shipment needs besides the right to have one: records hold
// what processes printed and what graders said, and one that carries all runs, or sends
// them somewhere, is a matter of the tenant's admin.
func partsOfShipment(sh sandbox.Shipment) []part {
	ps := []part{reads("", "processes"), reads("", "grades")}
	if sh.Run == "" {
		ps = append(ps, part{"run", need{sandbox.AdminRole, "shipments"}})
	}
	switch sh.Sink.Kind {
	case sandbox.HTTPSink, sandbox.S3Sink:
		ps = append(ps, part{"sink.url", need{sandbox.AdminRole, "shipments"}})
	case sandbox.DirectorySink: // on the disk of who runs the installation
		ps = append(ps, part{"sink.path", need{sandbox.RootRole, "shipments"}})
	}
	if sh.Sink.Secret != "" {
		ps = append(ps, part{"sink.secret", need{sandbox.AdminRole, "secrets"}})
	}
	return ps
}

// CreateShipment makes a shipment, which begins with all that its runs have on record.
func (s *Server) CreateShipment(ctx context.Context, sh sandbox.Shipment) (out ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.create", about("name", sh.Name))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	sh = sh.WithDefaults()
	sh.ID, sh.Tenant, sh.CreatedAt, sh.Paused = sandbox.NewID(s.cfg.Rand), store.ScopeOf(ctx).Tenant(), s.cfg.Clock().UTC(), false
	if err := firstError(call.needs(partsOfShipment(sh)...), sandbox.ValidateIdempotencyKey("idempotency_key", sh.Key), sandbox.ValidateShipment(sh)); err != nil {
		return out, err
	}
	if sh.Run != "" {
		run, err := s.store.GetRun(ctx, sh.Run)
		if err != nil {
			return out, atField("run", err)
		}
		sh.Run = run.ID
	}
	if s.steps.logs.Load() == nil {
		return out, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server keeps no steps"}
	}
	if err := s.checkSink(ctx, sh); err != nil {
		return out, err
	}
	s.shipTurn.Lock()
	defer s.shipTurn.Unlock()
	have, err := s.store.ListShipments(ctx)
	if err != nil {
		return out, err
	}
	for _, old := range have {
		if old.Name == sh.Name && sh.Key != "" && old.Key == sh.Key {
			return s.shipmentStatus(old), nil
		}
	}
	if len(have) >= sandbox.MaxShipments {
		return out, &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "the tenant has as many shipments as there may be", RetryAfter: time.Minute, Hint: "\"cove ship ls\" lists them"}
	}
	ctx = context.WithoutCancel(ctx) // what is on record is under way
	if err := s.store.CreateShipment(ctx, sh); err != nil {
		return out, err
	}
	call.concerns("shipment", sh.ID)
	if err := s.ships.add(asServer(ctx), sh); err != nil {
		return out, errors.Join(err, s.store.DeleteShipment(ctx, sh.ID))
	}
	return s.shipmentStatus(sh), nil
}

func (s *Server) shipmentStatus(sh sandbox.Shipment) ShipmentStatus {
	if p := s.ships.get(sh.ID); p != nil {
		return p.status()
	}
	return ShipmentStatus{Shipment: sh}
}

// checkSink refuses a sink that could never take anything.
func (s *Server) checkSink(ctx context.Context, sh sandbox.Shipment) error {
	k := sh.Sink
	switch k.Kind {
	case sandbox.PullSink:
		return nil
	case sandbox.DirectorySink:
		if s.cfg.ShipDir == "" {
			return &sandbox.Error{Class: sandbox.Unsupported, Field: "sink.path", Msg: "this server has no directory for shipments", Hint: "the operator names one: cove serve --ship-dir DIR"}
		}
		return nil
	}
	u, err := url.Parse(k.URL)
	if err != nil {
		return sandbox.InvalidField("sink.url", "is not like https://host/path")
	}
	if u.Scheme == "http" && !s.cfg.ShipTo.Names(withPort(u)) {
		return sandbox.InvalidField("sink.url", "is not https; anybody on the way could read the records").WithHint("the operator allows it: cove serve --ship-allow %s", u.Host)
	}
	if k.Secret != "" {
		if _, err := s.sinkSecret(ctx, sh); err != nil {
			return err
		}
	}
	return nil
}

// withPort is the host and port of a URL.
func withPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	if u.Scheme == "http" {
		return u.Host + ":80"
	}
	return u.Host + ":443"
}

// sinkSecret is the secret of a sink with its value, if it may go there.
func (s *Server) sinkSecret(ctx context.Context, sh sandbox.Shipment) (sec sandbox.Secret, err error) {
	sealed, err := s.store.GetSecret(store.In(ctx, sh.Tenant), sh.Sink.Secret)
	if err != nil {
		return sec, s.noSecret(ctx, "sink.secret", sh.Sink.Secret, err)
	}
	if sec, err = s.vault.open(sealed.Secret, sealed.Sealed); err != nil {
		return sec, err
	}
	u, err := url.Parse(sh.Sink.URL)
	if err != nil {
		return sec, sandbox.InvalidField("sink.url", "is not like https://host/path")
	}
	set, err := secret.Compile([]sandbox.Secret{sec})
	switch {
	case err != nil:
		return sec, err
	case !set.Covers(strings.ToLower(u.Hostname())):
		return sandbox.Secret{}, &sandbox.Error{Class: sandbox.Denied, Field: "sink.secret", Msg: "secret '" + sec.Name + "' may not go to " + u.Hostname(), Hint: "its hosts are where it may go: cove secret update"}
	case u.Scheme == "http" && !sec.AllowHTTP:
		return sandbox.Secret{}, &sandbox.Error{Class: sandbox.Denied, Field: "sink.secret", Msg: "secret '" + sec.Name + "' does not go without TLS"}
	}
	return sec, nil
}

// openSink is where a shipment goes.
func (s *Server) openSink(sh sandbox.Shipment) (ship.Sink, error) {
	k := sh.Sink
	ctx := asServer(context.Background())
	switch k.Kind {
	case sandbox.DirectorySink:
		if s.cfg.ShipDir == "" {
			return nil, &sandbox.Error{Class: sandbox.Unsupported, Op: "ship.directory", Msg: "this server has no directory for shipments", Hint: "start it with --ship-dir"}
		}
		return ship.NewDirectory(filepath.Join(s.cfg.ShipDir, k.Path), k.Format)
	case sandbox.HTTPSink:
		return ship.NewWeb(k.URL, s.cfg.ShipTo.Transport(s.cfg.ShipCA), func() (name, value string, err error) {
			if k.Secret == "" {
				return "", "", nil
			}
			sec, err := s.sinkSecret(ctx, sh)
			if err != nil {
				return "", "", err
			}
			if sec.Header == "" {
				return "Authorization", "Bearer " + sec.Value.Reveal(), nil
			}
			format := sec.Format
			if format == "" {
				format = "{}"
			}
			return sec.Header, strings.ReplaceAll(format, "{}", sec.Value.Reveal()), nil
		}), nil
	case sandbox.S3Sink:
		return ship.NewBucket(k, s.cfg.ShipTo.Transport(s.cfg.ShipCA), func() (string, error) {
			sec, err := s.sinkSecret(ctx, sh)
			return sec.Value.Reveal(), err
		})
	}
	return nil, &sandbox.Error{Class: sandbox.Internal, Op: "ship.open", Msg: "no sink of kind " + string(k.Kind)}
}

func (s *Server) shipment(ctx context.Context, ref string) (sandbox.Shipment, error) {
	if ref == "" {
		return sandbox.Shipment{}, sandbox.InvalidField("shipment", "is missing; a shipment's id or name is accepted")
	}
	return s.store.GetShipment(ctx, ref)
}

// GetShipment finds one by id or name.
func (s *Server) GetShipment(ctx context.Context, ref string) (out ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.get", about("shipment", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	sh, err := s.shipment(ctx, ref)
	if err != nil {
		return out, err
	}
	out = s.shipmentStatus(sh)
	out.Positions, err = s.store.ListPositions(ctx, sh.ID)
	return out, err
}

// ListShipments lists the tenant's, newest first.
func (s *Server) ListShipments(ctx context.Context) (out []ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	list, err := s.store.ListShipments(ctx)
	for _, sh := range list {
		out = append(out, s.shipmentStatus(sh))
	}
	return out, err
}

// PauseShipment stops deliveries. What waits waits on, up to the bound.
func (s *Server) PauseShipment(ctx context.Context, ref string) (out ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.pause", about("shipment", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	return s.setPaused(ctx, call, ref, true)
}

// ResumeShipment lets deliveries go on, at once.
func (s *Server) ResumeShipment(ctx context.Context, ref string) (out ShipmentStatus, err error) {
	ctx, call, err := s.begin(ctx, "shipment.resume", about("shipment", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	return s.setPaused(ctx, call, ref, false)
}

func (s *Server) setPaused(ctx context.Context, call *call, ref string, paused bool) (out ShipmentStatus, err error) {
	s.shipTurn.Lock()
	defer s.shipTurn.Unlock()
	sh, err := s.shipment(ctx, ref)
	if err == nil {
		err = call.needs(partsOfShipment(sh)...)
	}
	if err != nil {
		return out, err
	}
	sh, err = s.store.UpdateShipment(context.WithoutCancel(ctx), sh.ID, func(sh *sandbox.Shipment) error { sh.Paused = paused; return nil })
	if err != nil {
		return out, err
	}
	if p := s.ships.get(sh.ID); p != nil {
		p.mu.Lock()
		p.mu.Paused, p.mu.flush = paused, !paused
		p.mu.changed.Tell()
		p.mu.Unlock()
		p.poke()
	}
	return s.shipmentStatus(sh), nil
}

// DeleteShipment ends one. What was not delivered is not, and holds nothing back any
// more. One that is not there is no error.
func (s *Server) DeleteShipment(ctx context.Context, ref string) (err error) {
	ctx, call, err := s.begin(ctx, "shipment.delete", about("shipment", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	s.shipTurn.Lock()
	defer s.shipTurn.Unlock()
	sh, err := s.shipment(ctx, ref)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err == nil {
		err = call.needs(partsOfShipment(sh)...)
	}
	if err != nil {
		return err
	}
	if err := s.store.DeleteShipment(context.WithoutCancel(ctx), sh.ID); err != nil {
		return err
	}
	s.ships.drop(sh.ID)
	return nil
}
