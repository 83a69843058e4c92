package wire

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

var at = time.Date(2026, 3, 1, 12, 0, 0, 5000, time.UTC)

// fill sets every field of a domain value, so that a field added to the
// domain and forgotten here makes the round trip fail.
func fill(t *testing.T, v reflect.Value) {
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(at))
		return
	case sandbox.State:
		v.SetString(string(sandbox.EndedState))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1500)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		v.SetUint(2)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"k": "v"}))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i))
		}
	default:
		t.Fatalf("no value for a %s", v.Type())
	}
}

func roundTrip[D any, P proto.Message](t *testing.T, to func(D) P, from func(P) D) {
	t.Helper()
	var full, zero D
	fill(t, reflect.ValueOf(&full).Elem())
	for _, in := range []D{full, zero} {
		p := to(in)
		b, err := proto.Marshal(p)
		if err != nil {
			t.Errorf("%T: %v", in, err)
			continue
		}
		back := p.ProtoReflect().New().Interface().(P)
		if err := proto.Unmarshal(b, back); err != nil {
			t.Fatal(err)
		}
		if out := from(back); !reflect.DeepEqual(in, out) {
			t.Errorf("sent %+v\n got %+v", in, out)
		}
	}
}

func must[P, D any](t *testing.T, from func(P) (D, error)) func(P) D {
	return func(p P) D {
		d, err := from(p)
		if err != nil {
			t.Errorf("%T: %v", d, err)
		}
		return d
	}
}

func TestRoundTrips(t *testing.T) {
	roundTrip(t, Resources, func(p *covev1.Resources) sandbox.Resources { return reserved(must(t, ResourcesFrom)(p)) })
	roundTrip(t, Spec, func(p *covev1.SandboxSpec) sandbox.Spec { return ours(must(t, SpecFrom)(p)) })
	roundTrip(t, End, func(p *covev1.End) sandbox.End { return used(EndFrom(p)) })
	roundTrip(t, Stats, StatsFrom)
	roundTrip(t, func(k sandbox.ShipmentSink) *covev1.ShipmentSink { return Shipment(sandbox.Shipment{Sink: k}).Sink }, ShipmentSinkFrom)
	roundTrip(t, ProcessSpec, must(t, ProcessSpecFrom))
	roundTrip(t, ProcessEnd, func(p *covev1.ProcessEnd) sandbox.ProcessEnd {
		return usedBy(ProcessEndFrom(p))
	})
	roundTrip(t, Process, func(p *covev1.Process) sandbox.Process {
		proc := ProcessFrom(p)
		if proc.End != nil {
			*proc.End = usedBy(*proc.End)
		}
		return proc
	})
	roundTrip(t, Task, TaskFrom)
	roundTrip(t, FileInfo, FileInfoFrom)
	roundTrip(t, FileChange, FileChangeFrom)
	roundTrip(t, Image, func(p *covev1.Image) sandbox.Image {
		img := ImageFrom(p)
		if img.ID != "" { // what stays on the server's side
			all := sandbox.ImageConfig{}
			fill(nil, reflect.ValueOf(&all).Elem())
			img.Config.Authorities, img.Config.Volumes, img.Config.StopSignal, img.Config.Shell, img.Config.OnBuild, img.Config.Healthcheck = all.Authorities, all.Volumes, all.StopSignal, all.Shell, all.OnBuild, all.Healthcheck
		}
		return img
	})
	roundTrip(t, PullEvent, ProgressFrom)
	roundTrip(t, Volume, func(p *covev1.Volume) sandbox.Volume {
		v := VolumeFrom(p)
		if v.ID != "" { // what stays on the server's side
			v.Tenant, v.State = "text", "text"
		}
		return v
	})
	roundTrip(t, Template, func(p *covev1.Template) sandbox.Template {
		tpl := must(t, TemplateFrom)(p)
		if tpl.Name != "" { // what stays on the server's side
			tpl.Tenant, tpl.Spec = "text", ours(tpl.Spec)
		}
		return tpl
	})
	roundTrip(t, func(s sandbox.Snapshot) *covev1.Snapshot { return Snapshot(s) }, func(p *covev1.Snapshot) sandbox.Snapshot {
		s, err := SnapshotFrom(p)
		if err != nil {
			t.Error(err)
		}
		if s.ID != "" { // what stays on the server's side
			s.Hidden, s.Tenant, s.Spec = true, "text", ours(s.Spec)
			s.Content = sandbox.Content{Manifest: "text", Size: s.Content.Size, Stored: s.Content.Stored, Same: "text", Base: "text", Image: "text",
				Plain: "text", Needs: []string{"text", "text"}, Build: s.Content.Build, KernelClass: "text", Replay: "text", Clock: at}
		}
		return s
	})

	var sb sandbox.Sandbox
	fill(t, reflect.ValueOf(&sb).Elem())
	sb.Spec.NoTimeout = false                                                           // it has one
	sb.Tenant, sb.Unclaimed, sb.Spec.Authority, sb.Spec.KernelClass = "", false, "", "" // stay on the server's side
	sb.End.Usage, sb.Spec.Resources.Reserve, sb.Spec.Mounts, sb.Origin = nil, 0, nil, sandbox.Origin{}
	if got, err := SandboxFrom(Sandbox(sb)); err != nil || !reflect.DeepEqual(sb, got) {
		t.Errorf("sent %+v\n got %+v, %v", sb, got, err)
	}
}

