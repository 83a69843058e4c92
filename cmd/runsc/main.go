// Command runsc is gVisor's runsc of the pinned version, with the seccomp
// program of its sentry compiled ahead.
//
// gVisor compiles that program when a sentry starts or is restored, unless it
// was built with programs made ahead, which only its own build system knows how
// to do. By the sentry's own timeline, on two cores, that took 18 of the
// milliseconds of a boot and 25 of a restore, and takes 0.4 and 3.5 now. The program is
// the same, made by the same code (see gen), with the same variables filled in;
// a test compares. A sentry with other options compiles its own, as before.
//
// It is also the process that starts sentries (see runtime/gvisor/spawn).
package main

import (
	"fmt"
	"os"
	"runtime"
	_ "unsafe" // for linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sync"
	_ "gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/specutils"
	"gvisor.dev/gvisor/runsc/version"

	"github.com/cove-sandbox/cove/runtime/gvisor/spawn"
)

//go:generate go run ./gen programs_amd64.go

// These are where gVisor's generated code would put them; there is no exported
// way. A gVisor that names them otherwise does not link.
//
//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

//go:linkname registerPrecompiledProgramsOnce gvisor.dev/gvisor/runsc/boot/filter.registerPrecompiledProgramsOnce
var registerPrecompiledProgramsOnce sync.Once

// register puts the programs there before gVisor would put none.
func register() {
	registerPrecompiledProgramsOnce.Do(func() {
		precompiledPrograms = map[string]precompiledseccomp.Program{}
		for _, p := range programs {
			precompiledPrograms[p.Name] = p
		}
	})
}

// Set by the linker in gVisor's own builds; referenced so that it is there.
var _ = version.Version()

func main() {
	runtime.MemProfileRate = 0 // nobody asks for a profile, whose samples lie in a table of 1.4 MiB
	closeStrangers(os.Args)
	if len(os.Args) > 1 && os.Args[1] == spawn.Command {
		if err := spawn.Serve(specutils.StartInNS); err != nil {
			fmt.Fprintln(os.Stderr, "runsc:", err)
			os.Exit(1)
		}
		return
	}
	register()
	maincli.Main()
}
