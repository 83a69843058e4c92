package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Where programs look for certificates they trust. The first is made where an
// image has none, so that variables can point at it.
var trustBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch; Go and OpenSSL there
	"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora and its kin
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // what that points to
	"/etc/ssl/ca-bundle.pem",                            // SUSE
	"/etc/ssl/cert.pem",                                 // Alpine's OpenSSL, LibreSSL
}

// trustFile is the authority's certificate alone: update-ca-certificates keeps
// it, and it says that all else was written.
const trustFile = "/usr/local/share/ca-certificates/cove.crt"

// trustEnv are the variables of programs that bring certificates of their own:
// requests and httpx (certifi), curl builds, git, Node.js, the AWS SDKs, Deno.
// None that the image sets is among them.
func trustEnv(image []string) map[string]string {
	env := map[string]string{"NODE_EXTRA_CA_CERTS": trustFile}
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "DENO_CERT"} {
		env[name] = trustBundles[0]
	}
	for _, kv := range image {
		name, _, _ := strings.Cut(kv, "=")
		delete(env, name)
	}
	return env
}

// trust has a sandbox trust its authority, if it is to. What is there already,
// in a fork or a sandbox that wakes, costs one small read.
func (n *Node) trust(ctx context.Context, sb sandbox.Sandbox, k runtime.Kernel) error {
	if !intercepted(sb.Spec) || n.cfg.Networks == nil {
		return nil
	}
	a, err := n.cfg.Networks.Authority(authorityOf(sb))
	if err != nil {
		return err
	}
	if err := install(ctx, k.Guest(), a.PEM(), hostBundle); err != nil {
		return fmt.Errorf("the certificate of the sandbox's authority: %w", err)
	}
	return nil
}

// install writes a certificate into the stores of a container. What an image
// without any would trust is what the host does.
func install(ctx context.Context, g *guest.Client, pem []byte, host func() []byte) error {
	if have, _, err := g.ReadFile(ctx, trustFile, 0, 0); err == nil && bytes.Equal(have, pem) {
		return nil
	}
	// Numbers: an image may have no names of users.
	write := func(path string, data []byte, add bool) error {
		_, err := g.WriteFile(ctx, path, data, sandbox.WriteOptions{User: "0:0", Parents: true, Append: add})
		return err
	}
	var others []byte
	var missing []string
	for _, path := range trustBundles {
		have, _, err := g.ReadFile(ctx, path, 0, 0)
		switch {
		case sandbox.ClassOf(err) == sandbox.NotFound:
			missing = append(missing, path)
			continue
		case err != nil:
			return err
		}
		if others == nil {
			others = have
		}
		if bytes.Contains(have, pem) {
			continue // one of several names of a file
		}
		if err := write(path, append([]byte("\n"), pem...), true); err != nil {
			return err
		}
	}
	if slices.Contains(missing, trustBundles[0]) {
		if others == nil {
			others = host()
		}
		if err := write(trustBundles[0], slices.Concat(others, []byte("\n"), pem), false); err != nil {
			return err
		}
	}
	return write(trustFile, pem, false)
}

// hostBundle is what the host trusts; nothing if it does not say.
func hostBundle() []byte {
	for _, path := range trustBundles {
		if b, err := os.ReadFile(path); err == nil {
			return b
		}
	}
	return nil
}
