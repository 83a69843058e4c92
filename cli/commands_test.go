package cli

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestCreatePrintsTheIDAndSendsWhatWasAsked(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{env: map[string]string{"TOKEN": "t0p"}}, "create", "--image", "python:3.12", "--cpu", "0.5", "--memory", "1GiB", "--memory-limit", "2g",
		"--disk", "1.5GiB", "--pids", "100", "--timeout", "1h30m", "--idle-timeout", "90", "--env", "A=b=c", "-e", "TOKEN", "--label", "run=7", "--idempotency-key", "k").
		want(t, 0, "sb1\n")
	want := &covev1.CreateSandboxRequest{IdempotencyKey: "k", Spec: &covev1.SandboxSpec{
		Image:     "python:3.12",
		Resources: &covev1.Resources{Cpu: 0.5, Memory: 1 << 30, MemoryLimit: 2 << 30, Disk: 3 << 29, Pids: 100},
		Env:       map[string]string{"A": "b=c", "TOKEN": "t0p"}, Labels: map[string]string{"run": "7"},
		Timeout: durationpb.New(90 * time.Minute), IdleTimeout: durationpb.New(90 * time.Second),
	}}
	if !proto.Equal(f.created[0], want) {
		t.Errorf("sent %v\nwant %v", f.created[0], want)
	}
}

func TestCreateLeavesDefaultsToTheServer(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "create").want(t, 0, "sb1\n")
	spec := f.created[0].GetSpec()
	if spec.GetImage() != "" || spec.GetTimeout() != nil || spec.GetResources().GetMemory() != 0 {
		t.Errorf("sent %v", spec)
	}
}

func TestJSONOfASandbox(t *testing.T) {
	f := newFakeAPI(t)
	s := f.addSandbox("abc", map[string]string{"run": "7"})
	s.CreatedAt = timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	s.ExpiresAt = timestamppb.New(time.Date(2026, 1, 2, 4, 4, 5, 0, time.UTC))
	s.Spec.Timeout = durationpb.New(time.Hour)
	s.State, s.End = covev1.SandboxState_SANDBOX_STATE_ENDED, &covev1.End{Cause: "oom", Detail: "over <512MiB>"}
	f.cove(t, settings{}, "ls", "--all", "--json").want(t, 0, `[
  {
    "id": "abc",
    "state": "ended",
    "image": "base",
    "image_id": "sha256:abc",
    "node": "n1",
    "episode": 1,
    "cpu": 1,
    "memory": 536870912,
    "memory_limit": 536870912,
    "disk": 10737418240,
    "pids": 4096,
    "labels": {
      "run": "7"
    },
    "timeout_s": 3600,
    "created_at": "2026-01-02T03:04:05Z",
    "expires_at": "2026-01-02T04:04:05Z",
    "end": {
      "cause": "oom",
      "detail": "over <512MiB>"
    }
  }
]
`)
}

func TestListsAreNeverNull(t *testing.T) {
	f := newFakeAPI(t)
	for _, args := range [][]string{{"ls"}, {"image", "ls"}, {"key", "ls"}, {"stats"}, {"rm", "--all"}} {
		f.cove(t, settings{}, append(args, "--json")...).want(t, 0, "[]\n")
	}
}

func TestListShowsEveryPageAligned(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("aaa", nil)
	f.addSandbox("bbbbbb", map[string]string{"z": "1", "a": "2"})
	f.addSandbox("c", nil).ExpiresAt = timestamppb.New(time.Now().Add(90*time.Minute + 30*time.Second))
	f.cove(t, settings{}, "ls").want(t, 0, ""+
		"ID      IMAGE  STATE    AGE  CPU  MEMORY  EXPIRES   LABELS\n"+
		"aaa     base   running  1h   1    512MiB  never     -\n"+
		"bbbbbb  base   running  1h   1    512MiB  never     a=2,z=1\n"+
		"c       base   running  1h   1    512MiB  in 1h30m  -\n")
	f.cove(t, settings{}, "ls", "-q").want(t, 0, "aaa\nbbbbbb\nc\n")
	f.cove(t, settings{}, "ls", "-q", "-l", "run=7")
	if got := f.listed[len(f.listed)-1].GetLabels(); got["run"] != "7" {
		t.Errorf("labels sent: %v", got)
	}
}

