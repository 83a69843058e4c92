package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/cove-sandbox/cove/sandbox"
	"golang.org/x/sys/unix"
)

// Debian says what a bootstrap installs. The zero value is the base image of
// the machine's own release, from the machine's own mirror.
type Debian struct {
	Suite    string   // release name; "" = the machine's
	Mirror   string   // repository URI; "" = the machine's apt sources
	Packages []string // nil = BasePackages
	Refresh  bool     // make it anew even if an image of the same recipe is here
}

// BasePackages are what the base image has on top of Debian's minbase.
var BasePackages = []string{"bash", "ca-certificates", "coreutils", "curl", "git", "procps",
	"python3", "python3-pip", "python3-pytest", "python3-venv", "sudo", "tmux"}

// recipeVersion is raised when the same request makes another image.
const recipeVersion = 2

// baseConfig: ~/.local/bin is where pip installs scripts for a user.
var baseConfig = sandbox.ImageConfig{
	Env: []string{
		"PATH=/home/user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG=C.UTF-8",
	},
	WorkingDir: "/home/user",
	User:       "user",
	Cmd:        []string{"/bin/bash"},
}

// dpkgOptions stay in the image, for packages installed later: no
// documentation in its widest sense (licences stay), and no fsync per file,
// which only costs where a power cut ends the sandbox anyway.
var dpkgOptions = []string{
	"force-unsafe-io",
	"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*", "path-exclude=/usr/share/locale/*",
	"path-exclude=/usr/share/lintian/*",
}

// setup runs with the new root as $1. /work is where examples and agents put what
// they work on. /root is open to look into: closed, "ls -la /" complained of it to
// the default user (why was not traced). EXTERNALLY-MANAGED goes because a
// sandbox is the virtual environment: pip install should just work, for root
// too, who has none of our environment variables under sudo.
const setup = `set -e
chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user
if [ -d "$1/etc/sudoers.d" ]; then
	printf 'user ALL=(ALL:ALL) NOPASSWD:ALL\n' > "$1/etc/sudoers.d/user"
	chmod 0440 "$1/etc/sudoers.d/user"
fi
if [ -e "$1/usr/bin/python3" ] && [ ! -e "$1/usr/bin/python" ]; then ln -s python3 "$1/usr/bin/python"; fi
install -d -o 1000 -g 1000 "$1/work"
chmod 0755 "$1/root"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/resolv.conf" "$1/etc/hostname" "$1/etc/machine-id"
rm -f "$1"/var/log/*.log "$1"/var/log/apt/* "$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old
`

