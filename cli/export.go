package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) runsExportCmd() *cobra.Command {
	var asJSON bool
	var format, dir string
	cmd := &cobra.Command{
		Use: "export RUN", Short: "Write all records of a run as JSON lines, Parquet or ATIF trajectories, and print the files",
		Long: `Writes what is on record of a run: steps, ends of episodes and verdicts. jsonl and
parquet are one file, records.jsonl or records.parquet; atif is a file for each episode.
Files appear when they are whole. See docs/trajectories.md.`,
		Example: `  cove runs export grpo-7 --format parquet -o out
  cove runs export grpo-7 --format atif -o trajectories
  cove runs export grpo-7 -o - | jq .reward`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "jsonl" && format != "parquet" && format != "atif" {
				return sandbox.InvalidField("format", "%q is not accepted; jsonl, parquet and atif are", format)
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			body, err := api.ExportRun(cmd.Context(), args[0], format, "", false)
			if err != nil {
				return err
			}
			defer body.Close()
			if dir == "-" {
				if _, tty := terminal(a.Stdout); tty && format == "parquet" {
					return &sandbox.Error{Class: sandbox.Invalid, Msg: "Parquet is not for a terminal", Hint: "-o DIR writes a file"}
				}
				return export(a.Stdout, format, body)
			}
			if err := os.MkdirAll(dir, 0o777); err != nil {
				return err
			}
			var files []string
			if format == "atif" {
				files, err = exportTrajectories(dir, body)
			} else {
				name := filepath.Join(dir, "records."+format)
				files, err = []string{name}, appear(name, func(w io.Writer) error { return export(w, format, body) })
			}
			if err != nil {
				return err
			}
			return a.printIDs(files, asJSON)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&format, "format", "jsonl", "jsonl, parquet or atif")
	fs.StringVarP(&dir, "output", "o", ".", "directory to write to, which is made; - = standard output")
	fs.BoolVar(&asJSON, "json", false, "print a JSON array of the files")
	return cmd
}

// export copies a body. Lines are looked at: a stream that the server ended with an
// error says so in its last one.
func export(w io.Writer, format string, body io.Reader) error {
	if format != "jsonl" {
		_, err := io.Copy(w, body)
		return err
	}
	out := bufio.NewWriterSize(w, 64<<10)
	err := eachRecord(body, func(line []byte, _ recordLine) error {
		_, err := out.Write(line)
		return err
	})
	return errors.Join(err, out.Flush())
}

// exportTrajectories writes a file for each line.
func exportTrajectories(dir string, body io.Reader) (files []string, err error) {
	in := json.NewDecoder(body)
	for {
		var doc json.RawMessage
		if err := in.Decode(&doc); errors.Is(err, io.EOF) {
			return files, nil
		} else if err != nil {
			return files, err
		}
		var head struct {
			ID string `json:"trajectory_id"`
		}
		if err := json.Unmarshal(doc, &head); err != nil {
			return files, err
		}
		if head.ID == "" || head.ID != filepath.Base(head.ID) || head.ID[0] == '.' {
			return files, fmt.Errorf("the server sent a trajectory with the id %.80q", head.ID)
		}
		name := filepath.Join(dir, head.ID+".json")
		if err := appear(name, func(w io.Writer) error { _, err := w.Write(append(doc, '\n')); return err }); err != nil {
			return files, err
		}
		files = append(files, name)
	}
}

// appear writes a file that is there when it is whole, or not at all.
func appear(name string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