// usedBy is the end of a process with what stays on the server's side: steps tell it.
func usedBy(e sandbox.ProcessEnd) sandbox.ProcessEnd {
	if e.End = used(e.End); e.Cause != "" {
		e.EgressSent, e.EgressReceived = 1500, 1500
	}
	return e
}

// used is an end with what stays on the server's side.
func used(e sandbox.End) sandbox.End {
	if e.Cause != "" {
		e.Usage = &sandbox.Usage{}
		fill(nil, reflect.ValueOf(e.Usage).Elem())
	}
	return e
}

// ours is a spec with what stays on the server's side.
func ours(s sandbox.Spec) sandbox.Spec {
	if s.Image != "" {
		s.Mounts = []sandbox.DirectoryMount{{Manifest: "text", Path: "text"}, {Manifest: "text", Path: "text"}}
		s.Authority, s.KernelClass, s.NoTimeout = "text", "text", true
		s.Resources = reserved(s.Resources)
	}
	return s
}

// reserved is the same of a size.
func reserved(r sandbox.Resources) sandbox.Resources {
	if r.Memory != 0 {
		r.Reserve = r.Memory
	}
	return r
}

// A secret comes back whole but for its value, which has no way out.
func TestSecretWithoutItsValue(t *testing.T) {
	in := sandbox.Secret{Name: "n", Hosts: []string{"h"}, Header: "H", Format: "{}", URL: true, Body: true, AllowHTTP: true, Env: "E", Placeholder: "p",
		Labels: map[string]string{"team": "rl"}, Version: 3, CreatedAt: at, UpdatedAt: at, Value: sandbox.NewSecretValue("the value")}
	p := Secret(in)
	if b, err := proto.Marshal(p); err != nil || strings.Contains(string(b), "value") {
		t.Errorf("%q, %v", b, err)
	}
	in.Value = sandbox.SecretValue{}
	if out := SecretFrom(p); !reflect.DeepEqual(in, out) {
		t.Errorf("sent %+v\n got %+v", in, out)
	}
}

