package server

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"maps"
	"net"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// fakeNode is a node in memory. Its sandboxes hold files and run a few
// commands; tests fail it through the hooks, which are set before use.
type fakeNode struct {
	onCreate func(ctx context.Context, sb sandbox.Sandbox) error // before anything is made
	onReset  func() error
	onListen func(port int) error        // before anything listens
	onBulk   func(op guest.BulkOp) error // before anything is moved

	fakeNetworks // guarded by mu
	fakeSecrets

	lib   *fakeLibrary
	ended chan string

	mu   sync.Mutex
	live map[string]*fakeGuest
	ends map[string]sandbox.End

	listeners map[string]net.Listener // by sandbox
	created   int
	acked     []string
	held      int // guests not released

	fakeState
}

func newFakeNode() *fakeNode {
	return &fakeNode{lib: newFakeLibrary(), ended: make(chan string, 1000), live: map[string]*fakeGuest{}, ends: map[string]sandbox.End{},
		fakeState: newFakeState()}
}

func (n *fakeNode) Name() string { return "n1" }

func (n *fakeNode) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (time.Duration, error) {
	if n.onCreate != nil {
		if err := n.onCreate(ctx, sb); err != nil {
			return 0, err
		}
	}
	if !n.lib.Have(img.ID) {
		return 0, sandbox.Errorf(sandbox.Corrupt, "node.create", "no content %s", img.ID)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.created++
	n.live[sb.ID] = n.guestOfLocked(sb, img)
	return time.Millisecond, nil
}

func (n *fakeNode) find(id string) (*fakeGuest, error) {
	if g := n.live[id]; g != nil {
		return g, nil
	}
	if end, ok := n.ends[id]; ok {
		return nil, &sandbox.Error{Class: sandbox.Ended, Msg: end.String()}
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "node", "no sandbox %s", id).WithReason(sandbox.NoSandbox)
}

func (n *fakeNode) Reset(ctx context.Context, id string) (int64, time.Duration, error) {
	n.mu.Lock()
	g, err := n.find(id)
	n.mu.Unlock()
	if err != nil {
		return 0, 0, err
	}
	if n.onReset != nil {
		if err := n.onReset(); err != nil {
			return 0, 0, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	sb := g.sb
	sb.Episode++
	n.live[id] = newFakeGuest(sb)
	close(g.dead)
	return sb.Episode, time.Millisecond, nil
}

func (n *fakeNode) Kill(ctx context.Context, id string, end sandbox.End) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, over := n.ends[id]; over {
		return nil
	}
	g, err := n.find(id)
	if err != nil {
		return err
	}
	n.endLocked(g, end)
	return nil
}

func (n *fakeNode) endLocked(g *fakeGuest, end sandbox.End) {
	delete(n.live, g.sb.ID)
	if l := n.listeners[g.sb.ID]; l != nil {
		l.Close()
	}
	delete(n.standby, g.sb.ID)
	n.ends[g.sb.ID] = end
	close(g.dead)
}

// die is a sandbox ending by itself.
func (n *fakeNode) die(id string, cause sandbox.Cause) {
	n.mu.Lock()
	// With a time: the server forgets ends of long ago when it starts.
	n.endLocked(n.live[id], sandbox.End{Cause: cause, Detail: "by itself", At: time.Now().UTC()})
	n.mu.Unlock()
	n.ended <- id
}

func (n *fakeNode) SetExpiry(ctx context.Context, id string, at time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.find(id)
	if err == nil {
		g.sb.ExpiresAt = at
	}
	return err
}

func (n *fakeNode) Stats(ctx context.Context, id string) (sandbox.Stats, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, err := n.find(id)
	return sandbox.Stats{Memory: 42, Processes: 1}, err
}

func (n *fakeNode) Guest(ctx context.Context, id string) (Guest, func(), error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.find(id)
	if err != nil {
		return nil, nil, err
	}
	n.held++
	delete(n.standby, id) // a call wakes it
	return g, sync.OnceFunc(func() { n.mu.Lock(); n.held--; n.mu.Unlock() }), nil
}

// Dial reaches this machine's own loopback, where tests have their servers.
// Listen is on a port of this machine that the test asks the node for.
func (n *fakeNode) Listen(ctx context.Context, id string, port int) (net.Listener, error) {
	if _, release, err := n.Guest(ctx, id); err != nil {
		return nil, err
	} else {
		release()
	}
	if n.onListen != nil {
		if err := n.onListen(port); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners = map[string]net.Listener{}
	}
	n.listeners[id] = l
	return &endingListener{l, n, id}, nil
}

// endingListener ends with its sandbox, and says so.
type endingListener struct {
	net.Listener
	n  *fakeNode
	id string
}

func (l *endingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		_, release, ended := l.n.Guest(asServer(context.Background()), l.id)
		if ended != nil {
			return nil, ended
		}
		release()
	}
	return c, err
}

func (n *fakeNode) callbackURL(id string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return "http://" + n.listeners[id].Addr().String()
}

func (n *fakeNode) Dial(ctx context.Context, id string, port int) (net.Conn, func(), error) {
	_, release, err := n.Guest(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		release()
		return nil, nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortClosed, Err: err}
	}
	return c, release, nil
}

