package grade

import (
	"archive/tar"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// place is part of a system that programs trust without being told to. What a
// sandbox changed there is not carried over with a directory around it, only
// where an artifact names the place itself or something below it.
type place struct {
	kind string
	root string
}

// places are looked through in order; the first that a path is in is its own.
var places = []place{
	{"preload", "/etc/ld.so.preload"}, {"preload", "/etc/ld.so.conf"}, {"preload", "/etc/ld.so.conf.d"}, {"preload", "/etc/ld.so.cache"},
	{"accounts", "/etc/passwd"}, {"accounts", "/etc/shadow"}, {"accounts", "/etc/group"}, {"accounts", "/etc/gshadow"}, {"accounts", "/etc/sudoers"},
	{"accounts", "/etc/sudoers.d"}, {"accounts", "/etc/pam.d"}, {"accounts", "/etc/security"}, {"accounts", "/etc/ssh"},
	{"shell", "/etc/profile"}, {"shell", "/etc/profile.d"}, {"shell", "/etc/bash.bashrc"}, {"shell", "/etc/environment"}, {"shell", "/etc/zsh"},
	{"cron", "/etc/crontab"}, {"cron", "/etc/cron.d"}, {"cron", "/etc/cron.hourly"}, {"cron", "/etc/cron.daily"}, {"cron", "/etc/cron.weekly"},
	{"cron", "/etc/cron.monthly"}, {"cron", "/var/spool/cron"}, {"cron", "/var/spool/at"}, {"service", "/etc/systemd"}, {"service", "/etc/init.d"},
	{"service", "/lib/systemd"}, {"service", "/usr/lib/systemd"}, {"service", "/etc/rc.local"},
	{"names", "/etc/nsswitch.conf"},
	{"", "/etc/hosts"}, {"", "/etc/hostname"}, {"", "/etc/resolv.conf"}, // Cove writes them itself: no finding
	{"package_cache", "/etc/pip.conf"},
	{"library", "/lib"}, {"library", "/lib64"}, {"library", "/usr/lib"}, {"library", "/usr/lib64"}, {"library", "/usr/local/lib"}, {"library", "/usr/libexec"},
}

// standardPath is where programs are looked for in most images; an image may say
// more.
var standardPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// interpreters decide what other files mean.
var interpreters = regexp.MustCompile(`^(python[0-9.]*|pytest(-3)?|py\.test|pip[0-9.]*|bash|dash|sh|zsh|env|perl[0-9.]*|node|npm|npx|ruby|java|go|cargo|rustc|gcc|cc|g\+\+|make|git|sudo|su|setpriv|timeout|cat|diff|cmp|grep|test|\[|ld\.so.*)$`)

var (
	testConfig  = []string{"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "noxfile.py"}
	shellConfig = []string{".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile", ".inputrc"}
	rewardName  = regexp.MustCompile(`^reward\.(json|txt)$`)
	// A package of Python's, below which a thousand files are one finding.
	pythonPackage = regexp.MustCompile(`^(/.*/(?:site|dist)-packages/[^/]+)/`)
)

// note is one thing to say of an entry.
type note struct {
	kind, path, detail string
}

// notes are what a reader of the verdict should know of an entry, and where it is
// in a place that programs trust, which.
func (r Rules) notes(p string, h *tar.Header) (ns []note, in *place) {
	removed := whiteout(h)
	file := h.Typeflag != tar.TypeDir
	detail := ""
	if removed {
		detail = "removed"
	}
	add := func(kind, at string) { ns = append(ns, note{kind, at, detail}) }
	base := path.Base(p)

	if file && sandbox.Within(p, r.TestsPath) {
		add("tests", p)
	}
	if file && (rewardName.MatchString(base) || sandbox.Within(p, sandbox.GradeDir)) {
		add("reward", p)
	}
	if dir := path.Dir(p); slices.Contains(standardPath, dir) || slices.Contains(r.Path, dir) {
		in = &place{"program", dir}
		switch {
		case !file:
		case interpreters.MatchString(base):
			add("interpreter", p)
		default:
			add("program", p)
		}
	}
	for _, pl := range places {
		if in == nil && sandbox.Within(p, pl.root) {
			in = &pl
			if file && pl.kind != "" {
				at := p
				if m := pythonPackage.FindStringSubmatch(p); m != nil {
					at = m[1]
				}
				add(pl.kind, at)
			}
		}
	}
	if repo, rest, ok := gitPart(p); ok {
		in = &place{"git", repo}
		if file {
			kind := "git"
			switch first, _, _ := strings.Cut(rest, "/"); first {
			case "hooks", "config", "config.worktree", "info":
				kind = "git_config"
			case "refs", "packed-refs", "logs", "FETCH_HEAD", "ORIG_HEAD", "HEAD", "shallow", "index":
				kind = "git_history"
			case "objects":
				kind = "git_objects"
			}
			if kind == "git_config" {
				add(kind, p)
			} else {
				add(kind, repo) // one for all
			}
		}
	}
	if file {
		ns = append(ns, named(p, base, detail)...)
	}
	if file && !removed && h.Typeflag == tar.TypeReg && h.Mode&0o6000 != 0 {
		ns = append(ns, note{"setuid", p, "the bits are not carried"})
	}
	if _, ok := h.PAXRecords["SCHILY.xattr.security.capability"]; ok {
		ns = append(ns, note{"setuid", p, "file capabilities, which are not carried"})
	}
	return ns, in
}

// named is what a name says, wherever it is.
func named(p, base, detail string) (ns []note) {
	switch {
	case base == "sitecustomize.py" || base == "usercustomize.py" || strings.HasSuffix(base, ".pth"):
		ns = append(ns, note{"python_path", p, detail})
	case slices.Contains(testConfig, base):
		ns = append(ns, note{"test_config", p, detail})
	case slices.Contains(shellConfig, base):
		ns = append(ns, note{"shell", p, detail})
	case base == "authorized_keys":
		ns = append(ns, note{"accounts", p, detail})
	case base == "pip.conf" || base == ".pypirc" || base == ".npmrc":
		ns = append(ns, note{"package_cache", p, detail})
	case base == "pytest.py" || base == "_pytest" || strings.Contains(p, "/_pytest/"):
		ns = append(ns, note{"test_config", path.Dir(p), "a pytest of its own"})
	}
	for _, cache := range []string{"/.cache/pip/", "/.cache/uv/", "/.npm/"} {
		if i := strings.Index(p, cache); i >= 0 {
			ns = append(ns, note{"package_cache", p[:i+len(cache)-1], detail})
		}
	}
	return ns
}

// gitPart splits a path at its innermost .git.
func gitPart(p string) (repo, rest string, ok bool) {
	if strings.HasSuffix(p, "/.git") {
		return p, "", true
	}
	i := strings.LastIndex(p, "/.git/")
	if i < 0 {
		return "", "", false
	}
	return p[:i+len("/.git")], p[i+len("/.git/"):], true
}

// whiteout says whether an entry is a removal, in the form of overlayfs.
func whiteout(h *tar.Header) bool {
	return h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0
}

// opaque says whether a directory hides all that the image has there.
func opaque(h *tar.Header) bool {
	return h.Typeflag == tar.TypeDir && h.PAXRecords["SCHILY.xattr.trusted.overlay.opaque"] == "y"
}
