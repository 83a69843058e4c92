package sshd

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/cove-sandbox/cove/sandbox"
)

// Machine is what a session needs of the machine inside.
type Machine interface {
	Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error
	SendInput(ctx context.Context, execID string, data []byte) error
	CloseInput(ctx context.Context, execID string) error
	Signal(ctx context.Context, execID, signal string, processOnly bool) error
	Resize(ctx context.Context, execID string, size sandbox.TermSize) error
}

// Backend is how the server comes into sandboxes.
type Backend interface {
	// Machine wakes a sandbox and keeps it active until release.
	Machine(ctx context.Context, id string) (m Machine, release func(), err error)
	// Login says whether who had the certificate signed may still come in, by the
	// id of their API key. The context it returns is theirs: everything in the
	// session is done with it.
	Login(ctx context.Context, id, key, remote string) (context.Context, error)
	// KeyLives is nil if that API key could still have it signed;
	// sandbox.ErrUnauthenticated if not. It costs little.
	KeyLives(ctx context.Context, key string) error
	// Dial opens a stream to a port inside.
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
}

// Config of a server. CA and Backend are required.
type Config struct {
	CA      *LoginCA
	Backend Backend
	SFTP    []string // program inside that speaks sftp; nil = none
	Logger  *slog.Logger

	MaxConns int // at once, in the handshake or logged in; 1024
	// MaxStrangers is how many of one address may be in the handshake at once; 64.
	// Without it one machine that never logs in takes every place.
	MaxStrangers int
	// KeyLook is how often a connection looks whether the API key behind it still
	// lives, and ends if not; 5 s. A certificate is only looked at once, and one
	// connection can open sessions for ever.
	KeyLook time.Duration
}

const (
	// loginTimeout bounds how long a stranger is listened to.
	loginTimeout = 20 * time.Second
	// maxChannels of one connection: editors open a handful, a browser over a
	// forwarded port some dozens.
	maxChannels = 256
)

// Server is safe for concurrent use.
type Server struct {
	cfg    Config
	ssh    *ssh.ServerConfig
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		conns     int
		strangers map[string]int // in the handshake, by address
	}
}

// New makes a server.
func New(cfg Config) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxConns == 0 {
		cfg.MaxConns = 1024
	}
	if cfg.MaxStrangers == 0 {
		cfg.MaxStrangers = 64
	}
	if cfg.KeyLook == 0 {
		cfg.KeyLook = 5 * time.Second
	}
	s := &Server{cfg: cfg, ssh: cfg.CA.config(), log: cfg.Logger}
	s.mu.strangers = map[string]int{}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Serve accepts connections until Close. It closes ln.
func (s *Server) Serve(ln net.Listener) error {
	defer ln.Close()
	defer context.AfterFunc(s.ctx, func() { ln.Close() })()
	for {
		c, err := ln.Accept()
		if s.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil { // out of descriptors: the next may work
			s.log.Warn("ssh accept", "err", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		known, leave, ok := s.admit(c.RemoteAddr())
		if !ok {
			c.Close()
			continue
		}
		s.wg.Go(func() {
			defer leave()
			defer c.Close()
			s.serve(c, known)
		})
	}
}

// Close ends every connection and waits for them.
func (s *Server) Close() {
	s.cancel()
	s.wg.Wait()
}

// admit takes a place for a connection. known is called once it has logged in,
// leave when it has ended.
func (s *Server) admit(from net.Addr) (known, leave func(), ok bool) {
	address, _, _ := net.SplitHostPort(from.String())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.conns >= s.cfg.MaxConns || s.mu.strangers[address] >= s.cfg.MaxStrangers || s.ctx.Err() != nil {
		return nil, nil, false
	}
	s.mu.conns++
	s.mu.strangers[address]++
	known = sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.mu.strangers[address]--; s.mu.strangers[address] == 0 {
			delete(s.mu.strangers, address)
		}
	})
	return known, func() {
		known()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.conns--
	}, true
}

