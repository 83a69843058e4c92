package recording

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A position is which exchanges of a recording a replay has used, as text:
// "RECORDING:1-5,9". It travels with a snapshot, so that what is made of it goes
// on where that was.

// Position is where the player is.
func (p *Player) Position() string {
	var b strings.Builder
	b.WriteString(p.rec.Header.ID + ":")
	used := p.Used()
	for i := 0; i < len(used); {
		j := i
		for j+1 < len(used) && used[j+1] == used[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatUint(uint64(used[i]), 10))
		if j > i {
			fmt.Fprintf(&b, "-%d", used[j])
		}
		i = j + 1
	}
	return b.String()
}

// UsedAt is what a position says of a recording: nothing, of another one.
func UsedAt(position, recording string) (used []uint32) {
	list, ok := strings.CutPrefix(position, recording+":")
	if !ok || list == "" {
		return nil
	}
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, err1 := strconv.ParseUint(from, 10, 32)
		b, err2 := strconv.ParseUint(to, 10, 32)
		if err1 != nil || err2 != nil || b < a || b > maxExchanges {
			return nil // not one of ours: from the start
		}
		for n := a; n <= b; n++ {
			used = append(used, uint32(n))
		}
	}
	slices.Sort(used)
	return slices.Compact(used)
}

// SeekTo goes to a position; to the start with one of another recording.
func (p *Player) SeekTo(position string) error {
	if err := p.Rewind(); err != nil {
		return err
	}
	used := UsedAt(position, p.rec.Header.ID)
	p.seek(used)
	if p.note == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range used {
		p.note(n)
	}
	return nil
}
