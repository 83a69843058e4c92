package build

import (
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"

	"github.com/cove-sandbox/cove/sandbox"
)

func (s *State) copy(a *Action, c *instructions.CopyCommand) error {
	base := Copy{Owner: c.Chown, Parents: c.Parents, Exclude: c.ExcludePatterns}
	if c.From != "" {
		if base.Stage = s.stageOf(c.From); base.Stage == nil {
			base.Image = c.From
		}
	}
	for _, src := range c.SourcePaths {
		if isHTTP(src) {
			return sandbox.Errorf(sandbox.Invalid, "", "COPY takes files of the context; a URL is ADD's")
		}
	}
	return s.copies(a, base, c.SourcesAndDest, c.Chmod)
}

func (s *State) add(a *Action, c *instructions.AddCommand) error {
	base := Copy{Owner: c.Chown, Exclude: c.ExcludePatterns, Unpack: c.Unpack == nil || *c.Unpack}
	for _, src := range c.SourcePaths {
		if isGit(src) {
			return sandbox.Errorf(sandbox.Unsupported, "", "ADD of a Git repository").WithHint("clone it in a RUN, or into the build context")
		}
	}
	if c.Checksum != "" {
		if len(c.SourcePaths) != 1 || !isHTTP(c.SourcePaths[0]) {
			return sandbox.Errorf(sandbox.Invalid, "", "--checksum is of one URL")
		}
		if h, ok := strings.CutPrefix(c.Checksum, "sha256:"); !ok || len(h) != 64 {
			return sandbox.Errorf(sandbox.Invalid, "", "--checksum=%s is not sha256: and 64 hex digits", clip(c.Checksum))
		}
		base.Checksum = c.Checksum
	}
	if c.Unpack != nil {
		base.Unpack = *c.Unpack
	}
	return s.copies(a, base, c.SourcesAndDest, c.Chmod)
}

// stageOf is what --from means, which link has looked at.
func (s *State) stageOf(from string) *Stage {
	for _, n := range s.stage.needs {
		if strings.EqualFold(n.Name, from) || strconv.Itoa(n.index) == from {
			return n
		}
	}
	return nil
}

// copies makes one Copy of the files, one of the here-documents and one of each
// URL.
func (s *State) copies(a *Action, base Copy, sd instructions.SourcesAndDest, mode string) error {
	dest, err := s.dest(sd.DestPath)
	if err != nil {
		return err
	}
	if err := checkMode(mode); err != nil {
		return err
	}
	base.Dest, base.Mode = dest, mode
	n := len(sd.SourcePaths) + len(sd.SourceContents)
	if n == 0 {
		return sandbox.Errorf(sandbox.Invalid, "", "nothing is said to be copied")
	}
	var files []string
	for _, src := range sd.SourcePaths {
		if strings.IndexByte(src, 0) >= 0 {
			return sandbox.Errorf(sandbox.Invalid, "", "a source has a NUL byte")
		}
		if !isHTTP(src) {
			files = append(files, src)
			continue
		}
		one := base
		one.URL, one.Unpack = src, false
		a.Copies = append(a.Copies, one)
	}
	if len(files) > 0 {
		one := base
		one.Sources = files
		a.Copies = append(a.Copies, one)
	}
	if len(sd.SourceContents) > 0 {
		one := base
		one.Stage, one.Image, one.Unpack = nil, "", false
		for _, c := range sd.SourceContents {
			if c.Path == "" || strings.ContainsAny(c.Path, "/\x00") || c.Path == "." || c.Path == ".." {
				return sandbox.Errorf(sandbox.Invalid, "", "%q is no name of a here-document", clip(c.Path))
			}
			one.Inline = append(one.Inline, sandbox.InlineFile{Name: c.Path, Data: c.Data})
		}
		a.Copies = append(a.Copies, one)
	}
	if n > 1 && !strings.HasSuffix(dest, "/") && len(a.Copies) > 1 {
		return sandbox.Errorf(sandbox.Invalid, "", "several sources are copied to %s, which is to be a directory then", clip(dest)).WithHint("end the destination with a slash")
	}
	return nil
}

// dest is where a copy goes, absolute, with the slash at its end that says that
// it is a directory.
func (s *State) dest(p string) (string, error) {
	if p == "" || strings.IndexByte(p, 0) >= 0 || len(p) > 4096 {
		return "", sandbox.Errorf(sandbox.Invalid, "", "%q is no destination", clip(p))
	}
	d := s.inside(p)
	if (strings.HasSuffix(p, "/") || strings.HasSuffix(p, "/.") || p == ".") && d != "/" {
		d += "/"
	}
	return d, nil
}

