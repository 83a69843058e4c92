// Package wire is the byte format between a node and the guest.
//
// A connection carries frames: four bytes of big-endian payload length, one
// byte of kind, the payload. Headers are JSON, content is raw. One request
// runs at a time; when its Reply, Error or End has been sent the connection
// takes the next.
//
//	agent → client  Hello     nonce, at once on accept
//	client → agent  Auth      nonce and MAC, with the first request behind it
//	agent → client  Proof     MAC, in front of the first answer
//	client → agent  Request   then Data frames if the request has content
//	agent → client  Credit    content taken, while the request has more than a Window of it
//	agent → client  Data, Started, Output, Lost, Change … then Reply, Error or End
//
// Connect is the exception: after its Reply both sides send Data, Credit and
// Shut ([Stream]) until one sends Over. No connection survives a checkpoint, but
// the stream does: the agent keeps it under the host's token, and a connect with
// that token and a Mark, answered by a Mark, carries it on.
//
// What code inside sends to the host (a callback) is not a stream of this kind.
// The host reads and writes it in pieces by offset (call_read, call_write), each
// a request that may be sent again: a read's offset says what has arrived, a
// write's what is there already.
//
// The window is there for gVisor's port forward, which carries these bytes: a
// kernel of plain gVisor, or of a Cove before the edit that mends it, drops what
// does not fit the send buffer of its TCP end, 1 MiB, in the middle of the stream
// (runsc/boot/portforward, doCopy ignored short writes). The other way is safe:
// it writes at most 16 KiB at a time to a Unix socket, which takes all of that or
// nothing.
//
// Silence on a connection is normal: a process that runs has nothing to say. Who
// suspects a loss asks on another connection how far the guest has come on this one
// (progress), and compares. What was lost is sent again on a new connection; a
// request that must not run twice has an id, by which the guest repeats its answer.
//
// User code shares the loopback device with the agent. It can connect, but not
// sniff or inject (no CAP_NET_RAW, no CAP_NET_ADMIN), so a challenge at the
// start of a connection is enough and content needs no MAC of its own.
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Kind of a frame.
type Kind byte

const (
	Hello Kind = iota + 1
	Auth
	Proof
	Request
	Data
	Reply
	Error
	Started
	Output
	Lost
	End
	Change
	Credit
	Shut
	Over // of a stream: nothing more is read of it; empty, or the error that broke it
)

const (
	headerSize = 5

	// MaxFrame bounds one payload. The largest is a list of files or tasks.
	MaxFrame = 8 << 20

	// MaxHeader bounds the header of a request: 1 MiB of argv whose every byte
	// JSON writes as \u00xx.
	MaxHeader = 8 << 20

	// MaxData is how content is cut. Large enough that the five bytes of header
	// and the wake-up do not matter, small enough to be held per connection.
	MaxData = 64 << 10

	// Window is how much of a request may be on its way, not taken by the agent.
	Window = 256 << 10

	// MaxUntar bounds the tar of one request; what is larger goes by Bulk, whose
	// process takes 20 ms to start and then moves ten times as much a second.
	MaxUntar = 512 << 10
	// MaxContent bounds the content of one request (a file, a process's input).
	// Larger content is a bulk operation or several SendInput calls.
	MaxContent = 64 << 20
)

// Req is the header of a request. Which fields matter depends on Op.
type Req struct {
	Op string `json:"op"`
	ID string `json:"id,omitempty"` // of a request that must not run twice, however often it is sent

	InitPID    int      `json:"init_pid,omitempty"` // enter; mount: of the container that has it
	Env        []string `json:"env,omitempty"`
	WorkingDir string   `json:"working_dir,omitempty"`
	Resolv     string   `json:"resolv,omitempty"`   // enter: content of /etc/resolv.conf; "" = the image's
	Hostname   string   `json:"hostname,omitempty"` // enter, rekey
	User       string   `json:"user,omitempty"`     // enter; chown: the owner
	Pids       int64    `json:"pids,omitempty"`     // enter

	Secret []byte `json:"secret,omitempty"` // rekey; with Env and Pids, as enter has them
	Stay   bool   `json:"stay,omitempty"`   // rekey: a name and a limit for the time until another rekey, and Spec to practise; clocks stand

	Spec   *sandbox.ProcessSpec `json:"spec,omitempty"` // start; its Input travels as content
	ExecID string               `json:"exec_id,omitempty"`
	Signal string               `json:"signal,omitempty"`
	Size   *sandbox.TermSize    `json:"size,omitempty"`

	Port int `json:"port,omitempty"` // connect, listen

	Token string `json:"token,omitempty"` // listen, accept, unlisten: whose listener; progress: which connection; connect: which stream
	Mark  *Mark  `json:"mark,omitempty"`  // connect: the stream is there already, and the host has come so far
	Call  int64  `json:"call,omitempty"`  // call_*: which connection; accept: those after it

	Path   string                `json:"path,omitempty"`
	Paths  []string              `json:"paths,omitempty"` // trust: the stores; its content is the certificate, Path its own file
	To     string                `json:"to,omitempty"`
	Offset int64                 `json:"offset,omitempty"`
	Length int64                 `json:"length,omitempty"`
	Mode   uint32                `json:"mode,omitempty"`
	Depth  int                   `json:"depth,omitempty"`
	Limit  int                   `json:"limit,omitempty"`
	Flag   bool                  `json:"flag,omitempty"` // recursive; signal: the process only; list: attributes too
	Write  *sandbox.WriteOptions `json:"write,omitempty"`

	Attributes map[string]string `json:"attributes,omitempty"` // set_attrs

	// Header is the length of the true header, when that is too long for a frame
	// of its own and is the first part of the content.
	Header  int64 `json:"header,omitempty"`
	Content int64 `json:"content,omitempty"` // bytes of Data frames that follow
}

