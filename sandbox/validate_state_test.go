package sandbox

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func mounts(paths ...string) (out []VolumeMount) {
	for i, p := range paths {
		out = append(out, VolumeMount{Volume: fmt.Sprint("v", i), Path: p})
	}
	return out
}

func TestSpecRefusesWrongStateFields(t *testing.T) {
	many := make([]string, MaxVolumes+1)
	for i := range many {
		many[i] = fmt.Sprint("/v", i)
	}
	for _, c := range []struct {
		field, says string
		spoil       func(*Spec)
	}{
		{"spec.on_idle", "kill and pause", func(s *Spec) { s.OnIdle = "sleep" }},
		{"spec.on_timeout", "kill and pause", func(s *Spec) { s.OnTimeout = "sleep" }},
		{"spec.on_idle", "idle_timeout", func(s *Spec) { s.OnIdle = IdlePause }},
		{"spec.volumes", "at most 16", func(s *Spec) { s.Volumes = mounts(many...) }},
		{"spec.volumes[0].volume", "lower-case", func(s *Spec) { s.Volumes = []VolumeMount{{Volume: "A", Path: "/a"}} }},
		{"spec.volumes[0].path", "absolute", func(s *Spec) { s.Volumes = mounts("data") }},
		{"spec.volumes[0].path", `"/b"`, func(s *Spec) { s.Volumes = mounts("/a/../b") }},
		{"spec.volumes[0].path", "clean", func(s *Spec) { s.Volumes = mounts("/a/") }},
		{"spec.volumes[0].path", "root", func(s *Spec) { s.Volumes = mounts("/") }},
		{"spec.volumes[0].path", "kernel", func(s *Spec) { s.Volumes = mounts("/proc") }},
		{"spec.volumes[0].path", "kernel", func(s *Spec) { s.Volumes = mounts("/dev/shm") }},
		{"spec.volumes[0].path", "kernel", func(s *Spec) { s.Volumes = mounts("/sys/fs/cgroup") }},
		{"spec.volumes[1].path", "volume 0", func(s *Spec) { s.Volumes = mounts("/a", "/a") }},
		{"spec.volumes[0].mode", "shared", func(s *Spec) { s.Volumes = []VolumeMount{{Volume: "a", Path: "/a", Mode: "w"}} }},
	} {
		s := Spec{}.WithDefaults(StandardDefaults())
		c.spoil(&s)
		checkRefusal(t, s.Validate(StandardLimits()), c.field, c.says)
	}
	s := Spec{OnIdle: IdlePause, IdleTimeout: time.Minute, Volumes: mounts(many[:MaxVolumes]...)}.WithDefaults(StandardDefaults())
	s.Volumes[0] = VolumeMount{Volume: "a.b_c-1", Path: "/process/x", Mode: VolumeShared}
	if err := s.Validate(StandardLimits()); err != nil {
		t.Error(err)
	}
}

func TestASpecStartsFromOneThing(t *testing.T) {
	for _, c := range []struct {
		spec        Spec
		field, says string // "" = accepted
	}{
		{Spec{}, "", ""},
		{Spec{Image: "base"}, "", ""},
		{Spec{Snapshot: "warm"}, "", ""},
		{Spec{Snapshot: "abc234"}, "", ""},
		{Spec{Template: "py"}, "", ""},
		{Spec{Template: "py@12"}, "", ""},
		{Spec{Image: "base", Snapshot: "a"}, "spec.image", "snapshot"},
		{Spec{Image: "base", Template: "a"}, "spec.image", "template"},
		{Spec{Snapshot: "a", Template: "a"}, "spec.template", "at most one"},
		{Spec{Snapshot: "a b"}, "spec.snapshot", "63"},
		{Spec{Snapshot: "a/b"}, "spec.snapshot", "63"},
		{Spec{Snapshot: "-a"}, "spec.snapshot", "first"},
		{Spec{Template: "@1"}, "spec.template", "63"},
		{Spec{Template: "py@"}, "spec.template", "py@1"},
		{Spec{Template: "py@0"}, "spec.template", "from 1"},
		{Spec{Template: "py@-1"}, "spec.template", ""},
		{Spec{Template: "py@+1"}, "spec.template", ""},
		{Spec{Template: "py@01"}, "spec.template", ""},
		{Spec{Template: "py@1@2"}, "spec.template", ""},
		{Spec{Template: "py@99999999999999999999"}, "spec.template", ""},
		{Spec{Template: strings.Repeat("a", 64)}, "spec.template", ""},
	} {
		err := c.spec.ValidateSource()
		if c.field == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.spec, err)
			}
			continue
		}
		checkRefusal(t, err, c.field, c.says)
	}
	if got := (Spec{Snapshot: "a"}).WithDefaults(StandardDefaults()).Image; got != "" {
		t.Errorf("the image of what starts from a snapshot was filled in: %q", got)
	}
}

