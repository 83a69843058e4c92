package server

import (
	"errors"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/egress/secret"
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

// partsOfSpec is what a spec needs besides the right to make a sandbox. Whoever
// has a sandbox's id may name it with any scope that acts on sandboxes.
func partsOfSpec(s sandbox.Spec) (ps []part) {
	// The default image is everybody's, and clients name it.
	if s.Image != "" && s.Image != sandbox.StandardDefaults().Image {
		ps = append(ps, reads("spec.image", "images"))
	}
	if s.Snapshot != "" {
		ps = append(ps, reads("spec.snapshot", "snapshots"))
	}
	if s.Template != "" {
		ps = append(ps, reads("spec.template", "templates"))
	}
	for _, v := range s.Volumes {
		if v.Mode == sandbox.VolumeReadOnly {
			ps = append(ps, reads("spec.volumes", "volumes"))
		} else {
			ps = append(ps, writes("spec.volumes", "volumes"))
		}
	}
	if len(s.Secrets) > 0 {
		ps = append(ps, reads("spec.secrets", "secrets"))
	}
	if s.Ingress.Public {
		ps = append(ps, writes("spec.ingress.public", "ports"))
	}
	return append(ps, partsOfNetwork("spec.network", s.Network)...)
}

func partsOfNetwork(field string, n sandbox.Network) (ps []part) {
	if n.Record != nil {
		ps = append(ps, writes(field+".record", "recordings"))
	}
	if n.Replay != nil {
		ps = append(ps, reads(field+".replay", "recordings"))
	}
	// A header may say where a secret goes that has no hosts of its own.
	if slices.ContainsFunc(n.Headers, func(h sandbox.NetworkHeader) bool { return strings.Contains(h.Value, secret.Prefix) }) {
		ps = append(ps, reads(field+".headers", "secrets"))
	}
	return ps
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
