package agent

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

// trustKeys is what Java trusts where the operator or the image has authorities:
// those, and what the host trusts. It does not read the stores above.
const trustKeys = "/usr/local/share/ca-certificates/cove.jks"

const javaEnv, javaTrust = "JAVA_TOOL_OPTIONS", "-Djavax.net.ssl.trustStore=" + trustKeys + " -Djavax.net.ssl.trustStoreType=JKS -Djavax.net.ssl.trustStorePassword=" + keystorePassword

// trustEnv are the variables of programs that bring certificates of their own:
// requests and httpx (certifi), curl builds, git, Node.js, the AWS SDKs, Deno.
// None that the image sets is among them.
func (n *Node) trustEnv(img sandbox.ImageConfig) map[string]string {
	env := map[string]string{"NODE_EXTRA_CA_CERTS": trustFile}
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "DENO_CERT"} {
		env[name] = trustBundles[0]
	}
	if len(n.authorities(img)) > 0 {
		env[javaEnv] = javaTrust
	}
	for _, kv := range img.Env {
		name, _, _ := strings.Cut(kv, "=")
		delete(env, name)
	}
	return env
}

// authorities are those of the operator and of an image.
func (n *Node) authorities(img sandbox.ImageConfig) []byte {
	return slices.Concat(n.cfg.Authorities, img.Authorities)
}

// trusts says whether a sandbox is to trust more than its image does by itself.
func (n *Node) trusts(s sandbox.Spec, img sandbox.ImageConfig) bool {
	return s.Intercepted() || len(n.cfg.Authorities)+len(img.Authorities) > 0
}

// trust has a sandbox trust its authority, those of the operator and those of its
// image, if it is to. What is there already, in a fork or a sandbox that wakes, costs one small
// read.
func (n *Node) trust(ctx context.Context, sb sandbox.Sandbox, img sandbox.ImageConfig, k runtime.Kernel) error {
	if !n.trusts(sb.Spec, img) {
		return nil
	}
	pem := n.authorities(img)
	java := len(pem) > 0
	if sb.Spec.Intercepted() && n.cfg.Networks != nil {
		a, err := n.cfg.Networks.Authority(authorityOf(sb))
		if err != nil {
			return err
		}
		pem = append(pem, a.PEM()...)
	}
	if len(pem) == 0 {
		return nil
	}
	if err := install(ctx, k.Guest(), pem, java, hostBundle); err != nil {
		return fmt.Errorf("the certificates that the sandbox is to trust: %w", err)
	}
	return nil
}

// install has a container trust a certificate. What one without any store would
// trust is what the host does.
func install(ctx context.Context, g *guest.Client, pem []byte, java bool, host func() []byte) error {
	// Before the file of which Trust takes it that all else was written.
	if java {
		if have, _, err := g.ReadFile(ctx, trustFile, 0, int64(len(pem))+1); err != nil || !bytes.Equal(have, pem) {
			if _, err := g.WriteFile(ctx, trustKeys, keystore(append(host(), pem...)), sandbox.WriteOptions{User: "0:0", Parents: true}); err != nil {
				return err
			}
		}
	}
	missing, err := g.Trust(ctx, trustFile, trustBundles, pem)
	if err != nil || !missing {
		return err
	}
	// Numbers: an image may have no names of users.
	if _, err := g.WriteFile(ctx, trustBundles[0], host(), sandbox.WriteOptions{User: "0:0", Parents: true}); err != nil {
		return err
	}
	_, err = g.Trust(ctx, trustFile, trustBundles, pem)
	return err
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
