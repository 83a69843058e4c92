package main

import (
	"bytes"
	"io"
	"runtime/debug"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
	"gvisor.dev/gvisor/runsc/boot/portforward"
)

// lateTCP stands for a stack's TCP. Its one endpoint becomes ready at the worst
// moment: after it was asked and before anybody can have registered for the news.
type lateTCP struct {
	stack.TransportProtocol
	ep interface {
		tcpip.Endpoint
		uses(*waiter.Queue)
	}
}

func (p *lateTCP) Number() tcpip.TransportProtocolNumber { return tcp.ProtocolNumber }

func (p *lateTCP) NewEndpoint(_ tcpip.NetworkProtocolNumber, wq *waiter.Queue) (tcpip.Endpoint, tcpip.Error) {
	p.ep.uses(wq)
	return p.ep, nil
}

type lateEndpoint struct {
	tcpip.Endpoint
	wq    *waiter.Queue
	asked bool
}

func (e *lateEndpoint) uses(wq *waiter.Queue)                 { e.wq = wq }
func (e *lateEndpoint) Connect(tcpip.FullAddress) tcpip.Error { return nil }

// late says whether this is the first time.
func (e *lateEndpoint) late(ready waiter.EventMask) bool {
	if e.asked {
		return false
	}
	e.asked = true
	e.wq.Notify(ready)
	return true
}

func (e *lateEndpoint) Read(w io.Writer, _ tcpip.ReadOptions) (tcpip.ReadResult, tcpip.Error) {
	if e.late(waiter.ReadableEvents) {
		return tcpip.ReadResult{}, &tcpip.ErrWouldBlock{}
	}
	n, _ := w.Write([]byte("answer"))
	return tcpip.ReadResult{Count: n, Total: n}, nil
}

func (e *lateEndpoint) Write(p tcpip.Payloader, _ tcpip.WriteOptions) (int64, tcpip.Error) {
	if e.late(waiter.WritableEvents) {
		return 0, &tcpip.ErrWouldBlock{}
	}
	n, _ := io.Copy(io.Discard, p)
	return n, nil
}

// smallEndpoint is an endpoint with room for two bytes at a time and nothing to say.
type smallEndpoint struct {
	lateEndpoint
	got chan string
}

func (e *smallEndpoint) Read(io.Writer, tcpip.ReadOptions) (tcpip.ReadResult, tcpip.Error) {
	return tcpip.ReadResult{}, &tcpip.ErrWouldBlock{}
}

func (e *smallEndpoint) Write(p tcpip.Payloader, _ tcpip.WriteOptions) (int64, tcpip.Error) {
	var b bytes.Buffer
	n, _ := io.CopyN(&b, p, int64(min(p.Len(), 2)))
	e.got <- b.String()
	return n, nil
}

func (e *smallEndpoint) Close() {}

// edited skips a test of what cmd/runsc/edits mends where the build is of gVisor
// as it comes.
func edited(t *testing.T) {
	t.Helper()
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, d := range info.Deps {
			if d.Path == "gvisor.dev/gvisor" && d.Replace != nil {
				return
			}
		}
	}
	t.Skip("not built of the edited gVisor: use make, or -modfile=.cache/gvisor.mod")
}

// never is what a hang looks like. The mended code answers without waiting.
const never = 5 * time.Second

func TestThePortForwardLosesNoWakeUp(t *testing.T) {
	edited(t)
	for name, act := range map[string]func(c conn, cancel chan struct{}) (int, error){
		"an answer that comes before it is waited for": func(c conn, cancel chan struct{}) (int, error) {
			return c.Read(context.Background(), make([]byte, 6), cancel)
		},
		"room for a request before it is waited for": func(c conn, cancel chan struct{}) (int, error) {
			return c.Write(context.Background(), []byte("answer"), cancel)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, &lateTCP{ep: &lateEndpoint{}})
			cancel := make(chan struct{})
			timer := time.AfterFunc(never, func() { close(cancel) })
			defer timer.Stop()
			if n, err := act(c, cancel); n != 6 || err != nil {
				t.Errorf("%d bytes, %v: it waits for ever", n, err)
			}
		})
	}
}

// conn is portforward's own, which has no name outside.
type conn interface {
	Read(ctx context.Context, buf []byte, cancel <-chan struct{}) (int, error)
	Write(ctx context.Context, buf []byte, cancel <-chan struct{}) (int, error)
	Name() string
	Close(ctx context.Context)
}

func dial(t *testing.T, tcp *lateTCP) conn {
	t.Helper()
	s := stack.New(stack.Options{TransportProtocols: []stack.TransportProtocolFactory{
		func(*stack.Stack) stack.TransportProtocol { return tcp },
	}})
	c, err := portforward.NewNetstackConn(s, 1)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// source is a client that sends one message and then nothing.
type source struct {
	conn
	message []byte
	sent    bool
}

func (s *source) Read(_ context.Context, buf []byte, cancel <-chan struct{}) (int, error) {
	if !s.sent {
		s.sent = true
		return copy(buf, s.message), nil
	}
	<-cancel
	return 0, io.EOF
}
func (s *source) Name() string          { return "client" }
func (s *source) Close(context.Context) {}

func TestThePortForwardDropsNothingOfAWriteTakenInPart(t *testing.T) {
	edited(t)
	ep := &smallEndpoint{got: make(chan string)}
	p := portforward.NewProxy(portforward.ProxyPair{To: &source{message: []byte("request")}, From: dial(t, &lateTCP{ep: ep})}, "test")
	p.Start(context.Background())
	defer p.Close()
	for _, want := range []string{"re", "qu", "es", "t"} {
		select {
		case got := <-ep.got:
			if got != want {
				t.Fatalf("%q came through, not %q", got, want)
			}
		case <-time.After(never):
			t.Fatalf("%q never came through", want)
		}
	}
}
