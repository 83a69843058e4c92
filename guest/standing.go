package guest

import (
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
)

// Stand says where the sandbox stands now. Who follows a process is told
// (ProcessEvent.Standby): its stream stays open, says nothing more until the
// next wake, and would look like a call that hangs. It does not block.
func (c *Client) Stand(s sandbox.Standby) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.standing == s {
		return
	}
	c.standing = s
	for e := range c.following {
		go e.stand(c) // a reader that is slow to take output holds its own goroutine back and nobody else
	}
}

// follow has e told where the sandbox stands until the returned function is called;
// after that nothing reaches its sink any more.
func (c *Client) follow(e *events) (leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.following[e] = struct{}{}
	return func() {
		c.mu.Lock()
		delete(c.following, e)
		c.mu.Unlock()
		e.told.Lock()
		defer e.told.Unlock()
		e.told.left = true
	}
}

// told is what a follower knows; its mutex also keeps calls of the sink apart.
type told struct {
	sync.Mutex
	standing sandbox.Standby
	left     bool
}

// stand tells what holds now, whatever held when it was called: of a pause and a
// wake that follow each other fast, neither may be told.
func (e *events) stand(c *Client) {
	e.told.Lock()
	defer e.told.Unlock()
	c.mu.Lock()
	now := c.standing
	c.mu.Unlock()
	if e.told.left || e.told.standing == now {
		return
	}
	e.told.standing = now
	_ = e.sink(sandbox.ProcessEvent{Standby: &now}) // a sink that fails says so again with the next frame
}

// hand gives the sink an event of the process.
func (e *events) hand(ev sandbox.ProcessEvent) error {
	e.told.Lock()
	defer e.told.Unlock()
	return e.sink(ev)
}
