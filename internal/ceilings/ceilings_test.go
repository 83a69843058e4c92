package ceilings

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"
)

// host is a /proc/sys with the ceilings that a test names; others are not there.
type host map[string]string

func (h host) read(file string) ([]byte, error) {
	if v, ok := h["files"]; ok && file == "/proc/self/limits" {
		return []byte("Limit                     Soft Limit           Hard Limit           Units     \nMax processes             1                    2                    processes \nMax open files            1024                 " + v + "                files     \n"), nil
	}
	for sysctl, v := range h {
		if (Ceiling{Sysctl: sysctl}).File() == file {
			return []byte(v + "\n"), nil
		}
	}
	return nil, fs.ErrNotExist
}

func TestRoom(t *testing.T) {
	for _, c := range []struct {
		name string
		host host
		most int64
		by   string
	}{
		{"a kernel without any", host{}, 64511, "memory cgroups"},
		{"a small machine as it comes", host{"kernel.pid_max": "32768", "kernel.threads-max": "190000"}, (32768 - 4096) / 48, "kernel.pid_max"},
		{"what is raised", host{"kernel.pid_max": "4194304", "kernel.threads-max": "1048576", "fs.file-max": "9223372036854775807", "user.max_net_namespaces": "65536"},
			(1<<20 - 4096) / 48, "kernel.threads-max"},
		{"networks take two", host{"user.max_net_namespaces": "1256"}, 500, "user.max_net_namespaces"},
		{"less than the machine itself needs", host{"kernel.pid_max": "1000"}, 0, "kernel.pid_max"},
		{"more than a number", host{"fs.file-max": "18446744073709551615"}, 64511, "memory cgroups"},
		{"a server that may not have more files", host{"files": "20000", "kernel.pid_max": "4194304"}, (20000 - 1024) / 12, Files},
		{"one that may", host{"files": "unlimited"}, 64511, "memory cgroups"},
		{"one that may have none", host{"files": "256"}, 0, Files},
		{"nonsense", host{"kernel.pid_max": "many"}, 64511, "memory cgroups"},
	} {
		if most, by := MaxSandboxes(c.host.read); most != c.most || by != c.by {
			t.Errorf("%s: %d by %s, want %d by %s", c.name, most, by, c.most, c.by)
		}
	}
}

func TestRaise(t *testing.T) {
	h := host{"kernel.pid_max": "32768", "kernel.threads-max": "9999999", "fs.nr_open": "1024"}
	var wrote []string
	raised, refused := Raise(h.read, func(file string, value []byte) error {
		if strings.HasSuffix(file, "nr_open") {
			return errors.New("read-only")
		}
		wrote = append(wrote, file+" "+string(value))
		return nil
	})
	if !slices.Equal(wrote, []string{"/proc/sys/kernel/pid_max 4194304"}) || !slices.Equal(raised, []string{"kernel.pid_max=4194304 (was 32768)"}) ||
		!slices.Equal(refused, []string{"fs.nr_open=1048576"}) {
		t.Errorf("wrote %q, raised %q, refused %q", wrote, raised, refused)
	}
	if low := Low(h.read); !slices.Equal(low, []string{"kernel.pid_max=4194304", "fs.nr_open=1048576"}) {
		t.Errorf("low: %q", low)
	}
}

// What is wanted is enough for what is promised.
func TestWhatIsRaisedHoldsTwentyThousand(t *testing.T) {
	for _, c := range All {
		if got := c.Sandboxes(c.Want); got < 20_000 {
			t.Errorf("%s=%d has room for %d", c.Sysctl, c.Want, got)
		}
	}
}
