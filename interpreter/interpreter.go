// Package interpreter is the code interpreter that runs inside a sandbox: a small
// server (Python, in inside/) over Jupyter kernels, and the list of packages it
// needs. It is not part of any image: "cove code setup" installs it into one and
// freezes that with the kernel up, as a template.
package interpreter

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"path"
	"strings"
)

const (
	// Port is where it listens inside. E2B's SDKs have the number built in.
	Port = 49999 // sandbox.CodePort
	// Dir is where it is installed, and Start what runs it: a supervisor that ends
	// at once where another is.
	Dir   = "/opt/cove-interpreter"
	Start = Dir + "/start"
	// Template is what sandboxes with it are made of. E2B's SDKs ask for this name.
	Template = "code-interpreter-v1"
)

// Packages are what is installed beside it, all of PyPI: Deno is the kernel of
// JavaScript and TypeScript, in a wheel. ipykernel 7 has more threads, each of
// which costs a restore; matplotlib 3.11 lacks what charts written for E2B use.
var Packages = []string{
	"ipykernel==6.31.0", "jupyter_client==8.10.0", "tornado==6.6.1", "bash_kernel==0.10.0", "deno==2.9.8",
	"numpy>=2.2,<2.5", "pandas>=2.2,<3.2", "matplotlib>=3.9,<3.11", "pillow>=11", "requests>=2.32",
}

//go:embed inside
var inside embed.FS

// Tar is the content of Dir.
func Tar() ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	err := each(func(name string, data []byte) error {
		mode := int64(0o644)
		if name == path.Base(Start) {
			mode = 0o755
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(data)), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	})
	if err != nil {
		return nil, err
	}
	return buf.Bytes(), w.Close()
}

// Recipe names the content of Dir and the packages: another one needs another
// template.
func Recipe() string {
	h := sha256.New()
	_ = each(func(name string, data []byte) error { // of an embedded file, reading cannot fail
		h.Write([]byte(name + "\x00"))
		h.Write(data)
		return nil
	})
	h.Write([]byte(strings.Join(Packages, " ")))
	return hex.EncodeToString(h.Sum(nil))[:12]
}

func each(f func(name string, data []byte) error) error {
	return fs.WalkDir(inside, "inside", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := inside.ReadFile(p)
		if err != nil {
			return err
		}
		return f(path.Base(p), data)
	})
}
