package wire

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// The catalogue that the other SDKs are made from says what this package does.
func TestCatalogueAgrees(t *testing.T) {
	b, err := os.ReadFile("../api/errors.json")
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Code, Connect string
		HTTP          int
	}
	if err := json.Unmarshal(b, &rows); err != nil {
		t.Fatal(err)
	}
	var seen []sandbox.Class
	for _, row := range rows {
		class := sandbox.Class(row.Code)
		seen = append(seen, class)
		code, ok := codes[class]
		if !ok {
			t.Errorf("%s is in errors.json and not in codes", class)
			continue
		}
		if code.String() != row.Connect {
			t.Errorf("%s: errors.json says %s, codes %s", class, row.Connect, code)
		}
		w := httptest.NewRecorder()
		WriteError(w, httptest.NewRequest("GET", "/", nil), &sandbox.Error{Class: class, Msg: "m"})
		if w.Code != row.HTTP {
			t.Errorf("%s: errors.json says HTTP %d, the server %d", class, row.HTTP, w.Code)
		}
	}
	for class := range codes {
		if !slices.Contains(seen, class) {
			t.Errorf("%s is missing from errors.json", class)
		}
	}
	if n := len(sentinels()); n != len(rows) {
		t.Errorf("%d sentinels, %d rows in errors.json", n, len(rows))
	}
}

// Every reason is in the catalogue below its class. The list is read from the
// source, so that a new one cannot be forgotten.
func TestCatalogueHasEveryReason(t *testing.T) {
	src, err := os.ReadFile("../sandbox/errors.go")
	if err != nil {
		t.Fatal(err)
	}
	catalogue, err := os.ReadFile("../api/errors.json")
	if err != nil {
		t.Fatal(err)
	}
	reasons := regexp.MustCompile(`(?m)^\t\w+\s+Reason = "(\w+)"`).FindAllStringSubmatch(string(src), -1)
	if len(reasons) < 8 {
		t.Fatalf("only %d reasons found in sandbox/errors.go", len(reasons))
	}
	for _, r := range reasons {
		if !strings.Contains(string(catalogue), `"`+r[1]+`": "`) {
			t.Errorf("%s is missing from errors.json", r[1])
		}
	}
}

func sentinels() []*sandbox.Error {
	return []*sandbox.Error{sandbox.ErrInvalid, sandbox.ErrNotFound, sandbox.ErrImageNotFound, sandbox.ErrAlreadyExists,
		sandbox.ErrUnauthenticated, sandbox.ErrDenied, sandbox.ErrNoCapacity, sandbox.ErrQuotaExceeded, sandbox.ErrTooLarge, sandbox.ErrEnded,
		sandbox.ErrPrecondition, sandbox.ErrConflict, sandbox.ErrDiskFull, sandbox.ErrUnavailable, sandbox.ErrDeadline,
		sandbox.ErrCanceled, sandbox.ErrUnsupported, sandbox.ErrCorrupt, sandbox.ErrInternal}
}

// crossings are the two ways an error reaches a client.
var crossings = map[string]func(error) error{
	"connect": func(err error) error { return FromConnect(ToConnect(err)) },
	"http": func(err error) error {
		w := httptest.NewRecorder()
		WriteError(w, httptest.NewRequest("PUT", "/", nil), err)
		return fromResponse(w.Code, w.Body.Bytes())
	},
}

func TestEveryClassCrossesTheWire(t *testing.T) {
	for name, cross := range crossings {
		for _, sentinel := range sentinels() {
			in := &sandbox.Error{Class: sentinel.Class, Op: "sandbox.create", Field: "spec.image", Msg: "no image 'bse'",
				Hint: "did you mean 'base'?", RetryAfter: 1500 * time.Millisecond, Err: errors.New("cause")}
			err := cross(in)
			if !errors.Is(err, sentinel) {
				t.Errorf("%s: %s arrives as %v", name, sentinel.Class, err)
			}
			var out *sandbox.Error
			if !errors.As(err, &out) {
				t.Fatalf("%s: %T", name, err)
			}
			if out.Op != in.Op || out.Field != in.Field || out.Hint != in.Hint || out.RetryAfter != in.RetryAfter {
				t.Errorf("%s: sent %+v, got %+v", name, in, out)
			}
			if out.Error() != in.Error() {
				t.Errorf("%s: message %q became %q", name, in, out)
			}
		}
	}
}

