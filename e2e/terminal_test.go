package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/testbin"
)

const cliWithin = time.Minute

// screen is a terminal with a shell in it, and on that shell's screen whatever
// cove exec -it shows: tmux is the only client here that behaves like a person
// at a terminal emulator.
type screen struct {
	t      *testing.T
	socket string
}

func newScreen(t *testing.T, w *world.World) *screen {
	t.Helper()
	s := &screen{t: t, socket: filepath.Join(t.TempDir(), "tmux")}
	bin := filepath.Dir(testbin.Cove(t))
	rc := filepath.Join(filepath.Dir(s.socket), "rc")
	content := fmt.Sprintf("export PATH=%s:$PATH COVE_URL=%s COVE_KEY=%s COVE_DATA=%s\nPS1='outer> '\n", bin, w.URL(), w.Key(), w.Dir)
	if err := os.WriteFile(rc, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	s.tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", "bash --noprofile --rcfile "+rc)
	t.Cleanup(func() {
		_ = exec.Command("tmux", "-S", s.socket, "kill-server").Run() // a test may have ended it
	})
	s.tmux("set", "-g", "status", "off")
	s.tmux("resize-window", "-x", "100", "-y", "30")
	s.waits("outer>")
	return s
}

func (s *screen) tmux(args ...string) string {
	s.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", s.socket}, args...)...)
	cmd.Env = append(os.Environ(), "TERM=xterm-256color", "LANG=C.UTF-8")
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("tmux %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// types sends a line; keys sends keys by name (C-c).
func (s *screen) types(line string) {
	s.t.Helper()
	s.tmux("send-keys", "-l", line)
	s.tmux("send-keys", "Enter")
}

func (s *screen) keys(names ...string) {
	s.t.Helper()
	s.tmux(append([]string{"send-keys"}, names...)...)
}

// shows waits until a line of the screen begins with text.
func (s *screen) shows(text string) {
	s.t.Helper()
	s.until(fmt.Sprintf("show %q", text), func(lines []string) bool {
		return slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, text) })
	})
}

// waits waits for a prompt: what is typed before the program in front has
// ended would be that program's input.
func (s *screen) waits(prompt string) {
	s.t.Helper()
	s.until("wait at "+prompt, func(lines []string) bool { return len(lines) > 0 && lines[len(lines)-1] == prompt })
}

// presses sends a key that is for a program that bash starts, every second until it
// has done what it should. Bash shows nothing when it has started it: a key that
// comes before is the shell's, which ignores it, or its child's that is not the
// program yet.
func (s *screen) presses(key, what string, ok func(lines []string) bool) {
	s.t.Helper()
	looks := 0
	s.until(what, func(lines []string) bool {
		if len(lines) > 0 && ok(lines) {
			return true
		}
		if looks++; looks%20 == 10 {
			s.keys(key)
		}
		return false
	})
}

// until asks for the screen's lines, without empty ones and trailing spaces.
func (s *screen) until(what string, ok func(lines []string) bool) {
	s.t.Helper()
	var lines []string
	for deadline := time.Now().Add(cliWithin); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		lines = nil
		for _, l := range strings.Split(s.tmux("capture-pane", "-p", "-S", "-200"), "\n") {
			if l = strings.TrimRight(l, " "); l != "" {
				lines = append(lines, l)
			}
		}
		if ok(lines) {
			return
		}
	}
	s.t.Fatalf("the screen does not %s but shows\n%s", what, strings.Join(lines, "\n"))
}

// TestTerminal is cove exec -it at a real terminal.
func TestTerminal(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	s := newScreen(t, w)

	s.types("cove exec -it -e PS1='inner$ ' " + b.ID + " -- bash --norc --noprofile")
	s.waits("inner$")
	s.types("echo sum=$((6*7)); tty; echo $TERM")
	s.shows("sum=42")
	s.shows("/dev/pts/")
	s.types("stty size")
	s.shows("30 100")
	// Another size while it runs.
	s.tmux("resize-window", "-x", "120", "-y", "40")
	s.types("sleep 0.5; stty size; echo cols=$(tput cols 2>/dev/null || stty size | cut -d' ' -f2)")
	s.shows("40 120")
	// Ctrl-C goes to the program, not to cove.
	s.types("echo sleeping; sleep 1000")
	s.shows("sleeping")
	s.presses("C-c", "wait at inner$", func(lines []string) bool { return lines[len(lines)-1] == "inner$" })
	s.types("echo code=$?")
	s.shows("code=130")
	// So do Ctrl-Z and job control.
	s.waits("inner$")
	s.types("sleep 2000")
	s.presses("C-z", `show "[1]+  Stopped"`, func(lines []string) bool {
		return slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, "[1]+  Stopped") })
	})
	s.types("kill %1; wait; echo jobs-done")
	s.shows("jobs-done")
	// Line editing: cursor keys and deletion reach the shell inside.
	s.tmux("send-keys", "-l", "echo edXit")
	s.keys("Left", "Left", "BSpace", "Enter")
	s.shows("edit")
	s.types("python3 -c 'import getpass; print(\"got\", len(getpass.getpass(\"pw? \")))'")
	s.shows("pw?")
	s.types("hidden7")
	s.shows("got 7")
	// The program's exit code is cove's, and the terminal is as it was.
	s.types("exit 5")
	s.waits("outer>")
	s.types("echo outer-code=$?")
	s.shows("outer-code=5")
	s.types("stty -a | grep -o -w -e '-\\?icanon' -e '-\\?isig' -e '-\\?echo' -e '-\\?opost' | sort | tr '\\n' ' '; echo end")
	s.shows("echo icanon isig opost end")
	if strings.Contains(s.tmux("capture-pane", "-p", "-S", "-200"), "hidden7") {
		t.Error("a password was echoed")
	}
	// Killed from outside, too.
	s.types("clear; cove exec -it -e PS1='second$ ' " + b.ID + " -- bash --norc --noprofile")
	s.waits("second$")
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.waits("outer>")
	s.types("echo after=$?.")
	s.shows("after=137.")
	s.types("stty -a | grep -o -w -e '-\\?icanon' -e '-\\?echo' | sort | tr '\\n' ' '; echo end2")
	s.shows("echo icanon end2")
	// Not at a terminal it says so.
	if r := w.CLI(t, "exec", "-it", b.ID, "--", "bash"); r.Code != 125 || !strings.Contains(r.Stderr+"", "terminal") && !strings.Contains(r.Stderr, "ended") {
		t.Errorf("exec -it without a terminal: %d %q", r.Code, r.Stderr)
	}
}
