package sandbox

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestDefaultsFillOnlyWhatIsLeftOut(t *testing.T) {
	std := StandardDefaults()
	if got, want := (Spec{}).WithDefaults(std).Resources, (Resources{1000, 512 * MiB, 512 * MiB, 10 * GiB, 1024, 8 * MiB}); got != want {
		t.Errorf("of nothing: %+v, want %+v", got, want)
	}
	if got := (Spec{}).WithDefaults(std).Image; got != "base" {
		t.Errorf("image %q", got)
	}
	full := Spec{Image: "x", Resources: Resources{1, 2, 3, 4, 5, 1}}
	if got := full.WithDefaults(std); got.Resources != full.Resources || got.Image != "x" {
		t.Errorf("a full spec was changed to %+v", got)
	}
	for _, c := range []struct {
		name               string
		in                 Resources
		limit              int64 // of the defaults
		memory, wantsLimit int64
		reserved           int64
	}{
		{"memory alone sets the limit", Resources{Memory: GiB}, 0, GiB, GiB, 8 * MiB},
		{"a low limit alone lowers the memory", Resources{MemoryLimit: 100 * MiB}, 0, 100 * MiB, 100 * MiB, 8 * MiB},
		{"a high limit alone leaves the memory", Resources{MemoryLimit: 4 * GiB}, 0, 512 * MiB, 4 * GiB, 8 * MiB},
		{"a default limit holds", Resources{}, 2 * GiB, 512 * MiB, 2 * GiB, 8 * MiB},
		{"a default limit below the memory gives way", Resources{Memory: 3 * GiB}, 2 * GiB, 3 * GiB, 3 * GiB, 8 * MiB},
		{"both: the memory is reserved", Resources{Memory: GiB, MemoryLimit: 2 * GiB}, 0, GiB, 2 * GiB, GiB},
		{"all of it", Resources{Memory: GiB, MemoryLimit: GiB}, 0, GiB, GiB, GiB},
		{"no more than there is", Resources{Memory: 5, MemoryLimit: 0}, 0, 5, 5, 5},
	} {
		d := std
		d.Resources.MemoryLimit = c.limit
		got := Spec{Resources: c.in}.WithDefaults(d).Resources
		if got.Memory != c.memory || got.MemoryLimit != c.wantsLimit || got.Reserved() != c.reserved {
			t.Errorf("%s: memory %d, limit %d, reserved %d", c.name, got.Memory, got.MemoryLimit, got.Reserved())
		}
		if twice := (Spec{Resources: got}).WithDefaults(d).Resources; twice != got {
			t.Errorf("%s: filled twice it is %+v, once %+v", c.name, twice, got)
		}
	}
}

// repeat makes n entries of a map.
func repeat(n int, key, value string) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf(key, i)] = value
	}
	return m
}

