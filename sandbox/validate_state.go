package sandbox

import (
	"path"
	"strconv"
	"strings"
	"time"
)

// Bounds of snapshots, forks, templates and volumes; the messages below print
// them.
const (
	MaxVolumes    = 16  // of one sandbox
	MaxForks      = 256 // children of one call
	DefaultVolume = GiB
	// MinVolume holds ext4's own tables and journal with room to spare, MaxVolume
	// is ext4's with 4 KiB blocks.
	MinVolume    = 16 * MiB
	MaxVolume    = 16 << 40
	DefaultReady = time.Minute
	// MinSnapshotTTL is how often the server looks for expired ones.
	MinSnapshotTTL  = time.Minute
	MaxSnapshotTTL  = 10 * 365 * 24 * time.Hour
	longestReady    = time.Hour
	maxStartCommand = 64 * int(KiB)
)

var (
	// No '/': these names are one element of a URL's path.
	resourceName = pattern(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$`)
	// Lower case only: a volume's name is also a name on the node's disk, where
	// two that differ in case must not meet.
	volumeName = pattern(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)
)

// ValidateSource checks what a Spec starts from as it was asked for, before
// defaults: an image, a snapshot or a template, at most one of them.
func (s Spec) ValidateSource() error {
	switch {
	case s.Snapshot != "" && s.Template != "":
		return InvalidField("spec.template", "template and snapshot are both set; at most one of image, snapshot and template is accepted")
	case s.Image != "" && s.Snapshot != "":
		return InvalidField("spec.image", "image and snapshot are both set; at most one of image, snapshot and template is accepted").
			WithHint("leave the image out: it is the snapshot's")
	case s.Image != "" && s.Template != "":
		return InvalidField("spec.image", "image and template are both set; at most one of image, snapshot and template is accepted").
			WithHint("leave the image out: it is the template's")
	case s.Snapshot != "":
		return ValidateSnapshotRef("spec.snapshot", s.Snapshot)
	case s.Template != "":
		_, err := ParseTemplateRef("spec.template", s.Template)
		return err
	}
	return nil
}

// ValidateSnapshotName checks the name somebody gives a snapshot.
func ValidateSnapshotName(field, s string) error { return validateResourceName(field, "snapshot", s) }

// ValidateSnapshotTTL checks how long a snapshot is to be kept; 0 = until it is
// deleted.
func ValidateSnapshotTTL(ttl time.Duration) error {
	if ttl != 0 && (ttl < MinSnapshotTTL || ttl > MaxSnapshotTTL) {
		return InvalidField("ttl", "%s is not accepted; %s to %s is, or none: it stays until it is deleted", ttl, MinSnapshotTTL, MaxSnapshotTTL)
	}
	return nil
}

// ValidateSnapshotRef checks a name or id of a snapshot.
func ValidateSnapshotRef(field, s string) error {
	if ValidID(s) {
		return nil
	}
	return validateResourceName(field, "snapshot", s)
}

// ValidateTemplateName checks the name somebody gives a template.
func ValidateTemplateName(field, s string) error { return validateResourceName(field, "template", s) }

func validateResourceName(field, what, s string) error {
	if !resourceName().MatchString(s) {
		return InvalidField(field, "%q is no name of a %s; 1 to 63 of letters, digits, '.', '_' and '-' are accepted, with a letter or digit first and last", clip(s), what)
	}
	return nil
}

// ValidateVolumeName checks a name of a volume.
func ValidateVolumeName(field, s string) error {
	if !volumeName().MatchString(s) {
		return InvalidField(field, "%q is no name of a volume; 1 to 63 of lower-case letters, digits, '.', '_' and '-' are accepted, with a letter or digit first and last", clip(s))
	}
	return nil
}

// ParseTemplateRef reads "name", "name@version" or "name:tag".
func ParseTemplateRef(field, s string) (ref TemplateRef, err error) {
	name, tag, tagged := strings.Cut(s, ":")
	name, text, versioned := strings.Cut(name, "@")
	if err := ValidateTemplateName(field, name); err != nil {
		return ref, err
	}
	ref.Name = name
	switch {
	case tagged && versioned:
		return ref, InvalidField(field, "%q has a version and a tag; at most one of them is accepted", clip(s))
	case tagged:
		ref.Tag = tag
		return ref, ValidateTemplateTag(field, tag)
	case versioned:
		var perr error
		ref.Version, perr = strconv.ParseInt(text, 10, 64)
		// Only the one spelling: "+1" and "01" are not versions.
		if perr != nil || ref.Version < 1 || strconv.FormatInt(ref.Version, 10) != text {
			return ref, InvalidField(field, "%q has no version behind the @; a number from 1 on is accepted, as in %s@1", clip(s), clip(name))
		}
	}
	return ref, nil
}

// ValidateTemplateTag checks what somebody calls a version of a template.
func ValidateTemplateTag(field, s string) error { return validateResourceName(field, "tag", s) }

// Ref is how a version of a template is written.
func (t Template) Ref() string { return t.Name + "@" + strconv.FormatInt(t.Version, 10) }

// ValidateSnapshotKind checks a kind; Path is for a directory and needed there.
func ValidateSnapshotKind(kind SnapshotKind, dir string) error {
	switch kind {
	case MemorySnapshot, FilesystemSnapshot:
		if dir != "" {
			return InvalidField("path", "is only for kind directory, and this is %s", kind)
		}
		return nil
	case DirectorySnapshot:
		return ValidatePath("path", dir)
	}
	return InvalidField("kind", "%q is no kind of snapshot; memory, filesystem and directory are accepted", clip(string(kind)))
}

func validateOnIdle(a IdleAction, idle time.Duration) error {
	switch a {
	case "", IdleKill:
		return nil
	case IdlePause:
		if idle == 0 {
			return InvalidField("spec.on_idle", "pause needs an idle_timeout, after which to pause")
		}
		return nil
	}
	return InvalidField("spec.on_idle", "%q is not accepted; kill and pause are", clip(string(a)))
}

func validateOnTimeout(a IdleAction) error {
	switch a {
	case "", IdleKill, IdlePause:
		return nil
	}
	return InvalidField("spec.on_timeout", "%q is not accepted; kill and pause are", clip(string(a)))
}

func validateVolumes(mounts []VolumeMount) error {
	if len(mounts) > MaxVolumes {
		return InvalidField("spec.volumes", "has %d volumes; at most %d are accepted", len(mounts), MaxVolumes)
	}
	paths := map[string]int{}
	for i, m := range mounts {
		at := func(field string) string { return "spec.volumes[" + strconv.Itoa(i) + "]." + field }
		if err := ValidateVolumeName(at("volume"), m.Volume); err != nil {
			return err
		}
		if err := ValidateMountPath(at("path"), m.Path); err != nil {
			return err
		}
		if j, taken := paths[m.Path]; taken {
			return InvalidField(at("path"), "%q is where volume %d is already", clip(m.Path), j)
		}
		paths[m.Path] = i
		switch m.Mode {
		case "", VolumeReadWrite, VolumeReadOnly, VolumeShared:
		default:
			return InvalidField(at("mode"), "%q is not accepted; rw, ro and shared are", clip(string(m.Mode)))
		}
	}
	return nil
}

// kernelTrees are the sandbox kernel's own: what is mounted there would hide
// what every program relies on.
var kernelTrees = []string{"/proc", "/sys", "/dev"}

// ValidateMountPath checks where something is put into a sandbox: an absolute
// path in its one spelling that hides neither everything nor the kernel's own
// trees.
func ValidateMountPath(field, p string) error {
	if err := ValidatePath(field, p); err != nil {
		return err
	}
	if path.Clean(p) != p {
		return InvalidField(field, "%q is not clean; write it as %q", clip(p), clip(path.Clean(p)))
	}
	if p == "/" {
		return InvalidField(field, "is the root of the sandbox; a directory below it is accepted")
	}
	for _, tree := range kernelTrees {
		if p == tree || strings.HasPrefix(p, tree+"/") {
			return InvalidField(field, "%q is in %s, which is the sandbox kernel's own", clip(p), tree)
		}
	}
	return nil
}

// ValidateVolumeSize checks the size of a volume, with its default.
func ValidateVolumeSize(field string, size int64) error {
	if size < MinVolume || size > MaxVolume {
		return InvalidField(field, "%s is not accepted; %s to %s are", bytesText(size), bytesText(MinVolume), bytesText(MaxVolume))
	}
	return nil
}

// RoundVolumeSize is the size a volume gets that is asked for with size: whole
// mebibytes.
func RoundVolumeSize(size int64) int64 { return (size + 1<<20 - 1) &^ (1<<20 - 1) }

// ValidateFork checks how many children are asked for and how many are enough;
// minReady 0 is all of them.
func ValidateFork(count, minReady int) error {
	if count < 1 || count > MaxForks {
		return InvalidField("count", "%d is not accepted; 1 to %d is", count, MaxForks)
	}
	if minReady < 0 || minReady > count {
		return InvalidField("min_ready", "%d is not accepted; 1 to the count of %d is, or 0 for all", minReady, count)
	}
	return nil
}

// Validate checks a readiness as a request spells it.
func (r Readiness) Validate() error {
	switch {
	case r.Command != "" && r.Port != 0:
		return InvalidField("ready_port", "ready_command and ready_port are both set; at most one is accepted")
	case r.Port < 0 || r.Port > 65535:
		return InvalidField("ready_port", "%d is no port; 1 to 65535 is accepted", r.Port)
	case r.Timeout != 0 && (r.Timeout < time.Millisecond || r.Timeout > longestReady):
		return InvalidField("ready_timeout", "%s is not accepted; 1ms to %s is, or 0 for %s", r.Timeout, longestReady, DefaultReady)
	}
	return ValidateStartCommand("ready_command", r.Command)
}

// ValidateStartCommand checks a command of a template; "" is none.
func ValidateStartCommand(field, s string) error {
	if len(s) > maxStartCommand {
		return InvalidField(field, "has %d bytes; at most %s are accepted", len(s), bytesText(int64(maxStartCommand))).
			WithHint("put it into a file of the image and run that")
	}
	if strings.IndexByte(s, 0) >= 0 {
		return InvalidField(field, "holds a NUL byte, which no process can be given")
	}
	return nil
}

// ValidateRetention checks the rules of a prune: at least one that removes
// something, and none negative.
func ValidateRetention(keepLast int, keepLabels map[string]string, maxBytes int64, maxAge time.Duration) error {
	switch {
	case keepLast < 0:
		return InvalidField("keep_last", "%d is not accepted; 1 and above is, or 0 for no such rule", keepLast)
	case maxBytes < 0:
		return InvalidField("max_bytes", "%d is not accepted; 1 and above is, or 0 for no such rule", maxBytes)
	case maxAge < 0:
		return InvalidField("max_age", "%s is not accepted; a positive time is, or 0 for no such rule", maxAge)
	case keepLast == 0 && maxBytes == 0 && maxAge == 0:
		return InvalidField("keep_last", "no rule says what goes; give keep_last, max_bytes or max_age").
			WithHint("labels only say what stays")
	}
	return ValidateLabels("keep_labels", keepLabels)
}
