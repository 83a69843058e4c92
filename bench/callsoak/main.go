// Command callsoak makes short calls to the sandboxes of a server (COVE_URL,
// COVE_KEY) until their number is reached, and fails if one does not answer or if
// the server had to send one again. "make soak-calls" runs it.
//
//	callsoak -reads 1000000 -execs 200000 [-sandboxes 2] [-clients 4] [-limit 20s]
//	callsoak -reads 0 -execs 0 -lives 3000 [-reuse group] [-clients 4]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/wire"
)

func main() {
	reads := flag.Int64("reads", 1_000_000, "files read")
	execs := flag.Int64("execs", 200_000, "commands run")
	lives := flag.Int64("lives", 0, "sandboxes made, used once and killed")
	reuse := flag.String("reuse", "", "trust group of the lives")
	boxes := flag.Int("sandboxes", 2, "that they go to")
	clients := flag.Int("clients", 4, "at once")
	limit := flag.Duration("limit", 20*time.Second, "a call that takes longer has hung")
	every := flag.Duration("report", 10*time.Second, "between two lines of progress")
	flag.Parse()
	s := &soak{client: wire.NewClient(os.Getenv("COVE_URL"), os.Getenv("COVE_KEY"), wire.Options{UserAgent: "callsoak"}), clients: *clients, limit: *limit, every: *every, reuse: *reuse}
	if err := s.run(*boxes, *reads, *execs, *lives); err != nil {
		fmt.Fprintln(os.Stderr, "callsoak:", err)
		os.Exit(1)
	}
}

type soak struct {
	client       *wire.Client
	clients      int
	limit, every time.Duration
	reuse        string
	ids          []string
}

func (s *soak) run(boxes int, reads, execs, lives int64) (err error) {
	ctx := context.Background()
	for range boxes {
		r, err := s.client.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{}}))
		if err != nil {
			return err
		}
		id := r.Msg.Sandbox.Id
		s.ids = append(s.ids, id)
		defer func() {
			_, kerr := s.client.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
			err = errors.Join(err, kerr)
		}()
	}
	if err := s.many(ctx, "reads", reads, s.read); err != nil {
		return err
	}
	if err := s.many(ctx, "execs", execs, s.exec); err != nil {
		return err
	}
	if err := s.many(ctx, "lives", lives, s.live); err != nil {
		return err
	}
	info, err := s.client.System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil {
		return err
	}
	fmt.Printf("lost calls: %d\n", info.Msg.LostCalls)
	if info.Msg.LostCalls > 0 {
		return fmt.Errorf("%d calls were lost and sent again", info.Msg.LostCalls)
	}
	return nil
}

// many makes n calls; the first that fails ends it.
func (s *soak) many(ctx context.Context, what string, n int64, call func(context.Context, string) error) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var begun, done atomic.Int64
	began := time.Now()
	var mu sync.Mutex
	var took []time.Duration
	var wg sync.WaitGroup
	for c := range s.clients {
		wg.Go(func() {
			var mine []time.Duration
			for begun.Add(1) <= n && ctx.Err() == nil {
				start := time.Now()
				one, cancel := context.WithTimeout(ctx, s.limit)
				err := call(one, s.ids[c%len(s.ids)])
				cancel()
				if err != nil {
					fail(fmt.Errorf("%s: after %d, one in %v: %w", what, done.Load(), time.Since(start), err))
					break
				}
				done.Add(1)
				mine = append(mine, time.Since(start))
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, mine...)
		})
	}
	all := make(chan struct{})
	go func() { wg.Wait(); close(all) }()
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			fmt.Printf("%s: %d of %d, %.0f/s\n", what, done.Load(), n, float64(done.Load())/time.Since(began).Seconds())
			continue
		case <-all:
		}
		break
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if slices.Sort(took); len(took) > 0 {
		fmt.Printf("%s: %d, none hung, %.0f/s, p50 %v, p99 %v, longest %v\n", what, n, float64(n)/time.Since(began).Seconds(),
			took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	}
	return nil
}

func (s *soak) read(ctx context.Context, id string) error {
	r, err := s.client.Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: id, Path: "/etc/passwd"}))
	if err == nil && len(r.Msg.Data) == 0 {
		err = errors.New("read nothing")
	}
	return err
}

// live is a create, an exec and a kill, without a network.
func (s *soak) live(ctx context.Context, _ string) (err error) {
	r, err := s.client.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{
		Network: &covev1.Network{Mode: "none"}, Reuse: s.reuse}}))
	if err != nil {
		return err
	}
	defer func() {
		_, kerr := s.client.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: r.Msg.Sandbox.Id}))
		err = errors.Join(err, kerr)
	}()
	return s.exec(ctx, r.Msg.Sandbox.Id)
}

func (s *soak) exec(ctx context.Context, id string) error {
	st, err := s.client.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: id, Process: &covev1.ProcessSpec{Args: []string{"true"}}}))
	if err != nil {
		return err
	}
	defer st.Close()
	ended := false
	for st.Receive() {
		if e := st.Msg().GetEnd(); e != nil {
			if ended = true; e.GetEnd().GetExitCode() != 0 {
				return fmt.Errorf("true ended with %v", e)
			}
		}
	}
	if err := st.Err(); err != nil {
		return err
	}
	if !ended {
		return errors.New("the stream ended before the process")
	}
	return nil
}
