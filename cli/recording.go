package cli

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// recordingFlags are what is recorded or replayed.
type recordingFlags struct {
	record string
	replay sandbox.NetworkReplay
}

func (f *recordingFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.record, "record", "", "record all its HTTP and HTTPS under this name")
	fs.StringVar(&f.replay.Recording, "replay", "", "answer its HTTP and HTTPS out of this recording, with the network off: name or id")
	fs.BoolVar(&f.replay.RepeatLast, "replay-repeat-last", false, "equal requests beyond those recorded get the last answer instead of a miss")
	fs.StringSliceVar(&f.replay.IgnoreQuery, "replay-ignore-query", nil, "parameter that may differ, or '*' (repeatable)")
	fs.BoolVar(&f.replay.IgnoreBody, "replay-ignore-body", false, "bodies of requests may differ")
	fs.StringSliceVar(&f.replay.MatchHeaders, "replay-match-header", nil, "header that must be equal too (repeatable)")
}

// into adds what was asked for.
func (f *recordingFlags) into(n *sandbox.Network) {
	if f.record != "" {
		n.Record = &sandbox.NetworkRecord{Name: f.record}
	}
	if r := f.replay; r.Recording != "" {
		n.Replay = &r
	}
}

func (a *app) recordingCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "recording", Aliases: []string{"recordings"}, Short: "Manage recordings: HTTP of sandboxes, to be replayed",
		Long: `Recordings hold all HTTP and HTTPS that a sandbox spoke with the outside, so that
the same episode can be run again with the network off.`,
		Example: `  cove run --network public --record ep1 -- python3 agent.py
  cove run --replay ep1 -- python3 agent.py`}
	cmd.AddCommand(a.recordingLsCmd(), a.recordingShowCmd(), a.recordingExportCmd(), a.recordingImportCmd(), a.recordingRmCmd())
	return cmd
}