func (n *fakeNode) Live(ctx context.Context) (out []sandbox.Sandbox, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range n.live {
		out = append(out, g.sb)
	}
	return out, nil
}

func (n *fakeNode) Ends(ctx context.Context) (map[string]sandbox.End, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.ends), nil
}

func (n *fakeNode) AckEnd(ctx context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.ends, id)
	n.acked = append(n.acked, id)
	return nil
}

func (n *fakeNode) Ended() <-chan string { return n.ended }

func (n *fakeNode) Capacity() Capacity {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Capacity{Runtime: "fake", MaxSandboxes: 10, Sandboxes: int64(len(n.live)), Total: sandbox.Resources{MilliCPU: 2000, Memory: 1 << 30},
		WarmKernels: 1, WarmTarget: 2}
}

func (n *fakeNode) Images() ImageLibrary { return n.lib }

func (n *fakeNode) liveCount() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.live)
}

// Bulk moves content through the descriptors, as a kernel's process does.
func (n *fakeNode) Bulk(ctx context.Context, id string, op guest.BulkOp, stdin, stdout *os.File) error {
	if n.onBulk != nil {
		if err := n.onBulk(op); err != nil {
			return err
		}
	}
	n.mu.Lock()
	g, err := n.find(id)
	n.mu.Unlock()
	if err != nil {
		return err
	}
	switch op.Kind {
	case "read", "tar":
		data, _, err := g.content(op.Path)
		if err != nil {
			return err
		}
		data = data[min(op.Offset, int64(len(data))):]
		if op.Length > 0 {
			data = data[:min(op.Length, int64(len(data)))]
		}
		_, err = stdout.Write(data)
		return err
	case "write", "untar":
		type result struct {
			data []byte
			err  error
		}
		got := make(chan result, 1)
		go func() { // as a process: killed when ctx ends, before it sees the end of its stdin
			data, err := io.ReadAll(stdin)
			got <- result{data, err}
		}()
		select {
		case r := <-got:
			if r.err != nil {
				return r.err
			}
			_, err := g.WriteFile(ctx, op.Path, r.data, op.Write)
			return err
		case <-ctx.Done(): // killed: what it had written stays
			_ = stdin.SetReadDeadline(time.Unix(1, 0))
			r := <-got
			_, _ = g.WriteFile(ctx, op.Path, r.data, op.Write)
			return ctx.Err()
		}
	}
	return sandbox.Errorf(sandbox.Internal, "bulk", "kind %q", op.Kind)
}

// fakeGuest is the inside of one sandbox for one episode.
type fakeGuest struct {
	sb   sandbox.Sandbox
	dead chan struct{} // closed when the sandbox ends or is reset
	cut  chan struct{} // closed to break its connections

	mu    sync.Mutex
	files map[string][]byte
	procs map[string]*fakeProc
	clean string // manifest of the snapshot that nothing happened since
}

type fakeProc struct {
	spec    sandbox.ProcessSpec
	events  []sandbox.ProcessEvent // after Started
	changed chan struct{}
	ended   bool
	bytes   int64
}

