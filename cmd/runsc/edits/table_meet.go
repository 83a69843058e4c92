package main

// meetEdits are for kernels that meet others, or the death of who drives them.
var meetEdits = []edit{
	// A sentry wants its stdio at 253 to 255. One that found a number taken died
	// ("unable to remap stdios, FD 254 is already in use"), 4 of 96 in a burst:
	// what is there was inherited from a node that was starting others, and is
	// nobody's here. dup3 closes it. What a sentry is given lies far below.
	{
		file: "runsc/boot/loader.go",
		old: `			return nil, fmt.Errorf("unable to remap stdios, FD %d is already in use", newfd)
`,
		new: `			log.Warningf("FD %d was inherited and is closed", newfd)
`,
	},
}
