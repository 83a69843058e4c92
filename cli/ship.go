package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type shipmentJSON struct {
	ID          string             `json:"id"`
	Name        string             `json:"name"`
	Run         string             `json:"run,omitempty"`
	State       string             `json:"state"`
	Sink        sinkJSON           `json:"sink"`
	MaxLag      int64              `json:"max_lag"`
	LingerS     float64            `json:"linger_s"`
	Lag         int64              `json:"lag"`
	Records     int64              `json:"records"`
	CreatedAt   time.Time          `json:"created_at"`
	DeliveredAt time.Time          `json:"delivered_at,omitzero"`
	FailedAt    time.Time          `json:"failed_at,omitzero"`
	Error       *errorJSON         `json:"error,omitempty"`
	Positions   []shipPositionJSON `json:"positions,omitempty"`
}

type sinkJSON struct {
	Kind      string `json:"kind"`
	Format    string `json:"format"`
	URL       string `json:"url,omitempty"`
	Path      string `json:"path,omitempty"`
	Secret    string `json:"secret,omitempty"`
	AccessKey string `json:"access_key,omitempty"`
	Region    string `json:"region,omitempty"`
}

type shipPositionJSON struct {
	Run     string `json:"run"`
	Cursor  string `json:"cursor"`
	Records int64  `json:"records"`
}

func toShipmentJSON(s *covev1.Shipment) shipmentJSON {
	k := s.GetSink()
	j := shipmentJSON{ID: s.GetId(), Name: s.GetName(), Run: s.GetRun(), State: s.GetState(), MaxLag: s.GetMaxLag(), LingerS: s.GetLinger().AsDuration().Seconds(), Lag: s.GetLag(),
		Records: s.GetRecords(), CreatedAt: timeOf(s.GetCreatedAt()), DeliveredAt: timeOf(s.GetDeliveredAt()), FailedAt: timeOf(s.GetFailedAt()),
		Sink: sinkJSON{Kind: k.GetKind(), Format: k.GetFormat(), URL: k.GetUrl(), Path: k.GetPath(), Secret: k.GetSecret(), AccessKey: k.GetAccessKey(), Region: k.GetRegion()},
		Positions: each(s.GetPositions(), func(p *covev1.ShipmentPosition) shipPositionJSON {
			return shipPositionJSON{Run: p.GetRun(), Cursor: p.GetCursor(), Records: p.GetRecords()}
		})}
	if e := s.GetError(); e != nil {
		j.Error = &errorJSON{Code: e.GetCode(), Message: s.GetErrorMessage(), Hint: e.GetHint()}
	}
	return j
}

// to is where a shipment goes, in a word or two.
func (k sinkJSON) to() string {
	switch k.Kind {
	case "http":
		return k.URL
	case "s3":
		return "s3://" + k.Path + " at " + k.URL
	case "directory":
		return k.Path + "/"
	}
	return k.Kind
}

func (a *app) shipCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "ship", Short: "Carry steps, ends of episodes and verdicts of runs out of the platform",
		Long: `A shipment carries the records of a run, or of all runs, out of the platform: to an
HTTP endpoint, to a directory or a bucket, or to a consumer that reads them. Each
record arrives at least once and has an id; while a shipment is too far behind, no new
step of its runs begins. See docs/trajectories.md.`,
		Example: `  cove ship create feed --pull
  cove ship tail feed --follow --ack > records.jsonl
  cove ship create lake --run grpo-7 --http https://records.example.com/take --secret records
  cove ship create objects --bucket my-bucket/rl --endpoint https://s3.eu-central-1.amazonaws.com --access-key AKIA... --secret s3key --format parquet
  cove ship show lake`,
	}
	cmd.AddCommand(a.shipCreateCmd(), a.shipLsCmd(), a.shipShowCmd(), a.shipStateCmd("pause", "Stop deliveries; what waits waits on"),
		a.shipStateCmd("resume", "Go on with deliveries"), a.shipRmCmd(), a.shipTailCmd())
	return cmd
}

