package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
)

func pair(t testing.TB) (*Conn, *Conn) {
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	return NewConn(a), NewConn(b)
}

func TestFramesArriveAsTheyWereSent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var buf bytes.Buffer
		w := NewConn(rw{w: &buf})
		type sent struct {
			k Kind
			p []byte
		}
		var all []sent
		for range rapid.IntRange(0, 20).Draw(t, "frames") {
			s := sent{Kind(rapid.Byte().Draw(t, "kind")), rapid.SliceOfN(rapid.Byte(), 0, 5000).Draw(t, "payload")}
			cut := rapid.IntRange(0, len(s.p)).Draw(t, "cut")
			if err := w.Queue(s.k, s.p[:cut], s.p[cut:]); err != nil {
				t.Fatal(err)
			}
			if rapid.Bool().Draw(t, "flush") {
				w.Flush()
			}
			all = append(all, s)
		}
		w.Flush()
		r := NewConn(rw{r: &buf})
		for _, s := range all {
			k, p, err := r.ReadFrame(MaxFrame)
			if err != nil || k != s.k || !bytes.Equal(p, s.p) {
				t.Fatalf("%v %d %d bytes", err, k, len(p))
			}
		}
		if _, _, err := r.ReadFrame(MaxFrame); err != io.EOF {
			t.Fatal(err)
		}
	})
}

type rw struct {
	net.Conn
	r io.Reader
	w io.Writer
}

func (c rw) Read(b []byte) (int, error)  { return c.r.Read(b) }
func (c rw) Write(b []byte) (int, error) { return c.w.Write(b) }

func TestAFrameAboveTheLimitIsNotEvenAllocated(t *testing.T) {
	h := binary.BigEndian.AppendUint32(nil, 0xffffffff)
	c := NewConn(rw{r: bytes.NewReader(append(h, byte(Data)))})
	if _, _, err := c.ReadFrame(MaxFrame); err == nil {
		t.Error("taken")
	}
	if err := c.Queue(Data, make([]byte, MaxFrame+1)); err == nil {
		t.Error("sent")
	}
}

func TestTheHandshakeProvesBothSides(t *testing.T) {
	for name, c := range map[string]struct {
		agent, client string
		agentOK       bool
	}{
		"same secret":  {"secret", "secret", true},
		"wrong client": {"secret", "other", false},
		"no secret":    {"", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t)
			agent := make(chan error, 1)
			go func() {
				err := a.AcceptAuth([]byte(c.agent))
				if err == nil {
					err = a.Flush()
				}
				a.Close()
				agent <- err
			}()
			p, err := b.OfferAuth([]byte(c.client))
			if err != nil {
				t.Fatal(err)
			}
			b.Flush()
			err = p.Check(b)
			if aerr := <-agent; (aerr == nil) != c.agentOK || (err == nil) != c.agentOK {
				t.Errorf("agent %v, client %v", aerr, err)
			}
		})
	}
}

func TestAnImpostorCannotPlayTheAnswersBack(t *testing.T) {
	a, b := pair(t)
	go func() { // sends its own nonce and returns the client's MAC as proof
		a.WriteFrame(Hello, make([]byte, nonceSize))
		_, p, _ := a.ReadFrame(1000)
		a.WriteFrame(Proof, p[nonceSize:])
	}()
	p, err := b.OfferAuth([]byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	b.Flush()
	if err := p.Check(b); !errors.Is(err, ErrAuth) {
		t.Errorf("believed: %v", err)
	}
}

func TestErrorsKeepTheirClassAndWordsOverTheWire(t *testing.T) {
	e := FlattenError(sandbox.Errorf(sandbox.NotFound, "op", "no %s", "such").WithHint("look"))
	if e.Class != sandbox.NotFound || e.Op != "op" || e.Msg != "no such" || e.Hint != "look" || e.Err != nil {
		t.Errorf("%+v", e)
	}
	if e := FlattenError(io.EOF); e.Class != sandbox.Internal || e.Msg != "EOF" {
		t.Errorf("%+v", e)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 4, 'x'})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewConn(rw{r: bytes.NewReader(b)})
		for {
			k, p, err := c.ReadFrame(1 << 16)
			if err != nil {
				return
			}
			if k == Output {
				ParseOutput(p)
			}
		}
	})
}