func newFakeGuest(sb sandbox.Sandbox) *fakeGuest {
	return &fakeGuest{sb: sb, dead: make(chan struct{}), cut: make(chan struct{}), procs: map[string]*fakeProc{},
		files: map[string][]byte{"/etc/passwd": []byte("root:x:0:0::/:/bin/sh\n")}}
}

func errBroken() error { return sandbox.Errorf(sandbox.Unavailable, "guest", "connection reset") }

// Start knows "true", "false", "echo WORDS", "sleep" (runs until signalled)
// and "suicide" (ends by SIGKILL from inside).
func (g *fakeGuest) Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error {
	g.mu.Lock()
	p, replayed := g.procs[spec.ExecID]
	if !replayed {
		g.clean = ""
		p = &fakeProc{spec: spec, changed: make(chan struct{})}
		cmd, arg, _ := strings.Cut(spec.Command, " ")
		if spec.Command == "" {
			cmd, arg = spec.Args[0], strings.Join(spec.Args[1:], " ")
		}
		switch cmd {
		case "true":
			p.endLocked(sandbox.End{Cause: sandbox.Exited})
		case "false":
			p.endLocked(sandbox.End{Cause: sandbox.Exited, ExitCode: 1})
		case "echo":
			p.printLocked([]byte(arg + "\n"))
			p.endLocked(sandbox.End{Cause: sandbox.Exited})
		case "cat":
			p.printLocked(spec.Input)
			p.endLocked(sandbox.End{Cause: sandbox.Exited})
		case "suicide":
			p.endLocked(sandbox.End{Cause: sandbox.Signalled, Signal: "SIGKILL", ExitCode: 137})
		case "sleep":
			p.printLocked([]byte("sleeping\n"))
		case "serve": // becomes ready by listening on a port, given in hexadecimal
			g.files["/proc/1/net/tcp"] = []byte("  sl  local_address rem_address   st\n   0: 00000000:" + arg + " 00000000:0000 0A 0\n")
			p.printLocked([]byte("serving\n"))
		case "crash":
			p.printLocked([]byte(arg + "\n"))
			p.endLocked(sandbox.End{Cause: sandbox.Exited, ExitCode: 3})
		default:
			g.mu.Unlock()
			return sandbox.Errorf(sandbox.NotFound, "guest.start", "command not found: %s", cmd).WithReason(sandbox.CommandNotFound)
		}
		g.procs[spec.ExecID] = p
	}
	g.mu.Unlock()
	return g.follow(ctx, p, replayed, offset, sink)
}

func (p *fakeProc) printLocked(b []byte) {
	p.events = append(p.events, sandbox.ProcessEvent{Output: &sandbox.Output{Stream: sandbox.Stdout, Offset: p.bytes, Data: b}})
	p.bytes += int64(len(b))
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *fakeProc) endLocked(end sandbox.End) {
	p.events = append(p.events, sandbox.ProcessEvent{End: &sandbox.ProcessEnd{End: end, OutputBytes: p.bytes}})
	p.ended = true
	close(p.changed)
	p.changed = make(chan struct{})
}

func (g *fakeGuest) follow(ctx context.Context, p *fakeProc, replayed bool, offset int64, sink func(sandbox.ProcessEvent) error) error {
	if err := sink(sandbox.ProcessEvent{Started: &sandbox.ProcessStarted{ExecID: p.spec.ExecID, PID: 7, Replayed: replayed}}); err != nil {
		return err
	}
	for i := 0; ; {
		g.mu.Lock()
		evs, changed := p.events[i:], p.changed
		g.mu.Unlock()
		for _, ev := range evs {
			i++
			if o := ev.Output; o != nil {
				if o.Offset+int64(len(o.Data)) <= offset {
					continue
				}
				cut := max(0, offset-o.Offset)
				ev.Output = &sandbox.Output{Stream: o.Stream, Offset: o.Offset + cut, Data: o.Data[cut:]}
			}
			if err := sink(ev); err != nil {
				return err
			}
			if ev.End != nil {
				return nil
			}
		}
		select {
		case <-changed:
		case <-g.dead:
			return errBroken()
		case <-g.cut:
			return errBroken()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (g *fakeGuest) proc(id string) (*fakeProc, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "guest", "no process %q", id)
}

func (g *fakeGuest) Attach(ctx context.Context, id string, offset int64, sink func(sandbox.ProcessEvent) error) error {
	p, err := g.proc(id)
	if err != nil {
		return err
	}
	return g.follow(ctx, p, true, offset, sink)
}

func (g *fakeGuest) SendInput(ctx context.Context, id string, data []byte) error {
	p, err := g.proc(id)
	if err == nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		if !p.spec.Stdin {
			return sandbox.Errorf(sandbox.Precondition, "guest.input", "stdin is not open")
		}
		p.printLocked(data)
	}
	return err
}

func (g *fakeGuest) CloseInput(ctx context.Context, id string) error {
	_, err := g.proc(id)
	return err
}

func (g *fakeGuest) Signal(ctx context.Context, id, signal string, processOnly bool) error {
	p, err := g.proc(id)
	if err == nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		if !p.ended {
			p.endLocked(sandbox.End{Cause: sandbox.KilledByUser, Signal: signal})
		}
	}
	return err
}

