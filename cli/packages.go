package cli

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
)

// packageProxy fetches packages for a sandbox without a network. It goes to the
// index, and to PyPI's own host of files, and nowhere else: what asks is code inside.
type packageProxy struct {
	index *url.URL
	base  *http.Transport
	bytes atomic.Int64 // of packages, fetched so far
}

const (
	filesHost = "files.pythonhosted.org"
	filesPath = "/-files/"
	maxIndex  = 64 << 20 // of one package's page; numpy's has two
)

func newPackageProxy(index *url.URL) *packageProxy {
	index.Path = strings.TrimRight(index.Path, "/")
	return &packageProxy{index: index, base: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableCompression: true, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 8}}
}

func (p *packageProxy) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		return &http.Response{StatusCode: http.StatusMethodNotAllowed, Header: http.Header{}, Body: http.NoBody, Request: req}, nil
	}
	out := req.Clone(req.Context())
	rest, file := strings.CutPrefix(req.URL.EscapedPath(), filesPath)
	page := !file && strings.HasPrefix(req.URL.Path, p.index.Path+"/")
	if file {
		where, err := url.Parse("https://" + filesHost + "/" + rest)
		if err != nil {
			return nil, err
		}
		out.URL = where
	}
	if user := p.index.User; user != nil && !file {
		secret, _ := user.Password()
		out.SetBasicAuth(user.Username(), secret)
	}
	out.Host = out.URL.Host
	out.Header.Set("Accept-Encoding", "identity")
	resp, err := p.base.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	if !page || resp.StatusCode != http.StatusOK {
		resp.Body = &countedBody{resp.Body, &p.bytes}
		return resp, nil
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxIndex))
	if err != nil {
		return nil, err
	}
	here := "http://cove.internal/" + packageName
	data = bytes.ReplaceAll(data, []byte(p.index.Scheme+"://"+p.index.Host+"/"), []byte(here+"/"))
	data = bytes.ReplaceAll(data, []byte("https://"+filesHost+"/"), []byte(here+filesPath))
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(data)), int64(len(data))
	resp.Header.Set("Content-Length", strconv.Itoa(len(data)))
	return resp, nil
}

type countedBody struct {
	io.ReadCloser
	n *atomic.Int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(int64(n))
	return n, err
}

func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])[:12]
}
