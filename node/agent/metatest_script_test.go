//go:build !race

package agent_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// script is what one trial does: steps that are printed with what they saw, and
// where to cut it in two. It depends on nothing but its seed.
type script struct {
	seed  uint64
	pty   bool // the runner is on a terminal
	steps []string
	cut   int // steps before the snapshot, the pause, the fork
}

// A plot is some steps of one idea, in their order. A script has the steps of
// several plots in turns, so that most are under way at the cut, and that they
// meet: F, G, D are names that plots share half of the time. W is the process
// that does it, V a second one, I the slot, N a number, T some bytes.
var plots = []string{
	// Files.
	"W write F T; V read F; W append F T; V read F",
	"W write F T; W chmod F 6751; W chown F 1234 99; V stat F; W truncate F N; V stat F; V read F",
	"W write F T; W link F G; V append G T; W unlink F; V stat G; V read G",
	"W write F T; W symlink F G; V readlink G; V read G; W unlink F; V read G",
	"W write F T; W rename F G; V stat F; V read G; W rename G F; V read F",
	"W write F T; W utime F 123456789; V stat F; V sh md5sum < F",
	"W write F T; W setxattr F T; V getxattr F; W rename F G; V getxattr G",
	"W mkdir D/a/b; W write D/a/b/x T; W rename D/a D/c; V tree D; V rmdir D/c; V unlink D/c/b/x; W rmdir D/c/b; V tree D",
	"W sparse F 70000; V stat F; W sparse F 3000000; V read F; W truncate F 69999; V read F",
	"W sh mkfifo F 2>&1; V stat F; W unlink F",
	"W sh ln -sf /nowhere F; V read F; W write F T; V stat F",
	// Files of the image: a change copies them up first.
	"W append L T; V read L; W chmod L 600; V stat L",
	"W unlink L; V read L; W write L T; V stat L",
	"W open I L r; V unlink L; W fread I 10; W fread I 20; W fstat I",
	"W mapf I L private; W mset I 10 T; W mget I; V read L",
	"W rename /usr/share/perl5 /usr/share/I; V sh ls /usr/share/I 2>&1 | md5sum; W rename /usr/share/I /usr/share/perl5",
	// What a process has open.
	"W open I F rw; W fwrite I T; W unlink F; W fstat I; W fseek I 2; W fread I 5; W fread I 50",
	"W open I F a; W fwrite I T; V truncate F 3; W fwrite I T; V read F; W fstat I",
	"W write F T; W open I F rw; V rename F G; W fwrite I T; W fstat I; V read G",
	"W mkdir D/o; W open I D/o dir; W fopenat I x T; V sh rm -r D/o; W fstat I; W flist I; W fopenat I y T",
	"W open I F rw; W flock I ex; V trylock F flock; V trylock F flock; W fclose I; V trylock F flock",
	"W open I F rw; W lockf I 2 10; V trylock F lockf; V trylock F lockf; W fclose I; V trylock F lockf",
	"W memfd I T; W fread I 3; W fread I 10; W fstat I",
	"W eventfd I N; W eventread I; W eventread I",
	"W epoll I T; W epollwait I; W epollwait I",
	"W rlimit 256; W getrlimit; W getrlimit",
	// Memory.
	"W mapf I F shared; W mset I 4000 T; V read F; W mset I 5000 T; W mget I; V read F",
	"W mapf I F shared; W unlink F; W mset I 7 T; W mget I; V stat F",
	"W mapf I F private; W mset I 4094 T; V read F; W mget I",
	"W mapf I /dev/shm/I shared; V mapf I /dev/shm/I shared; W mset I 0 T; V mget I; V mset I 100 T; W mget I",
	"W sysv I T; W sysvget I; W sysvget I",
	"W heap I 300000; W heapsum I; W heapsum I",
	"W mapanon I 200000; W mset I 150000 T; W mget I; W mget I",
	// Bytes on their way.
	"W pipe I T; W pread I 2; W pwrite I T; W pread I 100",
	"W pair I unix T; W pairrecv I 2; W pairrecv I 100",
	"W pair I dgram T; W pairrecv I 100",
	"W pair I tcp T; W pairrecv I 2; W pairrecv I 100",
	"W pair I backlog T; W pairrecv I 100",
	"W pair I udp T; W pairrecv I 100",
	"W passfd I F T; V stat F; W takefd I",
	"W pty I T; W ptyread I",
	// Processes.
	"W kid I zombie 9; W kidsee I; W kidend I 0",
	"W kid I stopped 9; W kidsee I; W kidend I 18",
	"W kid I session; W kidsee I; W kidend I 15",
	"W kid I env T; W kidsee I; W kidsee I; W kidend I 9",
	"W shell I; W shellsay I T; W shellsay I T; W shellsay I T",
	"W thread I; W threadadd I N; W threadadd I N",
	"W sighandle I; W sigself I 2; W sigself I 3",
	"W sigblock 3; W sigtake; W sigtake",
	"W mkdir D/w; W chdir D/w; W cwd; W write x T; V tree D; V sh rm -r D/w; W cwd; W chdir /w",
	"W umask 27; W unlink F; W write F T; V stat F; W umask 22; W umask 22",
	"W setenv K_I T; W sh echo $K_I; W getenv K_I; V getenv K_I",
	"W nice 3; W nice 0; W nice 0",
	"W seed N; W draw; W draw",
	"W uname; V uname",
	"W procs; V procs",
	// Time.
	"W clock I; W clocksee I; W clocksee I",
	"W clock I; me clock I1; W clocksee I; me clocksee I1",
	"W timer I 0.02; W timerwait I; W timersee I",
	"W timer I 1000; W timersee I; W timersee I",
	"W kid I env T; W timer I1 900; W kidsee I; W timersee I1",
}

