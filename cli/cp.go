package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/untar"
	"github.com/cove-sandbox/cove/sandbox"
)

// copier is one run of cp.
type copier struct {
	app     *app
	user    string
	asTar   bool
	maxSize size
	skips   int
}

func (a *app) cpCmd() *cobra.Command {
	c := &copier{app: a, maxSize: 64 << 30}
	cmd := &cobra.Command{
		Use:   "cp LOCAL ID:PATH | ID:PATH LOCAL",
		Short: "Copy files and directories into and out of a sandbox",
		Long: `Copy a file or a directory into or out of a sandbox. "-" is stdin or stdout.

Where the destination is a directory, or ends in "/", the source goes into it
under its own name; a source ending in "/." copies what is inside. Owners are
not kept: in a sandbox everything belongs to --user, here to you. Modes are kept
but for the right of group and others to write.

A relative PATH is below the working directory of the sandbox's image. A symlink
at PATH is written through and a device like /dev/null into; they are not
replaced. Those met inside a directory that is copied in are replaced. On a terminal, a copy that takes its time shows how far it is.

What comes out of a sandbox is not trusted: names that leave the destination
are refused, and symlinks that point out of it, devices and setuid bits are
left behind with a note. A directory to "-" is a tar, passed on as it comes.`,
		Example: `  cove cp ./src $id:/work
  cove cp $id:/work/out.json .
  cove cp ./src/. $id:/work/src
  cove cp $id:/var/log/app.log - | less`,
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if strings.ContainsAny(prefix, "/.:") {
				return nil, cobra.ShellCompDirectiveDefault
			}
			ids, _ := a.liveIDs(0)(cmd, args, prefix)
			for i, id := range ids {
				name, about, _ := strings.Cut(id, "\t")
				ids[i] = name + ":\t" + about
			}
			return ids, cobra.ShellCompDirectiveNoSpace
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			fromID, from, fromRemote := remotePath(args[0])
			toID, to, toRemote := remotePath(args[1])
			switch {
			case fromRemote == toRemote:
				return usage(cmd, errors.New("exactly one side must be in a sandbox (ID:PATH)"))
			case toRemote:
				id, err := a.resolveID(cmd.Context(), toID)
				if err != nil {
					return err
				}
				return c.in(cmd.Context(), args[0], id, to)
			}
			id, err := a.resolveID(cmd.Context(), fromID)
			if err != nil {
				return err
			}
			return c.out(cmd.Context(), id, from, args[1])
		},
	}
	cmd.Flags().StringVarP(&c.user, "user", "u", "", "owner of what is made in the sandbox (default: the image's user)")
	cmd.Flags().BoolVar(&c.asTar, "tar", false, `with "-": the stream is a tar of a directory's content`)
	cmd.Flags().Var(&c.maxSize, "max-size", "most bytes to accept from a sandbox")
	return cmd
}

// remotePath splits ID:PATH. "./a:b" and "/a:b" are local.
func remotePath(arg string) (id, p string, ok bool) {
	id, p, ok = strings.Cut(arg, ":")
	if !ok || !idPattern.MatchString(id) {
		return "", "", false
	}
	if p == "" {
		p = "."
	}
	return id, p, true
}

func (c *copier) skipped(name, why string) {
	// Ten show what is going on; a hostile tree may hold a million.
	if c.skips++; c.skips <= 10 {
		c.app.warnf("left out %s: %s", name, why)
	}
}

func (c *copier) summary() {
	if c.skips > 10 {
		c.app.warnf("left out %d entries in all", c.skips)
	}
}

// stat looks at a path inside, following symlinks by hand: the API describes
// them. nil means that nothing is there. What it answers only chooses between
// file and directory, so a sandbox that lies harms itself.
func (c *copier) stat(ctx context.Context, id, p string) (*covev1.FileInfo, error) {
	for range 16 {
		resp, err := c.app.api.Files.Stat(ctx, connect.NewRequest(&covev1.StatFileRequest{SandboxId: id, Path: p}))
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		fi := resp.Msg.GetInfo()
		if fi.GetType() != string(sandbox.Symlink) {
			return fi, nil
		}
		if path.IsAbs(fi.GetTarget()) {
			p = fi.GetTarget()
		} else {
			p = path.Join(path.Dir(p), fi.GetTarget())
		}
	}
	return nil, sandbox.InvalidField("path", "too many symlinks at %s", p)
}

// in copies into a sandbox.
func (c *copier) in(ctx context.Context, local, id, to string) error {
	api := c.app.api
	dest, err := c.stat(ctx, id, path.Clean(to))
	if err != nil {
		return err
	}
	into := strings.HasSuffix(to, "/") || dest.GetType() == string(sandbox.Directory)
	if local == "-" {
		if c.asTar {
			return api.UploadTar(ctx, id, to, c.user, c.progress("", -1, c.app.Stdin))
		}
		if into {
			return usagef("name the file", "%s is a directory", to)
		}
		return api.Upload(ctx, id, to, c.progress(to, -1, c.app.Stdin), -1, c.options(0))
	}
	fi, err := os.Stat(local)
	if err != nil {
		return err
	}
	if fi.IsDir() {
		if dest != nil && !into {
			return usagef("", "%s is a file in the sandbox, %s a directory here", to, local)
		}
		if dest != nil && !inside(local) {
			to = path.Join(to, filepath.Base(mustAbs(local)))
		}
		return c.inDir(ctx, local, id, to)
	}
	if !fi.Mode().IsRegular() {
		return usagef("", "%s is neither a file nor a directory", local)
	}
	if into {
		to = path.Join(to, filepath.Base(local))
	}
	f, err := os.Open(local)
	if err != nil {
		return err
	}
	defer f.Close()
	return api.Upload(ctx, id, to, c.progress(filepath.Base(local), fi.Size(), f), fi.Size(), c.options(fi.Mode().Perm()&keptBits))
}

