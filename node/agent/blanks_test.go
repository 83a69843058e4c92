package agent

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
)

// halfway is the fake driver with blank kernels: nothing until they start.
type halfway struct {
	*fake.Driver
	made, started, destroyed int
}

type halfKernel struct {
	d     *halfway
	id    string
	class runtime.Class
	done  chan struct{}
}

func (d *halfway) Blank(ctx context.Context, id string, c runtime.Class) (runtime.Blank, error) {
	d.made++
	return &halfKernel{d, id, c, make(chan struct{})}, ctx.Err()
}

func (k *halfKernel) ID() string            { return k.id }
func (k *halfKernel) Done() <-chan struct{} { return k.done }
func (k *halfKernel) Start(ctx context.Context) (runtime.Kernel, error) {
	k.d.started++
	return k.d.Driver.Boot(ctx, k.id, k.class)
}

func (k *halfKernel) Destroy(context.Context) error {
	k.d.destroyed++
	close(k.done)
	return nil
}

// The second pool fills when the first is full, gives a boot its head start,
// is filled again, and is gone with the node.
func TestBlankKernels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fake.NewHost("", fake.Options{Bare: true})
		d := &halfway{Driver: host.Open()}
		n, err := Open(t.Context(), Config{Dir: t.TempDir(), Name: "n", Classes: []Class{{Driver: d, Pool: PoolSettings{Min: 2, Blank: 1}}}})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // virtual
		if ready, _ := n.classes[0].pool.counts(); ready != 2 || n.classes[0].blanks.count() != 1 {
			t.Errorf("at rest: %d warm, %d blank", ready, n.classes[0].blanks.count())
		}
		before := d.started // the first boots may have used one
		k, err := n.classes[0].pool.take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // virtual
		if ready, _ := n.classes[0].pool.counts(); ready != 2 || n.classes[0].blanks.count() != 1 || d.started != before+1 {
			t.Errorf("after a take: %d warm, %d blank, %d blanks started", ready, n.classes[0].blanks.count(), d.started-before)
		}
		n.discard(k)
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if left := d.made - d.started - d.destroyed; left != 0 || len(host.IDs()) != 0 {
			t.Errorf("left behind: %d blank, kernels %v", left, host.IDs())
		}
	})
}
