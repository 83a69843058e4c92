package sandbox

import "time"

// Image is an OCI image flattened to one EROFS file, addressed by content.
type Image struct {
	ID        string      `json:"id"`              // "sha256:…" of the EROFS file
	Names     []string    `json:"names,omitempty"` // what users call it
	Size      int64       `json:"size"`
	Source    string      `json:"source"`   // registry digest, "tar", "dir", "debian", ImageBuilt, ImageDerived or ImageData
	Platform  string      `json:"platform"` // "linux/amd64"
	CreatedAt time.Time   `json:"created_at"`
	Config    ImageConfig `json:"config"`
}

// Sources of images that are not from outside. They have no names and go with
// what they were made of.
const (
	ImageDerived = "derived" // of an image and the changes of a filesystem snapshot
	ImageData    = "data"    // of a directory snapshot, to be mounted
)

// ImageBuilt is the source of what a build made.
const ImageBuilt = "build"

// ImageConfig is what Cove honours and keeps of an OCI image's config.
type ImageConfig struct {
	Env        []string `json:"env,omitempty"` // KEY=value
	WorkingDir string   `json:"working_dir,omitempty"`
	User       string   `json:"user,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	// Authorities that its sandboxes trust (PEM), of its /etc/cove/ca.d.
	Authorities []byte   `json:"authorities,omitempty"`
	Cmd         []string `json:"cmd,omitempty"`

	// Not used here; kept for builds on top and for registries.
	Labels       map[string]string `json:"labels,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"` // "80/tcp"
	Volumes      []string          `json:"volumes,omitempty"`
	StopSignal   string            `json:"stop_signal,omitempty"`
	Shell        []string          `json:"shell,omitempty"`
	OnBuild      []string          `json:"on_build,omitempty"`
	Healthcheck  *Healthcheck      `json:"healthcheck,omitempty"`
}

// Progress is one step of long work, reported as it happens.
type Progress struct {
	Step  string `json:"step"`  // resolve, download, flatten, erofs, done
	Done  int64  `json:"done"`  // bytes
	Total int64  `json:"total"` // bytes; 0 = unknown
}

// RegistryAccess says who a pull is to a registry. The zero value is nobody.
type RegistryAccess struct {
	// Operator takes the credentials that the server's machine has.
	Operator           bool
	Username, Password string
}

// RegistryLogin is that a tenant has credentials for a registry.
type RegistryLogin struct {
	Tenant    string
	Registry  string // host, with a port where it is not the usual one
	Username  string
	UpdatedAt time.Time
}

// Validate checks what a caller gave.
func (a RegistryAccess) Validate() error {
	switch {
	case a.Password != "" && a.Username == "":
		return InvalidField("username", "is missing beside a password").WithHint("registries that take a token alone mostly want it with a user name of any kind")
	case a.Username != "" && a.Password == "":
		return InvalidField("password", "is missing beside a user name")
	case len(a.Username) > 256:
		return InvalidField("username", "is longer than 256 bytes")
	case len(a.Password) > 16<<10:
		return InvalidField("password", "is longer than 16 KiB")
	}
	return nil
}
