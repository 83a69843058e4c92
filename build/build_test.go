package build

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

var onAMD64 = Options{Platform: "linux/amd64"}

// all plans a Dockerfile and reads every step of it.
func all(t *testing.T, file string, o Options, base sandbox.ImageConfig) (p *Plan, last *State, actions []Action, err error) {
	t.Helper()
	if p, err = Parse([]byte(file), o); err != nil {
		return
	}
	for _, st := range p.Stages {
		if last, err = p.Begin(st, base); err != nil {
			return
		}
		for i := range st.Len() {
			a, err := last.Next(i)
			if err != nil {
				return p, last, actions, err
			}
			actions = append(actions, a)
		}
	}
	return
}

func TestConfig(t *testing.T) {
	base := sandbox.ImageConfig{Env: []string{"PATH=/bin", "KEEP=1"}, Cmd: []string{"old"}, Labels: map[string]string{"a": "1"}}
	_, st, _, err := all(t, `ARG V=9
FROM x:$V
ARG V
ARG NAME=def
ENV PATH=/app/bin:$PATH NAME2=${NAME:-none} Q="a b" E=\$x
ENV OLD style value
LABEL b=$V a="2 3"
WORKDIR /srv
WORKDIR sub
USER app:grp
EXPOSE 80 8000-8002/udp
VOLUME /d
ENTRYPOINT ["e", "$V"]
STOPSIGNAL 9
SHELL ["/bin/bash", "-c"]
CMD echo $V
HEALTHCHECK NONE
ONBUILD RUN x
`, Options{Platform: "linux/amd64", Args: map[string]string{"NAME": "given"}}, base)
	if err != nil {
		t.Fatal(err)
	}
	c := st.Config
	for _, kv := range []string{"PATH=/app/bin:/bin", "KEEP=1", "NAME2=given", "Q=a b", "E=$x", "OLD=style value"} {
		if !slices.Contains(c.Env, kv) {
			t.Errorf("no %q in %q", kv, c.Env)
		}
	}
	if c.Labels["a"] != "2 3" || c.Labels["b"] != "9" || base.Labels["a"] != "1" || c.WorkingDir != "/srv/sub" || c.User != "app:grp" ||
		!slices.Equal(c.ExposedPorts, []string{"80/tcp", "8000/udp", "8001/udp", "8002/udp"}) || !slices.Equal(c.Entrypoint, []string{"e", "$V"}) ||
		!slices.Equal(c.Cmd, []string{"/bin/bash", "-c", "echo $V"}) || c.Healthcheck.Test[0] != "NONE" || !slices.Equal(c.OnBuild, []string{"RUN x"}) {
		t.Errorf("%+v", c)
	}
	if !slices.Equal(base.Env, []string{"PATH=/bin", "KEEP=1"}) {
		t.Error("the base's own was changed:", base.Env)
	}
}

// An ENTRYPOINT of the Dockerfile takes the base's CMD away, its own it keeps.
func TestEntrypointAndCmd(t *testing.T) {
	base := sandbox.ImageConfig{Cmd: []string{"old"}}
	for file, want := range map[string]string{
		"FROM x\nENTRYPOINT [\"e\"]":              "",
		"FROM x\nCMD [\"c\"]\nENTRYPOINT [\"e\"]": "c",
		"FROM x\nENV A=1":                         "old",
	} {
		_, st, _, err := all(t, file, onAMD64, base)
		if err != nil || strings.Join(st.Config.Cmd, " ") != want {
			t.Errorf("%q: %v %v", file, st.Config.Cmd, err)
		}
	}
}

