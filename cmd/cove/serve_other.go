//go:build !linux

package main

import "github.com/cove-sandbox/cove/cli"

// wireServer leaves the server out: sandboxes need Linux, the client does not.
func wireServer(*cli.Deps) {}
