package local

import "sync"

// directory is what is known of one of the 256 directories: whether the names in it are
// on disk. Many snapshots end at once, and most of what each is made of was there
// before: a sync that another has begun since, or has done, is not done again.
type directory struct {
	mu struct {
		sync.Mutex
		names   uint64 // blobs named here, and one for what an earlier process named
		synced  uint64 // of those, that a sync which has returned began after
		syncing chan struct{}
	}
}

// name runs a rename into the directory. Under the lock: who sees the blob, and asks
// for a sync for that, must not be told of one that began before it.
func (d *directory) name(rename func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := rename()
	if err == nil {
		d.mu.names++
	}
	return err
}

// sync returns when every name that is there now is on disk.
func (d *directory) sync(do func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for want := d.mu.names + 1; d.mu.synced < want; {
		if wait := d.mu.syncing; wait != nil {
			d.mu.Unlock()
			<-wait
			d.mu.Lock()
			continue
		}
		done, covers := make(chan struct{}), d.mu.names+1
		d.mu.syncing = done
		d.mu.Unlock()
		err := do()
		d.mu.Lock()
		d.mu.syncing = nil
		close(done)
		if err != nil {
			return err // whoever waited tries for itself
		}
		d.mu.synced = max(d.mu.synced, covers)
	}
	return nil
}
