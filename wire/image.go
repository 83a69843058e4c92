package wire

import (
	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Image replaces bytes that are not UTF-8: an image's config is its maker's.
func Image(i sandbox.Image) *covev1.Image {
	return &covev1.Image{
		Id:         i.ID,
		Names:      i.Names,
		Size:       i.Size,
		Source:     utf8String(i.Source),
		Platform:   utf8String(i.Platform),
		CreatedAt:  Time(i.CreatedAt),
		Env:        validUTF8(i.Config.Env),
		WorkingDir: utf8String(i.Config.WorkingDir),
		User:       utf8String(i.Config.User),
		Entrypoint: validUTF8(i.Config.Entrypoint),
		Cmd:        validUTF8(i.Config.Cmd),

		Labels:       validMap(i.Config.Labels),
		ExposedPorts: validUTF8(i.Config.ExposedPorts),
	}
}

func ImageFrom(p *covev1.Image) sandbox.Image {
	return sandbox.Image{
		ID:        p.GetId(),
		Names:     p.GetNames(),
		Size:      p.GetSize(),
		Source:    p.GetSource(),
		Platform:  p.GetPlatform(),
		CreatedAt: TimeFrom(p.GetCreatedAt()),
		Config: sandbox.ImageConfig{
			Env:        p.GetEnv(),
			WorkingDir: p.GetWorkingDir(),
			User:       p.GetUser(),
			Entrypoint: p.GetEntrypoint(),
			Cmd:        p.GetCmd(),

			Labels:       p.GetLabels(),
			ExposedPorts: p.GetExposedPorts(),
		},
	}
}

// PullEvent is one step of a pull without its image.
func PullEvent(p sandbox.Progress) *covev1.PullImageEvent {
	return &covev1.PullImageEvent{Step: p.Step, Done: p.Done, Total: p.Total}
}

func ProgressFrom(p *covev1.PullImageEvent) sandbox.Progress {
	return sandbox.Progress{Step: p.GetStep(), Done: p.GetDone(), Total: p.GetTotal()}
}

func validMap(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[utf8String(k)] = utf8String(v)
	}
	return out
}
