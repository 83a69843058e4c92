package main

// callsEdits mend the port forward, which carries every call to a guest. They
// cost one look at an empty queue per wait and are not about speed.
var callsEdits = []edit{
	// A wake-up was lost: data that came after the read that found nothing and
	// before the registration told nobody, and the copy waited for the next data,
	// which a guest that waits for a request never sends. A read of a file is
	// answered in two frames, the second close behind the first: one read in some
	// ten thousand never got its second (1,048 to 26,301, measured on two cores).
	// The registration therefore counts as a notice, and the endpoint is asked
	// once more. The other end, a host socket, needs none: its registration is an
	// EPOLL_CTL_ADD, which reports what is there already.
	{
		file: "runsc/boot/portforward/portforward_netstack.go",
		old: `			e, ch = waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventIn | waiter.EventHUp | waiter.EventErr)
			n.wq.EventRegister(&e)
			defer n.wq.EventUnregister(&e)
`,
		new: `			e, ch = waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventIn | waiter.EventHUp | waiter.EventErr)
			n.wq.EventRegister(&e)
			defer n.wq.EventUnregister(&e)
			waiter.ChannelNotifier(ch).NotifyEvent(waiter.EventIn)
`,
	},
	// The same for room in the send buffer.
	{
		file: "runsc/boot/portforward/portforward_netstack.go",
		old: `			e, ch = waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventIn | waiter.EventHUp | waiter.EventErr)
			n.wq.EventRegister(&e)
			defer n.wq.EventUnregister(&e)
`,
		new: `			e, ch = waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventIn | waiter.EventHUp | waiter.EventErr)
			n.wq.EventRegister(&e)
			defer n.wq.EventUnregister(&e)
			waiter.ChannelNotifier(ch).NotifyEvent(waiter.EventOut)
`,
	},
	// A write that was taken in part lost the rest of it, in the middle of the
	// stream.
	{
		file: "runsc/boot/portforward/portforward.go",
		old: `	_, err = dst.Write(ctx, buf[0:n], cancel)
	if err != nil {
		return fmt.Errorf("failed to write to %q: err %v", src.Name(), err)
	}
	return nil
`,
		new: `	for rest := buf[:n]; len(rest) > 0; {
		n, err := dst.Write(ctx, rest, cancel)
		if err != nil {
			return fmt.Errorf("failed to write to %q: err %v", dst.Name(), err)
		}
		rest = rest[n:]
	}
	return nil
`,
	},
}
