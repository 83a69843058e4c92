package server

import (
	"errors"
	"strings"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// part is something in a request that the scope of the call itself does not
// cover: a thing of another kind that it names, or what otherwise another kind's
// calls do.
type part struct {
	field string // "" for the call as a whole
	need
}

func reads(field, scope string) part  { return part{field, need{sandbox.ReadonlyRole, scope}} }
func writes(field, scope string) part { return part{field, need{sandbox.DeveloperRole, scope}} }

// sshParts is what a login can do besides reaching ports: a shell, and sftp.
var sshParts = []part{writes("", "processes"), writes("", "files")}

// partsOf is what a message needs besides the right to its method. Whoever has a
// sandbox's id may name it with any scope that acts on sandboxes.
func partsOf(msg any) (ps []part) {
	when := func(is bool, p part) {
		if is {
			ps = append(ps, p)
		}
	}
	switch m := msg.(type) {
	case *covev1.CreateSandboxRequest:
		ps = partsOfSpec(m.GetSpec())
	case *covev1.BuildTemplateRequest:
		ps = partsOfSpec(m.GetSpec())
		when(m.GetStart() != "", writes("start", "processes"))
		when(m.GetReadyCommand() != "", writes("ready_command", "processes"))
	case *covev1.ForkRequest:
		when(m.GetSnapshot() != "", reads("snapshot", "snapshots"))
	case *covev1.RestoreRequest:
		when(m.GetSnapshot() != "", reads("snapshot", "snapshots"))
	case *covev1.SetNetworkRequest:
		ps = partsOfNetwork("network", m.GetNetwork())
	case *covev1.SetSecretsRequest:
		when(len(m.GetSecrets()) > 0, reads("secrets", "secrets"))
	case *covev1.WaitReadyRequest:
		when(m.GetCommand() != "", writes("command", "processes"))
	case *covev1.SignSshRequest:
		ps = sshParts
	case *covev1.CreateSnapshotRequest:
		when(m.GetStop(), writes("stop", "sandboxes"))
	case *covev1.MountSnapshotRequest:
		ps = []part{writes("path", "files")}
	case *covev1.CreateVolumeRequest:
		when(m.GetSnapshot() != "", reads("snapshot", "snapshots"))
	case *covev1.SnapshotVolumeRequest:
		ps = []part{writes("", "snapshots")}
	}
	return ps
}

func partsOfSpec(s *covev1.SandboxSpec) (ps []part) {
	// The default image is everybody's, and clients name it.
	if image := s.GetImage(); image != "" && image != sandbox.StandardDefaults().Image {
		ps = append(ps, reads("spec.image", "images"))
	}
	if s.GetSnapshot() != "" {
		ps = append(ps, reads("spec.snapshot", "snapshots"))
	}
	if s.GetTemplate() != "" {
		ps = append(ps, reads("spec.template", "templates"))
	}
	for _, v := range s.GetVolumes() {
		if v.GetMode() == string(sandbox.VolumeReadOnly) {
			ps = append(ps, reads("spec.volumes", "volumes"))
		} else {
			ps = append(ps, writes("spec.volumes", "volumes"))
		}
	}
	if len(s.GetSecrets()) > 0 {
		ps = append(ps, reads("spec.secrets", "secrets"))
	}
	return append(ps, partsOfNetwork("spec.network", s.GetNetwork())...)
}

func partsOfNetwork(field string, n *covev1.Network) (ps []part) {
	if n.GetRecord() != nil {
		ps = append(ps, writes(field+".record", "recordings"))
	}
	if n.GetReplay() != nil {
		ps = append(ps, reads(field+".replay", "recordings"))
	}
	return ps
}

// checkParts refuses a message with a part that is outside the key's scopes.
func checkParts(k store.Key, procedure string, msg any) error {
	return allowsAll(k, strings.TrimPrefix(procedure, "/"+apiPackage+"."), partsOf(msg))
}

func allowsAll(k store.Key, what string, ps []part) error {
	for _, p := range ps {
		name := what
		if p.field != "" {
			name = "this" // the field is named before it
		}
		var e *sandbox.Error
		if errors.As(p.allows(k, name), &e) {
			e.Field = p.field
			return e
		}
	}
	return nil
}