func TestForeignErrors(t *testing.T) {
	for _, tc := range []struct {
		in   error
		want *sandbox.Error
	}{
		{errors.New("boom"), sandbox.ErrInternal},
		{context.Canceled, sandbox.ErrCanceled},
		{context.DeadlineExceeded, sandbox.ErrDeadline},
		{&sandbox.Error{Class: sandbox.NotFound, Msg: "bad \xff bytes", Field: "\xfe"}, sandbox.ErrNotFound},
	} {
		for name, cross := range crossings {
			if err := cross(tc.in); !errors.Is(err, tc.want) {
				t.Errorf("%s: %v became %v", name, tc.in, err)
			}
		}
	}
	if ToConnect(nil) != nil || FromConnect(nil) != nil {
		t.Error("nil must stay nil")
	}
	// A proxy's page is no Connect error and still gets a class.
	err := fromResponse(502, []byte("<html>bad gateway</html>"))
	if !errors.Is(err, sandbox.ErrUnavailable) || !strings.Contains(err.Error(), "502") {
		t.Errorf("got %v", err)
	}
}

func TestRetryAfterHeaderRoundsUp(t *testing.T) {
	ce := ToConnect(&sandbox.Error{Class: sandbox.NoCapacity, RetryAfter: 1200 * time.Millisecond})
	if got := ce.Meta().Get("Retry-After"); got != "2" {
		t.Errorf("Retry-After %q, want 2", got)
	}
}

// A stream that breaks off in the middle of a message is the server's absence,
// not a wrong argument: clients come back after it.
func TestBrokenStreamIsUnavailable(t *testing.T) {
	for name, cut := range map[string]string{
		"in the length":  "\x00\x00\x00",
		"in the message": "\x00\x00\x00\x00\x10half",
		"before the end": "\x00\x00\x00\x00\x00",
		"at once":        "",
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/connect+proto")
			_, _ = io.WriteString(w, cut)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		c := NewClient(srv.URL, "k", Options{Transport: srv.Client().Transport})
		s, err := c.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{}))
		if err == nil {
			for s.Receive() {
			}
			err = s.Err()
			_ = s.Close()
		}
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.Unavailable || !strings.Contains(e.Msg, "the server went away") || !strings.Contains(e.Hint, "not lost") {
			t.Errorf("%s: %v (%s)", name, err, sandbox.ClassOf(err))
		}
		srv.Close()
	}
}

// A server that is killed takes its connections with it.
func TestAServerThatDiesIsUnavailable(t *testing.T) {
	begun := make(chan struct{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/connect+proto")
		_, _ = io.WriteString(w, "\x00\x00\x00\x00\x00")
		_ = http.NewResponseController(w).Flush()
		begun <- struct{}{}
		<-r.Context().Done()
	})}
	srv.Protocols.SetUnencryptedHTTP2(true)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	c := NewClient("http://"+l.Addr().String(), "k", Options{})
	defer c.Close()
	s, err := c.Snapshots.Create(t.Context(), connect.NewRequest(&covev1.CreateSnapshotRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	<-begun
	_ = srv.Close()
	<-served
	for s.Receive() {
	}
	var e *sandbox.Error
	if !errors.As(s.Err(), &e) || e.Class != sandbox.Unavailable || !strings.Contains(e.Msg, "the server went away") || !strings.Contains(e.Hint, "not lost") {
		t.Errorf("%v (%s)", s.Err(), sandbox.ClassOf(s.Err()))
	}
}
