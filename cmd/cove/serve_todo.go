//go:build linux && !cove_wip

package main

import "github.com/cove-sandbox/cove/cli"

func wireServer(*cli.Deps) {}
