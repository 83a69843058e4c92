package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

const (
	// fetchAttempts is how often in a row a blob may fail without a single new
	// byte; every byte received starts the count again, so a line that drops
	// once per MiB still finishes.
	fetchAttempts = 5
	// fetchRounds bounds the whole, for a server that always sends one byte.
	fetchRounds = 1000
	// stallAfter ends a connection that delivers nothing.
	stallAfter = 60 * time.Second
	retryFirst = 200 * time.Millisecond
	retryMost  = 5 * time.Second
)

// blobs fetches from one repository into the library's partial directory,
// where the next pull of the same repository finds what this one did not finish.
// Another repository's does not: it may be of whoever cannot read this one, who
// names a blob of it and would be given what is here without ever having had it,
// or be told how much of it is.
// (go-containerregistry's own layers start again from zero.)
type blobs struct {
	lib      *Library
	client   *http.Client
	repo     name.Repository
	progress *reporter
}

// errStalled is the cancel cause of a connection that stopped delivering.
var errStalled = errors.New("no data from the registry for " + stallAfter.String())

// fetch returns an open file with the verified content of a blob. The file is
// locked against other pulls only while it grows; once complete it is read
// through the descriptor, whatever becomes of the name.
func (b *blobs) fetch(ctx context.Context, d v1.Descriptor) (*os.File, error) {
	if d.Digest.Algorithm != "sha256" {
		return nil, sandbox.Errorf(sandbox.Unsupported, "", "blob digest %s is not SHA-256", d.Digest)
	}
	f, err := b.openPartial(ctx, b.lib.partialPath(b.repo, d.Digest))
	if err != nil {
		return nil, err
	}
	if err := b.complete(ctx, f, d); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (l *Library) partialPath(repo name.Repository, blob v1.Hash) string {
	of := sha256.Sum256([]byte(repo.Name()))
	return filepath.Join(l.partialDir(), hex.EncodeToString(of[:8])+"-"+blob.Hex)
}

// openPartial opens and locks the file, and makes sure that the name still
// leads to it: a pull that finished meanwhile has removed the name.
func (b *blobs) openPartial(ctx context.Context, path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := flock(ctx, f); err != nil {
			f.Close()
			return nil, err
		}
		if sameFile(f, path) {
			return f, nil
		}
		f.Close()
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(path)
	return err == nil && os.SameFile(a, b)
}

// complete brings a partial file to its full size and checks its digest, then
// gives the lock up.
func (b *blobs) complete(ctx context.Context, f *os.File, d v1.Descriptor) error {
	p := &partial{f: f, sum: sha256.New(), want: d.Size, progress: b.progress}
	if err := p.load(ctx); err != nil {
		return err
	}
	resumed := p.have > 0
	wait := retryFirst
	for failed, round := 0, 0; ; round++ {
		if p.have == p.want {
			got := hex.EncodeToString(p.sum.Sum(nil))
			if got == d.Digest.Hex {
				return unlock(f)
			}
			if err := p.restart(); err != nil {
				return err
			}
			if !resumed {
				// Of which digest is not said: it would tell what some server has.
				return corrupt("the registry sent something else as %s", d.Digest)
			}
			// What an earlier pull left was bad, for example after a power
			// cut. Once from the start is honest; after that it is the registry.
			resumed = false
			continue
		}
		before := p.have
		err := b.get(ctx, p, d)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !retryable(err) {
			return err
		}
		if p.have > before {
			failed, wait = 0, retryFirst
		}
		if failed++; failed >= fetchAttempts || round >= fetchRounds {
			return err
		}
		b.lib.log.Info("blob interrupted, resuming", "digest", d.Digest, "at", p.have, "of", p.want, "err", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		wait = min(2*wait, retryMost)
	}
}

// get asks for the rest of a blob once.
func (b *blobs) get(ctx context.Context, p *partial, d v1.Descriptor) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	u := url.URL{Scheme: b.repo.Scheme(), Host: b.repo.RegistryStr(),
		Path: fmt.Sprintf("/v2/%s/blobs/%s", b.repo.RepositoryStr(), d.Digest)}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	// Go would otherwise ask for gzip, and a range of that is not ours.
	req.Header.Set("Accept-Encoding", "identity")
	if p.have > 0 {
		// With both ends: some registries do not parse an open range.
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", p.have, p.want-1))
	}
	resp, err := b.client.Do(req)
	if err != nil {
		return b.lib.registryError(b.repo.Registry, err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusPartialContent && rangeStart(resp) == p.have:
	case resp.StatusCode == http.StatusOK, resp.StatusCode == http.StatusPartialContent,
		resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		// No ranges here: from the start.
		if err := p.restart(); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return unavailable(b.repo.Registry, fmt.Errorf("it answered a range request with %d", resp.StatusCode))
		}
	default:
		if err := transport.CheckError(resp, http.StatusOK); err != nil {
			return b.lib.registryError(b.repo.Registry, err)
		}
	}
	stall := time.AfterFunc(stallAfter, func() { cancel(errStalled) })
	defer stall.Stop()
	body := &heartbeat{r: resp.Body, beat: func() { stall.Reset(stallAfter) }}
	if err := p.append(body); err != nil {
		var we *localError
		var se *sandbox.Error
		if errors.As(err, &we) || errors.As(err, &se) {
			return err
		}
		if errors.Is(context.Cause(ctx), errStalled) {
			err = errStalled
		}
		b.lib.log.Info("registry", "name", b.repo.RegistryStr(), "err", err)
		return unavailable(b.repo.Registry, errors.New("the connection broke, or stood still"))
	}
	return nil
}

// rangeStart reads the first offset of "bytes 5-9/10"; -1 if there is none.
func rangeStart(resp *http.Response) int64 {
	rest, ok := strings.CutPrefix(resp.Header.Get("Content-Range"), "bytes ")
	first, _, ok2 := strings.Cut(rest, "-")
	n, err := strconv.ParseInt(first, 10, 64)
	if !ok || !ok2 || err != nil {
		return -1
	}
	return n
}

type heartbeat struct {
	r    io.Reader
	beat func()
}

func (h *heartbeat) Read(b []byte) (int, error) {
	n, err := h.r.Read(b)
	if n > 0 {
		h.beat()
	}
	return n, err
}

// partial is a file under download with the digest of what it has.
type partial struct {
	f          *os.File
	sum        hash.Hash
	have, want int64
	progress   *reporter
}

// localError marks a fault of our own disk, which no retry mends.
type localError struct{ err error }

func (e *localError) Error() string { return e.err.Error() }
func (e *localError) Unwrap() error { return e.err }

// load digests what an earlier pull left.
func (p *partial) load(ctx context.Context) error {
	info, err := p.f.Stat()
	if err != nil {
		return err
	}
	if info.Size() > p.want {
		return p.restart()
	}
	n, err := io.Copy(p.sum, contextReader{ctx, p.f})
	p.have = n
	p.progress.add(n)
	return err
}

func (p *partial) restart() error {
	p.progress.add(-p.have)
	p.have = 0
	p.sum.Reset()
	if err := p.f.Truncate(0); err != nil {
		return err
	}
	_, err := p.f.Seek(0, io.SeekStart)
	return err
}

func (p *partial) append(r io.Reader) error {
	buf := make([]byte, 256<<10)
	for p.have < p.want {
		n, err := r.Read(buf)
		n = int(min(int64(n), p.want-p.have)) // more than announced cannot match the digest; less is enough to tell
		if n > 0 {
			if _, werr := p.f.WriteAt(buf[:n], p.have); werr != nil {
				return &localError{werr}
			}
			p.sum.Write(buf[:n])
			p.have += int64(n)
			p.progress.add(int64(n))
		}
		if p.have == p.want {
			return nil
		}
		if err == io.EOF {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
	return nil
}
