package native

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"
)

// pair is the two ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close(); in.Close() })
	_ = out.SetDeadline(time.Now().Add(time.Minute))
	_ = in.SetDeadline(time.Now().Add(time.Minute))
	return out.(*net.TCPConn), in.(*net.TCPConn)
}

// A side that breaks off is not one that ended in order, to the other.
func TestJoinedConnectionsBreakOffTogether(t *testing.T) {
	for _, from := range []string{"outside", "inside"} {
		t.Run(from, func(t *testing.T) {
			user, client := pair(t)
			inside, program := pair(t)
			done := make(chan struct{})
			go func() { defer close(done); join(client, client, inside) }()
			broken, other := user, program
			if from == "inside" {
				broken, other = program, user
			}
			_ = broken.SetLinger(0)
			broken.Close()
			if _, err := io.ReadAll(other); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the other side sees %v", err)
			}
			<-done
		})
	}
}
