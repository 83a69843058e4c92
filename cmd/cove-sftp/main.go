// Command cove-sftp serves files to the client of the SSH server, on stdin and
// stdout. It is an ordinary process of a sandbox: who runs it says what it may.
// It is no part of the guest, which stays small and holds no parser of more than
// its own protocol.
package main

import (
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/pkg/sftp"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	runtime.GOMAXPROCS(2)
	dir := os.Getenv("HOME") // where sshd puts a user
	if st, err := os.Stat(dir); dir == "" || err != nil || !st.IsDir() {
		dir = "/"
	}
	s, err := sftp.NewServer(stdio{}, sftp.WithServerWorkingDirectory(dir))
	if err != nil {
		return err
	}
	if err := s.Serve(); err != nil && err != io.EOF {
		return err
	}
	return nil
}

type stdio struct{}

func (stdio) Read(p []byte) (int, error)  { return os.Stdin.Read(p) }
func (stdio) Write(p []byte) (int, error) { return os.Stdout.Write(p) }
func (stdio) Close() error                { return os.Stdin.Close() }
