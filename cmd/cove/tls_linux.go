package main

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/crypto/acme"
	"golang.org/x/crypto/acme/autocert"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

func (p places) tls() string  { return filepath.Join(p.dir, "tls") }
func (p places) acme() string { return filepath.Join(p.dir, "tls", "acme") }

// publicTLS is what the public listener speaks: nil for plain HTTP, and
// otherwise TLS 1.3. host is what the certificate is for, "" where a client on
// this machine can use the address.
func publicTLS(c cli.ServeConfig, at places, log *slog.Logger) (cfg *tls.Config, host string, err error) {
	given := 0
	for _, on := range []bool{c.TLSCert != "" || c.TLSKey != "", c.TLSSelf, c.TLSACME != ""} {
		if on {
			given++
		}
	}
	switch {
	case given == 0:
		if ip := listenIP(c.Listen); ip == nil || !ip.IsLoopback() {
			log.Warn("the API is served without TLS: keys and content are readable on the way", "listen", c.Listen, "fix", "--tls-cert and --tls-key, --tls-acme or --tls-self")
		}
		return nil, "", nil
	case given > 1:
		return nil, "", sandbox.InvalidField("tls", "--tls-cert, --tls-self and --tls-acme exclude each other")
	case c.TLSSelf:
		return selfTLS(c, at, log)
	case c.TLSACME != "":
		return acmeTLS(c, at)
	}
	if c.TLSCert == "" || c.TLSKey == "" {
		return nil, "", sandbox.InvalidField("tls-cert", "--tls-cert and --tls-key go together")
	}
	files, err := pki.OpenFiles(c.TLSCert, c.TLSKey, nil)
	if err != nil {
		return nil, "", err
	}
	leaf, err := files.Leaf()
	if err != nil {
		return nil, "", err
	}
	for _, name := range leaf.DNSNames {
		if !strings.Contains(name, "*") {
			host = name
			break
		}
	}
	return files.ServerTLS(), host, nil
}

func listenIP(listen string) net.IP {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return nil
	}
	if host == "localhost" {
		return net.IPv4(127, 0, 0, 1)
	}
	return net.ParseIP(host)
}

// selfTLS signs with an authority of the data directory. Whoever trusts its
// ca.crt (COVE_CA) is safe; the fingerprint is for comparing it by eye.
func selfTLS(c cli.ServeConfig, at places, log *slog.Logger) (*tls.Config, string, error) {
	ca, err := pki.Open(at.tls(), nil)
	if err != nil {
		return nil, "", err
	}
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	if name, err := os.Hostname(); err == nil {
		hosts = append(hosts, name)
	}
	if host, _, err := net.SplitHostPort(c.Listen); err == nil && host != "" {
		hosts = append(hosts, host)
	}
	if c.GatewayDomain != "" {
		d, err := gateway.ParseDomain(c.GatewayDomain, "https", "")
		if err != nil {
			return nil, "", err
		}
		hosts = append(hosts, d.Name, "*."+d.Name)
	}
	if addrs, err := net.InterfaceAddrs(); err == nil {
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				hosts = append(hosts, n.IP.String())
			}
		}
	}
	cert, err := ca.Renewing(pki.Server, nodeName(c), hosts...)
	if err != nil {
		return nil, "", err
	}
	log.Info("TLS with an authority of our own", "ca", ca.CertFile(), "sha256", ca.Fingerprint(), "clients", "COVE_CA names a copy of that file")
	return cert.ServerTLS(), "", nil
}

// acmeTLS gets certificates from Let's Encrypt, or whom else it is told, by TLS-ALPN-01, which needs the
// listener to be reachable from there at port 443 of the domain.
func acmeTLS(c cli.ServeConfig, at places) (cfg *tls.Config, host string, err error) {
	if strings.ContainsAny(c.TLSACME, "*/: ") || !strings.Contains(c.TLSACME, ".") {
		return nil, "", sandbox.InvalidField("tls-acme", "%.80q is no name of a domain; one without wildcards is accepted", c.TLSACME)
	}
	if err := os.MkdirAll(at.acme(), 0o700); err != nil {
		return nil, "", err
	}
	m := &autocert.Manager{Prompt: autocert.AcceptTOS, HostPolicy: autocert.HostWhitelist(c.TLSACME), Cache: autocert.DirCache(at.acme())}
	if m.Client, err = acmeClient(c); err != nil {
		return nil, "", err
	}
	cfg = m.TLSConfig()
	cfg.MinVersion = tls.VersionTLS13
	get := cfg.GetCertificate
	cfg.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if h.ServerName == "" {
			return nil, errors.New("a client that names no host")
		}
		return get(h)
	}
	return cfg, c.TLSACME, nil
}

// acmeClient is nil for Let's Encrypt.
func acmeClient(c cli.ServeConfig) (*acme.Client, error) {
	if c.TLSACMEFrom == "" && c.TLSACMECA == "" {
		return nil, nil
	}
	if u, err := url.Parse(c.TLSACMEFrom); err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, sandbox.InvalidField("tls-acme-directory", "%.200q is no https URL", c.TLSACMEFrom)
	}
	client := &acme.Client{DirectoryURL: c.TLSACMEFrom}
	if c.TLSACMECA != "" {
		pool, err := wire.LoadCA(c.TLSACMECA)
		if err != nil {
			return nil, err
		}
		client.HTTPClient = &http.Client{Timeout: time.Minute, Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{RootCAs: pool}}}
	}
	return client, nil
}
