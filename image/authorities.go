package image

import (
	"path"
	"slices"

	"github.com/cove-sandbox/cove/pki"
)

// authorityDir is where an image has certificates that its sandboxes are to
// trust, by all the ways that a program may look for them: a store of the
// distribution reaches neither Node.js nor Java nor what brings its own.
const authorityDir = "/etc/cove/ca.d"

// maxAuthorities bytes are taken: they are in the image's record, and written with
// every create.
const maxAuthorities = 64 << 10

// authorities are the certificates of authorityDir, in files *.crt and *.pem, by
// name. What is none is left out and noted: it may be of code inside, in an image
// derived of what that left.
func (f *flattener) authorities() ([]byte, error) {
	dir := f.lookup(authorityDir)
	if dir == nil || !dir.IsDir() {
		return nil, nil
	}
	var out []byte
	names := dir.Names()
	slices.Sort(names)
	for _, name := range names {
		if e := path.Ext(name); e != ".crt" && e != ".pem" {
			continue
		}
		b, err := f.readSmall(path.Join(authorityDir, name))
		if err != nil {
			return nil, err
		}
		certs, err := pki.Certificates(b)
		if err != nil || len(certs) == 0 || len(out)+len(certs) > maxAuthorities {
			if len(f.notes.Authorities) < 16 {
				f.notes.Authorities = append(f.notes.Authorities, name)
			}
			continue
		}
		out = append(out, certs...)
	}
	return out, nil
}