func TestEventsRoundTrip(t *testing.T) {
	for _, ev := range []sandbox.ProcessEvent{
		{Started: &sandbox.ProcessStarted{ExecID: "e", PID: 7, Replayed: true}},
		{Output: &sandbox.Output{Stream: sandbox.Stdout, Offset: 3, Data: []byte("\xff\x00")}},
		{Output: &sandbox.Output{Stream: sandbox.Stderr, Data: []byte("x")}},
		{Output: &sandbox.Output{Stream: sandbox.PTYOut, Data: []byte("x")}},
		{Lost: &sandbox.Lost{From: 1, To: 9}},
		{End: &sandbox.ProcessEnd{End: sandbox.End{Cause: sandbox.Exited, ExitCode: 3, At: at}, OutputBytes: 9, Duration: time.Second}},
	} {
		got, ok := EventFrom(Event(ev))
		if !ok || !reflect.DeepEqual(ev, got) {
			t.Errorf("sent %+v, got %+v", ev, got)
		}
	}
	if _, ok := EventFrom(KeepAlive()); ok {
		t.Error("a keep-alive is no event")
	}
	for s, p := range map[sandbox.Stream]covev1.OutputStream{
		sandbox.Stdout: covev1.OutputStream_OUTPUT_STREAM_STDOUT,
		sandbox.Stderr: covev1.OutputStream_OUTPUT_STREAM_STDERR,
		sandbox.PTYOut: covev1.OutputStream_OUTPUT_STREAM_PTY,
	} {
		if covev1.OutputStream(s) != p {
			t.Errorf("stream %d is not %s", s, p)
		}
	}
}

func TestEveryStateHasANumber(t *testing.T) {
	for _, s := range []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Ending, sandbox.EndedState} {
		if got, err := StateFrom(State(s)); err != nil || got != s {
			t.Errorf("%s became %s, %v", s, got, err)
		}
	}
}

// What protobuf lets through and the domain cannot hold is refused by name.
func TestBadValuesNameTheirField(t *testing.T) {
	spec := func(f func(*covev1.SandboxSpec)) error {
		s := &covev1.SandboxSpec{Resources: &covev1.Resources{}}
		f(s)
		_, err := SpecFrom(s)
		return err
	}
	size := func(rows, cols uint32) error {
		_, err := TermSizeFrom("pty", &covev1.TermSize{Rows: rows, Cols: cols})
		return err
	}
	_, stateErr := StateFrom(99)
	_, readyErr := TemplateFrom(&covev1.Template{ReadyTimeout: &durationpb.Duration{Seconds: 1, Nanos: -1}})
	for field, errs := range map[string][]error{
		"spec.resources.cpu": {
			spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = math.NaN() }),
			spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = math.Inf(1) }),
			spec(func(s *covev1.SandboxSpec) { s.Resources.Cpu = 1e-9 }),
		},
		"spec.timeout":      {spec(func(s *covev1.SandboxSpec) { s.Timeout = &durationpb.Duration{Seconds: 1, Nanos: -1} })},
		"spec.idle_timeout": {spec(func(s *covev1.SandboxSpec) { s.IdleTimeout = &durationpb.Duration{Seconds: math.MaxInt64} })},
		"pty.rows":          {size(0, 1), size(65536, 1)},
		"pty.cols":          {size(1, 0), size(1, 1<<20)},
		"states":            {stateErr},
		"ready_timeout":     {readyErr},
	} {
		for _, err := range errs {
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Class != sandbox.Invalid || e.Field != field {
				t.Errorf("want an invalid %s, got %v", field, err)
			}
		}
	}
}

// Names made inside a sandbox need not be UTF-8, and protobuf insists.
func TestHostileNamesMarshal(t *testing.T) {
	bad := "a\xffb"
	for _, m := range []proto.Message{
		FileInfo(sandbox.FileInfo{Path: bad, Name: bad, Owner: bad, Group: bad, Target: bad}),
		Task(sandbox.Task{Command: bad}),
		Process(sandbox.Process{Args: []string{"ok", bad, bad}}),
		FileChange(sandbox.FileChange{Path: bad}),
		Image(sandbox.Image{Config: sandbox.ImageConfig{Env: []string{bad}, Cmd: []string{bad}, User: bad}}),
		End(sandbox.End{Detail: bad}),
	} {
		if _, err := proto.Marshal(m); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
}
