package node

import (
	"context"
	"io"

	"github.com/cove-sandbox/cove/sandbox"
)

// NoVolumes are the volumes of a node that has none.
type NoVolumes struct{}

var errNoVolumes = &sandbox.Error{Class: sandbox.Unsupported, Op: "node.volumes", Msg: "this node keeps no volumes", Hint: "cove doctor says why"}

func (NoVolumes) Create(context.Context, string, int64) error { return errNoVolumes }
func (NoVolumes) CreateFrom(context.Context, string, int64, sandbox.Content) error {
	return errNoVolumes
}
func (NoVolumes) Clone(context.Context, string, string) error { return errNoVolumes }
func (NoVolumes) Snapshot(context.Context, string) (c sandbox.Content, err error) {
	return c, errNoVolumes
}
func (NoVolumes) Status(context.Context, []string) (map[string]sandbox.VolumeContent, error) {
	return nil, errNoVolumes
}
func (NoVolumes) List(context.Context) ([]sandbox.VolumeContent, error) { return nil, errNoVolumes }
func (NoVolumes) Delete(context.Context, string) error                  { return errNoVolumes }
func (NoVolumes) Resize(context.Context, string, int64) (size int64, err error) {
	return 0, errNoVolumes
}
func (NoVolumes) ListFiles(context.Context, string, string, int) ([]sandbox.FileInfo, bool, error) {
	return nil, false, errNoVolumes
}
func (NoVolumes) ReadFile(context.Context, string, string) (io.ReadCloser, sandbox.FileInfo, error) {
	return nil, sandbox.FileInfo{}, errNoVolumes
}
func (NoVolumes) WriteFile(context.Context, string, string, io.Reader, sandbox.VolumeFile) (f sandbox.FileInfo, err error) {
	return f, errNoVolumes
}
func (NoVolumes) MakeDirectory(context.Context, string, string, bool, sandbox.VolumeFile) (f sandbox.FileInfo, err error) {
	return f, errNoVolumes
}
func (NoVolumes) ChangeFile(context.Context, string, string, sandbox.VolumeFile) (f sandbox.FileInfo, err error) {
	return f, errNoVolumes
}
func (NoVolumes) RemoveFile(context.Context, string, string, bool) error { return errNoVolumes }

// NoRecordings are the recordings of a node that keeps none.
type NoRecordings struct{}

var errNoRecordings = &sandbox.Error{Class: sandbox.Unsupported, Op: "node.recordings", Msg: "this node keeps no recordings"}

func (NoRecordings) Status(context.Context, []string) (map[string]sandbox.Recording, error) {
	return nil, errNoRecordings
}
func (NoRecordings) List(context.Context) ([]sandbox.Recording, error) { return nil, errNoRecordings }
func (NoRecordings) Delete(context.Context, string) error              { return errNoRecordings }
func (NoRecordings) Exchanges(context.Context, string, int64, int) ([]sandbox.RecordedExchange, error) {
	return nil, errNoRecordings
}
func (NoRecordings) Export(context.Context, string, bool, io.Writer) error { return errNoRecordings }
func (NoRecordings) Import(context.Context, string, io.Reader) (r sandbox.Recording, err error) {
	return r, errNoRecordings
}

var (
	_ Volumes    = NoVolumes{}
	_ Recordings = NoRecordings{}
)
