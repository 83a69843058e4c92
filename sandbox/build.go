package sandbox

import "time"

// Layer is what one step of a build changed, as the node keeps it.
type Layer struct {
	Content Content `json:"content"`
	// Without are absolute paths that are no part of the image, with all below
	// them: what a step had mounted, and what every sandbox gets anew.
	Without []string `json:"without,omitempty"`
}

// Composition is an image with layers over it: where a build stands.
type Composition struct {
	Base   string  `json:"base,omitempty"` // image id; "" = nothing
	Layers []Layer `json:"layers,omitempty"`

	// Of the image that is made of it.
	Config  ImageConfig  `json:"config,omitzero"`
	History []BuiltLayer `json:"history,omitempty"`
	Built   bool         `json:"built,omitempty"` // the build's result, not something on the way
}

// BuiltLayer is a line of an image's history.
type BuiltLayer struct {
	CreatedAt time.Time `json:"created_at,omitzero"`
	CreatedBy string    `json:"created_by"`
	Empty     bool      `json:"empty,omitempty"` // it changed the config alone
}

// Copying is a step that puts files over a composition: COPY, ADD and WORKDIR.
// Exactly one of From, Files, Inline and Fetch says where they come from; WORKDIR has
// none of them and makes a directory.
type Copying struct {
	Onto Composition `json:"onto"`

	From   *Composition `json:"from,omitempty"`   // another image or stage
	Files  *Content     `json:"files,omitempty"`  // what the caller uploaded
	Inline []InlineFile `json:"inline,omitempty"` // here-documents
	Fetch  *Fetch       `json:"fetch,omitempty"`

	Sources []string `json:"sources,omitempty"` // paths in From or Files, with wildcards
	Dest    string   `json:"dest"`              // absolute; with a slash at its end it is a directory
	Owner   string   `json:"owner,omitempty"`   // name, uid, name:group or uid:gid of what is copied and made; "" = root, and as it is in From
	Mode    string   `json:"mode,omitempty"`    // octal
	Unpack  bool     `json:"unpack,omitempty"`  // archives are unpacked, as ADD does
	Parents bool     `json:"parents,omitempty"` // paths of sources are kept
	Exclude []string `json:"exclude,omitempty"` // patterns
	Ignore  bool     `json:"ignore,omitempty"`  // Files are less what their .dockerignore says
	// IgnoreFile is its name where it is not .dockerignore.
	IgnoreFile string `json:"ignore_file,omitempty"`
}

// InlineFile is a file given in the instruction itself.
type InlineFile struct {
	Name string `json:"name"`
	Data string `json:"data"`
}

// Fetch is a file from elsewhere.
type Fetch struct {
	URL      string  `json:"url"`
	Checksum string  `json:"checksum,omitempty"` // "sha256:…"; "" = any content
	Network  Network `json:"network,omitzero"`   // that must allow it
}

// Healthcheck is kept for those who run the image elsewhere.
type Healthcheck struct {
	Test          []string      `json:"test,omitempty"`
	Interval      time.Duration `json:"interval,omitempty"`
	Timeout       time.Duration `json:"timeout,omitempty"`
	StartPeriod   time.Duration `json:"start_period,omitempty"`
	StartInterval time.Duration `json:"start_interval,omitempty"`
	Retries       int           `json:"retries,omitempty"`
}
