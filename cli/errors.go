package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/cove-sandbox/cove/sandbox"
)

// Exit codes. ExitCove is docker's: the tool failed, not the command it ran.
const (
	exitFailed  = 1
	exitUsage   = 2
	exitTimeout = 124 // the command's own --timeout passed, as timeout(1) says it
	exitCove    = 125
	exitNotExec = 126 // the command is there and cannot be run, as shells say it
	exitMissing = 127 // there is no such command
)

// usageError is a wrong command line.
type usageError struct {
	msg, hint string
}

func (e *usageError) Error() string { return e.msg }

// usage wraps a complaint about the command line with how it is meant, which a
// value may know better than its command.
func usage(cmd *cobra.Command, err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) && e.Hint != "" {
		return &usageError{msg: err.Error(), hint: e.Hint}
	}
	return &usageError{msg: err.Error(), hint: fmt.Sprintf("usage: %s (see '%s --help')", cmd.UseLine(), cmd.CommandPath())}
}

func usagef(hint, format string, args ...any) error {
	return &usageError{msg: fmt.Sprintf(format, args...), hint: hint}
}

// report prints err and turns it into the exit code.
func (a *app) report(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var exit *ExitError
	if errors.As(err, &exit) && exit.Err == nil {
		return exit.Code
	}
	var many failures
	if errors.As(err, &many) {
		for _, f := range many {
			a.complain(f.name+": ", f.err)
		}
	} else {
		a.complain("", err)
	}
	var wrong *usageError
	switch {
	case exit != nil:
		return exit.Code
	case cmd != nil && cmd.Annotations[ownCode] != "":
		return exitOfStart(err)
	case errors.As(err, &wrong):
		return exitUsage
	case sandbox.ClassOf(err) == sandbox.Canceled || errors.Is(err, context.Canceled):
		return 128 + int(syscall.SIGINT)
	}
	return exitFailed
}

// exitOfStart is the code of a command that Cove did not bring to run: a shell's
// where it is the command's own fault, else docker's.
func exitOfStart(err error) int {
	var e *sandbox.Error
	if errors.As(err, &e) {
		switch e.Reason {
		case sandbox.CommandNotFound:
			return exitMissing
		case sandbox.NotExecutable:
			return exitNotExec
		}
	}
	return exitCove
}

// complain prints one error and its hint.
func (a *app) complain(about string, err error) {
	msg, hint := a.explain(err)
	fmt.Fprintln(a.Stderr, "cove: "+escape(about+msg))
	if hint == "" {
		return
	}
	// A failed build's hint holds what code inside printed, in lines.
	for i, line := range strings.Split(hint, "\n") {
		if i == 0 {
			line = "hint: " + line
		}
		fmt.Fprintln(a.Stderr, escape(line))
	}
}

// explain says what went wrong and what to do about it.
func (a *app) explain(err error) (msg, hint string) {
	var wrong *usageError
	if errors.As(err, &wrong) {
		return wrong.msg, wrong.hint
	}
	var e *sandbox.Error
	if !errors.As(err, &e) {
		text := strings.TrimSpace(err.Error())
		return text, ""
	}
	switch {
	case e.Class == sandbox.Unavailable && a.api != nil && a.nobodyListens():
		return "no Cove server at " + a.api.URL(), "start one with 'make start' or 'cove serve', or set COVE_URL"
	case e.Class == sandbox.Unavailable && a.api != nil && a.wantsTLS():
		return "the server at " + a.api.URL() + " speaks TLS", "COVE_URL begins with https:// then; COVE_CA names the authority to trust, if the server made its own"
	case e.Class == sandbox.Unauthenticated && !strings.HasPrefix(e.Op, "image."): // which is what a registry said
		c, _ := a.config()
		hint = "set COVE_KEY, or run as a user who can read " + c.keyPath + "; 'cove key create' makes more keys"
		if c.withheld != "" {
			return "no API key for " + c.url + ": COVE_KEY is not set, and " + c.withheld, "set COVE_KEY"
		}
		if c.key == "" {
			return "no API key: COVE_KEY is not set and " + c.keyPath + " cannot be read", hint
		}
		return "the server at " + c.url + " does not know this API key (from " + c.keyFrom + ")", hint
	case e.Class == sandbox.Canceled:
		return "interrupted", ""
	}
	hint = e.Hint
	if hint == "" && e.RetryAfter > 0 {
		hint = "try again in " + formatDuration(e.RetryAfter.Round(time.Second))
	}
	if e.Op != "" && e.Class != sandbox.Internal {
		// The operation is what the user typed; only a defect needs it named.
		c := *e
		c.Op = ""
		return c.Error(), hint
	}
	return e.Error(), hint
}

// address is where the server's URL leads.
func (a *app) address() string {
	u, err := url.Parse(a.api.URL())
	if err != nil {
		return ""
	}
	if u.Port() == "" {
		return net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	}
	return u.Host
}

// probeWithin bounds what is asked to explain an error.
const probeWithin = 5 * time.Second

// nobodyListens asks once more, at the level below: the API's error says only
// that the call could not be made, not why.
func (a *app) nobodyListens() bool {
	c, err := net.DialTimeout("tcp", a.address(), probeWithin)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// wantsTLS is whether a server that was asked without TLS speaks it. HTTP/2
// finds no words for what such a server answers.
func (a *app) wantsTLS() bool {
	if !strings.HasPrefix(a.api.URL(), "http://") {
		return false
	}
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: probeWithin}, "tcp", a.address(), nil)
	if err == nil {
		c.Close()
	}
	var distrust *tls.CertificateVerificationError
	return err == nil || errors.As(err, &distrust)
}

// warnf tells the user something on stderr that is not an error.
func (a *app) warnf(format string, args ...any) {
	fmt.Fprintln(a.Stderr, "cove: "+escape(fmt.Sprintf(format, args...)))
}
