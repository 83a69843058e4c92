package sandbox

import (
	"slices"
	"strconv"
	"strings"
)

// Ingress is how the ports of a sandbox are shown to the outside. The zero value:
// each is private until it is made public, and a request wakes the sandbox.
type Ingress struct {
	Public bool   `json:"public,omitempty"`  // every port needs no token
	Host   string `json:"host,omitempty"`    // what servers inside are told as Host; ${PORT} in it is the port
	TLS    []int  `json:"tls,omitempty"`     // ports whose servers speak TLS
	NoWake bool   `json:"no_wake,omitempty"` // a request does not wake the sandbox
}

// Door is how one port is shown.
type Door struct {
	Public bool   // it needs no token
	Host   string // what the server inside is told as Host; "" = what the client said
	TLS    bool   // the server inside speaks TLS
	NoWake bool   // a request does not wake the sandbox
}

// Door of a port.
func (sb Sandbox) Door(port int) Door {
	in := sb.Spec.Ingress
	return Door{Public: in.Public && port != CodePort || slices.Contains(sb.PublicPorts, port), TLS: slices.Contains(in.TLS, port), NoWake: in.NoWake,
		Host: strings.ReplaceAll(in.Host, "${PORT}", strconv.Itoa(port))}
}

const (
	maxIngressHost = 255
	maxIngressTLS  = 64
)

func (in Ingress) validate() error {
	// What is in a Host: nothing that could end the line or begin a path.
	if len(in.Host) > maxIngressHost || strings.Trim(strings.ToLower(strings.ReplaceAll(in.Host, "${PORT}", "0")), "abcdefghijklmnopqrstuvwxyz0123456789-._:[]") != "" {
		return InvalidField("spec.ingress.host", "%q is no host; one like localhost:${PORT} is accepted", clip(in.Host))
	}
	if len(in.TLS) > maxIngressTLS {
		return InvalidField("spec.ingress.tls", "has %d ports; at most %d are accepted", len(in.TLS), maxIngressTLS)
	}
	for _, port := range in.TLS {
		if port < 1 || port > 65535 {
			return InvalidField("spec.ingress.tls", "%d is no port; 1 to 65535 are", port)
		}
	}
	return nil
}

// CodePort is where the code interpreter listens. It runs what it is sent, so it is
// not public with all the others.
const CodePort = 49999
