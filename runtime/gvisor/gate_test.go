package gvisor

import (
	"context"
	"testing"
	"time"
)

func TestGate(t *testing.T) {
	var g gate
	if err := g.enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := g.shut(short); err == nil {
		t.Fatal("shut with one inside")
	}
	if err := g.enter(t.Context()); err != nil { // the failed shut left it open
		t.Fatal(err)
	}
	shut := make(chan error)
	go func() { shut <- g.shut(t.Context()) }()
	g.leave()
	select {
	case <-shut:
		t.Fatal("shut with one inside")
	case <-time.After(time.Millisecond):
	}
	g.leave()
	if err := <-shut; err != nil {
		t.Fatal(err)
	}
	if err := g.enter(short); err == nil {
		t.Fatal("entered a shut gate")
	}
	entered := make(chan error)
	go func() { entered <- g.enter(t.Context()) }()
	g.open()
	if err := <-entered; err != nil {
		t.Fatal(err)
	}
}
