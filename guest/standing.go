package guest

import "github.com/cove-sandbox/cove/sandbox"

// Stand says where the sandbox stands now. Who follows a process is told
// (ProcessEvent.Standby): its stream stays open, says nothing more until the
// next wake, and would look like a call that hangs. It does not block.
func (c *Client) Stand(s sandbox.Standby) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.standing == s {
		return
	}
	c.mu.standing = s
	for e := range c.mu.following {
		go e.stand(c) // a reader that is slow to take output holds its own goroutine back and nobody else
	}
}

// follow has e told where the sandbox stands until the returned function is called;
// after that nothing reaches its sink any more.
func (c *Client) follow(e *events) (leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.following[e] = struct{}{}
	return func() {
		c.mu.Lock()
		delete(c.mu.following, e)
		c.mu.Unlock()
		e.mu.Lock()
		defer e.mu.Unlock()
		e.mu.left = true
	}
}

// stand tells what holds now, whatever held when it was called: of a pause and a
// wake that follow each other fast, neither may be told.
func (e *events) stand(c *Client) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c.mu.Lock()
	now := c.mu.standing
	c.mu.Unlock()
	if e.mu.left || e.mu.standing == now {
		return
	}
	e.mu.standing = now
	_ = e.sink(sandbox.ProcessEvent{Standby: &now}) // a sink that fails says so again with the next frame
}

// hand gives the sink an event of the process.
func (e *events) hand(ev sandbox.ProcessEvent) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sink(ev)
}
