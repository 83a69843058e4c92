package node

import (
	"context"
	"sync"
)

// notices hands ids to one receiver without ever making the sender wait.
type notices struct {
	ch   chan string
	wake chan struct{} // capacity 1

	mu    sync.Mutex
	queue []string
}

func newNotices() *notices {
	return &notices{ch: make(chan string), wake: make(chan struct{}, 1)}
}

func (s *notices) push(id string) {
	s.mu.Lock()
	s.queue = append(s.queue, id)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *notices) run(ctx context.Context) {
	defer close(s.ch)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		s.mu.Lock()
		batch := s.queue
		s.queue = nil
		s.mu.Unlock()
		for _, id := range batch {
			select {
			case <-ctx.Done():
				return
			case s.ch <- id:
			}
		}
	}
}
