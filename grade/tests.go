package grade

import (
	"archive/tar"
	"errors"
	"io"

	"github.com/cove-sandbox/cove/sandbox"
)

// Tests copies a tar of tests so that every user of a grader can read them: the
// judged one, too, where judge and work share a process. It reads from to its end.
func Tests(from io.Reader, to io.Writer) error {
	tr, tw := tar.NewReader(from), tar.NewWriter(to)
	n, buf := 0, make([]byte, 32<<10)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			var e *sandbox.Error
			if errors.As(err, &e) { // of who sends it
				return err
			}
			return &sandbox.Error{Class: sandbox.Invalid, Field: "tests", Msg: "not a complete tar", Err: err}
		}
		out := &tar.Header{Typeflag: h.Typeflag, Name: h.Name, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode&0o777 | 0o444, ModTime: h.ModTime, Format: tar.FormatPAX}
		switch h.Typeflag {
		case tar.TypeDir:
			out.Mode |= 0o755
		case tar.TypeReg:
			if out.Mode&0o100 != 0 {
				out.Mode |= 0o111
			}
		case tar.TypeSymlink, tar.TypeLink:
		default:
			continue
		}
		n++
		if err := tw.WriteHeader(out); err != nil {
			return err
		}
		if _, err := io.CopyBuffer(tw, tr, buf); err != nil {
			return err
		}
	}
	if n == 0 {
		return sandbox.InvalidField("tests", "the tar is empty; at least one file is accepted")
	}
	if _, err := io.Copy(io.Discard, from); err != nil { // the padding behind the end is part of the digest
		return err
	}
	return tw.Close()
}