func (g *fakeGuest) Resize(ctx context.Context, id string, size sandbox.TermSize) error {
	_, err := g.proc(id)
	return err
}

func (g *fakeGuest) Processes(ctx context.Context) (out []sandbox.Process, tasks []sandbox.Task, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for id := range g.procs {
		out = append(out, sandbox.Process{ExecID: id, PID: 7})
	}
	return out, []sandbox.Task{{PID: 1, Command: "init\xff"}}, nil
}

func (g *fakeGuest) Wait(ctx context.Context, id string) (end sandbox.ProcessEnd, err error) {
	err = g.Attach(ctx, id, 1<<40, func(ev sandbox.ProcessEvent) error {
		if ev.End != nil {
			end = *ev.End
		}
		return nil
	})
	return end, err
}

func (g *fakeGuest) content(p string) ([]byte, sandbox.FileInfo, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	data, ok := g.files[p]
	if !ok && p == "/proc/1/net/tcp" {
		data, ok = []byte("  sl  local_address rem_address   st\n"), true
	}
	if !ok {
		return nil, sandbox.FileInfo{}, sandbox.Errorf(sandbox.NotFound, "guest.file", "no file %s", p)
	}
	info := sandbox.FileInfo{Path: p, Name: path.Base(p), Type: sandbox.Regular, Size: int64(len(data)), Mode: 0o644, ModTime: time.Unix(1e9, 0)}
	if strings.HasPrefix(p, "/proc/") {
		info.Size = 0 // as the kernel says it
	}
	return data, info, nil
}

func (g *fakeGuest) ReadFile(ctx context.Context, p string, offset, length int64) ([]byte, sandbox.FileInfo, error) {
	data, info, err := g.content(p)
	if err != nil {
		return nil, info, err
	}
	data = data[min(offset, int64(len(data))):]
	if length > 0 {
		data = data[:min(length, int64(len(data)))]
	}
	return bytes.Clone(data), info, nil
}

func (g *fakeGuest) WriteFile(ctx context.Context, p string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	if strings.HasPrefix(p, "/full/") {
		return sandbox.FileInfo{}, sandbox.Errorf(sandbox.DiskFull, "guest.write", "no space left")
	}
	g.mu.Lock()
	g.clean = ""
	if opt.Append {
		data = append(bytes.Clone(g.files[p]), data...)
	}
	g.files[p] = bytes.Clone(data)
	g.mu.Unlock()
	return g.Stat(ctx, p)
}

func (g *fakeGuest) Stat(ctx context.Context, p string) (sandbox.FileInfo, error) {
	select {
	case <-g.dead: // a call that was under way when the sandbox went
		return sandbox.FileInfo{}, errBroken()
	default:
	}
	_, info, err := g.content(p)
	return info, err
}

func (g *fakeGuest) List(ctx context.Context, p string, opt guest.ListOptions) ([]sandbox.FileInfo, bool, error) {
	g.mu.Lock()
	names := make([]string, 0, len(g.files))
	for f := range g.files {
		if strings.HasPrefix(f, p) {
			names = append(names, f)
		}
	}
	g.mu.Unlock()
	var out []sandbox.FileInfo
	for _, f := range names {
		_, info, _ := g.content(f)
		out = append(out, info)
	}
	return out, false, nil
}

