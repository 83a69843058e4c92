// Package agent runs sandboxes on one machine: it admits them, gives each a
// kernel from a pool of booted ones, ends them when their time is over, and
// finds them again after it was itself killed.
//
// What must survive is in the journal ([Node] appends before it answers);
// everything else is rebuilt by [Open], which is the recovery: there is no
// other way to start. Sandboxes do not notice a node's restart.
//
// Order of locks: Node.mu, then the small ones inside timers, notices,
// kernelSet, pool, blanks and contents. None of these is held across I/O
// (TestNoWaitUnderTheNodesLock). A sandbox's op slot serialises
// what its kernel's contract wants serialised (Attach, Reset, Destroy) and may
// be held for long; it is taken with no lock held.
package agent
