package volume

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Mode is how a holder has a volume.
type Mode string

const (
	ReadWrite Mode = "rw"     // the only writer; readers may be there
	ReadOnly  Mode = "ro"     // any number, beside writers of either kind
	Shared    Mode = "shared" // writers, any number, who see to one another
)

// Holder is who has a volume attached: a sandbox.
type Holder struct {
	Holder string `json:"holder"`
	Mode   Mode   `json:"mode"`
}

func (h Holder) String() string { return fmt.Sprintf("%s (%s)", h.Holder, h.Mode) }

type holders []Holder

func (hs holders) String() string {
	var b []string
	for _, h := range hs {
		b = append(b, h.String())
	}
	return strings.Join(b, ", ")
}

func (v *volume) holdersLocked() holders {
	var hs holders
	for h, m := range v.holders {
		hs = append(hs, Holder{h, m})
	}
	slices.SortFunc(hs, func(a, b Holder) int { return strings.Compare(a.Holder, b.Holder) })
	return hs
}

// Attach gives a volume to a holder and returns the directory of the host to
// mount into its sandbox. Again, with the same mode, it does nothing. A mode
// that does not go with the holders there are is refused with
// sandbox.ErrPrecondition, which names them.
func (s *Set) Attach(ctx context.Context, id, holder string, mode Mode) (hostdir string, err error) {
	const op = "volume.attach"
	if holder == "" {
		return "", sandbox.InvalidField("holder", "must not be empty")
	}
	s.mu.Lock()
	v, err := s.findLocked(op, id)
	if err != nil {
		s.mu.Unlock()
		return "", err
	}
	had, again := v.holders[holder]
	if err := v.admitLocked(op, holder, mode); err != nil {
		s.mu.Unlock()
		return "", err
	}
	v.holders[holder] = mode
	s.useLocked(v)
	s.mu.Unlock()
	defer s.release(v)
	if err := s.ensureMounted(ctx, v); err != nil {
		s.mu.Lock()
		if !again {
			delete(v.holders, holder)
		} else {
			v.holders[holder] = had
		}
		s.mu.Unlock()
		return "", fail(op, err)
	}
	return s.hostdir(v.id), nil
}

// admitLocked says whether a holder goes with those there are.
func (v *volume) admitLocked(op, holder string, mode Mode) error {
	if mode != ReadWrite && mode != ReadOnly && mode != Shared {
		return sandbox.InvalidField("mode", "%q is not one of rw, ro, shared", mode)
	}
	if had, ok := v.holders[holder]; ok {
		if had != mode {
			return sandbox.Errorf(sandbox.Precondition, op, "%s has the volume attached %s", holder, had).
				WithHint("mount a volume once in a sandbox")
		}
		return nil
	}
	var against holders
	for _, h := range v.holdersLocked() {
		if mode == ReadWrite && h.Mode != ReadOnly || mode == Shared && h.Mode == ReadWrite {
			against = append(against, h)
		}
	}
	if len(against) == 0 {
		return nil
	}
	hint := "a volume is a sandbox's until that ends; volumes for many writers are mounted by all of them with mode shared, for readers with ro"
	return sandbox.Errorf(sandbox.Precondition, op, "the volume cannot be attached %s: it is attached to %s", mode, against).WithHint("%s", hint)
}

// Detach takes a volume from a holder. One that does not have it is no error:
// a detach may be repeated. The holder's processes must be gone.
func (s *Set) Detach(_ context.Context, id, holder string) error {
	s.mu.Lock()
	v, err := s.findLocked("volume.detach", id)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	delete(v.holders, holder)
	s.useLocked(v)
	s.mu.Unlock()
	s.release(v)
	return nil
}

// Holders says who has a volume attached.
func (s *Set) Holders(_ context.Context, id string) ([]Holder, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.findLocked("volume.holders", id)
	if err != nil {
		return nil, err
	}
	return v.holdersLocked(), nil
}
