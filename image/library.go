package image

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/authn"
)

// Options of a library; the zero value works.
type Options struct {
	Log      *slog.Logger
	Limits   Limits
	Keychain authn.Keychain // registry credentials; default: the Docker config
	// Registries of the own network that may be pulled from, "host",
	// "host:port" or a CIDR. Default: none, so that who may pull cannot ask
	// around in it.
	Registries []string
	Roots      *x509.CertPool   // that registries are checked against; default: the host's
	Now        func() time.Time // for CreatedAt and the age of partial downloads; default time.Now
}

// Library is a directory of images. Safe for concurrent use, and several
// processes may share the directory.
type Library struct {
	dir       string
	opts      Options
	transport http.RoundTripper // to registries
	log       *slog.Logger
	limits    Limits
	packings  packings
	ctx       context.Context
	cancel    context.CancelCauseFunc // ends every operation under way
	ops       sync.WaitGroup          // added to under mu, never once it is closed

	mu struct {
		sync.Mutex
		closed bool
	}
}

var errClosed = errors.New("the image library is closed")

// sidecar is what is kept beside an image.
type sidecar struct {
	Image  sandbox.Image `json:"image"`
	Notes  Notes         `json:"notes"`
	Recipe string        `json:"recipe,omitempty"` // digest of what a bootstrap was asked for

	// Of what a build made, for registries.
	Base    string               `json:"base,omitempty"` // image it was built on first
	History []sandbox.BuiltLayer `json:"history,omitempty"`
}

// Notes say what of the source is not in the image.
type Notes struct {
	Devices int `json:"devices,omitempty"` // block and character devices and sockets: gVisor provides /dev
	// Xattrs counts extended attributes. gVisor's EROFS refuses every access
	// to a file that has any, so they stay out of the image and are listed here.
	Xattrs    int              `json:"xattrs,omitempty"`
	XattrList map[string]xattr `json:"xattr_list,omitempty"` // the first maxXattrNotes paths
	Mounts    int              `json:"mounts,omitempty"`     // other file systems below an imported directory
	// Authorities are files of /etc/cove/ca.d, 16 at most, that hold no
	// certificates, a private key beside them, or too many.
	Authorities []string `json:"authorities,omitempty"`
}

type xattr map[string][]byte

// Open opens or makes the library in dir, and removes what a crash left there.
func Open(dir string, opts Options) (*Library, error) {
	const op = "image.open"
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Keychain == nil {
		opts.Keychain = authn.DefaultKeychain
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	allowed, err := inward.Parse("registry-allow", opts.Registries)
	if err != nil {
		return nil, sandbox.WithOp(op, err)
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, asError(context.Background(), op, err)
	}
	l := &Library{dir: dir, opts: opts, transport: allowed.Transport(opts.Roots), log: opts.Log, limits: opts.Limits.withDefaults()}
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	for _, d := range []string{l.blobDir(), l.partialDir(), l.tmpDir()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, asError(l.ctx, op, err)
		}
	}
	if err := l.sweep(); err != nil {
		return nil, asError(l.ctx, op, err)
	}
	return l, nil
}

func (l *Library) blobDir() string    { return filepath.Join(l.dir, "blobs", "sha256") }
func (l *Library) partialDir() string { return filepath.Join(l.dir, "partial") }
func (l *Library) tmpDir() string     { return filepath.Join(l.dir, "tmp") }

// begin joins the caller's context with the library's life. Call done when the
// operation is over.
func (l *Library) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return nil, nil, &sandbox.Error{Class: sandbox.Unavailable, Err: errClosed}
	}
	l.ops.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(errClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
		l.ops.Done()
	}, nil
}

// Close ends operations under way and waits for them to have cleaned up.
func (l *Library) Close() error {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.Unlock()
	l.cancel(errClosed)
	l.ops.Wait()
	return nil
}

// hexOf checks an image id and returns its hex part, so that an id from
// outside can be part of a path.
func hexOf(id string) (string, error) {
	h, ok := strings.CutPrefix(id, "sha256:")
	if ok && len(h) == 64 && strings.Trim(h, "0123456789abcdef") == "" {
		return h, nil
	}
	return "", sandbox.InvalidField("image_id", "%q is not sha256: and 64 lower-case hex digits", id)
}

