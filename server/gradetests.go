package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"regexp"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/grade"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// testsTTL is how long tests are kept that nobody deletes.
const testsTTL = 30 * 24 * time.Hour

var sha256Hex = regexp.MustCompile(`^[0-9a-f]{64}$`)

// PutTests makes a directory snapshot of a tar, for grades to mount. With the
// digest of the tar (SHA-256, in hex) the same tests are made once, however often
// they are sent. The tar is unpacked in a sandbox of its own and nowhere else.
func (s *Server) PutTests(ctx context.Context, digest string, content Upload) (snap sandbox.Snapshot, err error) {
	ctx, call, err := s.begin(ctx, "grade.put_tests")
	if err != nil {
		return snap, err
	}
	defer call.end(&err)
	if err := call.needs(writes("", "snapshots")); err != nil {
		return snap, err
	}
	t := taking{kind: sandbox.DirectorySnapshot, path: sandbox.DefaultTestsPath, ttl: testsTTL, labels: map[string]string{"cove": "grade-tests"}}
	if digest != "" {
		if !sha256Hex.MatchString(digest) {
			return snap, sandbox.InvalidField("digest", "%.80q is no SHA-256; 64 hex digits are accepted", digest)
		}
		t.id = keyedID(store.ScopeOf(ctx).Tenant(), "grade tests "+digest)
		// The rollouts of an epoch are graded together, by the same tests: 256 that
		// send them at once would be as many sandboxes to unpack them in.
		done, err := s.sendings.enter(ctx, t.id)
		if err != nil {
			return snap, err
		}
		defer done()
		snap, err := s.store.GetSnapshot(ctx, t.id)
		if err == nil || !errors.Is(err, sandbox.ErrNotFound) {
			return snap, err
		}
	}
	body, err := boundedUpload(content, s.cfg.MaxUpload)
	if err != nil {
		return snap, err
	}
	defer body.stop()
	img, release, err := s.images.acquire(ctx, s.cfg.Defaults.Image)
	if err != nil {
		return snap, err
	}
	defer release()
	disk := 2 * sandbox.GiB
	if content.Size > 0 { // it says how large it is
		disk = max(256*sandbox.MiB, 2*content.Size)
	}
	spec := sandbox.Spec{Image: s.cfg.Defaults.Image, Template: graderMark, Network: sandbox.Network{Mode: sandbox.NetworkNone}, Timeout: time.Hour,
		Resources: sandbox.Resources{Memory: 256 * sandbox.MiB, Disk: disk}}.WithDefaults(s.cfg.Defaults)
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), lineTimeout)
	defer cancel()
	sb, _, err := s.makeSandbox(work, plan{spec: spec, img: img, wanted: ctx}, store.Idempotency{})
	if err != nil {
		return snap, err
	}
	defer s.takeBack(sb.ID)
	sum := sha256.New()
	err = pipeTar(func(w io.Writer) error { return grade.Tests(io.TeeReader(body, sum), w) }, func(r io.Reader) error {
		return s.node.Upload(ctx, sb.ID, node.Upload{Path: t.path, Tar: true, Write: sandbox.WriteOptions{User: rootUser, Parents: true}}, r)
	})
	if err != nil {
		return snap, s.explain(ctx, sb.ID, err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); digest != "" && got != digest {
		return snap, sandbox.InvalidField("digest", "the tar has %s, and %s was announced", got, digest)
	}
	snap, _, _, err = s.takeSnapshot(ctx, sb.ID, t, "")
	if errors.Is(err, sandbox.ErrAlreadyExists) && t.id != "" { // somebody sent the same at the same time
		snap, err = s.store.GetSnapshot(ctx, t.id)
	}
	if err == nil {
		call.concerns("snapshot", snap.ID)
	}
	return snap, err
}

// sendingBook lets one at a time make what several send.
type sendingBook struct {
	mu struct {
		sync.Mutex
		of map[string]chan struct{} // closed when its turn is over
	}
}

func (b *sendingBook) init() { b.mu.of = map[string]chan struct{}{} }

// enter waits until nobody else makes the thing of an id.
func (b *sendingBook) enter(ctx context.Context, id string) (done func(), err error) {
	for {
		b.mu.Lock()
		other := b.mu.of[id]
		if other == nil {
			mine := make(chan struct{})
			b.mu.of[id] = mine
			b.mu.Unlock()
			return func() {
				b.mu.Lock()
				delete(b.mu.of, id)
				b.mu.Unlock()
				close(mine)
			}, nil
		}
		b.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
