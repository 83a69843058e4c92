package cli

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

type diffJSON struct {
	Since     string       `json:"since"`
	Changes   []changeJSON `json:"changes"`
	Added     int64        `json:"added"`
	Modified  int64        `json:"modified"`
	Deleted   int64        `json:"deleted"`
	Bytes     int64        `json:"bytes"`
	Omitted   bool         `json:"omitted,omitempty"`
	Truncated bool         `json:"truncated,omitempty"`
	TookS     float64      `json:"took_s"`
}

type changeJSON struct {
	Path   string         `json:"path"`
	Kind   string         `json:"kind"`
	What   []string       `json:"what,omitempty"`
	Before *fileStateJSON `json:"before,omitempty"`
	Now    *fileStateJSON `json:"now,omitempty"`
}

type fileStateJSON struct {
	Type   string `json:"type"`
	Size   int64  `json:"size"`
	Mode   string `json:"mode"` // octal, as chmod takes it
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	Target string `json:"target,omitempty"`
	Hash   string `json:"hash,omitempty"`
}

func toChangeJSON(c *covev1.FileChanged) changeJSON {
	state := func(s *covev1.FileState) *fileStateJSON {
		if s == nil {
			return nil
		}
		return &fileStateJSON{Type: s.GetType(), Size: s.GetSize(), Mode: fmt.Sprintf("%04o", s.GetMode()), UID: s.GetUid(), GID: s.GetGid(), Target: s.GetTarget(), Hash: s.GetHash()}
	}
	return changeJSON{Path: c.GetPath(), Kind: c.GetKind(), What: c.GetWhat(), Before: state(c.GetBefore()), Now: state(c.GetNow())}
}

func toDiffJSON(d *covev1.DiffResponse) diffJSON {
	return diffJSON{Since: d.GetSince(), Changes: each(d.GetChanges(), toChangeJSON), Added: d.GetAdded(), Modified: d.GetModified(), Deleted: d.GetDeleted(), Bytes: d.GetBytes(),
		Omitted: d.GetOmitted(), Truncated: d.GetTruncated(), TookS: d.GetTook().AsDuration().Seconds()}
}

func (a *app) diffCmd() *cobra.Command {
	var asJSON bool
	var req covev1.DiffRequest
	cmd := &cobra.Command{
		Use:   "diff ID",
		Short: "Show what changed in the files of a sandbox",
		Long: `Show what changed in the files of a sandbox since it was created, reset or
restored, since its image, or since a filesystem snapshot of it. Volumes, times and
extended attributes are not compared.`,
		Example: `  cove diff $id
  cove diff $id --since before-the-edit --hash --json`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			req.Id = id
			resp, err := api.Sandboxes.Diff(cmd.Context(), connect.NewRequest(&req))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toDiffJSON(resp.Msg))
			}
			return a.printDiff(resp.Msg)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&req.Since, "since", "create", "create, reset (the same), image, or a filesystem snapshot by name or id")
	_ = cmd.RegisterFlagCompletionFunc("since", a.snapshotNames(0))
	fs.BoolVar(&req.Hash, "hash", false, "SHA-256 of files")
	fs.Int32Var(&req.Limit, "limit", 0, "changes that are listed (default 1000)")
	fs.BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func (a *app) printDiff(d *covev1.DiffResponse) error {
	letter := map[string]string{"added": "A", "modified": "M", "deleted": "D"}
	for _, c := range d.GetChanges() {
		note := ""
		switch {
		case c.GetKind() == "modified":
			note = strings.Join(c.GetWhat(), ", ")
			if note == "content" || strings.HasPrefix(note, "content,") {
				note += fmt.Sprintf(" (%s to %s)", formatSize(c.GetBefore().GetSize()), formatSize(c.GetNow().GetSize()))
			}
		case c.GetNow().GetType() == "file":
			note = formatSize(c.GetNow().GetSize())
		case c.GetNow().GetType() == "symlink":
			note = "-> " + escape(c.GetNow().GetTarget())
		case c.GetNow() != nil:
			note = c.GetNow().GetType()
		}
		if _, err := fmt.Fprintf(a.Stdout, "%s %s%s\n", letter[c.GetKind()], escape(c.GetPath()), prefixed("  ", note)); err != nil {
			return err
		}
	}
	more := ""
	if d.GetOmitted() {
		more = fmt.Sprintf("; the first %d are listed", len(d.GetChanges()))
	}
	if d.GetTruncated() {
		more += "; not all was looked at"
	}
	_, err := fmt.Fprintf(a.Stderr, "%d added, %d modified, %d deleted, %s since %s%s\n", d.GetAdded(), d.GetModified(), d.GetDeleted(), formatSize(d.GetBytes()), d.GetSince(), more)
	return err
}

func prefixed(with, s string) string {
	if s == "" {
		return ""
	}
	return with + s
}
