package main

import (
	"io"
	"os"
	"runtime"

	"github.com/pkg/sftp"
)

// runSFTP serves files to the SSH server's client. It is an ordinary process of
// the sandbox: who runs it says what it may.
func runSFTP() error {
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