func (a *app) recordingNames(limit int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		var out []string
		if limit > 0 && len(args) >= limit {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if api, err := a.client(); err == nil {
			if resp, err := api.Recordings.List(cmd.Context(), connect.NewRequest(&covev1.ListRecordingsRequest{})); err == nil {
				for _, r := range resp.Msg.GetRecordings() {
					if ref := recordingRef(r); strings.HasPrefix(ref, prefix) {
						out = append(out, ref+"\t"+strconv.FormatInt(r.GetExchanges(), 10)+" exchanges")
					}
				}
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// recordingRef is what a recording is called.
func recordingRef(r *covev1.Recording) string {
	if r.GetName() != "" {
		return r.GetName()
	}
	return r.GetId()
}

func (a *app) recordingLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List recordings, newest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Recordings.List(cmd.Context(), connect.NewRequest(&covev1.ListRecordingsRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetRecordings(), toRecordingJSON))
			}
			t := &table{}
			t.row("ID", "NAME", "STATE", "EXCHANGES", "SIZE", "SANDBOX", "AGE")
			for _, r := range resp.Msg.GetRecordings() {
				t.row(r.GetId(), r.GetName(), r.GetState(), strconv.FormatInt(r.GetExchanges(), 10), formatSize(r.GetBytes()), r.GetSandbox(), age(timeOf(r.GetCreatedAt())))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) recordingShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show NAME", Aliases: []string{"get", "inspect"}, Short: "List the requests of a recording and what came of them", Args: cobra.ExactArgs(1), ValidArgsFunction: a.recordingNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			const page = 1000
			out := struct {
				recordingJSON
				Exchanges []exchangeJSON `json:"requests"`
			}{Exchanges: []exchangeJSON{}}
			for after := int64(0); ; {
				resp, err := api.Recordings.Get(cmd.Context(), connect.NewRequest(&covev1.GetRecordingRequest{Name: args[0], Exchanges: page, After: after}))
				if err != nil {
					return err
				}
				out.recordingJSON = toRecordingJSON(resp.Msg.GetRecording())
				list := resp.Msg.GetExchanges()
				out.Exchanges = append(out.Exchanges, each(list, toExchangeJSON)...)
				if len(list) < page {
					break
				}
				after = list[len(list)-1].GetNumber()
			}
			if asJSON {
				return a.printJSON(out)
			}
			fmt.Fprintf(a.Stdout, "%s  %s, %s\n", escape(out.ref()), out.State, formatSize(out.Bytes))
			if out.Truncated > 0 || out.Dropped > 0 {
				fmt.Fprintf(a.Stdout, "%d cannot be replayed, %d are missing\n", out.Truncated, out.Dropped)
			}
			t := &table{}
			t.row("NO", "METHOD", "STATUS", "SENT", "RECEIVED", "TOOK", "URL")
			for _, e := range out.Exchanges {
				status := strconv.Itoa(e.Status)
				switch {
				case e.Failed != "":
					status = "failed"
				case e.Truncated:
					status += " (not whole)"
				}
				t.row(strconv.FormatInt(e.Number, 10), e.Method, status, formatSize(e.Sent), formatSize(e.Received), time.Duration(e.TookS*float64(time.Second)).Round(time.Millisecond).String(), e.URL)
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the recording as JSON")
	return cmd
}

func (a *app) recordingExportCmd() *cobra.Command {
	var har bool
	var file string
	cmd := &cobra.Command{
		Use: "export NAME", Short: "Write a recording to stdout, or a file", Args: cobra.ExactArgs(1), ValidArgsFunction: a.recordingNames(1),
		Long: `Write a recording to stdout, or a file: as the archive that import takes, or with
--har as HAR 1.2, which the tools of browsers show.`,
		Example: "  cove recording export ep1 -o ep1.tape\n  cove recording export ep1 --har > ep1.har",
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if _, tty := terminal(a.Stdout); tty && file == "" && !har {
				return usagef("cove recording export "+args[0]+" -o FILE", "an archive is not for a terminal")
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			body, err := api.ExportRecording(cmd.Context(), args[0], har)
			if err != nil {
				return err
			}
			defer body.Close()
			out := a.Stdout
			if file != "" {
				f, err := os.Create(file)
				if err != nil {
					return err
				}
				defer func() {
					if cerr := f.Close(); err == nil {
						err = cerr
					}
					if err != nil {
						_ = os.Remove(file) // half an archive is none
					}
				}()
				out = f
			}
			if _, err = io.Copy(out, (&copier{app: a}).progress(args[0], -1, body)); err != nil {
				return fmt.Errorf("the archive broke off: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&har, "har", false, "as HAR 1.2, which cannot be imported again")
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write")
	return cmd
}

func (a *app) recordingImportCmd() *cobra.Command {
	var asJSON bool
	var name string
	cmd := &cobra.Command{
		Use: "import FILE|-", Short: "Make a recording of an exported archive and print its id", Args: cobra.ExactArgs(1),
		Example: "  cove recording import ep1.recording --name ep1",
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			r, n := io.Reader(a.Stdin), int64(-1)
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				fi, err := f.Stat()
				if err != nil {
					return err
				}
				r, n = f, fi.Size()
			}
			rec, err := api.ImportRecording(cmd.Context(), name, (&copier{app: a}).progress(args[0], n, r), n)
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toRecordingJSON(rec))
			}
			_, err = fmt.Fprintln(a.Stdout, rec.GetId())
			return err
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "call it so")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the recording as JSON")
	return cmd
}

func (a *app) recordingRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Remove recordings", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.recordingNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(n string) error {
				_, err := api.Recordings.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteRecordingRequest{Name: n}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

type recordingJSON struct {
	ID         string    `json:"id"`
	Name       string    `json:"name,omitempty"`
	Sandbox    string    `json:"sandbox,omitempty"`
	Node       string    `json:"node,omitempty"`
	State      string    `json:"state"`
	CreatedAt  time.Time `json:"created_at"`
	FinishedAt time.Time `json:"finished_at,omitzero"`
	Exchanges  int64     `json:"exchanges"`
	Bytes      int64     `json:"bytes"`
	Truncated  int64     `json:"truncated,omitempty"`
	Dropped    int64     `json:"dropped,omitempty"`
}

func (r recordingJSON) ref() string {
	if r.Name != "" {
		return r.Name
	}
	return r.ID
}

func toRecordingJSON(r *covev1.Recording) recordingJSON {
	return recordingJSON{ID: r.GetId(), Name: r.GetName(), Sandbox: r.GetSandbox(), Node: r.GetNode(), State: r.GetState(), CreatedAt: timeOf(r.GetCreatedAt()),
		FinishedAt: timeOf(r.GetFinishedAt()), Exchanges: r.GetExchanges(), Bytes: r.GetBytes(), Truncated: r.GetTruncated(), Dropped: r.GetDropped()}
}

type exchangeJSON struct {
	Number    int64     `json:"number"`
	At        time.Time `json:"at"`
	TookS     float64   `json:"took_s"`
	Method    string    `json:"method"`
	URL       string    `json:"url"`
	Status    int       `json:"status,omitempty"`
	Failed    string    `json:"failed,omitempty"`
	Sent      int64     `json:"sent"`
	Received  int64     `json:"received"`
	Truncated bool      `json:"truncated,omitempty"`
}

func toExchangeJSON(e *covev1.RecordedExchange) exchangeJSON {
	return exchangeJSON{Number: e.GetNumber(), At: timeOf(e.GetAt()), TookS: e.GetTook().AsDuration().Seconds(), Method: e.GetMethod(), URL: e.GetUrl(),
		Status: int(e.GetStatus()), Failed: e.GetFailed(), Sent: e.GetSent(), Received: e.GetReceived(), Truncated: e.GetTruncated()}
}

// replayJSON is how far a replay is.
type replayJSON struct {
	Recording string     `json:"recording"`
	Answered  int64      `json:"answered"`
	Missed    int64      `json:"missed"`
	Unused    int64      `json:"unused"`
	Misses    []missJSON `json:"misses,omitempty"`
}

type missJSON struct {
	At     time.Time `json:"at"`
	Method string    `json:"method"`
	URL    string    `json:"url"`
	Reason string    `json:"reason"`
	Hint   string    `json:"hint,omitempty"`
}

func toReplayJSON(r *covev1.ReplayStatus) *replayJSON {
	if r == nil {
		return nil
	}
	return &replayJSON{Recording: r.GetRecording(), Answered: r.GetAnswered(), Missed: r.GetMissed(), Unused: r.GetUnused(),
		Misses: each(r.GetMisses(), func(m *covev1.ReplayMiss) missJSON {
			return missJSON{At: timeOf(m.GetAt()), Method: m.GetMethod(), URL: m.GetUrl(), Reason: m.GetReason(), Hint: m.GetHint()}
		})}
}
