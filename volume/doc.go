// Package volume keeps a node's volumes: storage that outlives every sandbox,
// mounted into sandboxes and readable without one. It knows them by id; names
// and owners are the store's.
//
// A volume is a sparse image file with an ext4 of its own, loop-mounted while
// somebody uses it. That is what makes its size a limit: code inside that
// writes too much gets ENOSPC from its own file system and takes nothing from
// the host's. (Project quotas would do without the loop, but not every host's
// file system has them, and a clone of a directory is no one operation.)
// Hostile code never writes the image itself, only files through the mount, so
// it cannot craft the metadata the host's kernel reads.
//
//	dir/format           the version of all this
//	dir/lock             one Set per directory
//	dir/v/<id>.json      the record; a volume exists if and only if this does
//	dir/v/<id>.img       the image: /data is what is served, /staging is ours
//	dir/tmp/             what is being made; emptied by Open
//	dir/mnt/<id>/        the mount, while in use
//
// Everything is made under tmp and renamed, the record last; deleting removes
// the record first. So a kill -9 at any point leaves a volume complete or
// absent, and Open, which is recovery, removes what no record refers to:
// mounts, loop devices, files.
//
// Who holds a volume is the node's knowledge (its journal says which sandbox
// has which), handed to Open; the Set keeps it in memory and refuses holders
// that do not go together.
package volume
