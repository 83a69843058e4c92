package openapi

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// comments are what the protos say, by "rpc Service.Method", "message Name" and
// "Name.field".
type comments map[string]string

var (
	blockLine = regexp.MustCompile(`^(service|message|enum) (\w+) \{(.*)$`)
	rpcLine   = regexp.MustCompile(`^rpc (\w+)\(`)
	fieldLine = regexp.MustCompile(`^(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+[^;]*;\s*(?://\s*(.*))?$`)
)

// readComments goes through the files line by line: the layout is buf's, and a
// comment that it does not find is only missing.
func readComments(dir string) (comments, error) {
	out := comments{}
	files, err := filepath.Glob(filepath.Join(dir, "*.proto"))
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		out.read(string(b))
	}
	return out, nil
}

func (c comments) read(text string) {
	block := ""
	var above []string
	note := func(key string, more string) {
		words := strings.TrimSpace(strings.Join(above, " ") + " " + more)
		if words != "" {
			c[key] = words
		}
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if word, ok := strings.CutPrefix(line, "//"); ok {
			above = append(above, strings.TrimSpace(word))
			continue
		}
		if m := blockLine.FindStringSubmatch(line); m != nil {
			block = m[2]
			note(m[1]+" "+block, "")
		} else if m := rpcLine.FindStringSubmatch(line); m != nil {
			note("rpc "+block+"."+m[1], "")
		} else if m := fieldLine.FindStringSubmatch(line); m != nil {
			note(block+"."+m[1], m[2])
		}
		above = nil
	}
}
