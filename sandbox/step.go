package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"time"
)

// Step is one exec in a sandbox of a run.
type Step struct {
	ID  string `json:"id"`  // RUN-SEQ
	Seq int64  `json:"seq"` // in the order of their starts: 1, 2, …
	Rollout
	Sandbox string   `json:"sandbox"`
	Reset   int64    `json:"reset"` // the sandbox's episode number
	ExecID  string   `json:"exec_id"`
	Args    []string `json:"args,omitempty"`
	Command string   `json:"command,omitempty"`
	Cwd     string   `json:"cwd,omitempty"`
	User    string   `json:"user,omitempty"`

	StartedAt  time.Time     `json:"started_at"`
	EndedAt    time.Time     `json:"ended_at,omitzero"`
	End        *End          `json:"end,omitempty"` // nil while it runs
	Duration   time.Duration `json:"duration,omitempty"`
	CPUTime    time.Duration `json:"cpu_time,omitempty"`
	PeakMemory int64         `json:"peak_memory,omitempty"`
	BytesIn    int64         `json:"bytes_in,omitempty"`
	BytesOut   int64         `json:"bytes_out,omitempty"`
	Stdout     StepOutput    `json:"stdout,omitzero"`
	Stderr     StepOutput    `json:"stderr,omitzero"`

	EgressDenied   int64       `json:"egress_denied,omitempty"`
	EgressSent     int64       `json:"egress_sent,omitempty"` // bytes
	EgressReceived int64       `json:"egress_received,omitempty"`
	ReplayMissed   int64       `json:"replay_missed,omitempty"`
	Files          *StepFiles  `json:"files,omitempty"`
	Egress         *StepEgress `json:"egress,omitempty"`

	// What a replay needs besides. Env has names; the values, what was written to the
	// process, and a command line that is too long for a list are in Sealed and Late, which
	// only the server can open.
	Env     []string      `json:"env,omitempty"`
	Timeout time.Duration `json:"timeout,omitempty"`
	PTY     *TermSize     `json:"pty,omitempty"`
	Stdin   bool          `json:"stdin,omitempty"`
	Sealed  []byte        `json:"sealed,omitempty"`
	Late    []byte        `json:"late,omitempty"` // what was written to it while it ran
	NotKept []string      `json:"not_kept,omitempty"`
}

// StepFiles is what changed in the file system while a step ran.
type StepFiles struct {
	Added     int64    `json:"added,omitempty"`
	Modified  int64    `json:"modified,omitempty"`
	Deleted   int64    `json:"deleted,omitempty"`
	Bytes     int64    `json:"bytes,omitempty"`
	Changes   []Change `json:"changes,omitempty"` // the first StepPaths
	Truncated bool     `json:"truncated,omitempty"`
}

// StepEgress is what left a sandbox while a step ran.
type StepEgress struct {
	Requests int64    `json:"requests,omitempty"`
	Denied   int64    `json:"denied,omitempty"`
	Sent     int64    `json:"sent,omitempty"`
	Received int64    `json:"received,omitempty"`
	Hosts    []string `json:"hosts,omitempty"` // the first StepPaths
}

// StepPaths is how many paths, and hosts, a step lists.
const StepPaths = 20

// StepDetail is what a step can say besides.
type StepDetail string

const (
	StepFilesDetail  StepDetail = "files"
	StepEgressDetail StepDetail = "egress"
)

// StepInput is what of a step is sealed.
type StepInput struct {
	Args    []string          `json:"args,omitempty"`
	Command string            `json:"command,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Input   []byte            `json:"input,omitempty"`
	Closed  bool              `json:"closed,omitempty"` // of Late: its input was closed in the end
}

// MaxStepInput is the most of it that is kept.
const MaxStepInput = 1 * MiB

// StepOutput is what is kept of a stream: head, then Dropped bytes, then tail.
type StepOutput struct {
	Head    []byte `json:"head,omitempty"`
	Dropped int64  `json:"dropped,omitempty"`
	Tail    []byte `json:"tail,omitempty"`
	Digest  string `json:"digest,omitempty"` // SHA-256 of all of it in hex; "" where some of it was lost
}

// What a step keeps of each stream. Of a hundred commands of coding agents 99
// print less than 11 KB (research/rl-frameworks.md).
const (
	StepEnds      = 8 * KiB // of its head, and of its tail
	MaxStepOutput = 1 * MiB // of KeepWhole
	maxStepText   = 4 * KiB // of a command line
)

// StepCommand is what a step keeps of a command line, which may have megabytes.
func StepCommand(p ProcessSpec) (args []string, command string) {
	command = p.Command[:min(len(p.Command), int(maxStepText))]
	left := int(maxStepText)
	for _, a := range p.Args {
		if left <= 0 {
			break
		}
		a = a[:min(len(a), left)]
		left -= len(a) + 1
		args = append(args, a)
	}
	return args, command
}

// StepCapture keeps of a stream what a rule says. The zero value keeps nothing.
type StepCapture struct {
	head, tail       []byte
	mostHead, atTail int // atTail: where the next byte goes, once the tail is full
	mostTail         int
	total            int64
	sum              hash.Hash // of all; nil = some was lost
}

// NewStepCapture makes one that keeps what a rule says.
func NewStepCapture(rule OutputRule) StepCapture {
	c := StepCapture{sum: sha256.New()}
	switch rule {
	case KeepNone:
	case KeepWhole:
		c.mostHead = int(MaxStepOutput)
	default:
		c.mostHead, c.mostTail = int(StepEnds), int(StepEnds)
	}
	return c
}

// Lose says that bytes passed that nobody saw.
func (c *StepCapture) Lose() { c.sum = nil }

// Add takes the next bytes.
func (c *StepCapture) Add(b []byte) {
	c.total += int64(len(b))
	if c.sum != nil {
		c.sum.Write(b)
	}
	if n := min(len(b), c.mostHead-len(c.head)); n > 0 {
		c.head = append(c.head, b[:n]...)
		b = b[n:]
	}
	if c.mostTail == 0 || len(b) == 0 {
		return
	}
	b = b[max(0, len(b)-c.mostTail):]
	if n := min(len(b), c.mostTail-len(c.tail)); n > 0 {
		c.tail = append(c.tail, b[:n]...)
		b = b[n:]
	}
	for len(b) > 0 {
		n := copy(c.tail[c.atTail:], b)
		b = b[n:]
		c.atTail = (c.atTail + n) % c.mostTail
	}
}

// Output is what was kept.
func (c *StepCapture) Output() StepOutput {
	out := StepOutput{Head: c.head, Tail: append(append([]byte(nil), c.tail[c.atTail:]...), c.tail[:c.atTail]...)}
	if len(out.Tail) == 0 {
		out.Tail = nil
	}
	out.Dropped = c.total - int64(len(out.Head)+len(out.Tail))
	if c.sum != nil && c.total > 0 {
		out.Digest = hex.EncodeToString(c.sum.Sum(nil))
	}
	return out
}
