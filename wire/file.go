package wire

import (
	"strings"
	"unicode/utf8"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// utf8String makes text that came from inside a sandbox fit for a protobuf
// string, which must be UTF-8; a file name need not be.
func utf8String(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func validUTF8(ss []string) []string {
	for i, s := range ss {
		if !utf8.ValidString(s) {
			out := append([]string(nil), ss...)
			for j := i; j < len(out); j++ {
				out[j] = utf8String(out[j])
			}
			return out
		}
	}
	return ss
}

func attributes(attrs map[string]string) map[string]string {
	if len(attrs) == 0 {
		return nil
	}
	out := map[string]string{}
	for k, v := range attrs {
		out[utf8String(k)] = utf8String(v)
	}
	return out
}

// FileInfo replaces bytes of names that are not UTF-8.
func FileInfo(f sandbox.FileInfo) *covev1.FileInfo {
	return &covev1.FileInfo{
		Path:    utf8String(f.Path),
		Name:    utf8String(f.Name),
		Type:    string(f.Type),
		Size:    f.Size,
		Mode:    f.Mode,
		Uid:     f.UID,
		Gid:     f.GID,
		Owner:   utf8String(f.Owner),
		Group:   utf8String(f.Group),
		ModTime: Time(f.ModTime),
		Target:  utf8String(f.Target),

		Attributes: attributes(f.Attributes),
	}
}

func FileInfoFrom(p *covev1.FileInfo) sandbox.FileInfo {
	return sandbox.FileInfo{
		Path:    p.GetPath(),
		Name:    p.GetName(),
		Type:    sandbox.FileType(p.GetType()),
		Size:    p.GetSize(),
		Mode:    p.GetMode(),
		UID:     p.GetUid(),
		GID:     p.GetGid(),
		Owner:   p.GetOwner(),
		Group:   p.GetGroup(),
		ModTime: TimeFrom(p.GetModTime()),
		Target:  p.GetTarget(),

		Attributes: p.GetAttributes(),
	}
}

func FileChange(c sandbox.FileChange) *covev1.WatchFilesEvent {
	return &covev1.WatchFilesEvent{Path: utf8String(c.Path), Op: c.Op}
}

func FileChangeFrom(p *covev1.WatchFilesEvent) sandbox.FileChange {
	return sandbox.FileChange{Path: p.GetPath(), Op: p.GetOp()}
}
