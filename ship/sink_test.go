package ship_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/parquet-go/parquet-go"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/ship/shiptest"
)

// smallDisk is a file system of one MiB that can be filled.
func smallDisk(t *testing.T) (out string, fill func(t *testing.T, full bool)) {
	dir := t.TempDir()
	if err := syscall.Mount("cove-test", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(dir, "ballast")
	return filepath.Join(dir, "out"), func(t *testing.T, full bool) {
		if !full {
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
			return
		}
		f, err := os.Create(ballast)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, n := range []int{64 << 10, 4 << 10, 1} { // up to the last byte
			for err = nil; err == nil; {
				_, err = f.Write(make([]byte, n))
			}
		}
	}
}

func files(t *testing.T, dir, ending string) (out [][]byte) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ending) {
			return err
		}
		b, err := os.ReadFile(path)
		out = append(out, b)
		return err
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return out
}

func TestDirectory(t *testing.T) {
	for _, format := range []sandbox.ShipFormat{sandbox.JSONLines, sandbox.Parquet} {
		t.Run(string(format), func(t *testing.T) {
			shiptest.Run(t, func(t *testing.T) shiptest.Target {
				dir, fill := smallDisk(t)
				return shiptest.Target{
					Open: func(t *testing.T) ship.Sink {
						s, err := ship.NewDirectory(dir, format)
						if err != nil {
							t.Fatal(err)
						}
						return s
					},
					Held: func(t *testing.T) (out []ship.Record) {
						for _, b := range files(t, dir, "."+string(format)) {
							if format == sandbox.Parquet {
								out = append(out, shiptest.ParseParquet(t, b)...)
							} else {
								out = append(out, shiptest.ParseLines(t, b)...)
							}
						}
						return out
					},
					Break:    fill,
					Replaces: format == sandbox.Parquet,
				}
			})
		})
	}
}

