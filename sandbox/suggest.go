package sandbox

import "strings"

// Suggest returns the one of names that name was probably meant to be, or ""
// when none is close. Close is at most one slip (a letter more, less, other, or
// two swapped) in three letters, without regard to case. The earlier of equally
// close names wins.
func Suggest(name string, names []string) string {
	const most = 256 // the table is quadratic and name may come from outside
	if name == "" || len(name) > most {
		return ""
	}
	allowed := max(1, len(name)/3)
	best, bestAt := "", allowed+1
	low := strings.ToLower(name)
	for _, n := range names {
		if len(n) > most || len(n) > len(name)+allowed || len(name) > len(n)+allowed {
			continue
		}
		if d := slips(low, strings.ToLower(n)); d < bestAt && n != name {
			best, bestAt = n, d
		}
	}
	// One slip turns any one-letter name into any other: that is no likeness.
	if bestAt >= len(name) {
		return ""
	}
	return best
}

// DidYouMean is a hint for an error about an unknown name; "" when nothing is
// close.
func DidYouMean(name string, names []string) string {
	if s := Suggest(name, names); s != "" {
		return "did you mean '" + s + "'?"
	}
	return ""
}

// slips is the edit distance of a and b where swapping two neighbours is one
// edit, as it is one mistake of a hand (optimal string alignment).
func slips(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
