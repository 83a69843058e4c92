package e2e

import (
	"crypto/rand"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// Real binaries: an episode of HTTPS calls with a secret is recorded, over a
// kill -9 of the server, and runs again with the internet gone. Nobody but the
// key can read it on disk.
func TestAnEpisodeRunsAgain(t *testing.T) {
	bank := newBank(t)
	key := seal.NewKey()
	keys := filepath.Join(t.TempDir(), "keys")
	writeKeys(t, keys, key)
	w := world.New(t, world.Options{Flags: []string{"--dns", bank.resolver, "--egress-roots", bank.roots, "--state-keys", keys}, Keys: seal.NewKeyring(key)})
	value := "sk-live-" + rand.Text()
	if r := w.CLIWith(t, strings.NewReader(value+"\n"), "secret", "set", "bank", "--host", bankName, "--header", "Authorization", "--format", "Bearer {}", "--env", "BANK_KEY"); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	// The bank echoes, so what each call says makes its answer its own.
	const marker = "marker-of-the-episode"
	url := "https://" + net.JoinHostPort(bankName, bank.port)
	script := fmt.Sprintf(`python3 -c '
import urllib.request as u, sys
for i in range(int(sys.argv[1]), int(sys.argv[2])):
    with u.urlopen(u.Request("%s/call/%%d?q=1" %% i, b"%s %%d" %% i), timeout=30) as r:
        print(i, r.status, r.headers["Date"], r.headers["X-Echo"], r.read().decode().strip())
' `, url, marker)
	spec := bank.spec()
	spec.Network.Record = &sandbox.NetworkRecord{Name: "episode"}
	b := w.Create(t, spec)
	want := b.Must(t, script+"0 4")
	w.Kill(t)
	w.Start(t)
	want += "\n" + b.Must(t, script+"4 8")
	if got := bank.last(); got != "Bearer "+value {
		t.Fatalf("the bank got %q", got)
	}
	if strings.Contains(want, value) || strings.Count(want, marker) != 8 {
		t.Fatalf("%s", want)
	}
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := w.Client().Recordings.Get(t.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: "episode", Exchanges: 100}))
	if err != nil || r.Msg.Recording.State != "finished" || len(r.Msg.Exchanges) != 8 || r.Msg.Exchanges[7].Status != 200 {
		t.Fatalf("%v %v", r, err)
	}
	for _, m := range []string{marker, value} {
		if found := holders(t, filepath.Join(w.Dir, "recordings"), m); len(found) > 0 {
			t.Errorf("%.7s... can be read in %v", m, found)
		}
	}
	archive := filepath.Join(t.TempDir(), "episode.tape")
	if r := w.CLI(t, "recording", "export", "episode", "-o", archive); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	if har := w.CLI(t, "recording", "export", "episode", "--har"); strings.Contains(har.Stdout, value) || !strings.Contains(har.Stdout, marker) {
		t.Errorf("the HAR: %.500s", har.Stdout)
	}

	bank.stop()
	again := world.Small()
	again.Secrets = []string{"bank"}
	again.Network.Replay = &sandbox.NetworkReplay{Recording: "episode"}
	c := w.Create(t, again)
	got := c.Must(t, script+"0 3")
	w.Kill(t) // and where the replay is outlives the server too
	w.Start(t)
	got += "\n" + c.Must(t, script+"3 8")
	if got != want {
		t.Errorf("replayed:\n%s\nrecorded:\n%s", got, want)
	}
	res := c.Root(t, "curl -sS -i "+url+"/never; curl -sS https://elsewhere.test/ || echo not found")
	if out := string(res.Out); !strings.Contains(out, "424") || !strings.Contains(out, "replay_miss") || !strings.Contains(out, "not found") || res.End.ReplayMissed != 2 || res.End.EgressDenied != 0 {
		t.Errorf("a miss: %+v\n%s", res.End, out)
	}
	if out := w.CLI(t, "net", "get", c.ID).Stdout; !strings.Contains(out, "8 answered, 2 missed, 0 not asked for") || !strings.Contains(out, "/never") {
		t.Errorf("net get:\n%s", out)
	}
	if r := w.CLI(t, "recording", "rm", "episode"); r.Code == 0 {
		t.Error("a recording was removed while it is replayed")
	}
	if _, err := c.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := w.CLI(t, "recording", "rm", "episode"); r.Code != 0 {
		t.Errorf("%+v", r)
	}
	// What was exported is the episode still.
	if r := w.CLI(t, "recording", "import", archive, "--name", "copy"); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	again.Network.Replay = &sandbox.NetworkReplay{Recording: "copy"}
	d := w.Create(t, again)
	if got := d.Must(t, script+"0 8"); got != want {
		t.Errorf("of the archive:\n%s\nrecorded:\n%s", got, want)
	}
	if _, err := d.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.AssertNoLitter(t)
}
