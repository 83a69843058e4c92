package cli

import (
	"cmp"
	"context"
	"errors"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// forEach does something to each thing that was named, also after one that could
// not be done: nobody said that the others depend on it. The error holds every
// failure; what was done is the caller's to print.
func (a *app) forEach(ctx context.Context, names []string, do func(name string) error) error {
	var all failures
	for _, name := range names {
		err := do(name)
		if err == nil {
			continue
		}
		stop := ctx.Err() != nil || a.hopeless(err)
		if len(names) == 1 || stop && len(all) == 0 {
			return err
		}
		all = append(all, failure{name, err})
		if stop {
			break
		}
	}
	return all.err()
}

// hopeless says that whatever is asked next fails the same way.
func (a *app) hopeless(err error) bool {
	switch sandbox.ClassOf(err) {
	case sandbox.Unauthenticated, sandbox.Canceled:
		return true
	case sandbox.Unavailable:
		return a.api != nil && a.nobodyListens()
	}
	return false
}

// failure is what became of one of several things.
type failure struct {
	name string
	err  error
}

func (f failure) Error() string { return f.name + ": " + f.err.Error() }
func (f failure) Unwrap() error { return f.err }

// failures are those of several things, told one by one. The exit code is the
// first one's.
type failures []failure

// err is nil where there is none.
func (f failures) err() error {
	if len(f) == 0 {
		return nil
	}
	return f
}

func (f failures) Error() string {
	var lines []string
	for _, e := range f {
		lines = append(lines, e.Error())
	}
	return strings.Join(lines, "; ")
}

func (f failures) Unwrap() error { return f[0].err }

// printDone prints what was done and passes on what was not. Where nothing was,
// the error says it all.
func printDone[T any](a *app, out []T, failed error) error {
	if len(out) == 0 && failed != nil {
		return failed
	}
	return cmp.Or(a.printJSON(out), failed)
}

// and adds failures of a later step to those of an earlier one.
func (f failures) and(earlier error) error {
	var before failures
	if earlier == nil || errors.As(earlier, &before) {
		return append(before, f...).err()
	}
	return earlier // of the only one there was
}
