package server

import (
	"testing"
	"testing/synctest"
	"time"
)

// Where content is deleted all the time, whoever makes some does not wait all
// the time for it to be collected.
func TestCollectionsLeaveOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b contentBook
		b.init()
		for _, held := range []time.Duration{0, 100 * time.Millisecond, time.Hour} {
			release, err := b.seize(t.Context(), true)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(held)
			release()
			end, err := b.begin(t.Context()) // at once: nothing holds it up
			if err != nil {
				t.Fatal(err)
			}
			if !b.busy() {
				t.Error("content is being made and a delete would wait for it")
			}
			end()
			start := time.Now()
			if !b.rest(t.Context()) {
				t.Fatal("the rest was cut short")
			}
			if got, want := time.Since(start), min(restRatio*held, collectPatience); got != want {
				t.Errorf("after %v the next collection waits %v, want %v", held, got, want)
			}
		}
	})
}
