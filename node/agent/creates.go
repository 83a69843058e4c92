package agent

import (
	"sync"
	"time"
)

// creates are the creates under way on the node, restores included. Background
// boots of every class give way to them: the machine's cores are one.
type creates struct {
	pools []*pool // set before anything is created

	mu struct {
		sync.Mutex
		underWay int
		last     time.Time // end of the last one
	}
}

// begin and end bracket a create.
func (c *creates) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.underWay++
}

func (c *creates) end() {
	c.mu.Lock()
	c.mu.underWay--
	c.mu.last = time.Now()
	c.mu.Unlock()
	for _, p := range c.pools {
		p.poke()
	}
}

// now is how many are under way, and when the last one ended.
func (c *creates) now() (underWay int, last time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.underWay, c.mu.last
}
