package image

import "github.com/cove-sandbox/cove/sandbox"

// Limits bound what a layer, an archive or a registry can make a node do. Zero
// fields take the default.
type Limits struct {
	Download int64 // compressed bytes of one image or archive; default 32 GiB
	Unpacked int64 // bytes of all layers after decompression; default 64 GiB
	Ratio    int64 // unpacked to packed, checked above 256 MiB; default 200
	Entries  int   // files, links and directories; default 2 million
	Names    int64 // bytes of names and link targets together; default 256 MiB
	Depth    int   // path components; default 256
}

const (
	gib = 1 << 30
	mib = 1 << 20

	// maxPath is Linux's PATH_MAX: longer paths could not be opened inside.
	maxPath = 4096
	// ratioFloor: small layers of zeros compress 1000:1 honestly and cost nothing.
	ratioFloor = 256 * mib
)

func (l Limits) withDefaults() Limits {
	set := func(v *int64, def int64) {
		if *v <= 0 {
			*v = def
		}
	}
	set(&l.Download, 32*gib)
	set(&l.Unpacked, 64*gib)
	set(&l.Ratio, 200)
	set(&l.Names, 256*mib)
	if l.Entries <= 0 {
		l.Entries = 2_000_000
	}
	if l.Depth <= 0 {
		l.Depth = 256
	}
	return l
}

func tooLarge(format string, args ...any) error {
	return sandbox.Errorf(sandbox.TooLarge, "", format, args...).
		WithHint("the node's image limits can be raised if this image is trusted")
}

func invalid(format string, args ...any) error {
	return sandbox.Errorf(sandbox.Invalid, "", format, args...)
}
