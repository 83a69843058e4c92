package image

import (
	"bufio"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// aptSource is one repository of the machine's apt configuration.
type aptSource struct {
	URI, Suite string
	Components []string
	SignedBy   string // keyring file, if it names one
	Trusted    bool
}

// line writes it as mmdebstrap takes it.
func (s aptSource) line() string {
	var opts []string
	if s.SignedBy != "" {
		opts = append(opts, "signed-by="+s.SignedBy)
	}
	if s.Trusted {
		opts = append(opts, "trusted=yes")
	}
	o := ""
	if len(opts) > 0 {
		o = "[" + strings.Join(opts, " ") + "] "
	}
	return "deb " + o + s.URI + " " + s.Suite + " " + strings.Join(s.Components, " ")
}

// public is the line for the image's own sources.list: without credentials,
// which code in a sandbox must not see, and without the host's keyring path,
// which the image's own keyring package replaces.
func (s aptSource) public() string {
	if u, err := url.Parse(s.URI); err == nil && u.User != nil {
		u.User = nil
		s.URI = u.String()
	}
	s.SignedBy = ""
	return s.line()
}

// readAptSources reads sources.list and sources.list.d below etc (/etc/apt) in
// both formats.
func readAptSources(etc string) []aptSource {
	var all []aptSource
	files := []string{filepath.Join(etc, "sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		more, _ := filepath.Glob(filepath.Join(etc, "sources.list.d", pattern))
		files = append(files, more...)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			continue // the glob's race, or no sources.list at all
		}
		if strings.HasSuffix(name, ".sources") {
			all = append(all, parseDeb822(string(data))...)
		} else {
			all = append(all, parseOneLine(string(data))...)
		}
	}
	var usable []aptSource
	for _, s := range all {
		if s.URI = resolveMirror(s.URI); s.URI != "" && len(s.Components) > 0 {
			usable = append(usable, s)
		}
	}
	return usable
}

// parseOneLine reads "deb [opt=value …] uri suite component…".
func parseOneLine(text string) []aptSource {
	var all []aptSource
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, "deb")
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '\t' {
			continue
		}
		rest = strings.TrimSpace(rest)
		var s aptSource
		if strings.HasPrefix(rest, "[") {
			opts, after, ok := strings.Cut(rest[1:], "]")
			if !ok {
				continue
			}
			for _, o := range strings.Fields(opts) {
				k, v, _ := strings.Cut(o, "=")
				s.option(k, strings.Trim(v, `"`))
			}
			rest = after
		}
		f := strings.Fields(rest)
		if len(f) < 3 {
			continue
		}
		s.URI, s.Suite, s.Components = f[0], f[1], f[2:]
		all = append(all, s)
	}
	return all
}

func (s *aptSource) option(key, value string) {
	switch strings.ToLower(key) {
	case "signed-by":
		if filepath.IsAbs(value) { // else a fingerprint or a key in line: mmdebstrap finds the keyring itself
			s.SignedBy = strings.TrimSuffix(strings.Fields(value)[0], ",")
		}
	case "trusted":
		s.Trusted = value == "yes"
	}
}

// parseDeb822 reads stanzas of "Types: deb", "URIs: …", with continuation
// lines; every URI is combined with every suite.
func parseDeb822(text string) []aptSource {
	var all []aptSource
	stanza := map[string]string{}
	last := ""
	flush := func() {
		enabled := strings.ToLower(strings.TrimSpace(stanza["enabled"]))
		if slices.Contains(strings.Fields(stanza["types"]), "deb") && enabled != "no" && enabled != "false" {
			for _, uri := range strings.Fields(stanza["uris"]) {
				for _, suite := range strings.Fields(stanza["suites"]) {
					s := aptSource{URI: uri, Suite: suite, Components: strings.Fields(stanza["components"])}
					s.option("signed-by", strings.TrimSpace(stanza["signed-by"]))
					s.option("trusted", strings.TrimSpace(stanza["trusted"]))
					all = append(all, s)
				}
			}
		}
		stanza, last = map[string]string{}, ""
	}
	sc := bufio.NewScanner(strings.NewReader(text))
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				stanza[last] += "\n" + strings.TrimSpace(line)
			}
		default:
			k, v, ok := strings.Cut(line, ":")
			if ok {
				last = strings.ToLower(strings.TrimSpace(k))
				stanza[last] = strings.TrimSpace(v)
			}
		}
	}
	flush()
	return all
}

// resolveMirror turns "mirror+file:/etc/apt/mirrors/debian.list" (Debian's
// cloud images) into the first mirror listed, and drops what a bootstrap
// cannot use.
func resolveMirror(uri string) string {
	if file, ok := strings.CutPrefix(uri, "mirror+file:"); ok {
		data, err := os.ReadFile("/" + strings.TrimLeft(file, "/"))
		if err != nil {
			return ""
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "http") {
				return f[0]
			}
		}
		return ""
	}
	if strings.HasPrefix(uri, "http://") || strings.HasPrefix(uri, "https://") || strings.HasPrefix(uri, "file:") {
		return uri
	}
	return "" // cdrom:, copy:, tor+…
}

// forSuite keeps the distribution's own repositories of one release: the suite
// itself, its updates and its security fixes, from entries signed with the
// distribution's key. A third party's repository often has the release's name
// too, and its packages are not asked for; it is used only if nothing else is
// there, as with a company mirror that signs for itself.
func forSuite(all []aptSource, suite string) []aptSource {
	var own, other []aptSource
	for _, s := range all {
		switch s.Suite {
		case suite, suite + "-updates", suite + "-security", suite + "/updates":
		default:
			continue
		}
		if !slices.Contains(s.Components, "main") {
			continue
		}
		// The rest (contrib, non-free, restricted, multiverse) has nothing for the base.
		s.Components = slices.DeleteFunc(slices.Clone(s.Components), func(c string) bool { return c != "main" && c != "universe" })
		key := filepath.Base(s.SignedBy)
		if s.SignedBy == "" || strings.HasPrefix(key, "debian-archive") || strings.HasPrefix(key, "ubuntu-archive") {
			own = append(own, s)
		} else {
			other = append(other, s)
		}
	}
	hasMain := func(l []aptSource) bool {
		return slices.ContainsFunc(l, func(s aptSource) bool { return s.Suite == suite })
	}
	if hasMain(own) {
		return own
	}
	if all := append(own, other...); hasMain(all) {
		return all
	}
	return nil
}