func (a *app) shipCreateCmd() *cobra.Command {
	var asJSON, pull bool
	var web, dir, bucket, endpoint string
	var lag size
	var linger duration
	req := &covev1.CreateShipmentRequest{Sink: &covev1.ShipmentSink{}}
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a shipment, which begins with all that is on record", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			k := req.Sink
			kinds := 0
			for kind, given := range map[string]bool{"pull": pull, "http": web != "", "directory": dir != "", "s3": bucket != ""} {
				if given {
					k.Kind = kind
					kinds++
				}
			}
			if kinds != 1 {
				return &sandbox.Error{Class: sandbox.Invalid, Msg: "say where the records go: one of --pull, --http URL, --dir PATH and --bucket BUCKET/PREFIX"}
			}
			if k.Url, k.Path = web+endpoint, dir+bucket; endpoint != "" && bucket == "" {
				return sandbox.InvalidField("endpoint", "--endpoint is of --bucket")
			}
			req.Name, req.MaxLag = args[0], int64(lag)
			if linger != 0 {
				req.Linger = durationpb.New(time.Duration(linger))
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Shipments.Create(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toShipmentJSON(resp.Msg.GetShipment()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetShipment().GetId())
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&req.Run, "run", "", "only of this run, by name or id (default: of all runs, those to come too)")
	fs.BoolVar(&pull, "pull", false, "a consumer reads and acknowledges them: cove ship tail")
	fs.StringVar(&web, "http", "", "POST lines of JSON to this URL")
	fs.StringVar(&dir, "dir", "", "files on the server's disk, below its --ship-dir; operators only")
	fs.StringVar(&bucket, "bucket", "", "objects of an S3 bucket: BUCKET or BUCKET/PREFIX")
	fs.StringVar(&endpoint, "endpoint", "", "of the bucket, like https://s3.eu-central-1.amazonaws.com")
	fs.StringVar(&req.Sink.AccessKey, "access-key", "", "id of the access key of the bucket")
	fs.StringVar(&req.Sink.Region, "region", "", "of the bucket")
	fs.StringVar(&req.Sink.Secret, "secret", "", "secret that opens it, by name: a header of --http, the secret key of --bucket")
	fs.StringVar(&req.Sink.Format, "format", "", "jsonl, or parquet for --dir and --bucket (default jsonl)")
	fs.Var(&lag, "max-lag", "how much may wait before steps are held back (default 1GiB)")
	fs.Var(&linger, "linger", "how long a record may wait for others to go with (default 1s; 1m for parquet and s3)")
	fs.BoolVar(&asJSON, "json", false, "print the shipment as JSON")
	return cmd
}

func (a *app) shipLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List shipments, newest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Shipments.List(cmd.Context(), connect.NewRequest(&covev1.ListShipmentsRequest{}))
			if err != nil {
				return err
			}
			list := each(resp.Msg.GetShipments(), toShipmentJSON)
			if asJSON {
				return a.printJSON(list)
			}
			t := &table{}
			t.row("NAME", "STATE", "RUN", "TO", "RECORDS", "WAITS", "AGE")
			for _, s := range list {
				run := s.Run
				if run == "" {
					run = "all"
				}
				t.row(cut(s.Name, 40), s.State, run, cut(s.Sink.to(), 60), fmt.Sprint(s.Records), formatSize(s.Lag), age(s.CreatedAt))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) shipShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show NAME", Aliases: []string{"get"}, Short: "Show how far a shipment is, and what it waits for", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Shipments.Get(cmd.Context(), connect.NewRequest(&covev1.GetShipmentRequest{Shipment: args[0]}))
			if err != nil {
				return err
			}
			s := toShipmentJSON(resp.Msg.GetShipment())
			if asJSON {
				return a.printJSON(s)
			}
			t := &table{}
			t.row("name", s.Name)
			t.row("id", s.ID)
			t.row("state", s.State)
			t.row("to", s.Sink.to()+" ("+s.Sink.Format+")")
			t.row("records", fmt.Sprint(s.Records))
			t.row("waits", formatSize(s.Lag)+" of at most "+formatSize(s.MaxLag))
			if !s.DeliveredAt.IsZero() {
				t.row("delivered", age(s.DeliveredAt)+" ago")
			}
			if s.Error != nil {
				t.row("failed", age(s.FailedAt)+" ago: "+s.Error.Message)
				if s.Error.Hint != "" {
					t.row("hint", s.Error.Hint)
				}
			}
			for _, p := range s.Positions {
				t.row("run "+p.Run, fmt.Sprintf("%d records, up to %s", p.Records, p.Cursor))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the shipment as JSON")
	return cmd
}

func (a *app) shipStateCmd(verb, short string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: verb + " NAME", Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var s *covev1.Shipment
			if verb == "pause" {
				resp, perr := api.Shipments.Pause(cmd.Context(), connect.NewRequest(&covev1.PauseShipmentRequest{Shipment: args[0]}))
				if err = perr; err == nil {
					s = resp.Msg.GetShipment()
				}
			} else {
				resp, rerr := api.Shipments.Resume(cmd.Context(), connect.NewRequest(&covev1.ResumeShipmentRequest{Shipment: args[0]}))
				if err = rerr; err == nil {
					s = resp.Msg.GetShipment()
				}
			}
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toShipmentJSON(s))
			}
			_, err = fmt.Fprintln(a.Stdout, s.GetState())
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the shipment as JSON")
	return cmd
}

