// Package arch holds no code: its test keeps the shape of the tree, so that a
// wrong import fails in review and not a year later.
package arch