// What a child may be blocked in; see calls in meta_procs.py.
var blocking = strings.Fields(`read readv write poll polltime select selecttime epoll epolltime nanosleep clocksleep flock lockf
	accept recv recvtime recvtcp futex futextime eventfd timerfd inotify tty fifo wait msgrcv semop sigwait pause`)

var lowerFiles = []string{"/etc/profile", "/etc/issue", "/etc/passwd", "/etc/bash.bashrc", "/etc/debian_version"}

func newScript(seed uint64) script {
	r := rand.New(rand.NewPCG(seed, 0x636f7665))
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	s := script{seed: seed, pty: r.IntN(3) == 0}
	var acting []string // the holders, and the runner itself
	for i := range 1 + r.IntN(3) {
		h := fmt.Sprint("h", i)
		acting = append(acting, h)
		s.steps = append(s.steps, fmt.Sprintf("me spawn %s %s %s", h, pick("unix", "tcp", "fifo"), pick("init", "me")))
	}
	spawns := len(s.steps)
	acting = append(acting, "me")

	dirs := []string{"/w", "/w", "/dev/shm/w", "/tmp/w"}
	shared := map[string]string{"F": pick(dirs...) + "/f", "G": pick(dirs...) + "/g", "D": pick(dirs...) + "/d"}
	var lines [][]string
	for i := range 5 + r.IntN(4) {
		p := plots[r.IntN(len(plots))]
		if r.IntN(5) == 0 {
			p = "W blocked I " + pick(blocking...) + "; W unblock I"
		}
		dir := pick(dirs...) // one file system, for links and renames
		own := map[string]string{"F": fmt.Sprint(dir, "/f", i), "G": fmt.Sprint(dir, "/g", i), "D": fmt.Sprint(dir, "/d", i)}
		// Who opens a FIFO that nobody has at its other end waits for ever; that
		// is a thing for blocked, not for a plot that meets another's file.
		if r.IntN(2) == 0 && !strings.Contains(p, "mkfifo") {
			own = shared
		}
		names := strings.NewReplacer("W", pick(acting...), "V", pick(acting...), "L", pick(lowerFiles...),
			"F", own["F"], "G", own["G"], "D", own["D"], "I", fmt.Sprint(i), "N", fmt.Sprint(1+r.IntN(40)))
		var steps []string
		for _, st := range strings.Split(p, "; ") {
			words := strings.Fields(st)
			for w := range words {
				switch {
				case words[w] == "T":
					words[w] = text(r)
				case w == 1: // an operation, not a name
				default:
					words[w] = names.Replace(words[w])
				}
			}
			steps = append(steps, strings.Join(words, " "))
		}
		lines = append(lines, steps)
	}
	for len(lines) > 0 && len(s.steps) < spawns+24 {
		i := r.IntN(len(lines))
		s.steps = append(s.steps, lines[i][0])
		if lines[i] = lines[i][1:]; len(lines[i]) == 0 {
			lines = append(lines[:i], lines[i+1:]...)
		}
	}
	s.cut = spawns + (len(s.steps)-spawns)/4 + r.IntN(1+(len(s.steps)-spawns)/2)
	for _, d := range []string{"/w", "/dev/shm/w", "/tmp/w"} {
		s.steps = append(s.steps, "me tree "+d)
	}
	s.steps = append(s.steps, "me procs")
	for i, st := range s.steps {
		s.steps[i] = fmt.Sprintf("%d %s", i+1, st)
	}
	return s
}

// text is 1 to 60 harmless characters.
func text(r *rand.Rand) string {
	b := make([]byte, 1+r.IntN(60))
	for i := range b {
		b[i] = "abcdefghijklmnopqrstuvwxyz0123456789"[r.IntN(36)]
	}
	return string(b)
}

func (s script) String() string {
	var b strings.Builder
	for i, st := range s.steps {
		if i == s.cut {
			b.WriteString("---\n")
		}
		b.WriteString(st + "\n")
	}
	return b.String()
}
