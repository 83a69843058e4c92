package agent

import (
	"maps"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// record is one fact of the journal. Fields are only ever added; a change of
// meaning needs a new journalVersion.
type record struct {
	Kind    recordKind       `json:"k"`
	ID      string           `json:"id,omitempty"`
	Boot    string           `json:"boot,omitempty"`    // opened: the machine's boot id
	Entry   *entry           `json:"entry,omitempty"`   // created
	Episode int64            `json:"episode,omitempty"` // reset; clock: in which it was set
	Expires time.Time        `json:"expires,omitzero"`  // expiry; zero = never
	End     *sandbox.End     `json:"end,omitempty"`     // ended
	Cold    *sandbox.Content `json:"cold,omitempty"`    // cold
	Parked  bool             `json:"parked,omitempty"`  // cold: by the node, for want of memory
	Needs   []string         `json:"needs,omitempty"`   // mounted
	Network *sandbox.Network `json:"network,omitempty"` // network
	Nth     int64            `json:"nth,omitempty"`     // network: its generation
	Secrets []string         `json:"secrets,omitempty"` // secrets: their names
	Clock   *clockMark       `json:"clock,omitempty"`   // clock

	Authority string `json:"authority,omitempty"` // secrets
}

type recordKind string

const (
	recOpened  recordKind = "opened"  // a node started here
	recCreated recordKind = "created" // a sandbox was given a kernel; again if it got another
	recReset   recordKind = "reset"
	recExpiry  recordKind = "expiry"
	recMounted recordKind = "mounted" // a directory snapshot
	recNetwork recordKind = "network"
	recSecrets recordKind = "secrets"
	recClock   recordKind = "clock" // of a deterministic sandbox was set
	recCold    recordKind = "cold"  // its kernel is gone, its state is in the store; created again when it wakes
	recEnded   recordKind = "ended"
	recForgot  recordKind = "forgot" // its end was acknowledged, or it was never handed out
)

// entry is what must survive a restart to go on with a sandbox.
type entry struct {
	Sandbox sandbox.Sandbox     `json:"sandbox"`
	Image   sandbox.ImageConfig `json:"image"`
	Kernel  runtime.Handle      `json:"kernel"`
	End     *sandbox.End        `json:"end,omitempty"`    // ended and not yet acknowledged
	Cold    *sandbox.Content    `json:"cold,omitempty"`   // on disk: Kernel is no more
	Parked  bool                `json:"parked,omitempty"` // the node put it there and wakes it
	Needs   []string            `json:"needs,omitempty"`  // manifests mounted inside
	Clock   *clockMark          `json:"clock,omitempty"`  // of a deterministic one
}

// state is the fold of a history of records: what the journal is for. An
// entry in it is never changed, only replaced.
type state struct {
	boot    string
	entries map[string]*entry
}

func newState() *state { return &state{entries: map[string]*entry{}} }

func (s *state) clone() *state { return &state{boot: s.boot, entries: maps.Clone(s.entries)} }

// apply adds one fact. A fact about a sandbox that is not there is ignored:
// its create was undone or its end acknowledged in between.
func (s *state) apply(r record) {
	switch r.Kind {
	case recOpened:
		s.boot = r.Boot
		return
	case recCreated:
		if r.Entry != nil {
			s.entries[r.ID] = r.Entry
		}
		return
	case recForgot:
		delete(s.entries, r.ID)
		return
	}
	old := s.entries[r.ID]
	if old == nil || old.End != nil {
		return
	}
	e := *old
	switch r.Kind {
	case recReset:
		e.Sandbox.Episode, e.Clock = r.Episode, nil
	case recClock:
		if r.Episode == e.Sandbox.Episode { // a reset may have overtaken it
			e.Clock = r.Clock
		}
	case recExpiry:
		e.Sandbox.ExpiresAt = r.Expires
	case recCold:
		e.Cold, e.Parked = r.Cold, r.Parked
	case recNetwork:
		if r.Network != nil {
			e.Sandbox.Spec.Network, e.Sandbox.NetworkGeneration = *r.Network, r.Nth
			e.Sandbox.Spec = e.Sandbox.Spec.WithAuthority(r.ID)
		}
	case recSecrets:
		e.Sandbox.Spec.Secrets, e.Sandbox.Spec.Authority = r.Secrets, r.Authority
	case recMounted:
		e.Needs = r.Needs
	case recEnded:
		e.End = r.End
	}
	s.entries[r.ID] = &e
}

// records is the shortest history that folds to s.
func (s *state) records() []record {
	recs := make([]record, 0, len(s.entries)+1)
	if s.boot != "" {
		recs = append(recs, record{Kind: recOpened, Boot: s.boot})
	}
	for _, id := range slices.Sorted(maps.Keys(s.entries)) {
		recs = append(recs, record{Kind: recCreated, ID: id, Entry: s.entries[id]})
	}
	return recs
}