func TestSpecRefusesEachWrongFieldByName(t *testing.T) {
	for _, c := range []struct {
		field string
		says  string // what the message must hold: the numbers accepted
		spoil func(*Spec)
	}{
		{"spec.image", "512", func(s *Spec) { s.Image = "a b" }},
		{"spec.image", "512", func(s *Spec) { s.Image = strings.Repeat("a", 513) }},
		{"spec.image", "", func(s *Spec) { s.Image = "-rf" }},
		{"spec.image", "", func(s *Spec) { s.Image = "bäse" }},
		{"spec.resources.cpu", "0.05 to 256", func(s *Spec) { s.Resources.MilliCPU = 49 }},
		{"spec.resources.cpu", "0.05 to 256", func(s *Spec) { s.Resources.MilliCPU = 256_001 }},
		{"spec.resources.cpu", "", func(s *Spec) { s.Resources.MilliCPU = -1 }},
		{"spec.resources.memory", "32MiB", func(s *Spec) { s.Resources.Memory = 32*MiB - 1 }},
		{"spec.resources.memory", "", func(s *Spec) { s.Resources.Memory = math.MinInt64 }},
		{"spec.resources.memory_limit", "512MiB", func(s *Spec) { s.Resources.MemoryLimit = 512*MiB - 1 }},
		{"spec.resources.memory_limit", "32MiB", func(s *Spec) { s.Resources.MemoryLimit = -1 }},
		{"spec.resources.disk", "16MiB", func(s *Spec) { s.Resources.Disk = 16*MiB - 1 }},
		{"spec.resources.pids", "16 to 65536", func(s *Spec) { s.Resources.Pids = 15 }},
		{"spec.resources.pids", "16 to 65536", func(s *Spec) { s.Resources.Pids = 65537 }},
		{"spec.env", "256", func(s *Spec) { s.Env = repeat(257, "A%d", "") }},
		{"spec.env", "256KiB", func(s *Spec) { s.Env = map[string]string{"A": strings.Repeat("x", 256*1024)} }},
		{"spec.env", "A-B", func(s *Spec) { s.Env = map[string]string{"A-B": ""} }},
		{"spec.env", "1A", func(s *Spec) { s.Env = map[string]string{"1A": ""} }},
		{"spec.env", "", func(s *Spec) { s.Env = map[string]string{"": "x"} }},
		{"spec.env", "", func(s *Spec) { s.Env = map[string]string{"A\n": "x"} }},
		{"spec.env", "NUL", func(s *Spec) { s.Env = map[string]string{"A": "x\x00"} }},
		{"spec.labels", "64", func(s *Spec) { s.Labels = repeat(65, "a%d", "") }},
		{"spec.labels", "-a", func(s *Spec) { s.Labels = map[string]string{"-a": ""} }},
		{"spec.labels", "a.", func(s *Spec) { s.Labels = map[string]string{"a.": ""} }},
		{"spec.labels", "64", func(s *Spec) { s.Labels = map[string]string{strings.Repeat("a", 65): ""} }},
		{"spec.labels", "256", func(s *Spec) { s.Labels = map[string]string{"a": strings.Repeat("a", 257)} }},
		{"spec.labels", "UTF-8", func(s *Spec) { s.Labels = map[string]string{"a": "\xff"} }},
		{"spec.labels", "control", func(s *Spec) { s.Labels = map[string]string{"a": "x\x1b[2J"} }},
		{"spec.timeout", "1s", func(s *Spec) { s.Timeout = time.Second - 1 }},
		{"spec.timeout", "1s", func(s *Spec) { s.Timeout = -time.Hour }},
		{"spec.timeout", "87600h", func(s *Spec) { s.Timeout = 10*365*24*time.Hour + 1 }},
		{"spec.idle_timeout", "1s", func(s *Spec) { s.IdleTimeout = -1 }},
	} {
		s := Spec{}.WithDefaults(StandardDefaults())
		c.spoil(&s)
		checkRefusal(t, s.Validate(StandardLimits()), c.field, c.says)
	}
}

