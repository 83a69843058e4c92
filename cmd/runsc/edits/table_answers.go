package main

const (
	overlayFS = "pkg/sentry/fsimpl/overlay/filesystem.go"
	tmpFS     = "pkg/sentry/fsimpl/tmpfs/filesystem.go"
)

// answerEdits are errors that programs tell apart and gVisor gives in another
// order than Linux. They cost nothing but where a call fails.
var answerEdits = []edit{
	// A name that is not there is ENOENT, also where one may not write: what
	// removes a file "if it exists" takes EACCES for a failure. In the two file
	// systems that a sandbox is made of.
	{file: "pkg/sentry/fsimpl/overlay/missing.go", add: "missing_overlay.go.in"},
	{
		file: overlayFS,
		old: `	if err := parent.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
	if err := rp.Mount().CheckBeginWrite(); err != nil {
		return err
	}
	defer rp.Mount().EndWrite()
	name := rp.Component()
	if name == "." || name == ".." {
		return linuxerr.EISDIR
	}
`,
		new: `	if err := parent.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return fs.orMissing(ctx, rp.Credentials(), parent, rp.Component(), &ds, err)
	}
	if err := rp.Mount().CheckBeginWrite(); err != nil {
		return err
	}
	defer rp.Mount().EndWrite()
	name := rp.Component()
	if name == "." || name == ".." {
		return linuxerr.EISDIR
	}
`,
	},
	{
		file: overlayFS,
		old: `	if err := parent.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
	if err := rp.Mount().CheckBeginWrite(); err != nil {
		return err
	}
	defer rp.Mount().EndWrite()
	name := rp.Component()
	if name == "." {
		return linuxerr.EINVAL
	}
`,
		new: `	if err := parent.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return fs.orMissing(ctx, rp.Credentials(), parent, rp.Component(), &ds, err)
	}
	if err := rp.Mount().CheckBeginWrite(); err != nil {
		return err
	}
	defer rp.Mount().EndWrite()
	name := rp.Component()
	if name == "." {
		return linuxerr.EINVAL
	}
`,
	},
	{
		file: overlayFS,
		old: `	if err := oldParent.checkPermissions(creds, vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
`,
		new: `	if err := oldParent.checkPermissions(creds, vfs.MayWrite|vfs.MayExec); err != nil {
		return fs.orMissing(ctx, creds, oldParent, oldName, &ds, err)
	}
`,
	},
	{file: "pkg/sentry/fsimpl/tmpfs/missing.go", add: "missing_tmpfs.go.in"},
	{
		file: tmpFS,
		old: `	if err := parentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
	name := rp.Component()
	if name == "." || name == ".." {
`,
		new: `	if err := parentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return parentDir.orMissing(rp.Credentials(), rp.Component(), err)
	}
	name := rp.Component()
	if name == "." || name == ".." {
`,
	},
	{
		file: tmpFS,
		old: `	if err := parentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
	name := rp.Component()
	if name == "." {
`,
		new: `	if err := parentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return parentDir.orMissing(rp.Credentials(), rp.Component(), err)
	}
	name := rp.Component()
	if name == "." {
`,
	},
	{
		file: tmpFS,
		old: `	if err := oldParentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
`,
		new: `	if err := oldParentDir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
		return oldParentDir.orMissing(rp.Credentials(), oldName, err)
	}
`,
	},

	// A directory opened for writing is EISDIR, also where one may not write.
	{
		file: overlayFS,
		old: `	ats := vfs.AccessTypesForOpenFlags(opts)
	if err := d.checkPermissions(rp.Credentials(), ats); err != nil {
		return err
	}
	if d.isDir() {
`,
		new: `	ats := vfs.AccessTypesForOpenFlags(opts)
	if d.isDir() && ats.MayWrite() {
		return linuxerr.EISDIR
	}
	if err := d.checkPermissions(rp.Credentials(), ats); err != nil {
		return err
	}
	if d.isDir() {
`,
	},
	{
		file: tmpFS,
		old: `	ats := vfs.AccessTypesForOpenFlags(opts)
	if !afterCreate {
`,
		new: `	ats := vfs.AccessTypesForOpenFlags(opts)
	if _, ok := d.inode.impl.(*directory); ok && ats.MayWrite() {
		return nil, linuxerr.EISDIR
	}
	if !afterCreate {
`,
	},
}
