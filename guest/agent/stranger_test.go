package agent_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestAWrongSecretGetsNothing(t *testing.T) {
	b := newBox(t)
	c := guest.NewClient(dialer(b.addr), []byte("a wrong secret, or so we hope"))
	defer c.Close()
	if err := c.Ping(t.Context()); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if err := c.Start(t.Context(), sandbox.ProcessSpec{ExecID: "x", Command: "touch pwned"}, 0, func(sandbox.ProcessEvent) error { return nil }); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if m, _ := filepath.Glob(filepath.Join(b.root, "work/*")); len(m) > 0 {
		t.Error("a stranger's command ran")
	}
}

func TestGarbageIsAnsweredByANonceAndAClosedDoor(t *testing.T) {
	b := newBox(t)
	for _, garbage := range []string{"", "GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x40\x02" + strings.Repeat("x", 64), "\xff\xff\xff\xff\x02", "\x00\x00\x00\x02\x04{}"} {
		c, err := net.Dial("tcp4", b.addr)
		must(t, err)
		c.Write([]byte(garbage))
		c.(*net.TCPConn).CloseWrite()
		got, _ := io.ReadAll(c)
		c.Close()
		if len(got) != 5+32 || !bytes.Equal(got[:5], []byte{0, 0, 0, 32, 1}) {
			t.Errorf("%q: %d bytes back", garbage, len(got))
		}
	}
	must(t, b.Ping(t.Context()))
}

func TestAFloodOfStrangersDoesNotKeepTheHostOut(t *testing.T) {
	b := newBox(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			var held []net.Conn
			defer func() {
				for _, c := range held {
					c.Close()
				}
			}()
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.DialTimeout("tcp4", b.addr, time.Second)
				if err != nil {
					continue
				}
				if held = append(held, c); len(held) > 400 {
					held[0].Close()
					held = held[1:]
				}
			}
		})
	}
	for range 30 {
		c := guest.NewClient(dialer(b.addr), secret) // a new connection each time
		if err := c.Ping(t.Context()); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	close(stop)
	wg.Wait()
}

// The guest binary is copied into every kernel and its memory counts for every
// sandbox, so what it is made of is a promise.
func TestTheGuestIsMadeOfLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "../../cmd/cove-guest").Output()
	must(t, err)
	for dep := range strings.FieldsSeq(string(out)) {
		switch {
		case dep == "golang.org/x/sys/unix":
		case dep == "github.com/cove-sandbox/cove/sandbox":
		case dep == "github.com/cove-sandbox/cove/internal/notify": // 20 lines, of sync alone
		case strings.HasPrefix(dep, "github.com/cove-sandbox/cove/guest"):
		case dep == "github.com/cove-sandbox/cove/cmd/cove-guest":
		default:
			t.Errorf("the guest depends on %s", dep)
		}
	}
	out, err = exec.Command("go", "list", "-deps", "../../cmd/cove-guest").Output()
	must(t, err)
	for dep := range strings.FieldsSeq(string(out)) {
		if dep == "net/http" || dep == "crypto/tls" || dep == "text/template" {
			t.Errorf("the guest depends on %s", dep)
		}
	}
}
