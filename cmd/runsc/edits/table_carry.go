package main

// carryEdits take wake-ups out of the port forward, which carries every byte
// between the host and a guest.
var carryEdits = []edit{
	// The host's end of a forward was registered with epoll and taken out again
	// for every message, two system calls, and for being writable too, which it
	// always is: the registration woke its own reader at once, to find nothing.
	// It now stays for as long as the forward, for what can be read alone.
	{
		file: "runsc/boot/portforward/portforward_fd_rw.go",
		old: `	// once makes sure we release the owned FileDescription once.
	once sync.Once
}
`,
		new: `	// once makes sure we release the owned FileDescription once.
	once sync.Once
	// readable has a token if there may be something to read. Registered by the
	// first Read that waits, of which there is one at a time, until Close.
	readable  chan struct{}
	readEntry waiter.Entry
}
`,
	},
	{
		file: "runsc/boot/portforward/portforward_fd_rw.go",
		old: `	var (
		notifyCh  chan struct{}
		waitEntry waiter.Entry
	)
	n, err := r.file.Read(ctx, usermem.BytesIOSequence(buf), vfs.ReadOptions{})
	for linuxerr.Equals(linuxerr.ErrWouldBlock, err) {
		if notifyCh == nil {
			waitEntry, notifyCh = waiter.NewChannelEntry(waiter.ReadableEvents | waiter.WritableEvents | waiter.EventHUp | waiter.EventErr)
			// Register for when the endpoint is readable or disconnected.
			r.file.EventRegister(&waitEntry)
			defer r.file.EventUnregister(&waitEntry)
		}
		select {
		case <-notifyCh:
`,
		new: `	n, err := r.file.Read(ctx, usermem.BytesIOSequence(buf), vfs.ReadOptions{})
	for linuxerr.Equals(linuxerr.ErrWouldBlock, err) {
		if r.readable == nil {
			// What came since the read is reported by the registration.
			r.readEntry, r.readable = waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr)
			r.file.EventRegister(&r.readEntry)
		}
		select {
		case <-r.readable:
`,
	},
	{
		file: "runsc/boot/portforward/portforward_fd_rw.go",
		old: `	r.once.Do(func() {
		r.file.DecRef(ctx)
`,
		new: `	r.once.Do(func() {
		if r.readable != nil {
			r.file.EventUnregister(&r.readEntry)
		}
		r.file.DecRef(ctx)
`,
	},
}