// maxEntries is far above any real tree and bounds what a stream of empty
// files can do to the file system's inodes.
const maxEntries = 5_000_000

// keptBits are those of a mode that a copy keeps, in either direction: who may
// read and execute, but not that others may write. Such bits come from a umask or
// a shared directory on one side and mean other people on the other.
const keptBits = 0o755

func (c *copier) options(mode fs.FileMode) sandbox.WriteOptions {
	return sandbox.WriteOptions{User: c.user, Mode: uint32(mode), Atomic: true, Parents: true}
}

func (c *copier) inDir(ctx context.Context, local, id, to string) error {
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := mktar(pw, local, nil, c.skipped)
		pw.CloseWithError(err)
		done <- err
	}()
	err := c.app.api.UploadTar(ctx, id, to, c.user, c.progress(filepath.Base(mustAbs(local)), -1, pr))
	pr.CloseWithError(errors.New("upload ended"))
	if terr := <-done; terr != nil && (err == nil || sandbox.ClassOf(err) == sandbox.Unavailable) {
		// Our side broke the stream: that reason is the real one, unless the
		// server's answer came first.
		err = terr
	}
	c.summary()
	return err
}

// out copies out of a sandbox.
func (c *copier) out(ctx context.Context, id, from, local string) error {
	content := inside(from)
	from = path.Clean(from)
	fi, err := c.stat(ctx, id, from)
	if err != nil {
		return err
	}
	if fi == nil {
		return &sandbox.Error{Class: sandbox.NotFound, Msg: "no " + from + " in the sandbox"}
	}
	if fi.GetType() == string(sandbox.Directory) {
		return c.outDir(ctx, id, from, local, content)
	}
	if fi.GetType() != string(sandbox.Regular) {
		return usagef("", "%s is neither a file nor a directory", from)
	}
	body, size, err := c.app.api.Download(ctx, id, from, 0, 0)
	if err != nil {
		return err
	}
	defer body.Close()
	r := c.limit(c.progress(path.Base(from), size, body))
	if local == "-" {
		_, err := io.Copy(c.app.Stdout, r)
		return err
	}
	if d, err := os.Stat(local); (err == nil && d.IsDir()) || strings.HasSuffix(local, "/") {
		local = filepath.Join(local, safeBase(from))
	}
	return writeFile(local, fs.FileMode(fi.GetMode())&keptBits, r)
}

func (c *copier) outDir(ctx context.Context, id, from, local string, content bool) error {
	body, err := c.app.api.DownloadTar(ctx, id, from)
	if err != nil {
		return err
	}
	defer body.Close()
	r := c.progress(path.Base(from), -1, body)
	if local == "-" {
		_, err := io.Copy(c.app.Stdout, c.limit(r))
		return err
	}
	if d, serr := os.Stat(local); serr == nil && d.IsDir() && !content {
		local = filepath.Join(local, safeBase(from))
	}
	if err := os.MkdirAll(local, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return err
	}
	defer root.Close()
	err = untar.Extract(ctx, root, r, untar.Options{Bytes: int64(c.maxSize), Entries: maxEntries, Modes: keptBits, Skipped: c.skipped})
	c.summary()
	if errors.Is(err, sandbox.ErrTooLarge) {
		return usagef("--max-size allows more", "more than %s from the sandbox", formatSize(int64(c.maxSize)))
	}
	if err != nil {
		return fmt.Errorf("the sandbox's files: %w", err)
	}
	return nil
}

// limit fails a read beyond --max-size: a file may grow while it is sent.
func (c *copier) limit(r io.Reader) io.Reader {
	return &limited{r: r, left: int64(c.maxSize), max: int64(c.maxSize)}
}

type limited struct {
	r         io.Reader
	left, max int64
}

func (l *limited) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, usagef("--max-size allows more", "more than %s from the sandbox", formatSize(l.max))
	}
	return n, err
}

// writeFile makes the file whole or not at all, beside its place. Symlinks at
// its place are replaced, not followed.
func writeFile(name string, mode fs.FileMode, r io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), ".cove-*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if _, err := io.Copy(f, r); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

// inside says that a directory's content is meant, not the directory.
func inside(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// safeBase is a file name for here of a path the user typed for there.
func safeBase(p string) string {
	b := path.Base(path.Clean("/" + p))
	if b == "/" {
		return "root"
	}
	return b
}

func mustAbs(p string) string {
	if abs, err := filepath.Abs(p); err == nil {
		return abs
	}
	return p
}

// progress counts on stderr, when someone is looking; the meter shows nothing of
// what is done before it would be read.
func (c *copier) progress(what string, total int64, r io.Reader) io.Reader {
	if _, tty := terminal(c.app.Stderr); !tty {
		return r
	}
	return &meter{w: c.app.Stderr, what: fmt.Sprintf("%.40s", escape(what)), total: total, r: r}
}
