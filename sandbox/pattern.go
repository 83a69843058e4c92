package sandbox

import (
	"regexp"
	"sync"
)

// pattern is an expression that is compiled when it is first needed. Every sentry and every guest
// starts with this package, and most never look at a name: all of them were 1 ms of CPU of each start.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}