func (s *Server) serve(nc net.Conn, known func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { nc.Close() })()
	_ = nc.SetDeadline(time.Now().Add(loginTimeout))
	conn, chans, reqs, err := ssh.NewServerConn(nc, s.ssh)
	if err != nil {
		s.log.Debug("ssh login", "from", nc.RemoteAddr(), "err", err)
		return
	}
	_ = nc.SetDeadline(time.Time{})
	known()
	id, key := conn.User(), conn.Permissions.Extensions[signedBy]
	ctx, refused := s.cfg.Backend.Login(ctx, id, key, nc.RemoteAddr().String())
	s.log.Info("ssh", "sandbox", id, "from", nc.RemoteAddr(), "err", refused)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { // what a connection is asked: keepalives are answered, forwarding back refused
		for r := range reqs {
			if r.WantReply {
				_ = r.Reply(r.Type == "keepalive@openssh.com", nil)
			}
		}
	})
	wg.Go(func() { s.endWithKey(ctx, key, cancel) })
	slots := make(chan struct{}, maxChannels)
	for nch := range chans {
		if refused != nil {
			_ = nch.Reject(ssh.Prohibited, plain(refused))
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = nch.Reject(ssh.ResourceShortage, "too many channels")
			continue
		}
		wg.Go(func() {
			defer func() { <-slots }()
			switch nch.ChannelType() {
			case "session":
				s.session(ctx, id, nch)
			case "direct-tcpip":
				s.forward(ctx, id, nch)
			default:
				_ = nch.Reject(ssh.UnknownChannelType, "session and direct-tcpip are served")
			}
		})
	}
}

// endWithKey ends a connection when the API key that had its certificate signed is
// revoked or expires.
func (s *Server) endWithKey(ctx context.Context, key string, end context.CancelFunc) {
	look := time.NewTicker(s.cfg.KeyLook)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		if err := s.cfg.Backend.KeyLives(ctx, key); errors.Is(err, sandbox.ErrUnauthenticated) {
			s.log.Info("ssh ends with its API key", "key", key, "err", err)
			end()
			return
		}
	}
}

// forward joins a channel with a port of the sandbox. The host that the client
// names must mean the sandbox itself.
func (s *Server) forward(ctx context.Context, id string, nch ssh.NewChannel) {
	var to struct {
		Host       string
		Port       uint32
		OriginHost string
		OriginPort uint32
	}
	if err := ssh.Unmarshal(nch.ExtraData(), &to); err != nil {
		_ = nch.Reject(ssh.ConnectionFailed, "not understood")
		return
	}
	if ip := net.ParseIP(to.Host); to.Host != "localhost" && to.Host != id && (ip == nil || !ip.IsLoopback() && !ip.IsUnspecified()) {
		_ = nch.Reject(ssh.Prohibited, "only ports of the sandbox itself are reached: localhost:PORT")
		return
	}
	if to.Port < 1 || to.Port > 65535 {
		_ = nch.Reject(ssh.ConnectionFailed, "no such port")
		return
	}
	_, release, err := s.cfg.Backend.Machine(ctx, id)
	if err != nil {
		_ = nch.Reject(ssh.ConnectionFailed, plain(err))
		return
	}
	defer release()
	c, err := s.cfg.Backend.Dial(ctx, id, int(to.Port))
	if err != nil {
		_ = nch.Reject(ssh.ConnectionFailed, plain(err))
		return
	}
	defer c.Close()
	ch, reqs, err := nch.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	go ssh.DiscardRequests(reqs) // ends with the channel
	defer context.AfterFunc(ctx, func() { c.Close(); ch.Close() })()
	join(ch, c)
}

// plain is an error as a person at a terminal is told it.
func plain(err error) string {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return "the sandbox cannot be reached"
	}
	c := *e
	c.Op = ""
	return c.Error()
}
