package build

import (
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestNeeds(t *testing.T) {
	for file, want := range map[string]string{
		"FROM x\nRUN y\n": "",
		"FROM x AS a\nCOPY a/b ./c* /d/\nFROM x\nADD e.tar https://h/f /g/\nCOPY --from=a /h /i\n":          "a/b c* e.tar",
		"FROM x\nRUN --mount=type=bind,source=in,target=/m cat /m\nRUN --mount=type=cache,target=/c true\n": "in",
		"FROM x\nCOPY [\"a b\", \"/c\"]\nCOPY <<E /f\ntext\nE\n":                                            "a b",
		"FROM x AS p\nONBUILD COPY on /o\nFROM p\n":                                                         "on",
		"FROM x\nCOPY ../../up /u\n":                                                                        "up",
		"FROM x\nCOPY . /\n":                                                                                "all",
		"FROM x\nCOPY a/.. /\n":                                                                             "all",
		"FROM x\nARG D\nCOPY $D /\n":                                                                        "all",
		"FROM x\nRUN --mount=type=bind,target=/m ls /m\n":                                                   "all",
		"nonsense":                           "all",
		strings.Repeat("#", MaxDockerfile+1): "all",
	} {
		got, ok := Needs([]byte(file))
		if said := strings.Join(got, " "); ok != (want != "all") || ok && said != want {
			t.Errorf("%.80q needs %q %t, not %q", file, said, ok, want)
		}
	}
}

// A word that is almost an instruction or flag gets its line and what was
// probably meant.
func TestTypos(t *testing.T) {
	for file, want := range map[string][]string{
		"FROM x\n\nCOYP a b\n":                        {"dockerfile:3", "COPY"},
		"FROM x\nRNU y\n":                             {"dockerfile:2", "did you mean 'RUN'"},
		"FORM x\n":                                    {"dockerfile:1", "FROM"},
		"FROM x\nWORKDR /a\n":                         {"dockerfile:2", "WORKDIR"},
		"FROM x\nCOPY --form=1 a b\n":                 {"dockerfile:2", "did you mean from"},
		"FROM x\nRUN --mount=type=sercet,id=a true\n": {"dockerfile:2", "secret"},
	} {
		p, _, _, err := all(t, file, onAMD64, sandbox.ImageConfig{})
		if err == nil {
			t.Errorf("%q is accepted: %v", file, p)
			continue
		}
		if got := err.Error(); !strings.HasPrefix(got, want[0]+":") || !strings.Contains(got, want[1]) {
			t.Errorf("%q: %v", file, err)
		}
	}
}