func TestStages(t *testing.T) {
	file := `FROM a AS one
RUN 1
FROM b AS unused
RUN 2
FROM one AS two
COPY --from=one /x /
FROM c
COPY --from=two a b
COPY --from=0 c d/
RUN --mount=type=bind,from=two,target=/m 3
COPY --from=other:1 e f
`
	p, _, actions, err := all(t, file, onAMD64, sandbox.ImageConfig{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range p.Stages {
		names = append(names, s.Name)
	}
	if strings.Join(names, " ") != "one two 3" || p.Stages[1].Base != p.Stages[0] || p.Steps() != 9 {
		t.Error(names, p.Steps())
	}
	last := actions[len(actions)-4:]
	if last[0].Copies[0].Stage != p.Stages[1] || last[1].Copies[0].Stage != p.Stages[0] || last[2].Run.Mounts[0].Stage != p.Stages[1] || last[3].Copies[0].Image != "other:1" {
		t.Errorf("%+v", last)
	}
	p, err = Parse([]byte(file), Options{Platform: "linux/amd64", Target: "unused"})
	if err != nil || len(p.Stages) != 1 {
		t.Error(p, err)
	}
	_, err = Parse([]byte(file), Options{Platform: "linux/amd64", Target: "unusd"})
	if !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "unused") {
		t.Error(err)
	}
}

func TestRunForms(t *testing.T) {
	_, _, as, err := all(t, `FROM x
ENV A=1
ARG B=2
USER u
WORKDIR /w
RUN echo $A
RUN ["echo", "$A"]
RUN <<EOF
one
two
EOF
RUN <<EOF
#!/usr/bin/env python3
print(1)
EOF
RUN cat <<X > /f
text
X
RUN --network=none --mount=type=secret,id=s --mount=type=cache,target=c true
`, onAMD64, sandbox.ImageConfig{})
	if err != nil {
		t.Fatal(err)
	}
	var runs []*Run
	for _, a := range as {
		if a.Run != nil {
			runs = append(runs, a.Run)
		}
	}
	sh := func(s string) []string { return []string{"/bin/sh", "-c", s} }
	for i, want := range [][]string{sh("echo $A"), {"echo", "$A"}, sh("one\ntwo\n"), sh("#!/usr/bin/env python3\nprint(1)\n"), sh("cat <<X > /f\ntext\nX"), sh("true")} {
		if !slices.Equal(runs[i].Args, want) {
			t.Errorf("%d: %q, not %q", i, runs[i].Args, want)
		}
	}
	if r := runs[0]; r.User != "u" || r.Dir != "/w" || !slices.Contains(r.Env, "A=1") || !slices.Contains(r.Env, "B=2") || r.Script != nil {
		t.Errorf("%+v", r)
	}
	if runs[3].Script == nil || !runs[5].Offline || runs[5].Mounts[0].Target != "/run/secrets/s" || runs[5].Mounts[1].Target != "/w/c" || runs[5].Mounts[1].ID != "/w/c" {
		t.Errorf("%+v", runs[5])
	}
	if runs[0].Key("s", nil) == runs[0].Key("t", nil) || runs[0].Key("s", nil) == runs[1].Key("s", nil) {
		t.Error("keys are alike")
	}
}

func TestTriggers(t *testing.T) {
	base := sandbox.ImageConfig{OnBuild: []string{"ENV A=1", "COPY . /app/"}}
	p, st, as, err := all(t, "FROM x\nRUN y\n", onAMD64, base)
	if err != nil || len(as) != 3 || as[1].Copies[0].Dest != "/app/" || st.Config.OnBuild != nil || p.Steps() != 4 {
		t.Error(as, err)
	}
	_, _, _, err = all(t, "FROM x\n", onAMD64, sandbox.ImageConfig{OnBuild: []string{"COPY --from=other /secret /"}})
	if !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
}

// What is wrong is refused with its line, and nothing grows beyond bounds.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		file, field string
		is          error
	}{
		{"", "dockerfile", sandbox.ErrInvalid},
		{"RUN x\n", "dockerfile:1", sandbox.ErrInvalid},
		{"FROM x\nCOPY a\n", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM x\nADD git@github.com:a/b.git /x\n", "dockerfile:2", sandbox.ErrUnsupported},
		{"FROM x\nCOPY http://a/b /x\n", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM x\nCOPY --chmod=u+x a /x\n", "dockerfile:2", sandbox.ErrUnsupported},
		{"FROM x\nRUN --mount=type=ssh y\n", "dockerfile:2", sandbox.ErrUnsupported},
		{"FROM x\nRUN --network=host y\n", "dockerfile:2", sandbox.ErrUnsupported},
		{"FROM x\nRUN --mount=type=bind,target=/ y\n", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM --platform=linux/riscv64 x\n", "dockerfile:1", sandbox.ErrUnsupported},
		{"FROM $NOTHING\n", "dockerfile:1", sandbox.ErrInvalid},
		{"FROM x\nEXPOSE 99999\n", "dockerfile:2", sandbox.ErrInvalid},
		{"FROM x\nENV A=" + strings.Repeat("x", 200_000) + "\n", "dockerfile:1", sandbox.ErrInvalid}, // the parser's own bound
		{"FROM x\nENV A=" + strings.Repeat("x", 60_000) + "\nLABEL l=" + strings.Repeat("$A", 10_000), "dockerfile:3", sandbox.ErrTooLarge},
		{"FROM x\n" + strings.Repeat("RUN x\n", MaxSteps), "", sandbox.ErrTooLarge},
		{strings.Repeat("#", MaxDockerfile+1), "", sandbox.ErrTooLarge},
	} {
		_, _, _, err := all(t, c.file, onAMD64, sandbox.ImageConfig{})
		var e *sandbox.Error
		if !errors.Is(err, c.is) || !errors.As(err, &e) || e.Field != c.field {
			t.Errorf("%.70q: %v", c.file, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("FROM x\nRUN y\n")
	f.Add("ARG A=1\nFROM x:$A AS b\nCOPY --from=b <<E /f\nx\nE\n")
	f.Fuzz(func(t *testing.T, file string) {
		_, _, _, err := all(t, file, onAMD64, sandbox.ImageConfig{})
		var e *sandbox.Error
		if err != nil && !errors.As(err, &e) {
			t.Error("without a class:", err)
		}
	})
}
