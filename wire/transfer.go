package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"google.golang.org/protobuf/encoding/protojson"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Upload writes r to a file of a sandbox. size -1 means unknown; a known size
// lets the server refuse at once what is too large. With opt.Atomic a broken
// upload leaves nothing behind.
func (c *Client) Upload(ctx context.Context, id, path string, r io.Reader, size int64, opt sandbox.WriteOptions) error {
	q := url.Values{"path": {path}}
	if opt.User != "" {
		q.Set("user", opt.User)
	}
	if opt.Mode != 0 {
		q.Set("mode", fmt.Sprintf("%04o", opt.Mode))
	}
	for k, on := range map[string]bool{"atomic": opt.Atomic, "append": opt.Append, "parents": opt.Parents} {
		if on {
			q.Set(k, "true")
		}
	}
	return c.put(ctx, sandboxPath(id, "files"), q, r, size, nil)
}

// Download opens a file of a sandbox from offset on; length 0 is to the end.
// The size of what comes is -1 where the server cannot know it.
func (c *Client) Download(ctx context.Context, id, path string, offset, length int64) (body io.ReadCloser, size int64, err error) {
	rng := ""
	if offset != 0 || length != 0 {
		rng = fmt.Sprintf("bytes=%d-", offset)
		if length > 0 {
			rng += strconv.FormatInt(offset+length-1, 10)
		}
	}
	return c.get(ctx, sandboxPath(id, "files"), url.Values{"path": {path}}, rng)
}

// UploadTar unpacks a tar stream into dir, which is made if it is missing.
func (c *Client) UploadTar(ctx context.Context, id, dir, user string, r io.Reader) error {
	q := url.Values{"path": {dir}}
	if user != "" {
		q.Set("user", user)
	}
	return c.put(ctx, sandboxPath(id, "tar"), q, r, -1, nil)
}

// DownloadTar opens a directory of a sandbox as a tar stream.
func (c *Client) DownloadTar(ctx context.Context, id, dir string) (io.ReadCloser, error) {
	body, _, err := c.get(ctx, sandboxPath(id, "tar"), url.Values{"path": {dir}}, "")
	return body, err
}

// ImportImage makes an image of a tar (docker save, OCI layout or a plain
// root file system) and names it.
func (c *Client) ImportImage(ctx context.Context, name string, r io.Reader, size int64) (sandbox.Image, error) {
	var img covev1.Image
	err := c.put(ctx, "/v1/images", url.Values{"name": {name}}, r, size, func(b []byte) error {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, &img)
	})
	return ImageFrom(&img), err
}

// PutBuildFiles gives files for builds to copy from, as a tar, under a key.
func (c *Client) PutBuildFiles(ctx context.Context, key string, r io.Reader, size int64) error {
	return c.put(ctx, "/v1/build-files/"+url.PathEscape(key), nil, r, size, nil)
}

// SnapshotTar opens the content of a filesystem or directory snapshot as a tar
// stream.
func (c *Client) SnapshotTar(ctx context.Context, nameOrID string) (io.ReadCloser, error) {
	body, _, err := c.get(ctx, "/v1/snapshots/"+url.PathEscape(nameOrID)+"/tar", nil, "")
	return body, err
}

// UploadVolumeFile writes r to a file of a volume, without a sandbox. It takes
// its place whole or not at all; missing parents are made. mode 0 is 0644.
func (c *Client) UploadVolumeFile(ctx context.Context, volume, path string, r io.Reader, size int64, mode uint32) (sandbox.FileInfo, error) {
	q := url.Values{"path": {path}}
	if mode != 0 {
		q.Set("mode", fmt.Sprintf("%04o", mode))
	}
	var info covev1.FileInfo
	err := c.put(ctx, volumePath(volume), q, r, size, func(b []byte) error {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, &info)
	})
	return FileInfoFrom(&info), err
}

// DownloadVolumeFile opens a file of a volume.
func (c *Client) DownloadVolumeFile(ctx context.Context, volume, path string) (body io.ReadCloser, size int64, err error) {
	return c.get(ctx, volumePath(volume), url.Values{"path": {path}}, "")
}

// ExportRecording opens the archive of a recording, or with har a HAR 1.2.
func (c *Client) ExportRecording(ctx context.Context, nameOrID string, har bool) (io.ReadCloser, error) {
	q := url.Values{}
	if har {
		q.Set("format", "har")
	}
	body, _, err := c.get(ctx, "/v1/recordings/"+url.PathEscape(nameOrID)+"/archive", q, "")
	return body, err
}