func TestATerminalIsSafeFromWhatSandboxesSay(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.cove(t, settings{}, "ps", "abc").want(t, 0, ""+
		"PID  PPID  UID   STATE  EXEC  COMMAND\n"+
		"1    0     0     S      -     init\n"+
		`7    1     1000  R      e1    evil \x1b]0;title\x07`+"\n")
	for in, want := range map[string]string{
		"plain äöü €": "plain äöü €", "a\nb\tc": "a b c", "\x1b[2J": `\x1b[2J`, "\x9b": `\x9b`, "\xff": `\xff`, "\u202e": `\u202e`, "\u009b": `\x9b`,
	} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestAnIDMayBeShortened(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc1", nil)
	f.addSandbox("abc2", nil)
	f.addSandbox("abcd", nil)
	f.addSandbox("abc", nil) // exact beats prefix
	f.cove(t, settings{}, "reset", "abc").want(t, 0, "abc\n", "episode 2, 2ms")
	f.cove(t, settings{}, "reset", "abcd").want(t, 0, "abcd\n", "episode 2")
	f.cove(t, settings{}, "reset", "abc1").want(t, 0, "abc1\n", "episode 2")
	f.cove(t, settings{}, "reset", "ab").want(t, 2, "", `"ab" is the start of more than one sandbox id`, "abc1, abc2, abcd, abc")
	f.cove(t, settings{}, "reset", "x").want(t, 1, "", "cove: no sandbox x", "hint: 'cove ls'")
	f.cove(t, settings{}, "reset", "../x").want(t, 2, "", `"../x" is not a sandbox id`)
}

func TestRemove(t *testing.T) {
	f := newFakeAPI(t)
	for _, id := range []string{"a1", "b1", "c1", "d1"} {
		f.addSandbox(id, map[string]string{"id": id})
	}
	f.cove(t, settings{}, "rm", "nope").want(t, 1, "", "cove: no sandbox nope")
	f.cove(t, settings{}, "rm", "nope", "nix", "--json").want(t, 1, "", "cove: nope: no sandbox nope", "cove: nix: no sandbox nix")
	f.cove(t, settings{}, "rm", "a", "b1").want(t, 0, "a1\nb1\n")
	f.cove(t, settings{}, "rm", "--label", "id=c1").want(t, 0, "c1\n")
	for _, args := range [][]string{{"rm"}, {"rm", "--all", "a1"}, {"rm", "--all", "--label", "a=b"}} {
		f.cove(t, settings{}, args...).want(t, 2, "", "name sandboxes, or give --label, or --all")
	}
	got := f.cove(t, settings{}, "rm", "--all")
	if got.code != 0 || !strings.Contains(got.stdout, "d1") || strings.Contains(got.stdout, "a1") {
		t.Errorf("%+v", got)
	}
}

func TestStatsTimeoutInfo(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.cove(t, settings{}, "stats").want(t, 0, "ID   CPU TIME  MEMORY  PEAK   DISK  PROCESSES  OOM KILLS\nabc  1.5s      9MiB    20MiB  1MiB  3          0\n")
	f.cove(t, settings{}, "stats", "abc", "--json").want(t, 0, `[
  {
    "id": "abc",
    "cpu_time_s": 1.5,
    "memory": 9437184,
    "memory_peak": 20971520,
    "disk_used": 1048576,
    "processes": 3
  }
]
`)
	f.cove(t, settings{}, "timeout", "abc", "0").want(t, 0, "never\n")
	f.cove(t, settings{}, "timeout", "abc", "soon").want(t, 2, "", `"soon" is not a duration`)
	if got := f.cove(t, settings{}, "info"); got.code != 0 || !strings.Contains(got.stdout, "1 of 2000") || !strings.Contains(got.stdout, "2, 3MiB, 1d old on average (2.0 days in all), the oldest 1d12h") {
		t.Errorf("%+v", got)
	}
}

func TestImagesAndKeys(t *testing.T) {
	f := newFakeAPI(t)
	f.images = []*covev1.Image{{Id: "sha256:" + strings.Repeat("a", 64), Names: []string{"base", "debian"}, Size: 200 << 20, Source: "debian", Platform: "linux/amd64",
		CreatedAt: timestamppb.New(time.Now().Add(-48 * time.Hour))}}
	f.keys = []*covev1.Key{{Id: "k1", Name: "first", CreatedAt: timestamppb.New(time.Now().Add(-time.Hour))}}
	f.cove(t, settings{}, "image", "ls").want(t, 0, "NAME          ID            SIZE    SOURCE  AGE\nbase, debian  aaaaaaaaaaaa  200MiB  debian  2d\n")
	f.cove(t, settings{}, "image", "pull", "python:3.12").want(t, 0, "sha256:"+strings.Repeat("2", 64)+"\n")
	f.cove(t, settings{stdin: strings.NewReader("tar")}, "image", "import", "mine", "-", "--json").want(t, 0, `{
  "id": "sha256:`+strings.Repeat("1", 64)+`",
  "names": [
    "mine"
  ],
  "size": 3,
  "source": "tar",
  "platform": ""
}
`)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cove(t, settings{}, "image", "import", "mine", dir).want(t, 0, "sha256:"+strings.Repeat("1", 64)+"\n")
	tar := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(tar, []byte("tar"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cove(t, settings{}, "image", "import", "mine", tar).want(t, 0, "sha256:"+strings.Repeat("1", 64)+"\n")
	f.cove(t, settings{}, "image", "inspect", "bse").want(t, 1, "", "cove: no image 'bse'", "hint: did you mean 'base'?")
	f.cove(t, settings{}, "image", "prune", "--dry-run").want(t, 0, "sha256:dead\n", "would free 3MiB")
	f.cove(t, settings{}, "image", "rm", "debian").want(t, 0, "debian\n")
	f.cove(t, settings{}, "key", "create", "ci").want(t, 0, "cove_secret\n", "key k1")
	f.cove(t, settings{}, "key", "ls").want(t, 0, "ID  NAME   TENANT  ROLE  SCOPES  AGE  LAST USED  EXPIRES\nk1  first  -       -     all     1h   never      never\n")
	f.cove(t, settings{}, "key", "create", "ci", "--expires", "0").want(t, 2, "", "never expires")
	f.cove(t, settings{}, "key", "create", "ci", "--expires", "30d").want(t, 0, "cove_secret\n", "key k1")
	if got := f.madeKeys[len(f.madeKeys)-1].GetExpires().AsDuration(); got != 30*24*time.Hour {
		t.Errorf("a key for 30d is asked for %s", got)
	}
	f.cove(t, settings{}, "key", "rotate", "k1", "--grace", "5m").want(t, 0, "cove_next\n", "old secret is good until")
	f.cove(t, settings{}, "tenant", "create", "research", "--sandboxes", "5", "--memory", "64GiB").want(t, 0, "t1\n")
	f.cove(t, settings{}, "tenant", "create", "research", "--memory", "lots").want(t, 2, "", "lots")
	f.cove(t, settings{}, "tenant", "ls").want(t, 0, "ID  NAME      SANDBOXES  CPU  MEMORY  DISK  SNAPSHOTS  IMAGES  CREATES/S\nt1  research  5          -    64GiB   -     -          -       -\n")
	f.cove(t, settings{}, "tenant", "get", "research").want(t, 0, "t1 research\nTHING      USED  QUOTA\nsandboxes  2     5\ncpu        0     -\nmemory     1GiB  64GiB\ndisk       0B    -\nsnapshots  0B    -\nimages     0B    -\ncreates/s  -     -\n")
	for flags, want := range map[string]quotaJSON{ // of 5 sandboxes and 64 GiB
		"--cpu 8":                       {Sandboxes: 5, Memory: 64 << 30, CPU: 8},
		"--memory none --sandboxes 9":   {Sandboxes: 9},
		"--memory 1GiB --sandboxes 0":   {Memory: 1 << 30},
		"--creates-per-second 0.5":      {Sandboxes: 5, Memory: 64 << 30, CreatesPerSecond: 0.5},
		"--snapshot-bytes 1k --disk 2k": {Sandboxes: 5, Memory: 64 << 30, SnapshotBytes: 1 << 10, Disk: 2 << 10},
	} {
		var got tenantJSON
		out := f.cove(t, settings{}, append([]string{"tenant", "set-quota", "research", "--json"}, strings.Fields(flags)...)...)
		if err := json.Unmarshal([]byte(out.stdout), &got); err != nil || got.Quota != want {
			t.Errorf("set-quota %s: %+v %v, want %+v\n%s", flags, got.Quota, err, want, out.stderr)
		}
	}
	f.cove(t, settings{}, "tenant", "set-quota", "research", "--cpu", "8").want(t, 0, "t1\n")
	f.cove(t, settings{}, "tenant", "set-quota", "research").want(t, 2, "", "which bound?")
	f.cove(t, settings{}, "tenant", "set-quota", "research", "--cpu", "many").want(t, 2, "", `"many" is neither a number nor none`)
	f.cove(t, settings{}, "tenant", "rm", "research").want(t, 0, "research\n")
	f.cove(t, settings{}, "audit").want(t, 0, "2023-11-14T22:13:20Z t1               ci               sandbox.kill         ok                 id:abc\n")
	f.cove(t, settings{}, "audit", "--json", "--since", "7d").want(t, 0, `{"seq":1,"at":"2023-11-14T22:13:20Z","tenant":"t1","key":"k1","key_name":"ci","remote":"127.0.0.1","op":"sandbox.kill","things":["id:abc"],"outcome":"ok","prev":"","hash":"ff"}`+"\n")
	f.cove(t, settings{}, "key", "revoke", "k1").want(t, 0, "k1\n")
	for _, args := range []string{"key revoke", "tenant rm", "image rm"} {
		f.cove(t, settings{}, append(strings.Fields(args), "a", "b", "--json")...).want(t, 0, "[\n  \"a\",\n  \"b\"\n]\n")
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.fail["Sandboxes/Create"] = &sandbox.Error{Class: sandbox.NoCapacity, Op: "sandbox.create", Msg: "no memory left", RetryAfter: 3 * time.Second}
	f.cove(t, settings{}, "create").want(t, 1, "", "cove: no memory left", "hint: try again in 3s")
	f.fail["Sandboxes/Create"] = sandbox.InvalidField("spec.resources.memory", "at least 16 MiB").WithHint("write 512MiB")
	f.cove(t, settings{}, "create", "--memory", "5").want(t, 1, "", "cove: spec.resources.memory: at least 16 MiB", "hint: write 512MiB")
	f.cove(t, settings{}, "create", "--memory", "5X").want(t, 2, "", `"5X" is not a size; write it like 512MiB`)
	f.cove(t, settings{env: map[string]string{"COVE_KEY": "wrong"}}, "ls").want(t, 1, "", "does not know this API key (from COVE_KEY)", "hint: set COVE_KEY")
	f.cove(t, settings{env: map[string]string{"COVE_KEY": ""}}, "ls").want(t, 1, "", "no API key: COVE_KEY is not set")
	f.cove(t, settings{}, "sl").want(t, 2, "", `unknown command "sl"`, "did you mean 'cove ls'?")
	f.cove(t, settings{}, "creat").want(t, 2, "", "did you mean 'cove create'?")
	f.cove(t, settings{}, "frobnicate").want(t, 2, "", "'cove --help' lists the commands")
	for _, parent := range []string{"image", "runs", "lease", "e2b", "code", "grades", "recording", "registry"} {
		f.cove(t, settings{}, parent, "frobnicate").want(t, 2, "", `unknown command "`+parent+` frobnicate"`)
	}
	f.cove(t, settings{}, "runs", "shwo", "x").want(t, 2, "", "did you mean 'cove runs show'?")
	f.cove(t, settings{}, "image", "pul", "x").want(t, 2, "", "did you mean 'cove image pull'?")
	// Its flags are not what is wrong with a command that is none.
	f.cove(t, settings{}, "tenant", "set", "ta", "--sandboxes", "9").want(t, 2, "", `unknown command "tenant set"`, "did you mean 'cove tenant set-quota'?")
	f.cove(t, settings{}, "creat", "--memory", "1GiB").want(t, 2, "", `unknown command "creat"`, "did you mean 'cove create'?")
	f.cove(t, settings{}, "volume", "--nope", "ls").want(t, 2, "", "unknown flag: --nope")
	f.cove(t, settings{}, "ls", "--nope").want(t, 2, "", "unknown flag: --nope", "usage: cove ls")
	f.cove(t, settings{}, "--url", "127.0.0.1:7777", "ls").want(t, 2, "", "is not the URL of a server")

	dead := fmt.Sprint("http://127.0.0.1:", testport.Free(t, "127.0.0.1"))
	f.cove(t, settings{}, "--url", dead, "ls").want(t, 1, "", "cove: no Cove server at "+dead, "'make start' or 'cove serve'")
	f.cove(t, settings{}, "--url", dead, "run", "--", "ls").want(t, 125, "", "no Cove server")
}

// The server runs; it is not what must be looked after.
func TestTLSThatFailsIsNamed(t *testing.T) {
	f := newFakeAPI(t)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {})) // healthy
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)                                                      // handshakes given up, which is the point
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	ca := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cove(t, settings{env: map[string]string{"COVE_CA": ca}}, "--url", srv.URL, "health").want(t, 0, "ok\n")
	f.cove(t, settings{}, "--url", srv.URL, "info").want(t, 1, "", "unknown authority", "hint: COVE_CA names the file")
	f.cove(t, settings{}, "--url", strings.Replace(srv.URL, "https:", "http:", 1), "info").want(t, 1, "", "speaks TLS", "hint: COVE_URL begins with https://")
	f.cove(t, settings{}, "--url", strings.Replace(f.url, "http:", "https:", 1), "info").want(t, 1, "", "hint: the server speaks no TLS")
}

// What help names must be there. A flag in a long text is one of the command
// itself, unless it stands behind another's name; --url, which every command
// has and which is the server's address, is none of them.
func TestHelpNamesFlagsThatExist(t *testing.T) {
	a := &app{}
	a.fill()
	root := a.root()
	flag, call := regexp.MustCompile(`--[a-z][a-z-]*`), regexp.MustCompile(`(?:cove ((?:[a-z-]+ )+))?(--[a-z][a-z-]*)`)
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, m := range call.FindAllStringSubmatch(cmd.Long, -1) {
			of := cmd
			if m[1] != "" {
				of, _, _ = root.Find(strings.Fields(m[1]))
			}
			if of.LocalFlags().Lookup(m[2][2:]) == nil {
				t.Errorf("%s: its help names %s, which is no flag of %s", cmd.CommandPath(), m[2], of.CommandPath())
			}
		}
		for _, line := range strings.Split(cmd.Example, "\n") {
			_, line, ok := strings.Cut(line, "cove ")
			if !ok {
				continue
			}
			line, _, _ = strings.Cut(line, " -- ")
			of, _, err := root.Find(strings.Fields(strings.NewReplacer(")", " ").Replace(line)))
			if err != nil || of == root {
				t.Errorf("%s: no command in the example %q (%v)", cmd.CommandPath(), line, err)
				continue
			}
			for _, name := range flag.FindAllString(line, -1) {
				if of.Flag(name[2:]) == nil {
					t.Errorf("%s: the example %q has %s, which is no flag of %s", cmd.CommandPath(), line, name, of.CommandPath())
				}
			}
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root)
}

func TestTheLocalServerIsFoundByItsFiles(t *testing.T) {
	f := newFakeAPI(t)
	data := t.TempDir()
	for name, content := range map[string]string{"key": "right\n", "url": f.url + "\n", "pid": strconv.Itoa(os.Getpid()) + "\n"} {
		if err := os.WriteFile(filepath.Join(data, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"COVE_URL": "", "COVE_KEY": "", "COVE_DATA": data}
	f.cove(t, settings{env: env}, "ls", "--json").want(t, 0, "[]\n")
	want := "export COVE_URL='" + f.url + "'\nexport COVE_KEY='right'\n"
	f.cove(t, settings{env: env}, "env").want(t, 0, want)
	f.cove(t, settings{env: map[string]string{"COVE_KEY": "other"}}, "env", "--data", data).want(t, 0, want)
	f.cove(t, settings{}, "env", "--data", t.TempDir()).want(t, 2, "", "cannot read")
	f.cove(t, settings{}, "e2b", "env", "--data", t.TempDir()).want(t, 2, "", "cannot read")
	f.cove(t, settings{env: env}, "e2b", "env").want(t, 2, "", "not one of Cove's")
	if got, err := e2bKey("cove_AAEC_w"); err != nil || got != "e2b_000102ff" {
		t.Errorf("e2bKey = %q, %v", got, err)
	}
	f.cove(t, settings{env: map[string]string{"COVE_KEY": "wrong"}}, "--key-file", filepath.Join(data, "key"), "ls", "--json").want(t, 0, "[]\n")
	if got := shellQuote("a'b"); got != `'a'\''b'` {
		t.Errorf("shellQuote: %s", got)
	}
}

// The local server's key is root's: it goes to the URL that the server wrote
// down, while it runs, and to nobody else.
func TestTheLocalKeyGoesToTheLocalServerOnly(t *testing.T) {
	f := newFakeAPI(t)
	data := t.TempDir()
	put := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(data, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("key", "right\n")
	put("url", "http://127.0.0.1:1\n")
	put("pid", strconv.Itoa(os.Getpid())+"\n")
	env := map[string]string{"COVE_URL": f.url, "COVE_KEY": "", "COVE_DATA": data}
	f.cove(t, settings{env: env}, "ls").want(t, 1, "", "no API key for "+f.url, "goes to http://127.0.0.1:1 only")
	// Somebody listens at its URL while it is down.
	env["COVE_URL"] = ""
	put("url", f.url+"\n")
	for _, pid := range []string{"", "4194305\n", "no number\n"} {
		put("pid", pid)
		f.cove(t, settings{env: env}, "ls").want(t, 1, "", "the server of "+data+" does not run")
	}
	put("pid", strconv.Itoa(os.Getpid())+"\n")
	f.cove(t, settings{env: env}, "ls", "--json").want(t, 0, "[]\n")
}

func TestCompletionKnowsSandboxesAndImages(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc1", map[string]string{"run": "7"})
	f.addSandbox("abd2", nil)
	f.images = []*covev1.Image{{Names: []string{"base", "python:3.12"}}}
	for _, c := range []struct{ args, want string }{
		{"exec a", "abc1\tbase run=7\nabd2\tbase\n:4\n"},
		{"rm abc1 abd", "abd2\tbase\n:4\n"},
		{"cp ab", "abc1:\tbase run=7\nabd2:\tbase\n:2\n"},
		{"create --image py", "python:3.12\n:4\n"},
		{"ls x", ":4\n"},
	} {
		got := f.cove(t, settings{}, append([]string{"__complete"}, strings.Fields(c.args)...)...)
		if got.stdout != c.want {
			t.Errorf("completing %q: %q, want %q", c.args, got.stdout, c.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := f.cove(t, settings{}, "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "cove") {
			t.Errorf("completion %s: %+v", shell, got.code)
		}
	}
	// No server: no completions, no error on the command line.
	got := f.cove(t, settings{env: map[string]string{"COVE_URL": "http://127.0.0.1:1"}}, "__complete", "exec", "")
	if got.stdout != ":4\n" {
		t.Errorf("without a server: %q", got.stdout)
	}
}

func TestTheServersOwnCommandsGetTheirFlags(t *testing.T) {
	f := newFakeAPI(t)
	var got ServeConfig
	deps := func(d *Deps) {
		d.Serve = func(_ context.Context, c ServeConfig) error { got = c; return nil }
		d.Bootstrap = func(_ context.Context, c ServeConfig, p func(sandbox.Progress)) (sandbox.Image, error) {
			p(sandbox.Progress{Step: "download"})
			return sandbox.Image{ID: "sha256:" + c.Data}, nil
		}
	}
	f.cove(t, settings{deps: deps, env: map[string]string{"COVE_RUNSC": "/opt/runsc"}}, "serve", "--data", "/d", "--listen", ":1", "--no-base").want(t, 0, "")
	if got.Data != "/d" || got.Listen != ":1" || got.RunscPath != "/opt/runsc" || got.Runtime != "gvisor" || !got.NoBase {
		t.Errorf("%+v", got)
	}
	// Options in a file; the command line comes first.
	file := filepath.Join(t.TempDir(), "cove.toml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("listen = \"0.0.0.0:80\"\nno-base = true\nqueue-wait = \"5s\"\nssh = \":22\"\n")
	f.cove(t, settings{deps: deps}, "serve", "--config", file, "--ssh", ":7722").want(t, 0, "")
	if got.Listen != "0.0.0.0:80" || !got.NoBase || got.QueueWait != 5*time.Second || got.SSH != ":7722" {
		t.Errorf("%+v", got)
	}
	f.cove(t, settings{deps: deps}, "serve", "--data", filepath.Dir(file)).want(t, 0, "")
	if got.Listen != "0.0.0.0:80" {
		t.Errorf("DATA/cove.toml was not found: %+v", got)
	}
	for text, words := range map[string]string{
		"listn = \"x\"": "did you mean 'listen'", "listen = [1]": "a list or table", "queue-wait = \"soon\"": "queue-wait", "listen": "cove.toml", "config = \"x\"": "no option",
		"no-base = 3": "no-base",
	} {
		write(text)
		f.cove(t, settings{deps: deps}, "serve", "--config", file).want(t, 2, "", words)
	}
	f.cove(t, settings{deps: deps}, "serve", "--config", "/no/such").want(t, 1, "", "/no/such")
	// What is given once is kept, and what was there too.
	write("# mine\nlisten = \"0.0.0.0:80\"\nssh = \":22\"\n")
	got = ServeConfig{}
	f.cove(t, settings{deps: deps}, "serve", "--data", filepath.Dir(file), "--save-config", "--listen", ":1", "--dns", "10.0.0.1,10.0.0.2", "--no-base").want(t, 0, "")
	if content, err := os.ReadFile(file); err != nil || got.Data != "" ||
		string(content) != "# mine\nlisten = \":1\"\nssh = \":22\"\ndns = \"10.0.0.1,10.0.0.2\"\nno-base = \"true\"\n" {
		t.Errorf("%s %v %+v", content, err, got)
	}
	f.cove(t, settings{deps: deps}, "serve", "--data", filepath.Dir(file)).want(t, 0, "")
	if got.Listen != ":1" || got.SSH != ":22" || !got.NoBase || !slices.Equal(got.Resolvers, []string{"10.0.0.1", "10.0.0.2"}) {
		t.Errorf("%+v", got)
	}
	f.cove(t, settings{deps: deps}, "serve", "--data", filepath.Dir(file), "--save-config", "--queue-wiat", "5s").want(t, 2, "", "queue-wiat")
	write("listen = [")
	f.cove(t, settings{deps: deps}, "serve", "--config", file, "--save-config", "--no-base").want(t, 2, "", "no TOML")
	f.cove(t, settings{deps: deps}, "image", "bootstrap", "--data", "/d").want(t, 0, "sha256:/d\n")
	f.cove(t, settings{}, "serve").want(t, 1, "", "not part of this build")
	f.cove(t, settings{}, "health").want(t, 0, "ok\n")
	f.cove(t, settings{}, "version").want(t, 0, "cove test\n")
	var v versionJSON
	if err := json.Unmarshal([]byte(f.cove(t, settings{}, "version", "--json").stdout), &v); err != nil || v.Version != "test" || v.Go == "" {
		t.Errorf("%+v %v", v, err)
	}
}

func TestCreateMany(t *testing.T) {
	f := newFakeAPI(t)
	c := f.cove(t, settings{}, "create", "--count", "40", "--label", "step=1", "--reuse", "run-7", "--network", "none")
	ids := strings.Fields(c.stdout)
	slices.Sort(ids)
	if c.code != 0 || len(ids) != 40 || len(slices.Compact(ids)) != 40 {
		t.Errorf("exit %d, %d ids: %s", c.code, len(ids), c.stderr)
	}
	keys := map[string]bool{}
	for _, r := range f.created {
		keys[r.GetIdempotencyKey()] = true
		if r.GetSpec().GetLabels()["step"] != "1" || r.GetSpec().GetReuse() != "run-7" {
			t.Errorf("sent %v", r)
		}
	}
	if len(keys) != 40 {
		t.Errorf("%d keys for 40 sandboxes", len(keys))
	}
	f.cove(t, settings{}, "create", "-n", "0").want(t, 2, "", "--count 0 is not accepted")
	f.cove(t, settings{}, "create", "-n", "3", "--idempotency-key", "k").want(t, 2, "", "names one sandbox")
	f.fail["Sandboxes/Create"] = sandbox.InvalidField("spec.image", "no such image")
	f.cove(t, settings{}, "create", "-n", "300").want(t, 1, "", "no such image")
}

// A node that is full for a while costs time; one that says no to the rest leaves
// what was made, and says so.
func TestCreateManyOnAFullNode(t *testing.T) {
	f := newFakeAPI(t)
	var calls atomic.Int64
	f.onCreate = func() {
		if calls.Add(1) == 3 {
			f.mu.Lock()
			f.fail["Sandboxes/Create"] = sandbox.InvalidField("spec.image", "gone")
			f.mu.Unlock()
		}
	}
	c := f.cove(t, settings{}, "create", "-n", "300")
	made := len(strings.Fields(c.stdout))
	if c.code != 1 || made < 1 || made > 3+createLanes || !strings.Contains(c.stderr, "of 300 sandboxes were made, and are there") || !strings.Contains(c.stderr, "gone") {
		t.Errorf("exit %d, %d made: %s", c.code, made, c.stderr)
	}
}
