package main

// unreadEdits free what only unread messages hold when a container ends: gVisor has
// no collector for it, and a port that such a message held was taken in the next
// episode.
var unreadEdits = []edit{
	{file: "pkg/sentry/socket/unix/transport/unread.go", add: "unread_transport.go.in"},
	{file: "pkg/sentry/socket/unix/unread.go", add: "unread_unix.go.in"},
	{file: "pkg/sentry/kernel/unread.go", add: "unread_kernel.go.in"},
	{
		file: "pkg/sentry/kernel/task.go",
		old: `	// exitState is the task's progress through the exit path.
`,
		new: `	// released is set once an exiting task has let go of its descriptors.
	// Protected by the TaskSet mutex.
	released bool ` + "`state:\"nosave\"`" + `

	// exitState is the task's progress through the exit path.
`,
	},
	// Before anybody is told that the last process of a container has ended.
	{
		file: "pkg/sentry/kernel/task_exit.go",
		old: `	t.exitChildrenLocked()
	t.tg.pidns.owner.mu.Unlock()
`,
		new: `	t.exitChildrenLocked()
	last := t.lastOfContainerLocked()
	t.tg.pidns.owner.mu.Unlock()
	if last && CollectUnread != nil {
		CollectUnread(t, t.k)
	}
`,
	},
	// And for those that a checkpoint took amid their end.
	{
		file: "runsc/boot/loader.go",
		old: `	log.Debugf("Container destroyed, cid: %s", cid)
`,
		new: `	kernel.CollectUnread(l.k.SupervisorContext(), l.k)
	log.Debugf("Container destroyed, cid: %s", cid)
`,
	},
}