func TestSpecAcceptsTheEdges(t *testing.T) {
	limits := StandardLimits()
	for name, set := range map[string]func(*Spec){
		"defaults":    func(*Spec) {},
		"least":       func(s *Spec) { s.Resources = Resources{50, 32 * MiB, 32 * MiB, 16 * MiB, 16, 0} },
		"most":        func(s *Spec) { s.Resources = Resources{256_000, 1 << 50, 1 << 60, 1 << 60, 65536, 0} },
		"full labels": func(s *Spec) { s.Labels = repeat(64, "a/b.c_d-%d", strings.Repeat("é", 128)) },
		"long key":    func(s *Spec) { s.Labels = map[string]string{strings.Repeat("a", 64): ""} },
		"full env":    func(s *Spec) { s.Env = repeat(256, "_A%d", "line\nbreaks are fine") },
		"times":       func(s *Spec) { s.Timeout, s.IdleTimeout = time.Second, 10*365*24*time.Hour },
		"reference":   func(s *Spec) { s.Image = "registry.example:5000/a/b:tag@sha256:" + strings.Repeat("0", 64) },
	} {
		s := Spec{}.WithDefaults(StandardDefaults())
		set(&s)
		if err := s.Validate(limits); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	limits.MaxMemory = GiB
	s := Spec{Resources: Resources{Memory: GiB + 1}}.WithDefaults(StandardDefaults())
	checkRefusal(t, s.Validate(limits), "spec.resources.memory", "1GiB")
}

func TestProcessRefusesEachWrongFieldByName(t *testing.T) {
	for _, c := range []struct {
		field string
		says  string
		spoil func(*ProcessSpec)
	}{
		{"process.exec_id", "128", func(p *ProcessSpec) { p.ExecID = "" }},
		{"process.exec_id", "128", func(p *ProcessSpec) { p.ExecID = strings.Repeat("a", 129) }},
		{"process.exec_id", "", func(p *ProcessSpec) { p.ExecID = "a/b" }},
		{"process.exec_id", "", func(p *ProcessSpec) { p.ExecID = "a\n" }},
		{"process.args", "exactly one", func(p *ProcessSpec) { p.Args = nil }},
		{"process.args", "exactly one", func(p *ProcessSpec) { p.Command = "ls" }},
		{"process.args", "65536", func(p *ProcessSpec) { p.Args = make([]string, 65537) }},
		{"process.args", "2MiB", func(p *ProcessSpec) { p.Args = []string{"x", strings.Repeat("a", 2<<20)} }},
		{"process.args", "NUL", func(p *ProcessSpec) { p.Args = []string{"x", "\x00"} }},
		{"process.args", "program", func(p *ProcessSpec) { p.Args = []string{"", "x"} }},
		{"process.command", "1MiB", func(p *ProcessSpec) { p.Args, p.Command = nil, strings.Repeat("a", 1<<20+1) }},
		{"process.command", "NUL", func(p *ProcessSpec) { p.Args, p.Command = nil, "a\x00" }},
		{"process.cwd", "absolute", func(p *ProcessSpec) { p.Cwd = "tmp" }},
		{"process.cwd", "4095", func(p *ProcessSpec) { p.Cwd = "/" + strings.Repeat("a", 4095) }},
		{"process.cwd", "NUL", func(p *ProcessSpec) { p.Cwd = "/\x00" }},
		{"process.env", "A=B", func(p *ProcessSpec) { p.Env = map[string]string{"A=B": ""} }},
		{"process.user", "256", func(p *ProcessSpec) { p.User = strings.Repeat("a", 257) }},
		{"process.user", "NUL", func(p *ProcessSpec) { p.User = "a\x00" }},
		{"process.pty.rows", "1 to 10000", func(p *ProcessSpec) { p.PTY = &TermSize{0, 80} }},
		{"process.pty.cols", "1 to 10000", func(p *ProcessSpec) { p.PTY = &TermSize{25, 10001} }},
		{"process.timeout", "1ms", func(p *ProcessSpec) { p.Timeout = -1 }},
		{"process.timeout", "1ms", func(p *ProcessSpec) { p.Timeout = time.Microsecond }},
	} {
		p := ProcessSpec{ExecID: "e", Args: []string{"true"}}
		c.spoil(&p)
		checkRefusal(t, p.Validate(), c.field, c.says)
	}
	for _, p := range []ProcessSpec{
		{ExecID: "A.b_c:d-1", Args: []string{"x", ""}, Cwd: "/", PTY: &TermSize{1, 10000}, User: "1000:1000", Timeout: time.Millisecond},
		{ExecID: "e", Command: strings.Repeat("a", 1<<20)},
		{ExecID: "e", Args: []string{"x", strings.Repeat("a", 2<<20-1)}},
	} {
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
}

func TestMilliCPU(t *testing.T) {
	for in, want := range map[float64]int64{0: 0, 1: 1000, 0.05: 50, 1.2345: 1235, 0.0001: -1, -1: -1000,
		math.Inf(1): -1, math.NaN(): -1, 1e300: -1} {
		if got := MilliCPU(in); got != want {
			t.Errorf("MilliCPU(%v) = %d, want %d", in, got, want)
		}
	}
}

func TestNames(t *testing.T) {
	checkRefusal(t, ValidateName("name", ""), "name", "256")
	checkRefusal(t, ValidateName("name", "a\tb"), "name", "control")
	checkRefusal(t, ValidateIdempotencyKey("idempotency_key", strings.Repeat("a", 257)), "idempotency_key", "256")
	if err := first(ValidateName("name", "mein Schlüssel"), ValidateIdempotencyKey("k", ""), ValidatePath("path", "/a/../b")); err != nil {
		t.Error(err)
	}
}

func checkRefusal(t *testing.T, err error, field, says string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Class != Invalid || e.Field != field || !strings.Contains(e.Msg, says) {
		t.Errorf("%v; want invalid %s saying %q", err, field, says)
		return
	}
	if len(err.Error()) > 400 {
		t.Errorf("%s: a message of %d bytes", field, len(err.Error()))
	}
}

func TestValidateReuse(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*Spec)
		ok   bool
	}{
		{"a name", func(s *Spec) { s.Reuse = "run-7.a_B" }, true},
		{"none", func(s *Spec) { s.Reuse, s.Network.Mode = "", NetworkPublic }, true},
		{"64 letters", func(s *Spec) { s.Reuse = strings.Repeat("a", 64) }, true},
		{"65", func(s *Spec) { s.Reuse = strings.Repeat("a", 65) }, false},
		{"a slash", func(s *Spec) { s.Reuse = "a/b" }, false},
		{"a line", func(s *Spec) { s.Reuse = "a\n" }, false},
		{"a dash in front", func(s *Spec) { s.Reuse = "-a" }, false},
		{"a network", func(s *Spec) { s.Reuse, s.Network.Mode = "a", NetworkPublic }, false},
		{"volumes", func(s *Spec) { s.Reuse, s.Volumes = "a", []VolumeMount{{Volume: "v", Path: "/v"}} }, false},
	} {
		s := Spec{}.WithDefaults(StandardDefaults())
		c.set(&s)
		err := s.Validate(StandardLimits())
		var e *Error
		if (err == nil) != c.ok || err != nil && (!errors.As(err, &e) || e.Field != "spec.reuse" || e.Hint == "") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
