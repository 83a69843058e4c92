package proxy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// nameCache remembers for a short time what names of one sandbox resolve to,
// and which name an address was given out for. It is a sandbox's own: a cache of
// all would tell one sandbox what another looks up.
type nameCache struct {
	mu struct {
		sync.Mutex
		answers map[nameType]cached
		hints   map[netip.Addr]hint
	}
}

type nameType struct {
	name string
	typ  uint16
}

type cached struct {
	until time.Time
	msg   *dns.Msg
}

type hint struct {
	until time.Time
	name  string
}

const (
	namesKept = 1024
	hintFor   = 10 * time.Minute // programs keep addresses longer than their TTL
)

func (c *nameCache) answer(name string, typ uint16) *dns.Msg {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a, ok := c.mu.answers[nameType{name, typ}]; ok && time.Now().Before(a.until) {
		return a.msg
	}
	return nil
}

func (c *nameCache) keep(name string, typ uint16, m *dns.Msg) {
	ttl := maxTTL
	for _, rr := range m.Answer {
		ttl = min(ttl, time.Duration(rr.Header().Ttl)*time.Second)
	}
	if len(m.Answer) == 0 {
		ttl = time.Second
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.answers = bounded(c.mu.answers)
	c.mu.answers[nameType{name, typ}] = cached{time.Now().Add(ttl), m}
}

// remember that an address was given out for a name. It is a hint: who is
// allowed by it is connected to what the name resolves to then.
func (c *nameCache) remember(a netip.Addr, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.hints = bounded(c.mu.hints)
	c.mu.hints[a] = hint{time.Now().Add(hintFor), name}
}

func (c *nameCache) hint(a netip.Addr) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h, ok := c.mu.hints[a]; ok && time.Now().Before(h.until) {
		return h.name
	}
	return ""
}

// bounded makes a map, or drops any half of a full one.
func bounded[K comparable, V any](m map[K]V) map[K]V {
	if m == nil {
		return map[K]V{}
	}
	if len(m) >= namesKept {
		n := 0
		for k := range m {
			if n++; n > namesKept/2 {
				break
			}
			delete(m, k)
		}
	}
	return m
}