// Res is the header of a reply.
type Res struct {
	InitPID   int                 `json:"init_pid,omitempty"` // init
	File      *sandbox.FileInfo   `json:"file,omitempty"`
	Files     []sandbox.FileInfo  `json:"files,omitempty"`
	Truncated bool                `json:"truncated,omitempty"`
	Missing   bool                `json:"missing,omitempty"` // trust: there is no store
	End       *sandbox.ProcessEnd `json:"end,omitempty"`
	Processes []sandbox.Process   `json:"processes,omitempty"`
	Tasks     []sandbox.Task      `json:"tasks,omitempty"`
	OOMKills  int64               `json:"oom_kills,omitempty"` // processes
	Calls     []int64             `json:"calls,omitempty"`     // accept: connections, the oldest first
	EOF       bool                `json:"eof,omitempty"`       // call_read: nothing comes after this
	Progress  *Progress           `json:"progress,omitempty"`  // nil: the connection is not known
	Mark      *Mark               `json:"mark,omitempty"`      // connect: how far the agent has come; guests of before have none
}

// Ops of a request.
const (
	OpPing       = "ping"
	OpProgress   = "progress"
	OpPrepare    = "prepare"
	OpEnter      = "enter"
	OpLeave      = "leave"
	OpScrub      = "scrub"
	OpInit       = "init"
	OpWaitInit   = "wait_init"
	OpFreeze     = "freeze"
	OpThaw       = "thaw"
	OpSetEnv     = "setenv"
	OpTrust      = "trust"
	OpRekey      = "rekey"
	OpMount      = "mount"
	OpStart      = "start"
	OpAttach     = "attach"
	OpInput      = "input"
	OpCloseInput = "close_input"
	OpSignal     = "signal"
	OpResize     = "resize"
	OpProcesses  = "processes"
	OpWait       = "wait"
	OpRead       = "read"
	OpWrite      = "write"
	OpStat       = "stat"
	OpList       = "list"
	OpMkdir      = "mkdir"
	OpMove       = "move"
	OpRemove     = "remove"
	OpChmod      = "chmod"
	OpChown      = "chown"
	OpSetAttrs   = "set_attrs"
	OpUntar      = "untar" // content: a tar of at most MaxUntar
	OpWatch      = "watch"
	OpConnect    = "connect"
	OpListen     = "listen"
	OpUnlisten   = "unlisten"
	OpAccept     = "accept"
	OpCallRead   = "call_read"
	OpCallWrite  = "call_write"
	OpCallClose  = "call_close" // Flag: only our half
)

// CallbackAddr is where the agent listens for calls to the host. Not 127.0.0.1:
// a program inside that serves on that may have the same port beside it.
const CallbackAddr = "127.0.0.77"

// CallbackHost is the name of that address inside.
const CallbackHost = "cove.internal"

// Conn frames a connection. One goroutine may read while another writes.
type Conn struct {
	net.Conn
	r   *bufio.Reader
	w   []byte // frame being built; kept small between frames
	got int64  // bytes of payload and headers read, for the client's retry rule

	id   string // by the handshake
	in   *counter
	sent atomic.Int64
}

// NewConn wraps c. The read buffer is small: an idle sandbox holds several
// connections, and large payloads are read past it anyway.
func NewConn(c net.Conn) *Conn {
	in := &counter{Conn: c}
	return &Conn{Conn: c, in: in, r: bufio.NewReaderSize(in, 2048)}
}

