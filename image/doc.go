// Package image keeps content-addressed EROFS images on a node and makes them:
// from a registry ([Library.Pull]), a tarball ([Library.ImportTar]), a
// directory ([Library.ImportDir]), the machine's own Debian mirror
// ([Library.Bootstrap]), or an image that is here and a tar of changes
// ([Library.Derive]). [Library.FromTar] makes one that is only mounted.
//
// Every way in ends in the same three steps. Layers are read into a tree in
// memory, their contents kept in spool files (those of a base image stay where
// they are, in its own file); the tree is completed with what a sandbox needs
// (mount points, /etc/hosts); package erofs writes it. Nothing is ever unpacked
// on the host, so a layer with "../", absolute links or symlinked parents has
// nowhere to escape to: its paths are resolved in the tree, which has no way
// out.
//
// On disk:
//
//	<dir>/blobs/sha256/<hex>.erofs   the image; its name is its SHA-256
//	<dir>/blobs/sha256/<hex>.json    sidecar: config, source, notes
//	<dir>/partial/<hex>              layer blobs under download, resumed by the next pull
//	<dir>/tmp/<random>/              work of one operation, flocked by its owner
//	<dir>/lock                       flocked while names change in blobs/ or tmp/
//
// The config is part of the name (its digest is the file system's UUID), so
// two images with the same files and different environments do not share a
// sidecar.
package image
