package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// source is what one of glob's names leads to. A symlink that leads nowhere and that a
// wildcard found is copied as it is: where it will be it may lead somewhere.
func (f *flattener) source(name string) *erofs.Node {
	if n := f.lookup(name); n != nil {
		return n
	}
	dir, err := f.walk(strings.Split(path.Dir(name), "/"), false)
	if err != nil || dir == nil {
		return nil
	}
	return dir.Child(path.Base(name))
}

// glob finds the paths of a tree that a source of COPY names, in order. One
// without wildcards is not looked for.
func (f *flattener) glob(pattern string) ([]string, error) {
	if len(pattern) > maxPath {
		return nil, invalid("source of %d bytes", len(pattern))
	}
	clean := path.Clean("/" + pattern)
	if !strings.ContainsAny(clean, `*?[\`) {
		if f.lookup(clean) == nil {
			return nil, notThere(pattern)
		}
		return []string{clean}, nil
	}
	names := []string{"/"}
	for _, part := range strings.Split(clean[1:], "/") {
		var next []string
		for _, name := range names {
			dir := f.lookup(name)
			if dir == nil || !dir.IsDir() {
				continue
			}
			for _, base := range dir.Names() {
				ok, err := path.Match(part, base)
				if err != nil {
					return nil, invalid("source %q: %w", clip(pattern), err)
				}
				if ok {
					next = append(next, path.Join(name, base))
				}
			}
		}
		names = next
	}
	return names, nil
}

// owner reads "user", "user:group" with names of the image or numbers. A user
// without a group has the one of /etc/passwd, and a number that is not there
// the group of that number, as BuildKit has it.
func (f *flattener) owner(s string) (uid, gid uint32, err error) {
	user, group, both := strings.Cut(s, ":")
	passwd, err := f.readSmall("/etc/passwd")
	if err != nil {
		return 0, 0, err
	}
	u, g, ok := idOf(user, passwd)
	if !ok {
		return 0, 0, invalid("no user %q in /etc/passwd of the image", clip(user))
	}
	if !both {
		return u, g, nil
	}
	groups, err := f.readSmall("/etc/group")
	if err != nil {
		return 0, 0, err
	}
	if g, _, ok = idOf(group, groups); !ok {
		return 0, 0, invalid("no group %q in /etc/group of the image", clip(group))
	}
	return u, g, nil
}

// idOf finds a name or a number in a file like /etc/passwd or /etc/group.
func idOf(name string, file []byte) (id, group uint32, ok bool) {
	number, err := strconv.ParseUint(name, 10, 32)
	isNumber := err == nil && number < 1<<32-1
	for line := range strings.Lines(string(file)) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if len(fields) < 3 {
			continue
		}
		n, err := strconv.ParseUint(fields[2], 10, 32)
		if err != nil || fields[0] != name && !(isNumber && n == number) {
			continue
		}
		if len(fields) > 3 {
			g, err := strconv.ParseUint(fields[3], 10, 32)
			if err == nil {
				return uint32(n), uint32(g), true
			}
		}
		return uint32(n), uint32(n), true
	}
	return uint32(number), uint32(number), isNumber
}

// excluder are patterns of what is not copied, as .dockerignore has them.
type excluder struct {
	m *patternmatcher.PatternMatcher
}

// maxPatterns is far above what people write; each file is held against each.
const maxPatterns = 1000

func newExcluder(patterns []string) (excluder, error) {
	if len(patterns) == 0 {
		return excluder{}, nil
	}
	if len(patterns) > maxPatterns {
		return excluder{}, tooLarge("%d patterns, more than %d", len(patterns), maxPatterns)
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return excluder{}, invalid("pattern of what is left out: %w", err)
	}
	return excluder{m}, nil
}

// excludes says whether a path is left out with all that is below it.
func (x excluder) excludes(name string, dir bool) (bool, error) {
	if x.m == nil || dir && x.m.Exclusions() {
		return false, nil
	}
	out, err := x.m.MatchesOrParentMatches(strings.TrimPrefix(name, "/"))
	if err != nil {
		return false, invalid("pattern of what is left out: %w", err)
	}
	return out, nil
}

// ignore takes what .dockerignore says out of a context.
func (f *flattener) ignore(file string) error {
	var data []byte
	for _, name := range []string{file, ".dockerignore"} {
		if name == "" || data != nil {
			continue
		}
		var err error
		if data, err = f.readSmall("/" + name); err != nil {
			return err
		}
	}
	if data == nil {
		return nil
	}
	patterns, err := ignorefile.ReadAll(strings.NewReader(string(data)))
	if err != nil {
		return invalid(".dockerignore: %w", err)
	}
	x, err := newExcluder(patterns)
	if err != nil || x.m == nil {
		return err
	}
	return x.prune(f.root, "")
}

// prune removes from a tree what is left out. A directory that is stays for what
// is let in again below it.
func (x excluder) prune(dir *erofs.Node, name string) error {
	for _, base := range dir.Names() {
		child, at := dir.Child(base), path.Join(name, base)
		out, err := x.m.MatchesOrParentMatches(at)
		if err != nil {
			return invalid(".dockerignore: %w", err)
		}
		if child.IsDir() && (!out || x.m.Exclusions()) {
			if err := x.prune(child, at); err != nil {
				return err
			}
			out = out && child.Len() == 0
		}
		if out {
			dir.Remove(base)
		}
	}
	return nil
}

// unpack does with a local archive what ADD does; false if it is none.
func (cp *copier) unpack(name string, n *erofs.Node, dest string) (bool, error) {
	if !n.IsRegular() || n.Size == 0 {
		return false, nil
	}
	if ok, err := cp.isArchive(n); !ok || err != nil {
		return false, err
	}
	r, err := n.Open()
	if err != nil {
		return false, err
	}
	defer r.Close()
	plain, err := unpackAny(contextReader{cp.ctx, r}, cp.limits)
	if err != nil {
		return false, err
	}
	defer plain.Close()
	tree := newFlattener(cp.limits, cp.ws)
	cp.cleanup = append(cp.cleanup, tree.close) // its files are read when the layer is written
	if err := tree.apply(cp.ctx, plain, formPlain); err != nil {
		return false, fmt.Errorf("archive %q: %w", clip(name), err)
	}
	dir, err := cp.dir(dest)
	if err != nil {
		return false, err
	}
	sub := *cp
	sub.kept, sub.match = true, excluder{}
	err = sub.tree("/", tree.root, dir)
	cp.changed = sub.changed
	return true, err
}

// maxFetch bounds what ADD gets from elsewhere.
const maxFetch = 2 * gib

// fetch gets the file of a URL. Where a name leads is looked at when the
// connection is made, so that neither a redirect nor a resolver leads inward.
func (cp *copier) fetch(allow func(string, netip.AddrPort) bool) error {
	c := cp.c.Fetch
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return invalid("%q is no http or https URL", clip(c.URL))
	}
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = nil // a proxy would be asked for everything, and know nothing of the build's rules
	t.ResponseHeaderTimeout = time.Minute
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		d := &net.Dialer{Timeout: 15 * time.Second, Control: func(_, to string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(to)
			if err != nil || allow == nil || !allow(host, ap) {
				return inward.ErrInward
			}
			return nil
		}}
		return d.DialContext(ctx, network, address)
	}
	if cp.lib.opts.Roots != nil {
		t.TLSClientConfig.RootCAs = cp.lib.opts.Roots
	}
	defer t.CloseIdleConnections()
	req, err := http.NewRequestWithContext(cp.ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return invalid("%q is no http or https URL", clip(c.URL))
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	switch {
	case errors.Is(err, inward.ErrInward):
		return sandbox.Errorf(sandbox.Denied, "", "the build's network policy does not allow %s", clip(u.Host))
	case err != nil && cp.ctx.Err() != nil:
		return err
	case err != nil:
		cp.lib.log.Info("ADD of a URL", "host", u.Host, "err", err)
		return sandbox.Errorf(sandbox.Unavailable, "", "%s cannot be reached", clip(u.Host))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return sandbox.Errorf(sandbox.Unavailable, "", "%s answered %d", clip(u.Host), resp.StatusCode)
	}
	spool, err := cp.newSpool()
	if err != nil {
		return err
	}
	sum := sha256.New()
	size, err := io.Copy(io.MultiWriter(spool, sum), io.LimitReader(contextReader{cp.ctx, resp.Body}, maxFetch+1))
	if err != nil {
		return err
	}
	if size > maxFetch {
		return tooLarge("%q has more than %d bytes", clip(c.URL), int64(maxFetch))
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); c.Checksum != "" && c.Checksum != got {
		return corrupt("%q has digest %s, and not %s", clip(c.URL), got, clip(c.Checksum))
	}
	name := path.Base(u.Path)
	if name == "." || name == "/" || len(name) > erofs.MaxName {
		name = "__unnamed__"
	}
	n := &erofs.Node{Mode: erofs.TypeRegular | 0o600, Size: size,
		Open: func() (io.ReadCloser, error) { return io.NopCloser(io.NewSectionReader(spool, 0, size)), nil }}
	if at, err := http.ParseTime(resp.Header.Get("Last-Modified")); err == nil {
		n.Mtime = at.Unix()
	}
	cp.src.root.Put(name, n)
	cp.c.Sources = []string{name}
	return nil
}
