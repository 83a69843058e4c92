package server

import (
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// refusedWithout makes a key of red's with everything but a scope, and with its reading half
// if it may read, and says whether a request is refused for its scopes.
func (s *shared) refusedWithout(scope string, read bool, m protoreflect.MethodDescriptor, msg proto.Message) bool {
	s.Helper()
	who := "without " + scope
	if read {
		who += " but its reading"
	}
	if s.keys[who] == "" {
		has := slices.DeleteFunc(slices.Clone(sandbox.ScopeNames), func(name string) bool { return name == scope })
		if read {
			has = append(has, scope+":read")
		}
		s.keys[who] = s.key(s.red, &covev1.CreateKeyRequest{Name: "scoped", Role: "developer", Scopes: has})
	}
	b, err := protojson.Marshal(msg)
	if err != nil {
		s.Fatal(err)
	}
	class, body := s.call(who, m, "/"+apiPackage+"."+string(m.Parent().Name())+"/"+string(m.Name()), string(b))
	return class == "permission_denied" && strings.Contains(body, "scopes")
}

// What a request names needs the scopes of its kind, and nothing else does.
func TestNamedThingsNeedTheirScopes(t *testing.T) {
	s := newShared(t, func(c *Config) { c.SSH, c.Ports = testSigner{}, testGate{} })
	inputs := map[protoreflect.FullName]protoreflect.MethodDescriptor{}
	for _, m := range methods() {
		inputs[m.Input().FullName()] = m
	}
	create := func(s *covev1.SandboxSpec) proto.Message { return &covev1.CreateSandboxRequest{Spec: s} }
	volume := func(mode string) *covev1.SandboxSpec {
		return &covev1.SandboxSpec{Volumes: []*covev1.VolumeMount{{Volume: "v", Mode: mode}}}
	}
	for _, c := range []struct {
		msg  proto.Message
		want string // the least scopes
	}{
		{&covev1.CreateSandboxRequest{}, ""},
		{create(&covev1.SandboxSpec{Image: "base", Network: &covev1.Network{Mode: "public"}, Env: map[string]string{"A": "b"}}), ""},
		{create(&covev1.SandboxSpec{Image: "mine"}), "images:read"},
		{create(&covev1.SandboxSpec{Snapshot: "s"}), "snapshots:read"},
		{create(&covev1.SandboxSpec{Template: "t"}), "templates:read"},
		{create(volume("ro")), "volumes:read"},
		{create(volume("rw")), "volumes"},
		{create(volume("")), "volumes"},
		{create(volume("shared")), "volumes"},
		{create(&covev1.SandboxSpec{Secrets: []string{"s"}}), "secrets:read"},
		{create(&covev1.SandboxSpec{Network: &covev1.Network{Record: &covev1.NetworkRecord{}}}), "recordings"},
		{create(&covev1.SandboxSpec{Network: &covev1.Network{Replay: &covev1.NetworkReplay{}}}), "recordings:read"},
		{create(&covev1.SandboxSpec{Template: "t", Secrets: []string{"s"}, Network: &covev1.Network{Record: &covev1.NetworkRecord{}}}), "templates:read secrets:read recordings"},
		{&covev1.BuildTemplateRequest{Spec: &covev1.SandboxSpec{Snapshot: "s"}, Start: "x", ReadyCommand: "y"}, "snapshots:read processes processes"},
		{&covev1.BuildTemplateRequest{Name: "t", ReadyPort: 80, ReadyTimeout: durationpb.New(time.Millisecond)}, ""},
		{&covev1.ForkRequest{Id: "a", Count: 3}, ""},
		{&covev1.ForkRequest{Snapshot: "s"}, "snapshots:read"},
		{&covev1.RestoreRequest{Id: "a", Snapshot: "s"}, "snapshots:read"},
		{&covev1.SetNetworkRequest{Id: "a", Network: &covev1.Network{Mode: "none"}}, ""},
		{&covev1.SetNetworkRequest{Id: "a", Network: &covev1.Network{Record: &covev1.NetworkRecord{}}}, "recordings"},
		{&covev1.SetNetworkRequest{Id: "a", Network: &covev1.Network{Replay: &covev1.NetworkReplay{}}}, "recordings:read"},
		{&covev1.SetSecretsRequest{Id: "a", Secrets: []string{"s"}}, "secrets:read"},
		{&covev1.SetSecretsRequest{Id: "a"}, ""}, // taking them away names none
		{&covev1.WaitReadyRequest{SandboxId: "a", Port: 80}, ""},
		{&covev1.WaitReadyRequest{SandboxId: "a", Command: "true"}, "processes"},
		{&covev1.SignSshRequest{SandboxId: "a"}, "processes files"},
		{&covev1.CreateSnapshotRequest{Sandbox: "a"}, ""},
		{&covev1.CreateSnapshotRequest{Sandbox: "a", Stop: true}, "sandboxes"},
		{&covev1.MountSnapshotRequest{Sandbox: "a", Snapshot: "s"}, "files"},
		{&covev1.CreateVolumeRequest{Name: "v"}, ""},
		{&covev1.CreateVolumeRequest{Name: "v", Snapshot: "s"}, "snapshots:read"},
		{&covev1.SnapshotVolumeRequest{Name: "v"}, "snapshots"},
		{&covev1.StartProcessRequest{SandboxId: "a", Process: &covev1.ProcessSpec{Command: "x"}}, ""},
		{&covev1.PortUrlRequest{SandboxId: "a"}, ""},
	} {
		m := inputs[c.msg.ProtoReflect().Descriptor().FullName()]
		own := operations[nativeProcedures["/"+apiPackage+"."+string(m.Parent().Name())+"/"+string(m.Name())]].scope
		want := strings.Fields(c.want)
		for _, scope := range sandbox.ScopeNames {
			if scope == own {
				continue
			}
			writes, reads := slices.Contains(want, scope), slices.Contains(want, scope+":read")
			if got := s.refusedWithout(scope, false, m, c.msg); got != (writes || reads) {
				t.Errorf("%T %v without %s: refused %t", c.msg, c.msg, scope, got)
			}
			if writes || reads {
				if got := s.refusedWithout(scope, true, m, c.msg); got != writes {
					t.Errorf("%T %v with only %s:read: refused %t", c.msg, c.msg, scope, got)
				}
			}
		}
	}
}

// Every field of every request that names a thing of a kind, or is a command, has
// a part of that kind: a new method cannot forget it.
func TestEveryNamedThingIsAPart(t *testing.T) {
	s := newShared(t, func(c *Config) { c.SSH, c.Ports = testSigner{}, testGate{} })
	kinds := map[protoreflect.Name]string{"image": "images", "snapshot": "snapshots", "template": "templates", "volumes": "volumes", "secrets": "secrets",
		"record": "recordings", "replay": "recordings", "command": "processes", "start": "processes", "ready_command": "processes"}
	found := 0
	for name, m := range methods() {
		own := strings.ToLower(string(m.Parent().Name()))
		typ, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
		if err != nil {
			t.Fatal(err)
		}
		var walk func(d protoreflect.MessageDescriptor, path []protoreflect.FieldDescriptor)
		walk = func(d protoreflect.MessageDescriptor, path []protoreflect.FieldDescriptor) {
			for i := range d.Fields().Len() {
				f := d.Fields().Get(i)
				here := append(slices.Clone(path), f)
				if kind := kinds[f.Name()]; kind != "" && kind != own {
					found++
					msg := typ.New()
					set(msg, here)
					if !s.refusedWithout(kind, false, m, msg.Interface()) {
						t.Errorf("%s: %v is open without the scope %s", name, msg, kind)
					}
				}
				if f.Kind() == protoreflect.MessageKind && !f.IsMap() && !f.IsList() && f.Message().ParentFile().Package() == apiPackage {
					walk(f.Message(), here)
				}
			}
		}
		walk(m.Input(), nil)
	}
	if found < 20 {
		t.Errorf("only %d fields were found", found)
	}
}

// set makes a field of a message, along a path, anything but empty.
func set(m protoreflect.Message, path []protoreflect.FieldDescriptor) {
	f := path[0]
	switch {
	case len(path) > 1:
		set(m.Mutable(f).Message(), path[1:])
	case f.IsList() && f.Kind() == protoreflect.MessageKind:
		l := m.Mutable(f).List()
		l.Append(l.NewElement())
	case f.IsList():
		m.Mutable(f).List().Append(protoreflect.ValueOfString("x"))
	case f.Kind() == protoreflect.MessageKind:
		m.Set(f, m.NewField(f))
	default:
		m.Set(f, protoreflect.ValueOfString("x"))
	}
}

// A key with scopes does nothing through one kind that it could not do through
// another: every call is tried with the call's own scope, and with what it names
// besides.
func TestScopesDoNotLeak(t *testing.T) {
	s := newShared(t, func(c *Config) { c.SSH, c.Ports = testSigner{}, testGate{} })
	for name, c := range map[string]struct {
		call, msg string
		short     string // scopes that do not do
		enough    string
		field     string
	}{
		"a command waited for":   {"Ports/WaitReady", `{"sandboxId":"$BOX","command":"touch /evil"}`, "ports sandboxes:read processes:read", "ports processes", "command"},
		"SSH":                    {"Ports/SignSsh", `{"sandboxId":"$BOX","publicKey":"x"}`, "ports sandboxes:read", "ports processes files", ""},
		"SSH without files":      {"Ports/SignSsh", `{"sandboxId":"$BOX","publicKey":"x"}`, "ports processes files:read", "ports processes files", ""},
		"SSH without ports":      {"Ports/SignSsh", `{"sandboxId":"$BOX","publicKey":"x"}`, "processes files", "ports processes files", ""},
		"secrets":                {"Sandboxes/Create", `{"spec":{"network":{"mode":"public"},"secrets":["redtoken"]}}`, "sandboxes", "sandboxes secrets:read", "spec.secrets"},
		"a recording":            {"Sandboxes/Create", `{"spec":{"network":{"mode":"public","record":{"name":"r"}}}}`, "sandboxes recordings:read", "sandboxes recordings", "spec.network.record"},
		"a replay":               {"Sandboxes/Create", `{"spec":{"network":{"replay":{"recording":"redtape"}}}}`, "sandboxes", "sandboxes recordings:read", "spec.network.replay"},
		"a snapshot":             {"Sandboxes/Create", `{"spec":{"snapshot":"red-memory"}}`, "sandboxes", "sandboxes snapshots:read", "spec.snapshot"},
		"a template":             {"Sandboxes/Create", `{"spec":{"template":"redpy"}}`, "sandboxes", "sandboxes templates:read", "spec.template"},
		"a volume":               {"Sandboxes/Create", `{"spec":{"volumes":[{"volume":"data","path":"/d"}]}}`, "sandboxes volumes:read", "sandboxes volumes", "spec.volumes"},
		"an image":               {"Sandboxes/Create", `{"spec":{"image":"mine"}}`, "sandboxes", "sandboxes images:read", "spec.image"},
		"a fork of a snapshot":   {"Sandboxes/Fork", `{"snapshot":"red-memory","count":1}`, "sandboxes", "sandboxes snapshots:read", "snapshot"},
		"a restore":              {"Sandboxes/Restore", `{"id":"$BOX","snapshot":"red-memory"}`, "sandboxes", "sandboxes snapshots:read", "snapshot"},
		"secrets later":          {"Sandboxes/SetSecrets", `{"id":"$BOX","secrets":["redtoken"]}`, "sandboxes", "sandboxes secrets:read", "secrets"},
		"a template's start":     {"Templates/Build", `{"name":"t","start":"touch /evil"}`, "templates", "templates processes", "start"},
		"a snapshot that stops":  {"Snapshots/Create", `{"sandbox":"$BOX","kind":"filesystem","stop":true}`, "snapshots", "snapshots sandboxes", "stop"},
		"nothing of another":     {"Sandboxes/Create", `{"spec":{"image":"base"}}`, "files", "sandboxes", ""},
		"a snapshot of a volume": {"Volumes/Snapshot", `{"name":"data"}`, "volumes", "volumes snapshots", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := methods()[c.call]
			msg := s.fill(c.msg, nil)
			s.keys["short"] = s.key(s.red, &covev1.CreateKeyRequest{Name: "short", Role: "developer", Scopes: strings.Fields(c.short)})
			before := s.fingerprint()
			class, body := s.call("short", m, "/"+apiPackage+"."+c.call, msg)
			if class != "permission_denied" || !strings.Contains(body, "scopes") || c.field != "" && !strings.Contains(body, c.field) {
				t.Errorf("with %s: %q %s", c.short, class, body)
			}
			if now := s.fingerprint(); now != before {
				t.Fatal("something was done")
			}
			s.keys["enough"] = s.key(s.red, &covev1.CreateKeyRequest{Name: "enough", Role: "developer", Scopes: strings.Fields(c.enough)})
			if strings.Contains(c.msg, "stop") {
				return // it would take the sandbox of the others away
			}
			if class, body := s.call("enough", m, "/"+apiPackage+"."+c.call, msg); class == "permission_denied" {
				t.Errorf("with %s: %s", c.enough, body)
			}
		})
	}

	// A certificate that was signed is no way around: the login asks again.
	for scopes, may := range map[string]bool{"": true, "ports processes files": true, "ports": false, "ports processes": false, "processes files": false} {
		s.key(s.red, &covev1.CreateKeyRequest{Name: "ssh", Role: "developer", Scopes: strings.Fields(scopes)})
		if _, err := s.server.Reach().Login(t.Context(), s.box, s.keyID, "192.0.2.1:9"); (err == nil) != may {
			t.Errorf("SSH with the scopes %q: %v", scopes, err)
		}
	}
	// A refusal is on record, and says what is missing.
	denied := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "denied", Role: "developer", Scopes: []string{"sandboxes"}}))
	_, err := denied.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Secrets: []string{"redtoken"}}}))
	if e := wantError(t, err, sandbox.ErrDenied, "scopes"); e.Field != "spec.secrets" || !strings.Contains(e.Hint, "secrets:read") {
		t.Errorf("field %q, hint %q", e.Field, e.Hint)
	}
	log := s.auditLog(s.red, &covev1.AuditRequest{})
	if last := log[len(log)-1]; last.Op != "sandbox.create" || last.Outcome != "permission_denied" {
		t.Errorf("the last entry is %v", last)
	}
}

type testSigner struct{}

func (testSigner) Sign(id, by, publicKey string, until time.Time) (string, error) { return "cert", nil }
func (testSigner) HostKey() string                                                { return "host" }
func (testSigner) Port() int                                                      { return 22 }