func checkMode(mode string) error {
	if mode == "" {
		return nil
	}
	if m, err := strconv.ParseUint(mode, 8, 16); err != nil || m > 0o7777 {
		return sandbox.Errorf(sandbox.Unsupported, "", "--chmod=%s: an octal mode of at most 7777 is accepted", clip(mode))
	}
	return nil
}

// run is a RUN of a Dockerfile.
func (s *State) run(a *Action, c *instructions.RunCommand) error {
	r := &Run{Env: s.env().list, User: s.Config.User, Dir: s.Config.WorkingDir}
	args := c.CmdLine
	if len(c.Files) > 0 {
		if len(args) != 1 || !c.PrependShell {
			return sandbox.Errorf(sandbox.Invalid, "", "a here-document goes with the shell form of RUN")
		}
		heredoc, err := parser.ParseHeredoc(args[0])
		if err != nil {
			return err
		}
		if heredoc == nil { // part of a longer line: the shell's own to read
			for _, f := range c.Files {
				args = []string{args[0] + "\n" + f.Data + f.Name}
			}
		} else {
			data := c.Files[0].Data
			if c.Files[0].Chomp {
				data = parser.ChompHeredocContent(data)
			}
			args = []string{data}
			if strings.HasPrefix(data, "#!") {
				r.Script = []byte(data)
			}
		}
	}
	r.Args = args
	if c.PrependShell {
		r.Args = append(append([]string(nil), s.shell()...), strings.Join(args, " "))
	}
	if len(r.Args) == 0 {
		return sandbox.Errorf(sandbox.Invalid, "", "RUN without a command")
	}
	switch n := instructions.GetNetwork(c); n {
	case instructions.NetworkNone:
		r.Offline = true
	case instructions.NetworkHost:
		return sandbox.Errorf(sandbox.Unsupported, "", "RUN --network=host: a build has the network that its policy gives it")
	}
	if instructions.GetSecurity(c) == instructions.SecurityInsecure {
		return sandbox.Errorf(sandbox.Unsupported, "", "RUN --security=insecure")
	}
	for _, m := range instructions.GetMounts(c) {
		one, err := s.mount(m)
		if err != nil {
			return err
		}
		r.Mounts = append(r.Mounts, one)
	}
	a.Run = r
	return nil
}

// mount is a --mount of a RUN.
func (s *State) mount(m *instructions.Mount) (Mount, error) {
	one := Mount{Type: string(m.Type), Source: m.Source, ID: m.CacheID, Required: m.Required}
	if m.Target != "" {
		one.Target = s.inside(m.Target)
	}
	if m.UID != nil && *m.UID < 1<<32-1 {
		one.UID = uint32(*m.UID)
	}
	if m.GID != nil && *m.GID < 1<<32-1 {
		one.GID = uint32(*m.GID)
	}
	if m.Mode != nil {
		one.Mode = uint32(*m.Mode) & 0o7777
	}
	switch m.Type {
	case instructions.MountTypeCache:
		if one.ID == "" {
			one.ID = one.Target
		}
		if m.From != "" {
			return one, sandbox.Errorf(sandbox.Unsupported, "", "--mount=type=cache with from=")
		}
	case instructions.MountTypeSecret:
		if one.ID == "" {
			one.ID = lastPart(cmpOr(m.Source, m.Target))
		}
		if m.Env != nil {
			if one.Env = *m.Env; one.Env == "" {
				one.Env = one.ID
			}
		}
		if one.Target == "" && m.Env == nil {
			one.Target = "/run/secrets/" + lastPart(one.ID)
		}
		if one.ID == "" {
			return one, sandbox.Errorf(sandbox.Invalid, "", "--mount=type=secret without an id")
		}
	case instructions.MountTypeBind:
		if m.From != "" {
			if one.Stage = s.stageOf(m.From); one.Stage == nil {
				one.Image = m.From
			}
		}
		if one.Source == "" {
			one.Source = "/"
		}
	case instructions.MountTypeTmpfs:
	default:
		return one, sandbox.Errorf(sandbox.Unsupported, "", "--mount=type=%s", m.Type)
	}
	if one.Target == "/" || one.Target == "" && m.Type != instructions.MountTypeSecret {
		return one, sandbox.Errorf(sandbox.Invalid, "", "--mount=type=%s needs a target other than /", m.Type)
	}
	return one, nil
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func lastPart(p string) string { return p[strings.LastIndexByte(p, '/')+1:] }