func (a *app) shipRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"delete"}, Short: "Remove shipments; what was delivered stays where it is", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(name string) error {
				resp, err := api.Shipments.Get(cmd.Context(), connect.NewRequest(&covev1.GetShipmentRequest{Shipment: name})) // a typo is an error
				if err == nil {
					_, err = api.Shipments.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteShipmentRequest{Shipment: resp.Msg.GetShipment().GetId()}))
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

func (a *app) shipTailCmd() *cobra.Command {
	var follow, ack bool
	var from, run string
	cmd := &cobra.Command{
		Use: "tail [NAME]", Short: "Print the records of a shipment that is pulled, or of a run, a line of JSON each",
		Long: `Prints the records of a shipment of kind pull that were not acknowledged, or with
--run those of a run. Each line has a cursor; --from goes on after one. With --ack what
was printed is acknowledged, and not printed by the next.`,
		Example: `  cove ship tail feed --follow --ack > records.jsonl
  cove ship tail --run grpo-7 --from "$(tail -1 records.jsonl | jq -r .cursor)"`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case (len(args) == 0) == (run == ""):
				return &sandbox.Error{Class: sandbox.Invalid, Msg: "say whose records: the name of a shipment, or --run RUN"}
			case ack && run != "":
				return sandbox.InvalidField("ack", "a run keeps no place for its readers; --ack is of a shipment")
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			var body io.ReadCloser
			if run != "" {
				body, err = api.ExportRun(cmd.Context(), run, "", from, follow)
			} else {
				body, err = api.ReadShipment(cmd.Context(), args[0], from, follow)
			}
			if err != nil {
				return err
			}
			defer body.Close()
			acks := map[string]string{}
			flush := func(ctx context.Context) error {
				for of, cursor := range acks {
					if _, err := api.Shipments.Ack(ctx, connect.NewRequest(&covev1.AckShipmentRequest{Shipment: args[0], Cursor: cursor})); err != nil {
						return err
					}
					delete(acks, of)
				}
				return nil
			}
			n := 0
			err = eachRecord(body, func(line []byte, r recordLine) error {
				if r.Cursor == "" {
					return flush(cmd.Context())
				}
				if _, err := a.Stdout.Write(line); err != nil {
					return err
				}
				if from = r.Cursor; !ack {
					return nil
				}
				acks[r.Run] = r.Cursor
				if n++; n%ackEvery == 0 {
					return flush(cmd.Context())
				}
				return nil
			})
			// What was printed is acknowledged after Ctrl-C too.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), 5*time.Second)
			defer cancel()
			if ferr := flush(ctx); err == nil {
				err = ferr
			}
			return err
		},
	}
	fs := cmd.Flags()
	fs.BoolVarP(&follow, "follow", "f", false, "go on with each record that comes")
	fs.StringVar(&from, "from", "", "only what comes after this cursor, of its run")
	fs.StringVar(&run, "run", "", "of this run, without a shipment")
	fs.BoolVar(&ack, "ack", false, "acknowledge what was printed")
	return cmd
}

// ackEvery is after how many records they are acknowledged; a quiet stream does it too.
const ackEvery = 100

// recordLine is what a reader needs of a record, or of the error that ends a stream.
type recordLine struct {
	Run     string `json:"run"`
	Cursor  string `json:"cursor"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

// eachRecord calls f with the lines of a stream; one without a cursor says that the
// server is there.
func eachRecord(r io.Reader, f func(line []byte, rec recordLine) error) error {
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			if len(line) > 0 {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
		if err != nil {
			return err
		}
		var rec recordLine
		if len(bytes.TrimSpace(line)) > 0 {
			if err := json.Unmarshal(line, &rec); err != nil {
				return fmt.Errorf("the stream has no record where one should be: %w", err)
			}
			if rec.Cursor == "" && rec.Code != "" {
				return fmt.Errorf("the server ended the stream: %s", rec.Message)
			}
		}
		if err := f(line, rec); err != nil {
			return err
		}
	}
}
