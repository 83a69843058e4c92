package mountinfo

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	got := Parse(`22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:4 net:[4026532] /data/a\040b\134 rw shared:3 master:1 - nsfs nsfs rw
31 22 7:0 / /v rw - ext4 /dev/loop0 rw
half a line
32 22 7:0 / /no rw shared:1 ext4 /dev/loop1 rw
33 22 7:0 / /cut rw - ext4
`)
	want := []Mount{{"/", "ext4", "/dev/vda"}, {`/data/a b\`, "nsfs", "nsfs"}, {"/v", "ext4", "/dev/loop0"}}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestOwn(t *testing.T) {
	all, err := Own()
	if err != nil || !slices.ContainsFunc(all, func(m Mount) bool { return m.At == "/proc" && m.Kind == "proc" }) {
		t.Errorf("no /proc in %q, %v", all, err)
	}
}
