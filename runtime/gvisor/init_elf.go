package gvisor

import (
	"bytes"
	"encoding/binary"
	goruntime "runtime"
)

// initELF is process 1 of the user's container: a static program of 49 bytes
// of code that has orphans reaped by the kernel, since it ignores SIGCHLD, blocks
// every signal, so that a stray SIGTERM is not the end, and then sleeps for
// ever. A Go init instead costs 1.5 MiB a sandbox and starts
// its runtime exactly while the first exec of a new sandbox wants the CPU; to ignore
// the signals one by one is 64 calls into the sentry where this has 2, a fifth of all
// that a create and an exec of "true" make.
//
// It returns nil where it was not written (and tried) for the architecture;
// then "cove-guest init" does the same.
func initELF() []byte {
	if goruntime.GOARCH != "amd64" {
		return nil
	}
	code := []byte{
		0xb8, 13, 0, 0, 0, // mov eax, rt_sigaction
		0xbf, 17, 0, 0, 0, // mov edi, SIGCHLD
		0x48, 0x8d, 0x35, 32, 0, 0, 0, // lea rsi, [rip+32]: the action below
		0x31, 0xd2, // xor edx, edx
		0x41, 0xba, 8, 0, 0, 0, // mov r10d, sizeof(sigset)
		0x0f, 0x05, // syscall
		0xb8, 14, 0, 0, 0, // mov eax, rt_sigprocmask
		0x31, 0xff, // xor edi, edi: SIG_BLOCK
		0x48, 0x83, 0xc6, 24, // add rsi, 24: the mask of the action
		0x0f, 0x05, // syscall
		0xb8, 34, 0, 0, 0, // sleep: mov eax, pause
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp sleep
	}
	action := make([]byte, 32) // handler SIG_IGN, no flags or restorer, all signals in its mask
	action[0] = 1
	binary.LittleEndian.PutUint64(action[24:], ^uint64(0))

	const base, headers = 0x400000, 64 + 56
	size := uint64(headers + len(code) + len(action))
	var b bytes.Buffer
	b.Write([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	for _, v := range []any{
		uint16(2), uint16(62), uint32(1), // executable, x86-64, version
		uint64(base + headers), uint64(64), uint64(0), // entry, program headers, no sections
		uint32(0), uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0),
		uint32(1), uint32(5), uint64(0), // PT_LOAD, R+X, from offset 0
		uint64(base), uint64(base), size, size, uint64(0x1000),
	} {
		_ = binary.Write(&b, binary.LittleEndian, v) // a Buffer takes any fixed-size value
	}
	b.Write(code)
	b.Write(action)
	return b.Bytes()
}
