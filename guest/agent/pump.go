package agent

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// pumpBuf is what one read takes from a pipe: a full one.
const pumpBuf = 64 << 10

// pumpBufs are shared by all pumps: one that waits for output holds none.
var pumpBufs = sync.Pool{New: func() any { b := make([]byte, pumpBuf); return &b }}

// pump moves one output pipe of a process into its log. When the main process
// has ended it takes what is in the pipe at that moment and reports drained;
// from then on it reads and discards, so that a child left behind with the pipe
// neither blocks nor dies of SIGPIPE.
type pump struct {
	f       *os.File
	stream  sandbox.Stream
	log     *outlog
	exited  chan struct{} // closed by finish
	drained chan struct{} // closed by run: the log has all it will get
	gone    chan struct{} // closed by run: the descriptor is closed
}

func newPump(f *os.File, s sandbox.Stream, l *outlog) *pump {
	p := &pump{f: f, stream: s, log: l, exited: make(chan struct{}), drained: make(chan struct{}), gone: make(chan struct{})}
	go p.run()
	return p
}

func (p *pump) run() {
	defer close(p.gone)
	defer p.f.Close()
	eof := p.live()
	if !eof {
		eof = p.drain()
	}
	close(p.drained)
	switch {
	case !eof:
		p.discard()
	case p.stream == sandbox.PTYOut:
		<-p.exited // closing a terminal hangs up its session, and the end of output is not its end
	}
}

// live reads to the end of the pipe (true) or until the main process has ended.
func (p *pump) live() (eof bool) {
	for {
		p.log.waitSpace(p.exited)
		n, err := p.read(func(b []byte) { p.log.append(p.stream, b) })
		if os.IsTimeout(err) {
			select {
			case <-p.exited:
				return false
			default:
				continue
			}
		}
		if err != nil || n == 0 {
			return true // a terminal whose other side is closed says EIO
		}
	}
}

// read waits for the pipe and reads once, holding a buffer only meanwhile.
func (p *pump) read(got func([]byte)) (n int, err error) {
	rc, err := p.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var rerr error
	err = rc.Read(func(fd uintptr) bool {
		n, rerr = readOnce(int(fd), pumpBuf, got)
		return rerr != unix.EAGAIN
	})
	if err == nil {
		err = rerr
	}
	return n, err
}

func readOnce(fd, limit int, got func([]byte)) (int, error) {
	b := pumpBufs.Get().(*[]byte)
	defer pumpBufs.Put(b)
	n, err := retryEINTR(func() (int, error) { return unix.Read(fd, (*b)[:min(limit, pumpBuf)]) })
	if n > 0 && err == nil {
		got((*b)[:n])
	}
	return max(n, 0), err
}

// drain takes what the pipe holds now. A child that goes on writing cannot
// make that more, so it is bounded by the size of a pipe, and it does not wait
// for room in the log.
func (p *pump) drain() (eof bool) {
	rc, err := p.f.SyscallConn()
	if err != nil {
		return true
	}
	rc.Control(func(fd uintptr) {
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ) // FIONREAD by its other name
		if err != nil {
			left = pumpBuf
		}
		// One read more than asked for tells an end from a pipe held open,
		// and spares the common case a goroutine that waits for it.
		for left >= 0 {
			n, err := readOnce(int(fd), max(left, 1), func(b []byte) { p.log.append(p.stream, b) })
			if err == unix.EAGAIN {
				return
			}
			if err != nil || n == 0 {
				eof = true
				return
			}
			left -= n
		}
	})
	return eof
}

func (p *pump) discard() {
	p.f.SetReadDeadline(time.Time{})
	for {
		if n, err := p.read(func([]byte) {}); err != nil || n == 0 {
			return
		}
	}
}

// finish says that the main process has ended.
func (p *pump) finish() {
	close(p.exited)
	p.f.SetReadDeadline(time.Unix(1, 0))
}

// close ends the pump whatever it does.
func (p *pump) close() {
	p.f.Close()
	<-p.gone
}
