package seal

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestLoadKeyring(t *testing.T) {
	a, b := NewKey(), NewKey()
	hexKey, b64Key := hex.EncodeToString(a[:]), base64.StdEncoding.EncodeToString(b[:])
	for _, c := range []struct {
		name, content string
		mode          os.FileMode
		want          int    // keys; 0: refused
		say           string // in the error
	}{
		{"hex then base64", "# ours\n\n" + hexKey + "\n  " + b64Key + "\n", 0o600, 2, ""},
		{"read-only, no newline", hexKey, 0o400, 1, ""},
		{"the same twice", hexKey + "\n" + hexKey, 0o600, 1, ""},
		{"windows lines", hexKey + "\r\n" + b64Key + "\r\n", 0o600, 2, ""},
		{"readable by the group", hexKey, 0o640, 0, "mode 0640"},
		{"readable by all", hexKey, 0o644, 0, "mode 0644"},
		{"empty", "", 0o600, 0, "holds no key"},
		{"comments only", "# x\n", 0o600, 0, "holds no key"},
		{"short", hexKey + "\n" + hexKey[:60], 0o600, 0, ":2:"},
		{"long", hexKey + "00", 0o600, 0, ":1:"},
		{"zeros", strings.Repeat("0", 64), 0o600, 0, ":1:"},
		{"garbage", "secret" + hexKey, 0o600, 0, ":1:"},
		{"huge", strings.Repeat("#\n", 40<<10), 0o600, 0, "not a file of keys"},
	} {
		path := filepath.Join(t.TempDir(), "keys")
		if err := os.WriteFile(path, []byte(c.content), c.mode); err != nil {
			t.Fatal(err)
		}
		k, err := LoadKeyring(path)
		if c.want > 0 {
			id, key, ok := k.Active()
			if err != nil || !ok || key != a || id != keyID(a) || len(k.keys) != c.want {
				t.Errorf("%s: %v, %v", c.name, k, err)
			}
			if s := fmt.Sprintf("%v %+v %#v %s", k, k, k, k); strings.Contains(s, hexKey[:16]) || strings.Contains(s, fmt.Sprint(a[:4])) {
				t.Errorf("a print of the keyring tells its keys: %s", s)
			}
			continue
		}
		var se *sandbox.Error
		if !errors.As(err, &se) || !errors.Is(err, sandbox.ErrPrecondition) || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if all := err.Error() + se.Hint; strings.Contains(all, hexKey[:16]) {
			t.Errorf("%s: the error tells the key: %s", c.name, all)
		}
	}
	if _, err := LoadKeyring(filepath.Join(t.TempDir(), "none")); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("no file: %v", err)
	}
	if _, err := LoadKeyring(t.TempDir()); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("a directory: %v", err)
	}
	var none *Keyring
	if _, _, ok := none.Active(); ok {
		t.Error("no keyring has an active key")
	}
}