// What a crash left half written at the end of a file of lines is cut off.
func TestLinesAreWhole(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		s, err := ship.NewDirectory(dir, sandbox.JSONLines)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Deliver(t.Context(), shiptest.Batch("a", 0, 2)); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(filepath.Join(dir, "records-000001.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(`{"schema":1,"kind":"ste` + strings.Repeat("x", 100_000)); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if s, err := ship.NewDirectory(dir, sandbox.JSONLines); err != nil || s.Close() != nil {
		t.Fatal(err)
	}
	if got := shiptest.ParseLines(t, files(t, dir, ".jsonl")[0]); len(got) != 6 {
		t.Errorf("%d records", len(got))
	}
}

// endpoint is an HTTPS server that keeps what it is sent.
type endpoint struct {
	*httptest.Server
	mu     sync.Mutex
	held   []byte
	answer func(w http.ResponseWriter, r *http.Request, body []byte) bool // true = it has answered
	keys   []string
}

func newEndpoint(t *testing.T) *endpoint {
	e := &endpoint{}
	e.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		e.mu.Lock()
		defer e.mu.Unlock()
		if err != nil || e.answer != nil && e.answer(w, r, b) {
			return
		}
		e.held = append(e.held, b...)
		e.keys = append(e.keys, r.Header.Get("Idempotency-Key"))
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *endpoint) answers(f func(w http.ResponseWriter, r *http.Request, body []byte) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = f
}

func (e *endpoint) sink(t *testing.T, allow ...string) ship.Sink {
	t.Helper()
	to, err := inward.Parse("ship-allow", allow)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(e.Certificate())
	return ship.NewWeb(e.URL+"/take", to.Transport(roots), func() (string, string, error) { return "Authorization", "Bearer hunter22", nil })
}

func TestWeb(t *testing.T) {
	shiptest.Run(t, func(t *testing.T) shiptest.Target {
		e := newEndpoint(t)
		return shiptest.Target{
			Open: func(t *testing.T) ship.Sink { return e.sink(t, e.Listener.Addr().String()) },
			Held: func(t *testing.T) []ship.Record {
				e.mu.Lock()
				defer e.mu.Unlock()
				return shiptest.ParseLines(t, e.held)
			},
			Break: func(t *testing.T, broken bool) {
				e.answers(nil)
				if broken {
					e.answers(func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
						http.Error(w, "no", http.StatusInternalServerError)
						return true
					})
				}
			},
		}
	})
}

// What an endpoint answers becomes what a shipment does: wait, halve, or say so, and
// nothing of the answer is told.
func TestWebAnswers(t *testing.T) {
	e := newEndpoint(t)
	s := e.sink(t, "127.0.0.0/8")
	defer s.Close()
	for _, c := range []struct {
		status int
		header string
		class  sandbox.Class
		after  time.Duration
	}{{429, "7", sandbox.NoCapacity, 7 * time.Second}, {503, "", sandbox.NoCapacity, 0}, {500, "9", sandbox.Unavailable, 0}, {400, "", sandbox.Unavailable, 0},
		{401, "", sandbox.Denied, 0}, {302, "", sandbox.Unavailable, 0}, {429, "99999999", sandbox.NoCapacity, time.Hour}} {
		e.answers(func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			if r.Header.Get("Authorization") != "Bearer hunter22" || r.Header.Get("Cove-Records") != "3" {
				t.Errorf("%v", r.Header)
			}
			w.Header().Set("Retry-After", c.header)
			w.Header().Set("Location", "https://169.254.169.254/secret")
			w.WriteHeader(c.status)
			_, _ = io.WriteString(w, "topsecret")
			return true
		})
		err := s.Deliver(t.Context(), shiptest.Batch("a", 0, 3))
		var is *sandbox.Error
		if !errors.As(err, &is) || is.Class != c.class || is.RetryAfter != c.after || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "hunter") {
			t.Errorf("%d: %v (%+v)", c.status, err, is)
		}
	}
	// One that takes small requests only gets all of it, in halves.
	var sizes []int
	e.answers(func(w http.ResponseWriter, r *http.Request, b []byte) bool {
		sizes = append(sizes, bytes.Count(b, []byte{'\n'}))
		if bytes.Count(b, []byte{'\n'}) <= 2 {
			return false
		}
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		return true
	})
	if err := ship.Deliver(t.Context(), s, shiptest.Batch("a", 0, 7)); err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if got := shiptest.ParseLines(t, e.held); len(got) != 7 {
		t.Errorf("%d records by requests of %v", len(got), sizes)
	}
	if slices.Sort(e.keys); len(slices.Compact(e.keys)) != len(e.keys) {
		t.Errorf("two requests with one key: %q", e.keys)
	}
}

// A shipment cannot be made to reach servers of the own network.
func TestWebReachesNothingInward(t *testing.T) {
	e := newEndpoint(t)
	for _, allow := range [][]string{nil, {"10.0.0.0/8"}, {"127.0.0.1:1"}} {
		s := e.sink(t, allow...)
		if err := s.Deliver(t.Context(), shiptest.Batch("a", 0, 1)); !errors.Is(err, sandbox.ErrDenied) {
			t.Errorf("%v: %v", allow, err)
		}
		s.Close()
	}
	if len(e.held) > 0 {
		t.Error("it was reached")
	}
}

// moto is a server that speaks S3, of PyPI's moto package.
func moto(t *testing.T) (url string) {
	t.Helper()
	path := ""
	for _, p := range []string{"../.venv-adapters/bin/moto_server", "moto_server"} {
		if found, err := exec.LookPath(p); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		t.Skip("moto_server is not installed: make .venv-adapters/.installed")
	}
	port := strconv.Itoa(testport.Free(t, "127.0.0.1"))
	cmd := exec.Command(path, "-H", "127.0.0.1", "-p", port)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for end := time.Now().Add(time.Minute); ; {
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			c.Close()
			return "http://127.0.0.1:" + port
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestBucket(t *testing.T) {
	url := moto(t)
	admin, err := minio.New(strings.TrimPrefix(url, "http://"), &minio.Options{Creds: credentials.NewStaticV4("id", "secretkey", ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	to, err := inward.Parse("ship-allow", []string{strings.TrimPrefix(url, "http://")})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, format := range []sandbox.ShipFormat{sandbox.Parquet, sandbox.JSONLines} {
		t.Run(string(format), func(t *testing.T) {
			shiptest.Run(t, func(t *testing.T) shiptest.Target {
				n++
				bucket := "runs" + strings.Repeat("x", n)
				mkdir := func(t *testing.T) {
					if err := admin.MakeBucket(t.Context(), bucket, minio.MakeBucketOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				mkdir(t)
				broken := false
				return shiptest.Target{
					Open: func(t *testing.T) ship.Sink {
						s, err := ship.NewBucket(sandbox.ShipmentSink{Kind: sandbox.S3Sink, Format: format, URL: url, Path: bucket + "/some/where", AccessKey: "id"}, to.Transport(nil),
							func() (string, error) {
								if broken {
									return "", sandbox.ErrDenied
								}
								return "secretkey", nil
							})
						if err != nil {
							t.Fatal(err)
						}
						return s
					},
					Held: func(t *testing.T) (out []ship.Record) {
						var keys []string
						for o := range admin.ListObjects(t.Context(), bucket, minio.ListObjectsOptions{Recursive: true, Prefix: "some/where/run="}) {
							if o.Err != nil {
								t.Fatal(o.Err)
							}
							keys = append(keys, o.Key)
						}
						slices.Sort(keys)
						for _, k := range keys {
							o, err := admin.GetObject(t.Context(), bucket, k, minio.GetObjectOptions{})
							if err != nil {
								t.Fatal(err)
							}
							b, err := io.ReadAll(o)
							if err != nil {
								t.Fatal(err)
							}
							if format == sandbox.Parquet {
								out = append(out, shiptest.ParseParquet(t, b)...)
							} else {
								out = append(out, shiptest.ParseLines(t, b)...)
							}
						}
						return out
					},
					Break:    func(_ *testing.T, b bool) { broken = b },
					Replaces: true,
				}
			})
		})
	}
	for what, c := range map[string]struct {
		path string
		want error
	}{"no such bucket": {"nosuchbucket", sandbox.ErrNotFound}} {
		s, err := ship.NewBucket(sandbox.ShipmentSink{Format: sandbox.Parquet, URL: url, Path: c.path, AccessKey: "id"}, to.Transport(nil), func() (string, error) { return "secretkey", nil })
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Deliver(context.Background(), shiptest.Batch("a", 0, 1)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		s.Close()
	}
	inside, err := ship.NewBucket(sandbox.ShipmentSink{Format: sandbox.Parquet, URL: url, Path: "runs", AccessKey: "id"}, (inward.Allowed{}).Transport(nil), func() (string, error) { return "secretkey", nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := inside.Deliver(t.Context(), shiptest.Batch("a", 0, 1)); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("the own network: %v", err)
	}
	inside.Close()
}

// What a step changed and sent, where a run asks for it, is in every format.
func TestWhatAStepChangedAndSent(t *testing.T) {
	st := sandbox.Step{ID: "r-1", Seq: 1, Rollout: sandbox.Rollout{Run: "r"}, Sandbox: "sb", Reset: 1, Command: "make", EgressSent: 10, EgressReceived: 20,
		Files:  &sandbox.StepFiles{Added: 1, Bytes: 5, Changes: []sandbox.Change{{Path: "/a", Kind: sandbox.Added, Now: &sandbox.FileState{Type: "file", Size: 5, Mode: 0o644}}}},
		Egress: &sandbox.StepEgress{Requests: 2, Denied: 1, Sent: 10, Received: 20, Hosts: []string{"example.com:443"}}}
	r := ship.StepRecord("t", st)
	line, err := r.AppendJSON(nil)
	if err != nil {
		t.Fatal(err)
	}
	got := shiptest.ParseLines(t, line)[0]
	if !reflect.DeepEqual(got.Files, st.Files) || !reflect.DeepEqual(got.Egress, st.Egress) || got.EgressSent != 10 || got.EgressRecv != 20 {
		t.Errorf("%s", line)
	}

	var file bytes.Buffer
	w := ship.NewParquetWriter(&file)
	if err := errors.Join(w.Write(r), w.Write(ship.StepRecord("t", sandbox.Step{ID: "r-2"})), w.Close()); err != nil {
		t.Fatal(err)
	}
	rows, err := parquet.Read[struct {
		Files  string `parquet:"files_json"`
		Egress string `parquet:"egress_json"`
		Sent   int64  `parquet:"egress_sent"`
		Recv   int64  `parquet:"egress_received"`
	}](bytes.NewReader(file.Bytes()), int64(file.Len()))
	if err != nil {
		t.Fatal(err)
	}
	var files sandbox.StepFiles
	var egress sandbox.StepEgress
	if err := errors.Join(json.Unmarshal([]byte(rows[0].Files), &files), json.Unmarshal([]byte(rows[0].Egress), &egress)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(&files, st.Files) || !reflect.DeepEqual(&egress, st.Egress) || rows[0].Sent != 10 || rows[0].Recv != 20 || rows[1].Files != "" || rows[1].Egress != "" {
		t.Errorf("%+v", rows)
	}

	trajectory, _ := ship.NewTrajectory("v", ship.EpisodeKey{Sandbox: "sb", Reset: 1}, []ship.Record{r})
	if b, err := json.Marshal(trajectory); err != nil || !strings.Contains(string(b), `"files":{"added":1`) || !strings.Contains(string(b), `"egress":{"requests":2`) {
		t.Errorf("%s %v", b, err)
	}
}

func TestOutputJSON(t *testing.T) {
	for _, o := range []ship.Output{{}, {Head: []byte("text\n"), Dropped: 3, Tail: []byte("ü")}, {Head: []byte{0xff, 0}, Tail: []byte("x")}} {
		b, err := o.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var back ship.Output
		if err := back.UnmarshalJSON(b); err != nil || !bytes.Equal(back.Head, o.Head) || !bytes.Equal(back.Tail, o.Tail) || back.Dropped != o.Dropped {
			t.Errorf("%s: %+v %v", b, back, err)
		}
	}
	var o ship.Output
	if err := o.UnmarshalJSON([]byte(`{"head_base64":"` + strings.Repeat("*", 4) + `"}`)); err == nil || errors.Is(err, base64.CorruptInputError(1)) {
		t.Error(err)
	}
}
