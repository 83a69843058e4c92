package node

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machineLimits fills what l leaves open from the machine itself.
func machineLimits(l Limits, dir string) (Limits, error) {
	if l.MilliCPU == 0 {
		l.MilliCPU = int64(runtime.NumCPU()) * 1000
	}
	if l.Memory == 0 {
		total, _, err := hostMemory()
		if err != nil {
			return l, err
		}
		l.Memory = total
	}
	if l.Disk == 0 {
		free, err := freeDisk(dir)
		if err != nil {
			return l, err
		}
		l.Disk = free
	}
	return l, nil
}

// freeDisk is what a file in dir could still take.
func freeDisk(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// hostMemory reads the machine's memory and how much of it could be had now.
func hostMemory() (total, available int64, err error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	total, available = parseMeminfo(data)
	if total == 0 {
		return 0, 0, fmt.Errorf("/proc/meminfo has no MemTotal")
	}
	return total, available, nil
}

func parseMeminfo(data []byte) (total, available int64) {
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[0], 10, 64)
		switch name {
		case "MemTotal":
			total = kib << 10
		case "MemAvailable":
			available = kib << 10
		}
	}
	return total, available
}

// bootID changes with every start of the machine.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // then a restart of the machine is only not named as such
	}
	return strings.TrimSpace(string(b))
}