func (l *Library) blobPath(hex string) string    { return filepath.Join(l.blobDir(), hex+".erofs") }
func (l *Library) sidecarPath(hex string) string { return filepath.Join(l.blobDir(), hex+".json") }

// Path is where the EROFS file of an image is. sandbox.ErrImageNotFound if it
// is not here.
func (l *Library) Path(id string) (string, error) {
	h, err := hexOf(id)
	if err != nil {
		return "", sandbox.WithOp("image.path", err)
	}
	p := l.blobPath(h)
	if _, err := os.Stat(p); err != nil {
		return "", notHere("image.path", id, err)
	}
	return p, nil
}

func notHere(op, id string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return (&sandbox.Error{Class: sandbox.ImageNotFound, Op: op, Msg: "no image " + id + " on this node"}).
			WithHint("pull or import it again")
	}
	return &sandbox.Error{Class: sandbox.Internal, Op: op, Err: err}
}

// Have says whether the content is here.
func (l *Library) Have(id string) bool {
	_, err := l.Path(id)
	return err == nil
}

// Get returns what is known of an image, without its names: those are the
// store's.
func (l *Library) Get(id string) (sandbox.Image, error) {
	side, err := l.sidecar(id)
	return side.Image, err
}

// Notes says what of the source did not make it into the image.
func (l *Library) Notes(id string) (Notes, error) {
	side, err := l.sidecar(id)
	return side.Notes, err
}

func (l *Library) sidecar(id string) (sidecar, error) {
	const op = "image.get"
	h, err := hexOf(id)
	if err != nil {
		return sidecar{}, sandbox.WithOp(op, err)
	}
	data, err := os.ReadFile(l.sidecarPath(h))
	if err != nil {
		return sidecar{}, notHere(op, id, err)
	}
	var side sidecar
	if err := json.Unmarshal(data, &side); err != nil {
		return sidecar{}, &sandbox.Error{Class: sandbox.Corrupt, Op: op, Msg: "sidecar of " + id, Err: err}
	}
	return side, nil
}

// Contents lists every image here with its size.
func (l *Library) Contents(ctx context.Context) (map[string]int64, error) {
	entries, err := os.ReadDir(l.blobDir())
	if err != nil {
		return nil, asError(ctx, "image.contents", err)
	}
	all := map[string]int64{}
	for _, e := range entries {
		h, ok := strings.CutSuffix(e.Name(), ".erofs")
		if !ok {
			continue
		}
		if info, err := e.Info(); err == nil { // else deleted meanwhile
			all["sha256:"+h] = info.Size()
		}
	}
	return all, nil
}

// Delete removes an image. The caller knows that nothing uses it; a sandbox
// that still does keeps its open file.
func (l *Library) Delete(ctx context.Context, id string) error {
	const op = "image.delete"
	h, err := hexOf(id)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	unlock, err := l.lockNames(ctx)
	if err != nil {
		return asError(ctx, op, err)
	}
	defer unlock()
	if err := os.Remove(l.blobPath(h)); err != nil {
		return notHere(op, id, err)
	}
	if err := os.Remove(l.sidecarPath(h)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return asError(ctx, op, err)
	}
	return asError(ctx, op, durable.Sync(l.blobDir()))
}

// Verify reads an image and compares it with its name; sandbox.ErrCorrupt if
// they differ.
func (l *Library) Verify(ctx context.Context, id string) error {
	const op = "image.verify"
	path, err := l.Path(id)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return notHere(op, id, err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, contextReader{ctx, f}); err != nil {
		return asError(ctx, op, err)
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != id {
		return (&sandbox.Error{Class: sandbox.Corrupt, Op: op, Msg: fmt.Sprintf("%s holds content %s", path, got)}).
			WithHint("delete the image and pull or import it again; check the disk")
	}
	return nil
}

// contextReader lets a long copy end with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}
