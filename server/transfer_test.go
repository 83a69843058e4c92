package server

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// put has a file be there, behind everybody's back.
func (w *world) put(id, path string, data []byte) {
	w.Helper()
	name := filepath.Join(w.node.root(id), path)
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, data, 0o644)
	}
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) file(id, path string) (string, bool) {
	b, err := os.ReadFile(filepath.Join(w.node.root(id), path))
	return string(b), err == nil
}

// names is what is in the root of a sandbox.
func (w *world) names(id string) (names []string) {
	w.Helper()
	ents, err := os.ReadDir(w.node.root(id))
	if err != nil {
		w.Fatal(err)
	}
	for _, e := range ents {
		names = append(names, e.Name())
	}
	return names
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

// Content of every size takes its way (the guest's connection or a pipe) and
// arrives whole.
func TestUpAndDown(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	var bulk []node.Upload
	w.node.onUpload = func(_ context.Context, to node.Upload) error { bulk = append(bulk, to); return nil }
	for _, n := range []int{0, 1, firstRead - 1, firstRead, firstRead + 1, smallUpload - 1, smallUpload, smallUpload + 1, 5<<20 + 3} {
		for _, known := range []bool{true, false} {
			data := randomBytes(n)
			size := int64(n)
			if !known {
				size = -1
			}
			bulk = nil
			if err := w.client.Upload(t.Context(), sb.Id, "/f", bytes.NewReader(data), size, sandbox.WriteOptions{Mode: 0o600, Atomic: true}); err != nil {
				t.Fatal(n, known, err)
			}
			if got, _ := w.file(sb.Id, "/f"); got != string(data) {
				t.Fatalf("%d bytes, known %v: stored %d others", n, known, len(got))
			}
			if wantBulk := !known || n >= smallUpload; (len(bulk) == 1) != wantBulk {
				t.Errorf("%d bytes, known %v: %d bulk transfers", n, known, len(bulk))
			} else if wantBulk && (bulk[0].Write.Mode != 0o600 || !bulk[0].Write.Atomic || bulk[0].Path != "/f") {
				t.Errorf("not as it was asked for: %+v", bulk[0])
			}
			body, length, err := w.client.Download(t.Context(), sb.Id, "/f", 0, 0)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(body)
			_ = body.Close()
			if err != nil || length != int64(n) || !bytes.Equal(got, data) {
				t.Fatalf("%d bytes came down as %d (announced %d), %v", n, len(got), length, err)
			}
		}
	}
	// The rest of the options.
	if resp, body := w.http("PUT", "/v1/sandboxes/"+sb.Id+"/files?path=/f&append=1&parents=true&user=root&mode=0755", strings.NewReader("tail")); resp.StatusCode != 204 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if got, _ := w.file(sb.Id, "/f"); !strings.HasSuffix(got, "tail") || len(got) != 5<<20+3+4 {
		t.Errorf("append made %d bytes", len(got))
	}
}

func TestRanges(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	for _, size := range []int64{10, 300 << 10} {
		data := randomBytes(int(size))
		w.put(sb.Id, "/f", data)
		for _, tc := range []struct {
			rng         string
			status      int
			start, last int64
		}{
			{"", 200, 0, size - 1},
			{"bytes=0-", 206, 0, size - 1},
			{"bytes=0-0", 206, 0, 0},
			{"bytes=3-5", 206, 3, 5},
			{"bytes=9-", 206, 9, size - 1},
			{"bytes=5-99999999", 206, 5, size - 1},
			{"bytes=-3", 206, size - 3, size - 1},
			{"bytes=-99999999", 206, 0, size - 1},
			{fmt.Sprintf("bytes=%d-", size-1), 206, size - 1, size - 1},
			{fmt.Sprintf("bytes=%d-", size), 416, 0, 0},
			{"bytes=99999999-", 416, 0, 0},
			{"bytes=-0", 416, 0, 0},
			{"bytes=5-3", 200, 0, size - 1},
			{"bytes=1-2,4-5", 200, 0, size - 1},
			{"bytes=a-b", 200, 0, size - 1},
			{"bytes=+1-2", 200, 0, size - 1},
			{"lines=1-2", 200, 0, size - 1},
			{"bytes=99999999999999999999-", 200, 0, size - 1},
		} {
			for _, method := range []string{"GET", "HEAD"} {
				resp, body := w.http(method, "/v1/sandboxes/"+sb.Id+"/files?path=/f", nil, "Range", tc.rng)
				if resp.StatusCode != tc.status {
					t.Errorf("%s %q of %d: status %d, want %d", method, tc.rng, size, resp.StatusCode, tc.status)
					continue
				}
				if tc.status == 416 {
					if got := resp.Header.Get("Content-Range"); got != fmt.Sprintf("bytes */%d", size) {
						t.Errorf("%s %q: Content-Range %q", method, tc.rng, got)
					}
					continue
				}
				want := data[tc.start : tc.last+1]
				if method == "GET" && body != string(want) {
					t.Errorf("%q of %d: got %d bytes, want %d", tc.rng, size, len(body), len(want))
				}
				if resp.ContentLength != int64(len(want)) || resp.Header.Get("Accept-Ranges") != "bytes" || resp.Header.Get("Content-Type") != "application/octet-stream" {
					t.Errorf("%s %q: length %d, headers %v", method, tc.rng, resp.ContentLength, resp.Header)
				}
				if tc.status == 206 && resp.Header.Get("Content-Range") != fmt.Sprintf("bytes %d-%d/%d", tc.start, tc.last, size) {
					t.Errorf("%q: Content-Range %q", tc.rng, resp.Header.Get("Content-Range"))
				}
			}
		}
	}
	// A file that does not know its size still comes whole.
	w.put(sb.Id, "/proc/meminfo", []byte("MemTotal: lots\n"))
	if resp, body := w.http("GET", "/v1/sandboxes/"+sb.Id+"/files?path=/proc/meminfo", nil); resp.StatusCode != 200 || body != "MemTotal: lots\n" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

func TestTransferErrors(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxUpload = 8 << 20 })
	sb, deadSB := w.create(nil), w.create(nil)
	w.kill(deadSB.Id)
	big := func() io.Reader { return bytes.NewReader(make([]byte, 3<<20)) }
	unknown := func(r io.Reader) io.Reader { return io.MultiReader(r) } // hides the length
	w.node.onUpload = func(_ context.Context, to node.Upload) error {
		if strings.HasPrefix(to.Path, "/late/") {
			return sandbox.Errorf(sandbox.DiskFull, "guest.bulk", "no space left")
		}
		return nil
	}
	for _, tc := range []struct {
		name, method, path string
		body               io.Reader
		status             int
		code, says         string
	}{
		{"no path", "GET", sb.Id + "/files", nil, 400, "invalid_argument", "path: "},
		{"bad mode", "PUT", sb.Id + "/files?path=/x&mode=rwx", big(), 400, "invalid_argument", "mode: "},
		{"large mode", "PUT", sb.Id + "/files?path=/x&mode=77777", big(), 400, "invalid_argument", "mode: "},
		{"bad flag", "PUT", sb.Id + "/files?path=/x&atomic=maybe", big(), 400, "invalid_argument", "atomic: "},
		{"append atomically", "PUT", sb.Id + "/files?path=/x&atomic=1&append=1", big(), 400, "invalid_argument", "append: "},
		{"bad id", "GET", "A.B/files?path=/x", nil, 400, "invalid_argument", "sandbox_id: "},
		{"missing file", "GET", sb.Id + "/files?path=/x", nil, 404, "not_found", "/x"},
		{"missing dir", "GET", sb.Id + "/tar?path=/x", nil, 404, "not_found", "/x"},
		{"unknown sandbox", "PUT", "nosuch/files?path=/x", big(), 404, "not_found", "nosuch"},
		{"ended sandbox", "PUT", deadSB.Id + "/files?path=/x", big(), 400, "failed_precondition", "killed_by_user"},
		{"ended sandbox, tar", "GET", deadSB.Id + "/tar?path=/x", nil, 400, "failed_precondition", "killed_by_user"},
		{"disk full, small", "PUT", sb.Id + "/files?path=/full/x", strings.NewReader("x"), 429, "resource_exhausted", "space"},
		{"disk full, large", "PUT", sb.Id + "/files?path=/full/x", big(), 429, "resource_exhausted", "space"},
		{"disk full at once", "PUT", sb.Id + "/files?path=/late/x", big(), 429, "resource_exhausted", "space"},
		{"disk full, tar", "PUT", sb.Id + "/tar?path=/full/x", unknown(big()), 429, "resource_exhausted", "space"},
		{"too large", "PUT", sb.Id + "/files?path=/x", bytes.NewReader(make([]byte, 9<<20)), 400, "out_of_range", "8MiB"},
		{"too large, unannounced", "PUT", sb.Id + "/files?path=/x&atomic=1", unknown(bytes.NewReader(make([]byte, 9<<20))), 400, "out_of_range", "8MiB"},
		{"wrong method", "DELETE", sb.Id + "/files?path=/x", nil, 501, "unimplemented", "DELETE"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			resp, body := w.http(tc.method, "/v1/sandboxes/"+tc.path, tc.body)
			if resp.StatusCode != tc.status || !strings.Contains(body, `"code":"`+tc.code+`"`) || !strings.Contains(body, tc.says) {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
	if _, there := w.file(sb.Id, "/x"); there {
		t.Error("a refused upload left a file")
	}
}

func TestTar(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	data := randomBytes(2 << 20)
	w.put(sb.Id, "/dir/f", nil)
	if err := w.client.UploadTar(t.Context(), sb.Id, "/dir", "root", tarOf("f", data)); err != nil {
		t.Fatal(err)
	}
	if got, _ := w.file(sb.Id, "/dir/f"); got != string(data) {
		t.Errorf("unpacked %d bytes", len(got))
	}
	body, err := w.client.DownloadTar(t.Context(), sb.Id, "/dir")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	r := tar.NewReader(body)
	for {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, data) || path.Base(h.Name) != "f" {
			t.Errorf("%s: got %d bytes, %v", h.Name, len(got), err)
		}
		break
	}
	if _, err := io.Copy(io.Discard, body); err != nil {
		t.Error(err)
	}
}

// tarOf is a tar of one file.
func tarOf(name string, data []byte) io.Reader {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))})
	_, _ = w.Write(data)
	_ = w.Close() // into memory: none of these fails
	return &b
}

