package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/cove-sandbox/cove/wire"
)

const (
	defaultURL    = "http://127.0.0.1:7777"
	defaultListen = "127.0.0.1:7777"
	defaultData   = "/var/lib/cove"
)

// config is where the server is and how to be let in.
type config struct {
	url     string
	key     string
	keyFrom string // for messages: where the key came from
	keyPath string // the file that was or would be read
	// withheld says why the local server's key was not read for this URL.
	withheld string
	ca       string // file with the authority to trust; "" = the system's
}

// dataDir is the local server's state directory for commands without --data.
func (a *app) dataDir() string {
	if d := a.Getenv("COVE_DATA"); d != "" {
		return d
	}
	return defaultData
}

// config reads flags, then the environment, then the local server's files. A
// missing key is not an error here: the server says whether it needs one.
func (a *app) config() (config, error) {
	c := config{url: a.url, keyPath: a.keyFile}
	if c.url == "" {
		c.url = a.Getenv("COVE_URL")
	}
	if c.url == "" {
		c.url = a.localURL(a.dataDir())
	}
	u, err := url.Parse(c.url)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return c, usagef("a URL like "+defaultURL, "%q is not the URL of a server", c.url)
	}
	c.url = strings.TrimRight(c.url, "/")

	if c.keyPath == "" {
		if c.key = strings.TrimSpace(a.Getenv("COVE_KEY")); c.key != "" {
			c.keyFrom = "COVE_KEY"
		}
		c.keyPath = filepath.Join(a.dataDir(), "key")
	}
	if c.key == "" && a.keyFile == "" && !a.toShell {
		c.withheld = a.whyNotLocal(c.url)
	}
	if c.key == "" && c.withheld == "" {
		b, err := os.ReadFile(c.keyPath)
		switch {
		case err == nil:
			c.key, c.keyFrom = strings.TrimSpace(string(b)), c.keyPath
		case a.keyFile != "" && !errors.Is(err, fs.ErrNotExist):
			return c, err
		case a.keyFile != "":
			return c, usagef("", "no key file %s", a.keyFile)
		}
	}
	// Beside the local server's key is its authority, if it has one of its own.
	if c.ca = a.Getenv("COVE_CA"); c.ca == "" && u.Scheme == "https" && c.url == strings.TrimRight(a.localURL(a.dataDir()), "/") {
		if own := filepath.Join(a.dataDir(), "tls", "ca.crt"); fileExists(own) {
			c.ca = own
		}
	}
	return c, nil
}

// whyNotLocal is "" where the local server's own key may go to a URL: that is
// root's key, so it is sent only to the URL that the server of this machine wrote
// down, and only while that server runs. Whoever takes its port meanwhile would
// get it otherwise. The server writes its pid once it has its port, in a directory
// that only its user writes; a process that has the number now and is somebody
// else's is none.
func (a *app) whyNotLocal(target string) string {
	data := a.dataDir()
	if !fileExists(filepath.Join(data, "key")) {
		return "" // nothing to keep back
	}
	if local := strings.TrimRight(a.localURL(data), "/"); target != local {
		return "the key of this machine's server goes to " + local + " only"
	}
	b, _ := os.ReadFile(filepath.Join(data, "pid"))
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	owner, oerr := os.Stat(data)
	process, perr := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if errors.Join(err, oerr, perr) != nil || !sameOwner(owner, process) {
		return "the server of " + data + " does not run"
	}
	return ""
}

func sameOwner(a, b fs.FileInfo) bool {
	x, xok := a.Sys().(*syscall.Stat_t)
	y, yok := b.Sys().(*syscall.Stat_t)
	return xok && yok && x.Uid == y.Uid
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// localURL is where the server of a data directory listens: it writes its URL
// beside its key, so that a server on another port is found without COVE_URL.
func (a *app) localURL(data string) string {
	if b, err := os.ReadFile(filepath.Join(data, "url")); err == nil {
		if u := strings.TrimSpace(string(b)); u != "" {
			return u
		}
	}
	return defaultURL
}

// client is made on first use: help and completion of flags need no server.
func (a *app) client() (*wire.Client, error) {
	if a.api != nil {
		return a.api, nil
	}
	c, err := a.config()
	if err != nil {
		return nil, err
	}
	opts := wire.Options{UserAgent: "cove-cli/" + a.Version}
	if c.ca != "" {
		if opts.CA, err = wire.LoadCA(c.ca); err != nil {
			return nil, err
		}
	}
	a.api = wire.NewClient(c.url, c.key, opts)
	return a.api, nil
}
