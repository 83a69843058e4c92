package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// spanSets is the file of Go's runtime with the sets in which it keeps the pages of its heap.
const spanSets = "src/runtime/mspanset.go"

// runtimeEdits make a small heap cost less beside itself. Go keeps four sets of spans for each of 136 kinds of
// object, and each set that ever had one in it takes 2 KiB for a list of blocks and 4 KiB for a block, both of which are made for
// a heap of a gigabyte and never given back: of a sentry with 3 MiB of objects 1.0 MiB, of the guest in it 0.4.
// Lists and blocks of any length work, and grow as before; nothing outside this file knows the two numbers.
var runtimeEdits = []edit{
	{file: spanSets, old: "spanSetBlockEntries = 512 ", new: "spanSetBlockEntries = 32 "},
	{file: spanSets, old: "spanSetInitSpineCap = 256 ", new: "spanSetInitSpineCap = 8 "},
}

// overlay writes what "go build -overlay" reads: that file of the Go in goroot as changed, which lies beside it. A
// Go with other such sets is used as it is, for whoever builds has the Go he has: that costs memory alone, and said is true.
// One Go's runtime must not be built with the file of another: the name of the overlay is the caller's, and has the version in it.
func overlay(goroot, path string) (said bool, err error) {
	src, err := os.ReadFile(filepath.Join(goroot, spanSets))
	if err != nil {
		return false, err
	}
	changed := strings.TrimSuffix(path, ".json") + ".go"
	replace := map[string]string{filepath.Join(goroot, spanSets): changed}
	text := string(src)
	for _, e := range runtimeEdits {
		if strings.Count(text, e.old) != 1 {
			fmt.Fprintf(os.Stderr, "edits: %s of Go lacks %q, it is used as it is: a sandbox takes 1 MiB more\n", spanSets, e.old)
			said, replace, text = true, nil, string(src)
			break
		}
		text = strings.Replace(text, e.old, e.new, 1)
	}
	if err := putWhole(changed, []byte(text)); err != nil {
		return said, err
	}
	b, err := json.Marshal(struct{ Replace map[string]string }{replace})
	if err != nil {
		return said, err
	}
	return said, putWhole(path, b)
}

// putWhole lets no other build read a half.
func putWhole(path string, b []byte) error {
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