// A client that breaks off mid-upload leaves nothing where the file was.
func TestClientAbortsUpload(t *testing.T) {
	for _, header := range []string{"Content-Length: 4000000", "Transfer-Encoding: chunked"} {
		w := newWorld(t)
		sb := w.create(nil)
		w.put(sb.Id, "/f", []byte("old"))
		before := w.names(sb.Id)
		reached := make(chan struct{})
		w.node.onUpload = func(context.Context, node.Upload) error { close(reached); return nil }
		conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PUT /v1/sandboxes/%s/files?path=/f&atomic=true HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n", sb.Id, w.secret, header)
		fmt.Fprintf(conn, "5\r\nhello\r\n")
		<-reached
		_ = conn.Close()
		w.server.Drain(t.Context()) // waits for the handler
		if got, _ := w.file(sb.Id, "/f"); got != "old" {
			t.Errorf("%s: the file is now %q", header, got)
		}
		if files := w.names(sb.Id); !slices.Equal(files, before) {
			t.Errorf("%s: left %v of %v", header, files, before)
		}
	}
}

// A transfer that breaks after the first byte breaks the connection: no client
// may take half a file for a whole one.
func TestDownloadBreaks(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	w.put(sb.Id, "/f", make([]byte, 1<<20))
	w.node.onDownload = func(node.Download) error { // it shrinks before the transfer
		w.put(sb.Id, "/f", make([]byte, 500<<10))
		return nil
	}
	body, _, err := w.client.Download(t.Context(), sb.Id, "/f", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); err == nil {
		t.Errorf("%d bytes without an error", len(b))
	}
}

