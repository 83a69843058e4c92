// Package batch maps one command over many inputs, on machines that somebody
// else makes: cove batch and its tests.
//
// The file of results is the journal: a result is there, on disk, or its input
// has not been done. Who starts again with the same inputs and file does what is
// left. An input runs again only where the platform failed it, never because of
// what its command did, unless that is asked for.
package batch