// Bootstrap makes the base image with mmdebstrap, from a Debian or Ubuntu
// mirror and with no container registry. An image made before by the same
// recipe is returned as it is.
func (l *Library) Bootstrap(ctx context.Context, d Debian, progress func(sandbox.Progress)) (sandbox.Image, error) {
	const op = "image.bootstrap"
	host := readOSRelease("/etc/os-release")
	sources, suite, err := d.sources(host, readAptSources("/etc/apt"))
	if err != nil {
		return sandbox.Image{}, sandbox.WithOp(op, err)
	}
	packages := slices.Clone(d.Packages)
	if len(packages) == 0 {
		packages = slices.Clone(BasePackages)
	}
	slices.Sort(packages)
	packages = slices.Compact(packages)
	recipe := recipeOf(sources, packages)

	// One at a time: who waited finds the image made.
	lock, err := os.OpenFile(filepath.Join(l.dir, "bootstrap.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return sandbox.Image{}, asError(ctx, op, err)
	}
	defer lock.Close()
	if err := flock(ctx, lock); err != nil {
		return sandbox.Image{}, asError(ctx, op, err)
	}
	if !d.Refresh {
		if img, ok := l.byRecipe(ctx, recipe); ok {
			return img, nil
		}
	}
	return l.build(ctx, op, progress, func(b *build) (sidecar, error) {
		if err := b.debootstrap(suite, packages, sources); err != nil {
			return sidecar{}, err
		}
		if err := b.writeSources(sources); err != nil {
			return sidecar{}, err
		}
		return sidecar{Image: sandbox.Image{Source: "debian", Config: baseConfig}, Recipe: recipe}, nil
	})
}

// sources picks the repositories to install from.
func (d Debian) sources(host osRelease, all []aptSource) (use []aptSource, suite string, err error) {
	suite = d.Suite
	if suite == "" {
		suite = host.codename
	}
	if suite == "" {
		return nil, "", (&sandbox.Error{Class: sandbox.Precondition, Msg: "this machine is not Debian or Ubuntu, so its release is not known"}).
			WithHint("name a suite and a mirror, for example bookworm and http://deb.debian.org/debian")
	}
	if strings.ContainsAny(suite, " \t\n[]'\"") || strings.ContainsAny(d.Mirror, " \t\n[]'\"") {
		return nil, "", sandbox.InvalidField("suite", "%q is not a release name or %q not a URI", suite, d.Mirror)
	}
	components := []string{"main"}
	if host.id == "ubuntu" {
		components = append(components, "universe") // python3-pip is there
	}
	if d.Mirror != "" {
		return []aptSource{{URI: d.Mirror, Suite: suite, Components: components}}, suite, nil
	}
	if use = forSuite(all, suite); use == nil && host.codename != "" {
		// Another release of the same distribution is on the same mirror.
		for _, s := range forSuite(all, host.codename) {
			if s.Suite == host.codename {
				s.Suite = suite
				use = append(use, s)
			}
		}
	}
	if len(use) == 0 {
		return nil, "", (&sandbox.Error{Class: sandbox.Precondition, Msg: "no repository for " + suite + " in /etc/apt"}).
			WithHint("name a mirror, for example http://deb.debian.org/debian")
	}
	for i := range use {
		for _, c := range components {
			if !slices.Contains(use[i].Components, c) {
				use[i].Components = append(slices.Clone(use[i].Components), c)
			}
		}
	}
	return use, suite, nil
}

func recipeOf(sources []aptSource, packages []string) string {
	var lines []string
	for _, s := range sources {
		lines = append(lines, s.public())
	}
	data, _ := json.Marshal([]any{recipeVersion, runtime.GOARCH, lines, packages, dpkgOptions, setup, baseConfig}) // strings cannot fail
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// byRecipe finds the newest image a recipe made.
func (l *Library) byRecipe(ctx context.Context, recipe string) (best sandbox.Image, found bool) {
	all, err := l.Contents(ctx)
	if err != nil {
		return best, false
	}
	for id := range all {
		side, err := l.sidecar(id)
		if err == nil && side.Recipe == recipe && (!found || side.Image.CreatedAt.After(best.CreatedAt)) {
			best, found = side.Image, true
		}
	}
	return best, found
}

// debootstrap runs mmdebstrap and reads the tar it writes.
func (b *build) debootstrap(suite string, packages []string, sources []aptSource) error {
	tool, err := needTool("mmdebstrap", "mmdebstrap")
	if err != nil {
		return err
	}
	args := []string{"--variant=minbase", "--format=tar", "--include=" + strings.Join(packages, ","),
		`--aptopt=APT::Install-Recommends "false"`,
		// The workspace is root's alone, so apt's own user could not read it.
		`--aptopt=APT::Sandbox::User "root"`, "--customize-hook=" + setup}
	for _, o := range hostAptOptions(b.ctx) {
		args = append(args, "--aptopt="+o)
	}
	for _, o := range dpkgOptions {
		args = append(args, "--dpkgopt="+o)
	}
	if os.Geteuid() == 0 {
		// A mount and a PID namespace of its own: however it ends, by kill -9
		// too, no process and no mount of it is left on the host.
		unshare, err := needTool("unshare", "util-linux")
		if err != nil {
			return err
		}
		args = append([]string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", tool, "--mode=root"}, args...)
		tool = unshare
	} else {
		args = append([]string{"--mode=unshare"}, args...)
	}
	args = append(args, suite, "-")
	for _, s := range sources {
		args = append(args, s.line())
	}
	b.progress.step("bootstrap: "+suite+" from "+strings.TrimPrefix(sources[0].public(), "deb "), 0, 0)

	cmd := exec.Command(tool, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+b.ws.dir, "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	tail := &lastLines{}
	err = b.runTar(cmd, tail)
	var se *sandbox.Error
	switch {
	case err == nil:
		return nil
	case b.ctx.Err() != nil:
		return b.ctx.Err()
	case errors.As(err, &se) || sandbox.NoSpace(err):
		return err
	case freeBytes(b.ws.dir) < 32*mib:
		return fmt.Errorf("mmdebstrap: %w: %s", syscall.ENOSPC, tail)
	}
	return (&sandbox.Error{Class: sandbox.Unavailable, Msg: "mmdebstrap failed: " + tail.String(), Err: err}).
		WithHint("check that this machine reaches %s (apt-get update shows it)", strings.TrimPrefix(sources[0].public(), "deb "))
}

// runTar runs cmd, whose output is a tar, to its end. The process group is
// killed if the context or the tar ends first.
func (b *build) runTar(cmd *exec.Cmd, tail *lastLines) error {
	// The kernel delivers Pdeathsig when the thread that started the child
	// ends, so this goroutine keeps its thread until the child is gone.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	kill := func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	stop := context.AfterFunc(b.ctx, kill)
	defer stop()
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			tail.add(lines.Text())
			b.progress.step("bootstrap: "+strings.TrimPrefix(lines.Text(), "I: "), 0, 0)
		}
		io.Copy(io.Discard, stderr) // a line too long for the scanner must not block the child
	}()
	tarErr := b.apply(b.ctx, stdout, formRoot)
	if tarErr != nil {
		kill()
	}
	<-read
	if err := cmd.Wait(); err != nil && (tarErr == nil || isEarlyEnd(tarErr)) {
		return err // a tar cut short is the consequence
	}
	return tarErr
}

func isEarlyEnd(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, os.ErrClosed)
}

// writeSources gives the image an apt configuration that works inside: the
// mirror without credentials, and a keyring that is in the image.
func (b *build) writeSources(sources []aptSource) error {
	keyring := ""
	for _, k := range []string{"debian-archive-keyring.gpg", "debian-archive-keyring.pgp", "ubuntu-archive-keyring.gpg"} {
		if n := b.lookup("/usr/share/keyrings/" + k); n != nil && n.IsRegular() {
			keyring = "/usr/share/keyrings/" + k
			break
		}
	}
	var text strings.Builder
	for _, s := range sources {
		line := s.public()
		if keyring != "" && !s.Trusted {
			line = strings.Replace(line, "deb ", "deb [signed-by="+keyring+"] ", 1)
		}
		text.WriteString(line + "\n")
	}
	apt := b.lookup("/etc/apt")
	if apt == nil || !apt.IsDir() {
		return nil
	}
	if d := apt.Child("sources.list.d"); d != nil && d.IsDir() {
		for _, name := range d.Names() {
			d.Remove(name)
		}
	}
	return b.put(apt, "sources.list", textFile(text.String()))
}

// hostAptOptions are the settings without which the machine's own mirror may
// not be reachable: proxies and the like. They are used for the bootstrap and
// not left in the image.
func hostAptOptions(ctx context.Context) []string {
	out, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return nil
	}
	var opts []string
	for line := range bytes.Lines(out) {
		o := strings.TrimSpace(string(line))
		for _, prefix := range []string{"Acquire::http::", "Acquire::https::", "Acquire::Check-Valid-Until ", "Acquire::ForceIPv", "Acquire::Retries "} {
			if strings.HasPrefix(o, prefix) && !strings.HasSuffix(o, `"";`) {
				opts = append(opts, strings.TrimSuffix(o, ";"))
			}
		}
	}
	return opts
}

type osRelease struct{ id, codename string }

func readOSRelease(path string) (r osRelease) {
	data, err := os.ReadFile(path)
	if err != nil {
		return r
	}
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch v = strings.Trim(v, `"'`); k {
		case "ID":
			r.id = v
		case "VERSION_CODENAME":
			r.codename = v
		}
	}
	if r.id != "debian" && r.id != "ubuntu" {
		r.codename = "" // a derivative's names mean nothing to a Debian mirror
	}
	return r
}

// lastLines keeps the end of a program's messages for an error.
type lastLines struct{ lines []string }

func (t *lastLines) add(line string) {
	t.lines = append(t.lines, line)
	if len(t.lines) > 8 {
		t.lines = t.lines[1:]
	}
}

func (t *lastLines) String() string { return strings.Join(t.lines, "\n") }

func freeBytes(dir string) uint64 {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return 1 << 62
	}
	return st.Bavail * uint64(st.Bsize)
}