func (g *fakeGuest) Mkdir(ctx context.Context, p string, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{Path: p, Type: sandbox.Directory, Mode: opt.Mode}, nil
}

func (g *fakeGuest) Move(ctx context.Context, from, to string) (sandbox.FileInfo, error) {
	data, _, err := g.content(from)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	g.mu.Lock()
	delete(g.files, from)
	g.files[to] = data
	g.mu.Unlock()
	return g.Stat(ctx, to)
}

func (g *fakeGuest) Remove(ctx context.Context, p string, recursive bool) error {
	_, _, err := g.content(p)
	if err == nil {
		g.mu.Lock()
		delete(g.files, p)
		g.mu.Unlock()
	}
	return err
}

func (g *fakeGuest) Chmod(ctx context.Context, p string, mode uint32, recursive bool) error {
	_, _, err := g.content(p)
	return err
}

func (g *fakeGuest) Chown(ctx context.Context, p, owner string, recursive bool) error {
	_, _, err := g.content(p)
	return err
}

func (g *fakeGuest) Watch(ctx context.Context, p string, recursive bool, sink func(sandbox.FileChange) error) error {
	if err := sink(sandbox.FileChange{Path: p, Op: "ready"}); err != nil {
		return err
	}
	select {
	case <-g.dead:
		return errBroken()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fakeLibrary holds content ids; a reference "reg/NAME" pulls as "sha256:NAME".
type fakeLibrary struct {
	pulledAs []sandbox.RegistryAccess
	mu       sync.Mutex
	content  map[string]int64
	pulls    int
	gate     chan struct{} // if set, a pull waits for it (or for its context)
	left     chan struct{} // if set, closed when a pull was cancelled
	deleted  []string
	sources  map[string]string // where it is not "test"
}

func newFakeLibrary() *fakeLibrary {
	return &fakeLibrary{content: map[string]int64{}, sources: map[string]string{}}
}

// derive is add of an image made of a snapshot.
func (l *fakeLibrary) derive(name string) sandbox.Image {
	img := l.add(name)
	l.mu.Lock()
	defer l.mu.Unlock()
	img.Source = sandbox.ImageDerived
	l.sources[img.ID] = img.Source
	return img
}

func (l *fakeLibrary) Get(id string) (sandbox.Image, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	size, ok := l.content[id]
	if !ok {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ImageNotFound, "image.get", "no image %s", id)
	}
	return sandbox.Image{ID: id, Size: size, Source: cmp.Or(l.sources[id], "test")}, nil
}

func (l *fakeLibrary) PullAs(ctx context.Context, who sandbox.RegistryAccess, ref, platform string, progress func(ImageProgress)) (sandbox.Image, error) {
	l.mu.Lock()
	l.pulls++
	l.pulledAs = append(l.pulledAs, who)
	gate := l.gate
	l.mu.Unlock()
	progress(ImageProgress{Step: "download", Done: 1, Total: 2})
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			close(l.left)
			return sandbox.Image{}, ctx.Err()
		}
	}
	name, ok := strings.CutPrefix(ref, "reg/")
	if !ok {
		return sandbox.Image{}, &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "the registry has no " + ref}
	}
	progress(ImageProgress{Step: "done", Done: 2, Total: 2})
	return l.add(name), nil
}

func (l *fakeLibrary) add(name string) sandbox.Image {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := "sha256:" + name
	l.content[id] = 100
	return sandbox.Image{ID: id, Size: 100, Source: "test", Platform: "linux/amd64", CreatedAt: time.Unix(1e9, 0).UTC()}
}

func (l *fakeLibrary) ImportTar(ctx context.Context, r io.Reader, progress func(ImageProgress)) (sandbox.Image, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return sandbox.Image{}, sandbox.Errorf(sandbox.Invalid, "image.import", "broken tar: %w", err)
	}
	return l.add(strings.TrimSpace(string(b))), nil
}

func (l *fakeLibrary) Have(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.content[id]
	return ok
}

func (l *fakeLibrary) Delete(ctx context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.content, id)
	l.deleted = append(l.deleted, id)
	return nil
}

func (l *fakeLibrary) Contents(ctx context.Context) (map[string]int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.content), nil
}
