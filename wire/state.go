package wire

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Snapshot leaves out where and how a node keeps it: that is the node's and the
// store's.
func Snapshot(s sandbox.Snapshot) *covev1.Snapshot {
	return &covev1.Snapshot{
		Id:        s.ID,
		Name:      s.Name,
		Kind:      string(s.Kind),
		Labels:    s.Labels,
		Sandbox:   s.Sandbox,
		Parent:    s.Lineage.Parent,
		Ancestors: s.Lineage.Ancestors,
		Spec:      Spec(s.Spec),
		ImageId:   s.ImageID,
		Path:      utf8String(s.Path),
		Node:      s.Node,
		CreatedAt: Time(s.CreatedAt),
		ExpiresAt: Time(s.ExpiresAt),
		Size:      s.Content.Size,
		Stored:    s.Content.Stored,
		Build:     utf8String(s.Content.Build),
	}
}

// SnapshotFrom reads what a server sent.
func SnapshotFrom(p *covev1.Snapshot) (sandbox.Snapshot, error) {
	spec, err := SpecFrom(p.GetSpec())
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	return sandbox.Snapshot{
		ID:        p.GetId(),
		Name:      p.GetName(),
		Kind:      sandbox.SnapshotKind(p.GetKind()),
		Labels:    p.GetLabels(),
		Sandbox:   p.GetSandbox(),
		Lineage:   sandbox.Lineage{Parent: p.GetParent(), Ancestors: p.GetAncestors()},
		Spec:      spec,
		ImageID:   p.GetImageId(),
		Path:      p.GetPath(),
		Node:      p.GetNode(),
		CreatedAt: TimeFrom(p.GetCreatedAt()),
		ExpiresAt: TimeFrom(p.GetExpiresAt()),
		Content:   sandbox.Content{Size: p.GetSize(), Stored: p.GetStored(), Build: p.GetBuild()},
	}, nil
}

// SnapshotEvent is one step of taking a snapshot, without it.
func SnapshotEvent(p sandbox.Progress) *covev1.CreateSnapshotEvent {
	return &covev1.CreateSnapshotEvent{Step: p.Step, Done: p.Done, Total: p.Total}
}

// Template has no size: that is its snapshot's, which the caller knows.
func Template(t sandbox.Template) *covev1.Template {
	return &covev1.Template{
		Name:         t.Name,
		Version:      t.Version,
		Spec:         Spec(t.Spec),
		Start:        t.Start,
		ReadyCommand: t.Ready.Command,
		ReadyPort:    int32(t.Ready.Port),
		ReadyTimeout: Duration(t.Ready.Timeout),
		Snapshot:     t.Snapshot,
		CreatedAt:    Time(t.CreatedAt),
		BuildTime:    Duration(t.BuildTime),
		Tags:         t.Tags,
	}
}

// TemplateFrom reads what a server sent.
func TemplateFrom(p *covev1.Template) (sandbox.Template, error) {
	spec, err := SpecFrom(p.GetSpec())
	if err != nil {
		return sandbox.Template{}, err
	}
	ready, err := ReadinessFrom(p)
	if err != nil {
		return sandbox.Template{}, err
	}
	took, err := DurationFrom("build_time", p.GetBuildTime())
	if err != nil {
		return sandbox.Template{}, err
	}
	return sandbox.Template{
		Name:      p.GetName(),
		Version:   p.GetVersion(),
		Spec:      spec,
		Start:     p.GetStart(),
		Ready:     ready,
		Snapshot:  p.GetSnapshot(),
		CreatedAt: TimeFrom(p.GetCreatedAt()),
		BuildTime: took,
		Tags:      p.GetTags(),
	}, nil
}

// ReadinessFrom reads the fields a template and the request to build one share.
func ReadinessFrom(p interface {
	GetReadyCommand() string
	GetReadyPort() int32
	GetReadyTimeout() *durationpb.Duration
}) (sandbox.Readiness, error) {
	timeout, err := DurationFrom("ready_timeout", p.GetReadyTimeout())
	if err != nil {
		return sandbox.Readiness{}, err
	}
	return sandbox.Readiness{Command: p.GetReadyCommand(), Port: int(p.GetReadyPort()), Timeout: timeout}, nil
}

func Volume(v sandbox.Volume) *covev1.Volume {
	out := &covev1.Volume{
		Id:        v.ID,
		Name:      v.Name,
		Size:      v.Size,
		Used:      v.Used,
		Labels:    v.Labels,
		Node:      v.Node,
		CreatedAt: Time(v.CreatedAt),
		From:      v.From,
	}
	for _, h := range v.Holders {
		out.Holders = append(out.Holders, &covev1.VolumeHolder{Sandbox: h.Sandbox, Mode: string(h.Mode)})
	}
	return out
}

func VolumeFrom(p *covev1.Volume) sandbox.Volume {
	out := sandbox.Volume{
		ID:        p.GetId(),
		Name:      p.GetName(),
		Size:      p.GetSize(),
		Used:      p.GetUsed(),
		Labels:    p.GetLabels(),
		Node:      p.GetNode(),
		CreatedAt: TimeFrom(p.GetCreatedAt()),
		From:      p.GetFrom(),
	}
	for _, h := range p.GetHolders() {
		out.Holders = append(out.Holders, sandbox.VolumeHolder{Sandbox: h.GetSandbox(), Mode: sandbox.VolumeMode(h.GetMode())})
	}
	return out
}

func volumeMounts(ms []sandbox.VolumeMount) (out []*covev1.VolumeMount) {
	for _, m := range ms {
		out = append(out, &covev1.VolumeMount{Volume: m.Volume, Path: m.Path, Mode: string(m.Mode)})
	}
	return out
}

func volumeMountsFrom(ms []*covev1.VolumeMount) (out []sandbox.VolumeMount) {
	for _, m := range ms {
		out = append(out, sandbox.VolumeMount{Volume: m.GetVolume(), Path: m.GetPath(), Mode: sandbox.VolumeMode(m.GetMode())})
	}
	return out
}

// ErrorDetail is an error as part of an answer, for calls of which some parts
// succeed.
func ErrorDetail(err error) (*covev1.ErrorDetail, string) {
	e := sandbox.AsError(err)
	return &covev1.ErrorDetail{
		Code:         string(e.Class),
		Op:           utf8String(e.Op),
		Field:        utf8String(e.Field),
		Hint:         utf8String(e.Hint),
		Reason:       string(e.Reason),
		RetryAfterMs: e.RetryAfter.Milliseconds(),
	}, utf8String(message(e))
}

// ErrorFrom is the error that ErrorDetail was made of.
func ErrorFrom(d *covev1.ErrorDetail, msg string) error {
	return &sandbox.Error{
		Class:      sandbox.Class(d.GetCode()),
		Op:         d.GetOp(),
		Field:      d.GetField(),
		Msg:        strings.TrimPrefix(msg, d.GetField()+": "),
		Hint:       d.GetHint(),
		Reason:     sandbox.Reason(d.GetReason()),
		RetryAfter: time.Duration(d.GetRetryAfterMs()) * time.Millisecond,
	}
}
