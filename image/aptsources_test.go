package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Real sources of machines we want to run on, and what a bootstrap uses of them.
func TestAptSources(t *testing.T) {
	mirrors := filepath.Join(t.TempDir(), "debian.list")
	if err := os.WriteFile(mirrors, []byte("https://deb.debian.org/debian\nhttps://other/debian\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name, suite string
		files       map[string]string
		want        []string
	}{
		{"Debian 12 container", "bookworm", map[string]string{"sources.list.d/debian.sources": `Types: deb
# http://snapshot.debian.org/archive/debian/20250520T000000Z
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
`}, []string{
			"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main",
			"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-updates main",
			"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bookworm-security main"}},
		{"Debian cloud image", "bookworm", map[string]string{"sources.list.d/debian.sources": "Types: deb deb-src\nURIs: mirror+file://" + mirrors +
			"\nSuites: bookworm bookworm-updates bookworm-backports\nComponents: main\n"},
			[]string{"deb https://deb.debian.org/debian bookworm main", "deb https://deb.debian.org/debian bookworm-updates main"}},
		{"classic sources.list with third parties", "bookworm", map[string]string{
			"sources.list": "# comment\ndeb http://mirror.example/debian bookworm main contrib non-free # trailing\ndeb-src http://mirror.example/debian bookworm main\n" +
				"deb cdrom:[Debian]/ bookworm main\n\ndeb [arch=amd64] http://mirror.example/debian-security/ bookworm-security main\n",
			"sources.list.d/docker.list":    "deb [arch=amd64 signed-by=/etc/apt/keyrings/docker.gpg] https://download.docker.com/linux/debian bookworm stable\n",
			"sources.list.d/tailscale.list": "deb [signed-by=/usr/share/keyrings/tailscale-archive-keyring.gpg] https://pkgs.tailscale.com/stable/debian bookworm main\n",
		}, []string{"deb http://mirror.example/debian bookworm main", "deb http://mirror.example/debian-security/ bookworm-security main"}},
		{"a company that signs for itself", "bookworm", map[string]string{
			"sources.list": "deb [signed-by=/etc/apt/keyrings/acme.gpg] https://acme.example/debian bookworm main\n"},
			[]string{"deb [signed-by=/etc/apt/keyrings/acme.gpg] https://acme.example/debian bookworm main"}},
		{"Ubuntu 24.04", "noble", map[string]string{"sources.list.d/ubuntu.sources": "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu/\nSuites: noble noble-updates noble-backports\n" +
			"Components: main universe restricted multiverse\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"},
			[]string{"deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://archive.ubuntu.com/ubuntu/ noble main universe",
				"deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://archive.ubuntu.com/ubuntu/ noble-updates main universe"}},
		{"disabled, and a key in line", "trixie", map[string]string{"sources.list.d/a.sources": "Enabled: no\nTypes: deb\nURIs: http://off.example/debian\nSuites: trixie\nComponents: main\n\n" +
			"Types: deb\nURIs: http://on.example/debian\nSuites: trixie\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mDME\n -----END PGP PUBLIC KEY BLOCK-----\n"},
			[]string{"deb http://on.example/debian trixie main"}},
		{"nothing for the release", "sid", map[string]string{"sources.list": "deb http://x/debian bookworm main\n"}, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			etc := t.TempDir()
			os.Mkdir(filepath.Join(etc, "sources.list.d"), 0o755)
			for name, text := range c.files {
				if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			for _, s := range forSuite(readAptSources(etc), c.suite) {
				got = append(got, s.line())
			}
			if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

func TestMirrorCredentialsStayOutOfTheImage(t *testing.T) {
	s := aptSource{URI: "https://me:secret@mirror.example/debian", Suite: "bookworm", Components: []string{"main"}, SignedBy: "/etc/apt/keyrings/x.gpg"}
	if got := s.public(); got != "deb https://mirror.example/debian bookworm main" {
		t.Error(got)
	}
}
