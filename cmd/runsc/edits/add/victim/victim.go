// Package victim says which process ends when a sandbox is out of memory.
//
// It is compiled into the sentry (see cmd/runsc/edits), which is why it knows
// nothing but the language.
package victim

// Process is one that may end.
type Process struct {
	Resident uint64 // bytes
	Adjust   int32  // oom_score_adj: -1000 to 1000, thousandths of the limit
	Init     bool   // with it the whole container would go
}

// never is the adjustment of a process that asks to be spared.
const never = -1000

// Choose is the index of the process that ends, -1 for none. As on Linux the
// largest goes, its size shifted by what it was adjusted by, and init never
// does. Who asks to be spared is, unless all do: a limit that the code inside
// can switch off is none.
func Choose(ps []Process, limit uint64) int {
	if i := largest(ps, limit, false); i >= 0 {
		return i
	}
	return largest(ps, limit, true)
}

func largest(ps []Process, limit uint64, all bool) int {
	best, most := -1, int64(0)
	for i, p := range ps {
		if p.Init || p.Resident == 0 || p.Adjust <= never && !all {
			continue
		}
		size := int64(p.Resident)
		if !all {
			size += int64(limit) / 1000 * int64(p.Adjust)
		}
		if best < 0 || size > most {
			best, most = i, size
		}
	}
	return best
}
