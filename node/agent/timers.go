package agent

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// timers call back when something is due. One goroutine and one heap serve
// every sandbox: thousands of runtime timers would each cost a goroutine to
// act in.
type timers struct {
	fire func(id string) // must not block
	wake chan struct{}   // capacity 1

	mu struct {
		sync.Mutex
		queue timerQueue
		byID  map[string]*timerItem
	}
}

type timerItem struct {
	id    string
	at    time.Time
	index int
}

// longestSleep makes a step of the wall clock, which absolute times hang on,
// noticed within a minute.
const longestSleep = time.Minute

func newTimers(fire func(id string)) *timers {
	t := &timers{fire: fire, wake: make(chan struct{}, 1)}
	t.mu.byID = map[string]*timerItem{}
	return t
}

// set moves id's time; the zero time removes it.
func (t *timers) set(id string, at time.Time) {
	if at.IsZero() {
		t.remove(id)
		return
	}
	t.mu.Lock()
	it := t.mu.byID[id]
	if it == nil {
		it = &timerItem{id: id, at: at}
		t.mu.byID[id] = it
		heap.Push(&t.mu.queue, it)
	} else {
		it.at = at
		heap.Fix(&t.mu.queue, it.index)
	}
	first := it.index == 0
	t.mu.Unlock()
	if first {
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
}

func (t *timers) remove(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if it := t.mu.byID[id]; it != nil {
		delete(t.mu.byID, id)
		heap.Remove(&t.mu.queue, it.index)
	}
}

// next says in how long the next one is due, as a hint for when to ask again:
// between 1 and 30 seconds, 5 when nothing is.
func (t *timers) next(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.queue) == 0 {
		return 5 * time.Second
	}
	return min(max(t.mu.queue[0].at.Sub(now), time.Second), 30*time.Second)
}

func (t *timers) run(ctx context.Context) {
	timer := time.NewTimer(longestSleep)
	defer timer.Stop()
	for {
		sleep := longestSleep
		for {
			id, wait, due := t.pop(time.Now())
			if !due {
				sleep = min(wait, longestSleep)
				break
			}
			t.fire(id)
		}
		timer.Reset(sleep)
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		case <-timer.C:
		}
	}
}

func (t *timers) pop(now time.Time) (id string, wait time.Duration, due bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.queue) == 0 {
		return "", longestSleep, false
	}
	it := t.mu.queue[0]
	if wait := it.at.Sub(now); wait > 0 {
		return "", wait, false
	}
	heap.Pop(&t.mu.queue)
	delete(t.mu.byID, it.id)
	return it.id, 0, true
}

type timerQueue []*timerItem

func (q timerQueue) Len() int           { return len(q) }
func (q timerQueue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q timerQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}
func (q *timerQueue) Push(x any) {
	it := x.(*timerItem)
	it.index = len(*q)
	*q = append(*q, it)
}
func (q *timerQueue) Pop() any {
	old := *q
	it := old[len(old)-1]
	*q = old[:len(old)-1]
	return it
}
