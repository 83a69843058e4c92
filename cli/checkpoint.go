package cli

import (
	"fmt"
	"io"
	"os"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type checkpointJSON struct {
	Version   int64     `json:"version"`
	Size      int64     `json:"size"`
	CreatedAt time.Time `json:"created_at,omitzero"`
	Doc       string    `json:"doc,omitempty"`
	DocBase64 []byte    `json:"doc_base64,omitempty"`
}

func toCheckpointJSON(c *covev1.Checkpoint) checkpointJSON {
	j := checkpointJSON{Version: c.GetVersion(), Size: c.GetSize(), CreatedAt: timeOf(c.GetCreatedAt())}
	if utf8.Valid(c.GetDoc()) {
		j.Doc = string(c.GetDoc())
	} else {
		j.DocBase64 = c.GetDoc()
	}
	return j
}

func (a *app) runsCheckpointCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "checkpoint", Short: "Small versioned documents of a run, such as a trainer's state",
		Example: `  echo '{"step": 12}' | cove runs checkpoint put grpo-7 - --if-version 11
  cove runs checkpoint get grpo-7
  cove runs checkpoint ls grpo-7`}
	cmd.AddCommand(a.checkpointGetCmd(), a.checkpointPutCmd(), a.checkpointLsCmd())
	return cmd
}

func (a *app) checkpointGetCmd() *cobra.Command {
	var version int64
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get RUN", Short: "Print the latest document as it is, or one of the versions before",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Runs.GetCheckpoint(cmd.Context(), connect.NewRequest(&covev1.GetCheckpointRequest{Run: args[0], Version: version}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toCheckpointJSON(resp.Msg.GetCheckpoint()))
			}
			_, err = a.Stdout.Write(resp.Msg.GetCheckpoint().GetDoc())
			return err
		},
	}
	cmd.Flags().Int64Var(&version, "version", 0, "this one (default: the latest)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it with its version as JSON")
	return cmd
}

func (a *app) checkpointPutCmd() *cobra.Command {
	var ifVersion int64
	var asJSON bool
	cmd := &cobra.Command{
		Use: "put RUN FILE", Short: "Make a file the next version, and print which that is; - reads stdin",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			doc, err := a.readBounded(args[1], sandbox.MaxCheckpoint)
			if err != nil {
				return err
			}
			req := &covev1.PutCheckpointRequest{Run: args[0], Doc: doc}
			if cmd.Flags().Changed("if-version") {
				req.IfVersion = &ifVersion
			}
			resp, err := api.Runs.PutCheckpoint(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toCheckpointJSON(resp.Msg.GetCheckpoint()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetCheckpoint().GetVersion())
			return err
		},
	}
	cmd.Flags().Int64Var(&ifVersion, "if-version", 0, "only if this is the latest; 0: only if there is none")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print its version as JSON")
	return cmd
}

func (a *app) checkpointLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls RUN", Aliases: []string{"list"}, Short: "List the versions that are kept, newest first",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Runs.ListCheckpoints(cmd.Context(), connect.NewRequest(&covev1.ListCheckpointsRequest{Run: args[0]}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetCheckpoints(), toCheckpointJSON))
			}
			t := &table{}
			t.row("VERSION", "SIZE", "AGE")
			for _, c := range resp.Msg.GetCheckpoints() {
				t.row(fmt.Sprint(c.GetVersion()), sandbox.FormatSize(c.GetSize()), age(timeOf(c.GetCreatedAt())))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

// readBounded is a file, or stdin for -, of at most so many bytes.
func (a *app) readBounded(path string, most int64) ([]byte, error) {
	in := io.Reader(a.Stdin)
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, most+1))
	if err == nil && int64(len(b)) > most {
		err = usagef("", "%s has more than %s", path, sandbox.FormatSize(most))
	}
	return b, err
}