func TestTemplateRefs(t *testing.T) {
	for ref, want := range map[string]TemplateRef{"py": {Name: "py"}, "a.b-c_D@7": {Name: "a.b-c_D", Version: 7}, "py:v1.0": {Name: "py", Tag: "v1.0"}} {
		if got, err := ParseTemplateRef("name", ref); err != nil || got != want {
			t.Errorf("%s: %+v, %v", ref, got, err)
		}
	}
	for _, bad := range []string{"py:", ":v1", "py@1:v1", "py:a:b", "py@0"} {
		if _, err := ParseTemplateRef("name", bad); err == nil {
			t.Errorf("%s is a template", bad)
		}
	}
	if got := (Template{Name: "py", Version: 3}).Ref(); got != "py@3" {
		t.Error(got)
	}
}

func TestSnapshotKinds(t *testing.T) {
	checkRefusal(t, ValidateSnapshotKind("disk", ""), "kind", "memory, filesystem and directory")
	checkRefusal(t, ValidateSnapshotKind("", ""), "kind", "")
	checkRefusal(t, ValidateSnapshotKind(DirectorySnapshot, ""), "path", "absolute")
	checkRefusal(t, ValidateSnapshotKind(MemorySnapshot, "/a"), "path", "directory")
	if err := first(ValidateSnapshotKind(MemorySnapshot, ""), ValidateSnapshotKind(FilesystemSnapshot, ""), ValidateSnapshotKind(DirectorySnapshot, "/")); err != nil {
		t.Error(err)
	}
}

func TestStateNumbers(t *testing.T) {
	for _, c := range []struct {
		err         error
		field, says string
	}{
		{ValidateFork(0, 0), "count", "256"},
		{ValidateFork(257, 0), "count", "256"},
		{ValidateFork(3, 4), "min_ready", "3"},
		{ValidateFork(3, -1), "min_ready", ""},
		{ValidateVolumeSize("size", 16*MiB-1), "size", "16MiB"},
		{ValidateVolumeSize("size", -1), "size", "16MiB"},
		{ValidateVolumeSize("size", 16<<40+1), "size", "16TiB"},
		{Readiness{Command: "x", Port: 1}.Validate(), "ready_port", "at most one"},
		{Readiness{Port: 65536}.Validate(), "ready_port", "65535"},
		{Readiness{Port: -1}.Validate(), "ready_port", "65535"},
		{Readiness{Timeout: -1}.Validate(), "ready_timeout", "1h"},
		{Readiness{Timeout: 2 * time.Hour}.Validate(), "ready_timeout", "1h"},
		{Readiness{Command: "a\x00"}.Validate(), "ready_command", "NUL"},
		{ValidateStartCommand("start", strings.Repeat("a", 64<<10+1)), "start", "64KiB"},
		{ValidateRetention(0, nil, 0, 0), "keep_last", "no rule"},
		{ValidateRetention(0, map[string]string{"a": "b"}, 0, 0), "keep_last", "no rule"},
		{ValidateRetention(-1, nil, 0, 0), "keep_last", ""},
		{ValidateRetention(0, nil, -1, 0), "max_bytes", ""},
		{ValidateRetention(0, nil, 0, -1), "max_age", ""},
		{ValidateRetention(1, map[string]string{"-": ""}, 0, 0), "keep_labels", ""},
	} {
		checkRefusal(t, c.err, c.field, c.says)
	}
	if err := first(ValidateFork(1, 0), ValidateFork(256, 256), ValidateVolumeSize("size", 16*MiB), ValidateVolumeSize("size", 16<<40), Readiness{}.Validate(),
		Readiness{Port: 65535, Timeout: time.Hour}.Validate(), ValidateRetention(1, nil, 1, time.Second)); err != nil {
		t.Error(err)
	}
}
