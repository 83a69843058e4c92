package main

import (
	"slices"
	"testing"

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// The program made ahead is, instruction for instruction, what the sentry would
// compile: a stale one would forbid or, worse, allow something else.
func TestProgramsAreGVisorsOwn(t *testing.T) {
	register()
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range systrap.PrecompiledSeccompInfo() {
		opt := config.Options{Platform: info, ControllerFD: 77}
		p, ok := filter.GetPrecompiled(opt.ConfigKey())
		if !ok {
			t.Fatalf("no program for %s: go generate ./cmd/runsc", opt.ConfigKey())
		}
		got, err := p.RenderInstructions(opt.Vars())
		if err != nil {
			t.Fatal(err)
		}
		rules, deny := config.Rules(opt)
		compiled := &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: rules, Action: seccomp.Allow}},
			Options:  config.SeccompOptions(opt),
		}
		want, _, err := compiled.Build()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %d instructions, gVisor compiles %d others: go generate ./cmd/runsc", opt.ConfigKey(), len(got), len(want))
		}
	}
}