// Received is how many bytes have been read so far.
func (c *Conn) Received() int64 { return c.got }

// Read returns the next frame; limit bounds what is accepted of it.
func (c *Conn) ReadFrame(limit int) (Kind, []byte, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(c.r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(h[:4])
	if int64(n) > int64(limit) {
		return 0, nil, fmt.Errorf("frame of %d bytes, at most %d accepted", n, limit)
	}
	p := make([]byte, n)
	if _, err := io.ReadFull(c.r, p); err != nil {
		return 0, nil, err
	}
	c.got += headerSize + int64(n)
	return Kind(h[4]), p, nil
}

// WriteFrame sends one frame whose payload is the parts joined.
func (c *Conn) WriteFrame(k Kind, parts ...[]byte) error {
	if err := c.Queue(k, parts...); err != nil {
		return err
	}
	return c.Flush()
}

// Queue builds a frame behind those already queued; Flush sends them in one
// write, which is one wake-up of the other side.
func (c *Conn) Queue(k Kind, parts ...[]byte) error {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	if n > MaxFrame {
		return fmt.Errorf("frame of %d bytes, at most %d can be sent", n, MaxFrame)
	}
	c.w = binary.BigEndian.AppendUint32(c.w, uint32(n))
	c.w = append(c.w, byte(k))
	for _, p := range parts {
		c.w = append(c.w, p...)
	}
	return nil
}

// Flush sends what is queued.
func (c *Conn) Flush() error {
	if len(c.w) == 0 {
		return nil
	}
	n, err := c.Conn.Write(c.w)
	c.sent.Add(int64(n))
	if cap(c.w) > 16<<10 {
		c.w = nil
	} else {
		c.w = c.w[:0]
	}
	return err
}

// QueueJSON is Queue of v.
func (c *Conn) QueueJSON(k Kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.Queue(k, b)
}

// WriteJSON sends one frame with v.
func (c *Conn) WriteJSON(k Kind, v any) error {
	if err := c.QueueJSON(k, v); err != nil {
		return err
	}
	return c.Flush()
}

// WriteCredit says that n bytes of content were taken.
func (c *Conn) WriteCredit(n int) error {
	if err := c.QueueCredit(n); err != nil {
		return err
	}
	return c.Flush()
}

// QueueCredit is WriteCredit that goes with what is written next.
func (c *Conn) QueueCredit(n int) error {
	return c.Queue(Credit, binary.BigEndian.AppendUint32(nil, uint32(n)))
}

// ParseCredit is the content of a Credit frame.
func ParseCredit(p []byte) (int, error) {
	if len(p) != 4 {
		return 0, fmt.Errorf("credit frame of %d bytes", len(p))
	}
	return int(binary.BigEndian.Uint32(p)), nil
}

// WriteError sends err as the end of a request. Anything that is not a
// *sandbox.Error is a defect of ours and goes as internal.
func (c *Conn) WriteError(err error) error { return c.WriteJSON(Error, FlattenError(err)) }

// FlattenError makes err fit for the wire: causes do not cross it, so their
// text moves into the message.
func FlattenError(err error) *sandbox.Error {
	out := sandbox.Error{Class: sandbox.ClassOf(err)}
	if e, ok := asSandboxError(err); ok {
		out = *e
	}
	if out.Err != nil {
		if out.Msg != "" {
			out.Msg += ": "
		}
		out.Msg += out.Err.Error()
		out.Err = nil
	} else if out.Msg == "" && out.Class == sandbox.Internal {
		out.Msg = err.Error()
	}
	return &out
}

// outputHeader is stream and offset in front of the bytes.
const outputHeader = 9

// AppendOutputHeader writes the header of an Output frame.
func AppendOutputHeader(b []byte, s sandbox.Stream, offset int64) []byte {
	return binary.BigEndian.AppendUint64(append(b, byte(s)), uint64(offset))
}

// ParseOutput is the content of an Output frame.
func ParseOutput(p []byte) (*sandbox.Output, error) {
	if len(p) < outputHeader {
		return nil, fmt.Errorf("output frame of %d bytes", len(p))
	}
	return &sandbox.Output{
		Stream: sandbox.Stream(p[0]),
		Offset: int64(binary.BigEndian.Uint64(p[1:])),
		Data:   p[outputHeader:],
	}, nil
}

// HandshakeTimeout bounds how long an unauthenticated connection may live. The
// honest handshake is one round trip inside one machine.
const HandshakeTimeout = 2 * time.Second
