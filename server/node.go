package server

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// meetTimeout bounds the first call to the node.
const meetTimeout = 30 * time.Second

// meet asks the node what it is. What is kept of the answer does not change while
// it runs.
func meet(n node.Node) (node.Info, error) {
	ctx, cancel := context.WithTimeout(context.Background(), meetTimeout)
	defer cancel()
	return n.Info(ctx)
}

// littered says whether the node has content to collect by what it did itself. A
// node that cannot be asked is asked again.
func (s *Server) littered(ctx context.Context) bool {
	info, err := s.node.Info(ctx)
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot ask the node whether there is something to collect", "err", err)
	}
	return info.Litter
}

// follow tells how far the work of a name is on the node, until ctx ends or the
// work does.
func follow(ctx context.Context, n node.Node, op string, set func(sandbox.Progress)) {
	for p, err := range n.Progress(ctx, op) {
		if err != nil {
			return // what it is about says what is wrong
		}
		set(p)
	}
}

// standby says which sandboxes are not awake. Of a node that cannot be asked all
// are shown awake: that is a remark to a record, which stands without it.
func (s *Server) standby(ctx context.Context) map[string]sandbox.Standby {
	all, err := s.node.Standby(ctx)
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot ask the node which sandboxes are on standby", "err", err)
	}
	return all
}

// lives says whether the node has a sandbox that has not ended. It does not wake it.
func (s *Server) lives(ctx context.Context, id string) bool {
	_, err := s.node.NetworkStatus(ctx, id, 0)
	return err == nil
}

// active wakes a sandbox and keeps it active until release, or says why there is none.
func (s *Server) active(ctx context.Context, id string) (release func(), err error) {
	if err := validID("sandbox_id", id); err != nil {
		return nil, err
	}
	release, err = node.Keep(ctx, s.node, id)
	if err != nil {
		return nil, s.explain(ctx, id, err)
	}
	return release, nil
}
