package cli

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

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
	ca      string // file with the authority to trust; "" = the system's
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
	if c.key == "" {
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
