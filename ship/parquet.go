package ship

import (
	"bytes"
	"encoding/json"
	"io"
	"time"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/zstd"

	"github.com/cove-sandbox/cove/sandbox"
)

// row is a record as Parquet has it: flat, so that one column can be read alone.
type row struct {
	Schema    int32     `parquet:"schema"`
	Kind      string    `parquet:"kind,dict"`
	ID        string    `parquet:"id"`
	Tenant    string    `parquet:"tenant,dict"`
	Run       string    `parquet:"run,dict"`
	Group     string    `parquet:"group,dict"`
	Episode   string    `parquet:"episode,dict"`
	Sandbox   string    `parquet:"sandbox,dict"`
	Reset     int64     `parquet:"reset"`
	StartedAt time.Time `parquet:"started_at,optional,timestamp(microsecond)"`
	EndedAt   time.Time `parquet:"ended_at,optional,timestamp(microsecond)"`
	Cause     string    `parquet:"cause,dict"`
	ExitCode  *int32    `parquet:"exit_code,optional"`
	Signal    string    `parquet:"signal,dict"`
	Detail    string    `parquet:"detail"`
	DurationS float64   `parquet:"duration_s"`
	CPUTimeS  float64   `parquet:"cpu_time_s"`

	Seq           int64    `parquet:"seq"`
	ExecID        string   `parquet:"exec_id"`
	Args          []string `parquet:"args,list"`
	Command       string   `parquet:"command"`
	Cwd           string   `parquet:"cwd,dict"`
	User          string   `parquet:"user,dict"`
	PeakMemory    int64    `parquet:"peak_memory"`
	BytesIn       int64    `parquet:"bytes_in"`
	BytesOut      int64    `parquet:"bytes_out"`
	EgressDenied  int64    `parquet:"egress_denied"`
	ReplayMissed  int64    `parquet:"replay_missed"`
	EgressSent    int64    `parquet:"egress_sent"`
	EgressRecv    int64    `parquet:"egress_received"`
	Files         string   `parquet:"files_json"`
	Egress        string   `parquet:"egress_json"`
	StdoutHead    []byte   `parquet:"stdout_head"`
	StdoutDropped int64    `parquet:"stdout_dropped"`
	StdoutTail    []byte   `parquet:"stdout_tail"`
	StderrHead    []byte   `parquet:"stderr_head"`
	StderrDropped int64    `parquet:"stderr_dropped"`
	StderrTail    []byte   `parquet:"stderr_tail"`

	Grade    string             `parquet:"grade"`
	State    string             `parquet:"state,dict"`
	Reward   *float64           `parquet:"reward,optional"`
	Rewards  map[string]float64 `parquet:"rewards"`
	Reason   string             `parquet:"reason"`
	Digest   string             `parquet:"digest"`
	Tests    string             `parquet:"tests_json"`
	Findings string             `parquet:"findings_json"`
	Log      string             `parquet:"log"`
}

func rowOf(r Record) (out row, err error) {
	out = row{Schema: int32(r.Schema), Kind: r.Kind, ID: r.ID, Tenant: r.Tenant, Run: r.Run, Group: r.Group, Episode: r.Episode, Sandbox: r.Sandbox, Reset: r.Reset,
		StartedAt: r.StartedAt, EndedAt: r.EndedAt, Cause: r.Cause, Signal: r.Signal, Detail: r.Detail, DurationS: r.DurationS, CPUTimeS: r.CPUTimeS,
		Seq: r.Seq, ExecID: r.ExecID, Args: r.Args, Command: r.Command, Cwd: r.Cwd, User: r.User, PeakMemory: r.PeakMemory, BytesIn: r.BytesIn, BytesOut: r.BytesOut,
		EgressDenied: r.EgressDenied, ReplayMissed: r.ReplayMissed, EgressSent: r.EgressSent, EgressRecv: r.EgressRecv, Grade: r.Grade, State: r.State, Reward: r.Reward, Rewards: r.Rewards, Reason: r.Reason, Digest: r.Digest, Log: r.Log}
	if r.ExitCode != nil {
		code := int32(*r.ExitCode)
		out.ExitCode = &code
	}
	if o := r.Stdout; o != nil {
		out.StdoutHead, out.StdoutDropped, out.StdoutTail = o.Head, o.Dropped, o.Tail
	}
	if o := r.Stderr; o != nil {
		out.StderrHead, out.StderrDropped, out.StderrTail = o.Head, o.Dropped, o.Tail
	}
	for _, c := range []struct {
		there bool
		from  any
		to    *string
	}{{len(r.Tests) > 0, r.Tests, &out.Tests}, {len(r.Findings) > 0, r.Findings, &out.Findings}, {r.Files != nil, r.Files, &out.Files}, {r.Egress != nil, r.Egress, &out.Egress}} {
		if !c.there {
			continue
		}
		b, err := json.Marshal(c.from)
		if err != nil {
			return out, err
		}
		*c.to = string(b)
	}
	return out, nil
}

// A row group is held in memory until it is whole.
const (
	groupRows  = 20_000
	groupBytes = 32 << 20
)

// ParquetWriter writes records as one file, a row group at a time.
type ParquetWriter struct {
	w     *parquet.GenericWriter[row]
	rows  []row
	bytes int
	held  int
}

// NewParquetWriter writes to w; Close writes the rest, and does not close w.
func NewParquetWriter(w io.Writer) *ParquetWriter {
	return &ParquetWriter{w: parquet.NewGenericWriter[row](w, parquet.Compression(&zstd.Codec{}), parquet.CreatedBy("cove", "", ""),
		parquet.KeyValueMetadata("cove.schema", "1"))}
}

// Write adds a record.
func (p *ParquetWriter) Write(r Record) error {
	one, err := rowOf(r)
	if err != nil {
		return err
	}
	p.rows = append(p.rows, one)
	p.bytes += len(one.StdoutHead) + len(one.StdoutTail) + len(one.StderrHead) + len(one.StderrTail) + len(one.Log) + len(one.Tests) + len(one.Files) + len(one.Egress) + len(one.Command) + 256
	p.held++
	if len(p.rows) >= 256 {
		if err := p.pass(); err != nil {
			return err
		}
	}
	if p.held < groupRows && p.bytes < groupBytes {
		return nil
	}
	if err := p.pass(); err != nil {
		return err
	}
	p.held, p.bytes = 0, 0
	return p.w.Flush()
}

func (p *ParquetWriter) pass() error {
	_, err := p.w.Write(p.rows)
	clear(p.rows)
	p.rows = p.rows[:0]
	return err
}

// Close ends the file.
func (p *ParquetWriter) Close() error {
	if err := p.pass(); err != nil {
		return err
	}
	return p.w.Close()
}

func encodeParquet(records []Record) ([]byte, error) {
	var out bytes.Buffer
	w := NewParquetWriter(&out)
	for _, r := range records {
		if err := w.Write(r); err != nil {
			return nil, &sandbox.Error{Class: sandbox.Internal, Op: "ship.encode", Msg: "record " + r.ID, Err: err}
		}
	}
	if err := w.Close(); err != nil {
		return nil, &sandbox.Error{Class: sandbox.Internal, Op: "ship.encode", Err: err}
	}
	return out.Bytes(), nil
}
