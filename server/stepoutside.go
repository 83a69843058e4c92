package server

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// gapRecord is something that was done to a sandbox from outside, beside its steps.
type gapRecord struct {
	Sandbox string `json:"sandbox"`
	Reset   int64  `json:"reset"`
	sandbox.ReplayGap
	// ID and Sealed are of what a replay can do again: a fileChange. What is too large, or
	// there is no key for, is a gap.
	ID     string `json:"id,omitempty"`
	Sealed []byte `json:"sealed,omitempty"`
}

// fileChange is a call that changed files, with all that it takes to make it again. Content
// that comes as a stream (large uploads, tars) is not kept: it may be as large as a disk.
type fileChange struct {
	Path       string               `json:"path"`
	To         string               `json:"to,omitempty"`
	Data       []byte               `json:"data,omitempty"`
	Options    sandbox.WriteOptions `json:"options,omitzero"`
	Mode       uint32               `json:"mode,omitempty"`
	Owner      string               `json:"owner,omitempty"`
	Recursive  bool                 `json:"recursive,omitempty"`
	Attributes map[string]string    `json:"attributes,omitempty"`
}

// maxKeptFiles is how much content of files an episode keeps, of calls with at most
// sandbox.MaxStepInput each: what an agent writes through the API is small, and whoever moves
// data with it is not to have all of it twice. A server that restarts counts anew.
const maxKeptFiles = 64 << 20

// outside are the operations that change a sandbox and are no steps of it.
var outside = map[Operation]bool{
	"file.write": true, "file.mkdir": true, "file.move": true, "file.remove": true, "file.chmod": true, "file.chown": true, "file.set_attributes": true,
	"file.upload": true, "file.upload_tar": true, "snapshot.mount": true, "code.run": true, "process.signal": true, "sandbox.set_network": true, "sandbox.set_secrets": true,
}

// changes says what a call does to files, for the record.
func (c *call) changes(f fileChange) { c.detail, c.file = f.Path, &f }

// noteOutside puts on record that something was done to a sandbox of a run beside its
// steps. That it is not, for want of room, is told by the next step, which is refused.
func (c *call) noteOutside() {
	for _, t := range c.things {
		if t.noun != "sandbox" && t.noun != "id" {
			continue
		}
		m, ok := c.s.members.get(t.value)
		if !ok || c.s.steps.logs.Load() == nil || !store.ScopeOf(c.ctx).Sees(m.tenant) {
			continue
		}
		of, err := c.s.stepsOf(m.tenant, m.Run)
		if err != nil {
			continue
		}
		of.mu.Lock()
		box := of.boxLocked(t.value, m.reset)
		last := box.last
		var keep *fileChange
		if f := c.file; f != nil && int64(len(f.Data)) <= min(sandbox.MaxStepInput, maxKeptFiles-box.kept) {
			keep, box.kept = f, box.kept+int64(len(f.Data))
		}
		of.mu.Unlock()
		gap := gapRecord{Sandbox: t.value, Reset: m.reset, ReplayGap: sandbox.ReplayGap{AfterStep: last, What: string(c.op), Detail: c.detail}}
		var record []byte
		if err = c.s.keepChange(&gap, m.tenant, keep); err == nil {
			record, err = encodeRecord(doneOutside, 0, stepKey{sandbox: t.value}, gap)
		}
		if err == nil {
			_, err = of.log.Append(record)
		}
		if err != nil {
			c.s.log.Warn("what was done to a sandbox is not on record", "sandbox", t.value, "op", c.op, "err", err)
		}
		return
	}
}

// keepChange seals what a call did to files; nil is a gap.
func (s *Server) keepChange(gap *gapRecord, tenant string, f *fileChange) error {
	if f == nil {
		return nil
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	gap.ID = sandbox.NewID(s.cfg.Rand)
	gap.Sealed, err = s.vault.sealValue(sandbox.NewSecretValue(string(b)), inputContext(tenant, gap.ID, gap.What))
	if errors.Is(err, sandbox.ErrUnsupported) {
		return nil
	}
	return err
}

// changeAgain makes a call that changed files again, in the sandbox of a replay.
func (s *Server) changeAgain(ctx context.Context, box, tenant string, gap gapRecord) error {
	v, err := s.vault.openValue("what was done to the files of sandbox "+gap.Sandbox, gap.Sealed, inputContext(tenant, gap.ID, gap.What))
	if err != nil {
		return err
	}
	var f fileChange
	if err := json.Unmarshal([]byte(v.Reveal()), &f); err != nil {
		return err
	}
	return s.inside(ctx, box, func() (err error) {
		switch gap.What {
		case "file.write", "file.upload":
			_, err = s.node.WriteFile(ctx, box, f.Path, f.Data, f.Options)
		case "file.mkdir":
			_, err = s.node.MakeDir(ctx, box, f.Path, f.Options)
		case "file.move":
			_, err = s.node.MoveFile(ctx, box, f.Path, f.To)
		case "file.remove":
			err = s.node.RemoveFile(ctx, box, f.Path, f.Recursive)
		case "file.chmod":
			err = s.node.Chmod(ctx, box, f.Path, f.Mode, f.Recursive)
		case "file.chown":
			err = s.node.Chown(ctx, box, f.Path, f.Owner, f.Recursive)
		case "file.set_attributes":
			_, err = s.node.SetAttributes(ctx, box, f.Path, f.Attributes)
		default:
			err = sandbox.Errorf(sandbox.Unsupported, "", "a newer version of Cove did it")
		}
		return err
	})
}
