package wire

import "golang.org/x/sys/unix"

// UserCaps is what root in the user's container may have, by name and number.
// gVisor is the wall around the machine, so the question is only what would
// reach the guest, the limits or the next episode: docs/security-boundary.md
// goes through all of them. Not in it are NET_RAW and NET_ADMIN, with which root
// could sniff and redirect the loopback that it shares with the guest, and what
// gVisor has no use for (SYS_MODULE, SYS_BOOT, SYS_TIME, SYS_RAWIO, BPF, …).
var UserCaps = map[string]uint{
	"CAP_AUDIT_WRITE":      unix.CAP_AUDIT_WRITE,
	"CAP_CHOWN":            unix.CAP_CHOWN,
	"CAP_DAC_OVERRIDE":     unix.CAP_DAC_OVERRIDE,
	"CAP_DAC_READ_SEARCH":  unix.CAP_DAC_READ_SEARCH,
	"CAP_FOWNER":           unix.CAP_FOWNER,
	"CAP_FSETID":           unix.CAP_FSETID,
	"CAP_IPC_LOCK":         unix.CAP_IPC_LOCK,
	"CAP_IPC_OWNER":        unix.CAP_IPC_OWNER,
	"CAP_KILL":             unix.CAP_KILL,
	"CAP_MKNOD":            unix.CAP_MKNOD,
	"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"CAP_SETFCAP":          unix.CAP_SETFCAP,
	"CAP_SETGID":           unix.CAP_SETGID,
	"CAP_SETPCAP":          unix.CAP_SETPCAP,
	"CAP_SETUID":           unix.CAP_SETUID,
	"CAP_SYS_ADMIN":        unix.CAP_SYS_ADMIN,
	"CAP_SYS_CHROOT":       unix.CAP_SYS_CHROOT,
	"CAP_SYS_NICE":         unix.CAP_SYS_NICE,
	"CAP_SYS_PTRACE":       unix.CAP_SYS_PTRACE,
	"CAP_SYS_RESOURCE":     unix.CAP_SYS_RESOURCE,
}
