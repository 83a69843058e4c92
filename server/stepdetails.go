package server

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// What a step keeps so that it can be run again, and what it says besides of the files
// and the network, where its run asks for that.

// episodeRecord is what an episode began with, on record before its first step: its
// sandbox is forgotten one day.
type episodeRecord struct {
	Sandbox string         `json:"sandbox"`
	Reset   int64          `json:"reset"`
	Spec    sandbox.Spec   `json:"spec"`
	ImageID string         `json:"image_id"`
	Origin  sandbox.Origin `json:"origin,omitzero"`
}

// stepEpisode is an episode of a sandbox.
type stepEpisode struct {
	sandbox string
	reset   int64
}

// noteEpisode puts on record what an episode began with, once.
func (s *Server) noteEpisode(ctx context.Context, of opened, id string, reset int64) error {
	of.mu.Lock()
	noted := of.boxLocked(id, reset).noted
	of.mu.Unlock()
	if noted {
		return nil
	}
	sb, err := s.store.GetSandbox(ctx, id)
	if err != nil {
		return err
	}
	record, err := encodeRecord(episodeBegun, 0, stepKey{sandbox: id}, episodeRecord{Sandbox: id, Reset: reset, Spec: sb.Spec, ImageID: sb.ImageID, Origin: sb.Origin})
	if err != nil {
		return err
	}
	of.mu.Lock()
	defer of.mu.Unlock()
	box := of.boxLocked(id, reset)
	if box.noted {
		return nil
	}
	if _, err := of.log.Append(record); err != nil {
		return err
	}
	box.noted = true
	return nil
}

// keepInput is what a step needs to be run again. What may be secret is sealed.
func (s *Server) keepInput(st *sandbox.Step, tenant string, p sandbox.ProcessSpec) error {
	st.Timeout, st.PTY, st.Stdin = p.Timeout, p.PTY, p.Stdin
	st.Env = slices.Sorted(maps.Keys(p.Env))
	in := sandbox.StepInput{Env: p.Env, Input: p.Input}
	if p.Command != st.Command || !slices.Equal(p.Args, st.Args) { // it was cut
		in.Command, in.Args = p.Command, p.Args
	}
	if len(in.Env) == 0 && len(in.Input) == 0 && in.Command == "" && in.Args == nil {
		return nil
	}
	var err error
	st.Sealed, err = s.sealInput(st, tenant, "input", in)
	return err
}

// sealInput seals what of a step may be secret; what cannot be is not kept, and the step
// says so.
func (s *Server) sealInput(st *sandbox.Step, tenant, part string, in sandbox.StepInput) ([]byte, error) {
	b, err := json.Marshal(in)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > 2*sandbox.MaxStepInput {
		st.NotKept = append(st.NotKept, part+": more than "+sandbox.FormatSize(sandbox.MaxStepInput))
		return nil, nil
	}
	sealed, err := s.vault.sealValue(sandbox.NewSecretValue(string(b)), inputContext(tenant, st.ID, part))
	if errors.Is(err, sandbox.ErrUnsupported) {
		st.NotKept = append(st.NotKept, part+": this server has no key to keep it with")
		return nil, nil
	}
	return sealed, err
}

// openInput is what sealInput sealed.
func (s *Server) openInput(st sandbox.Step, tenant, part string, sealed []byte) (in sandbox.StepInput, err error) {
	if sealed == nil {
		return in, nil
	}
	v, err := s.vault.openValue("the "+part+" of step "+st.ID, sealed, inputContext(tenant, st.ID, part))
	if err != nil {
		return in, err
	}
	return in, json.Unmarshal([]byte(v.Reveal()), &in)
}

func inputContext(tenant, step, part string) []byte {
	return []byte("step\x00" + tenant + "\x00" + step + "\x00" + part)
}

// detailTime bounds what a step waits for to say more of itself.
const detailTime = 40 * time.Second

// observe takes note of how things are before a step, if its run wants to know what it
// changed. A sandbox that cannot be looked at has steps all the same.
func (s *Server) observe(ctx context.Context, st *step, run string) {
	details := s.detailsOf(run)
	if len(details) == 0 {
		return
	}
	st.mu.Lock()
	id, mark := st.mu.Sandbox, st.mu.ID
	st.mu.Unlock()
	var before *sandbox.NetworkStatus
	if slices.Contains(details, sandbox.StepEgressDetail) {
		if n, err := s.node.NetworkStatus(ctx, id, 0); err == nil {
			before = &n
		}
	}
	marked := false
	if slices.Contains(details, sandbox.StepFilesDetail) {
		err := s.node.MarkFiles(ctx, id, mark)
		if err != nil && ctx.Err() == nil {
			s.log.Warn("the files before a step are not known", "step", mark, "err", err)
		}
		marked = err == nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.mu.net, st.mu.marked = before, marked
}

// detailsOf is what the steps of a run say besides.
func (s *Server) detailsOf(run string) (details []sandbox.StepDetail) {
	_ = s.leases.see(asServer(context.Background()), run, func(l *heldLease) {
		if l.run != nil {
			details = l.run.Details
		}
	})
	return details
}

// describe adds to a step that has ended what changed meanwhile.
func (s *Server) describe(record *sandbox.Step, net *sandbox.NetworkStatus, marked bool) {
	ctx, cancel := context.WithTimeout(s.steps.context(), detailTime)
	defer cancel()
	if net != nil {
		if now, err := s.node.NetworkStatus(ctx, record.Sandbox, flowsOfStep); err == nil {
			record.Egress = egressOf(*net, now, record.StartedAt)
		}
	}
	if !marked {
		return
	}
	d, err := s.node.Diff(ctx, record.Sandbox, sandbox.DiffRequest{Mark: record.ID, Limit: sandbox.StepPaths})
	if err != nil {
		s.log.Warn("what a step changed is not known", "step", record.ID, "err", err)
		return
	}
	for i := range d.Changes { // a log keeps them: no more than a path may have
		d.Changes[i].Path = d.Changes[i].Path[:min(len(d.Changes[i].Path), 4096)]
	}
	record.Files = &sandbox.StepFiles{Added: d.Added, Modified: d.Modified, Deleted: d.Deleted, Bytes: d.Bytes, Changes: d.Changes, Truncated: d.Truncated}
}

// flowsOfStep is how many flows are looked at for the hosts of a step.
const flowsOfStep = 512

func egressOf(before, now sandbox.NetworkStatus, from time.Time) *sandbox.StepEgress {
	e := &sandbox.StepEgress{Requests: max(0, now.Allowed-before.Allowed), Denied: max(0, now.Denied-before.Denied),
		Sent: grown(now.Sent, before.Sent), Received: grown(now.Received, before.Received)}
	for _, f := range now.Flows {
		host := f.Name
		if host == "" {
			host = f.Address.String()
		}
		if !f.Start.Before(from) && f.Protocol != "dns" && len(e.Hosts) < sandbox.StepPaths && !slices.Contains(e.Hosts, host) {
			e.Hosts = append(e.Hosts, host)
		}
	}
	return e
}

// grown is what a counter of a kernel grew by; another kernel counts from nothing.
func grown(now, before int64) int64 {
	if now < before {
		return now
	}
	return now - before
}