// ExportRun opens the records of a run: jsonl, parquet or atif.
func (c *Client) ExportRun(ctx context.Context, run, format, cursor string, follow bool) (io.ReadCloser, error) {
	body, _, err := c.get(ctx, "/v1/runs/"+url.PathEscape(run)+"/export", recordQuery(format, cursor, follow), "")
	return body, err
}

// ReadShipment opens the records of a shipment that is pulled, a line of JSON each.
func (c *Client) ReadShipment(ctx context.Context, shipment, cursor string, follow bool) (io.ReadCloser, error) {
	body, _, err := c.get(ctx, "/v1/shipments/"+url.PathEscape(shipment)+"/records", recordQuery("", cursor, follow), "")
	return body, err
}

func recordQuery(format, cursor string, follow bool) url.Values {
	q := url.Values{}
	for k, v := range map[string]string{"format": format, "cursor": cursor} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if follow {
		q.Set("follow", "true")
	}
	return q
}

// ImportRecording makes a recording of an archive. size -1 means unknown.
func (c *Client) ImportRecording(ctx context.Context, name string, r io.Reader, size int64) (*covev1.Recording, error) {
	q := url.Values{}
	if name != "" {
		q.Set("name", name)
	}
	var rec covev1.Recording
	err := c.put(ctx, "/v1/recordings", q, r, size, func(b []byte) error {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, &rec)
	})
	return &rec, err
}

func volumePath(name string) string { return "/v1/volumes/" + url.PathEscape(name) + "/files" }

func sandboxPath(id, what string) string {
	return "/v1/sandboxes/" + url.PathEscape(id) + "/" + what
}

func (c *Client) put(ctx context.Context, path string, q url.Values, r io.Reader, size int64, answer func([]byte) error) error {
	body := io.NopCloser(r) // a file is the caller's to close
	if size == 0 {
		body = http.NoBody
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, c.url+path+"?"+q.Encode(), body)
	if err != nil {
		return sandbox.InvalidField("url", "%v", err)
	}
	req.ContentLength = size
	if size < 0 || size > 1<<20 {
		// A refusal comes before the content is sent, and its reason is not
		// lost in a reset connection.
		req.Header.Set("Expect", "100-continue")
	}
	resp, err := c.send(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return unreachable(req, err)
	}
	if answer == nil {
		return nil
	}
	if err := answer(b); err != nil {
		return &sandbox.Error{Class: sandbox.Internal, Msg: "the server's answer is not understood", Err: err}
	}
	return nil
}

func (c *Client) get(ctx context.Context, path string, q url.Values, rng string) (io.ReadCloser, int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+path+"?"+q.Encode(), nil)
	if err != nil {
		return nil, 0, sandbox.InvalidField("url", "%v", err)
	}
	if rng != "" {
		req.Header.Set("Range", rng)
	}
	resp, err := c.send(req)
	if err != nil {
		return nil, 0, err
	}
	return resp.Body, resp.ContentLength, nil
}

// send returns only answers that are good.
func (c *Client) send(req *http.Request) (*http.Response, error) {
	caller{key: c.key, agent: c.agent}.sign(req.Header)
	resp, err := c.bulk.Do(req)
	if err != nil {
		return nil, unreachable(req, err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return nil, fromResponse(resp.StatusCode, b)
}

func unreachable(req *http.Request, err error) error {
	if ctxErr := req.Context().Err(); ctxErr != nil {
		return FromConnect(ToConnect(ctxErr))
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	return &sandbox.Error{
		Class: sandbox.Unavailable,
		Msg:   "cannot reach " + req.URL.Scheme + "://" + req.URL.Host,
		Hint:  unreachedHint(err),
		Err:   err,
	}
}

// PutTests makes a directory snapshot of a tar of tests and returns its id. digest
// is the tar's SHA-256 in hex, or "".
func (c *Client) PutTests(ctx context.Context, digest string, r io.Reader, size int64) (snapshot string, err error) {
	err = c.put(ctx, "/v1/grades/tests", url.Values{"digest": {digest}}, r, size, func(b []byte) error {
		var got struct {
			Snapshot string `json:"snapshot"`
		}
		err := json.Unmarshal(b, &got)
		snapshot = got.Snapshot
		return err
	})
	return snapshot, err
}