// "Expect: 100-continue" gets its answer before the content, and a refusal
// comes instead of it.
func TestExpectContinue(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxUpload = 4 << 20 })
	sb := w.create(nil)
	for size, want := range map[int]string{2 << 20: "HTTP/1.1 100 Continue", 5 << 20: "HTTP/1.1 400 Bad Request"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PUT /v1/sandboxes/%s/files?path=/f HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n",
			sb.Id, w.secret, size)
		r := bufio.NewReader(conn)
		line, err := r.ReadString('\n')
		if err != nil || strings.TrimSpace(line) != want {
			t.Errorf("%d: got %q, %v", size, line, err)
		}
		if strings.Contains(want, "100") {
			if _, err := r.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(make([]byte, size)); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(r, nil)
			if err != nil || resp.StatusCode != 204 {
				t.Fatal(resp, err)
			}
		}
		_ = conn.Close()
	}
}

// A failure ends an upload whose client sends nothing more.
func TestFailureUnblocksAStalledUpload(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	w.node.onUpload = func(context.Context, node.Upload) error { return sandbox.Errorf(sandbox.DiskFull, "", "no space left") }
	pr, pw := io.Pipe()
	defer pw.Close()
	go func() { _, _ = pw.Write([]byte("a little")) }() // and then silence
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "PUT", w.url+"/v1/sandboxes/"+sb.Id+"/files?path=/f", pr)
	req.Header.Set("Authorization", "Bearer "+w.secret)
	resp, err := plainHTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 429 || !strings.Contains(string(b), "space") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}

// A failed upload must not take the next call on its connection with it.
func TestFailedUploadsLeaveTheConnectionAlone(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	var fail atomic.Bool
	w.node.onUpload = func(context.Context, node.Upload) error {
		if fail.Load() {
			return sandbox.Errorf(sandbox.DiskFull, "", "no space left")
		}
		return nil
	}
	for i := range 50 {
		fail.Store(i%2 == 0)
		err := w.client.UploadTar(t.Context(), sb.Id, "/dir", "root", tarOf("small", []byte("tar")))
		if fail.Load() && !errors.Is(err, sandbox.ErrDiskFull) || !fail.Load() && err != nil {
			t.Fatalf("upload %d: %v", i, err)
		}
	}
}
