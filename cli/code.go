package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

func (a *app) codeCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "code", Short: "Run code in kernels that keep their variables"}
	cmd.AddCommand(a.codeSetupCmd(), a.codeRunCmd(), a.codeContextsCmd(), a.codeContextCmd(), a.codeRestartCmd(), a.codeRmCmd())
	return cmd
}

// codeJSON is a promise: see docs/cli-json.md.
type codeJSON struct {
	Stdout         string            `json:"stdout"`
	Stderr         string            `json:"stderr"`
	Results        []json.RawMessage `json:"results"`
	Error          *codeErrorJSON    `json:"error,omitempty"`
	ExecutionCount int64             `json:"execution_count,omitempty"`
	Truncated      bool              `json:"truncated,omitempty"`
}

type codeErrorJSON struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

func (a *app) codeRunCmd() *cobra.Command {
	var code, language, context string
	var env keyValues
	var timeout duration
	var asJSON bool
	env.bare = func(k string) (string, bool) { v := a.Getenv(k); return v, v != "" }
	cmd := &cobra.Command{
		Use:   "run ID [FILE]",
		Short: "Run code in a kernel of a sandbox, which keeps its variables",
		Long: `Run code in a kernel of a sandbox and print what it prints, and its result. The
code is that of -c, of a file, or of stdin. Ends with 1 if it raised an error,
whose traceback goes to stderr. Ctrl-C interrupts it; its variables stay.

The sandbox needs a code interpreter: "cove code setup" makes the template
code-interpreter-v1, of which it is created.`,
		Example: `  id=$(cove create --template code-interpreter-v1)
  cove code run $id -c 'import math; x = math.pi'
  cove code run $id -c 'x * 2'
  cove code run $id --language js -c '[1, 2, 3].map(n => n * n)'`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case cmd.Flags().Changed("code") && len(args) == 2:
				return usagef("leave out one of them", "-c and a file are both code")
			case !cmd.Flags().Changed("code"):
				read := io.Reader(a.Stdin)
				if len(args) == 2 && args[1] != "-" {
					f, err := os.Open(args[1])
					if err != nil {
						return usagef("", "%v", err)
					}
					defer f.Close()
					read = f
				}
				data, err := io.ReadAll(io.LimitReader(read, 16<<20))
				if err != nil {
					return err
				}
				code = string(data)
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			out := codeOutput{app: a, asJSON: asJSON}
			req := wire.CodeRequest{Code: code, Context: context, Language: language, Env: env.m, Timeout: time.Duration(timeout).Seconds()}
			if err := a.api.RunCode(cmd.Context(), id, req, out.take); err != nil {
				return err
			}
			return out.end()
		},
	}
	fs := cmd.Flags()
	fs.StringVarP(&code, "code", "c", "", "the code")
	fs.StringVar(&language, "language", "", "python, javascript, typescript or bash (default python)")
	fs.StringVar(&context, "context", "", "id of a context, instead of the language's own")
	fs.VarP(&env, "env", "e", "variable for this run; KEY alone takes the local value (repeatable)")
	fs.Var(&timeout, "timeout", "interrupt it after this long (default: never)")
	fs.BoolVar(&asJSON, "json", false, "print output, results and error as JSON when it has ended")
	return cmd
}

// codeOutput prints what comes of an execution.
type codeOutput struct {
	*app
	asJSON bool
	held   int
	json   codeJSON
}

func (o *codeOutput) take(ev wire.CodeEvent) error {
	if o.held += len(ev.Raw); o.asJSON && o.held > maxCaptured && ev.Type != "error" {
		o.json.Truncated = true
		return nil
	}
	switch ev.Type {
	case "stdout":
		return o.print(o.Stdout, &o.json.Stdout, ev.Text)
	case "stderr":
		return o.print(o.Stderr, &o.json.Stderr, ev.Text)
	case "result":
		o.json.Results = append(o.json.Results, ev.Raw)
		if !o.asJSON {
			o.json.Results = nil
			text := ev.Text
			if text == "" {
				text = "(a result without text: --json shows it)"
			}
			return o.print(o.Stdout, nil, text+"\n")
		}
	case "number_of_executions":
		o.json.ExecutionCount = ev.ExecutionCount
	case "error":
		o.json.Error = &codeErrorJSON{ev.Name, ev.Value, ev.Traceback}
	}
	return nil
}

func (o *codeOutput) print(to io.Writer, held *string, text string) error {
	if o.asJSON {
		*held += text
		return nil
	}
	_, err := io.WriteString(to, text)
	return err
}

func (o *codeOutput) end() error {
	if o.asJSON {
		if o.json.Results == nil {
			o.json.Results = []json.RawMessage{}
		}
		if err := o.printJSON(o.json); err != nil {
			return err
		}
	}
	e := o.json.Error
	switch {
	case e == nil:
		return nil
	case !o.asJSON && e.Traceback != "":
		fmt.Fprintln(o.Stderr, strings.TrimRight(e.Traceback, "\n"))
	case !o.asJSON:
		fmt.Fprintf(o.Stderr, "%s: %s\n", e.Name, e.Value)
	}
	return &ExitError{Code: exitFailed}
}

func (a *app) codeContextsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "contexts ID", Short: "List the contexts of a sandbox", Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			list, err := a.api.CodeContexts(cmd.Context(), id)
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(list)
			}
			t := &table{}
			t.row("CONTEXT", "LANGUAGE", "CWD")
			for _, c := range list {
				t.row(escape(c.ID), escape(c.Language), escape(c.Cwd))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) codeContextCmd() *cobra.Command {
	var language, cwd string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "context ID", Short: "Start a kernel of its own and print the context's id", Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			c, err := a.api.CreateCodeContext(cmd.Context(), id, language, cwd)
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(c)
			}
			_, err = fmt.Fprintln(a.Stdout, escape(c.ID))
			return err
		},
	}
	cmd.Flags().StringVar(&language, "language", "", "python, javascript, typescript or bash (default python)")
	cmd.Flags().StringVarP(&cwd, "cwd", "w", "", "working directory (default: the user's home)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the context as JSON")
	return cmd
}

func (a *app) codeRestartCmd() *cobra.Command {
	return a.ofContext("restart", "Give a context a new kernel; its variables are gone and what ran in it ends",
		func(cmd *cobra.Command, id, context string) error {
			return a.api.RestartCodeContext(cmd.Context(), id, context)
		})
}

func (a *app) codeRmCmd() *cobra.Command {
	return a.ofContext("rm", "End a context", func(cmd *cobra.Command, id, context string) error {
		return a.api.RemoveCodeContext(cmd.Context(), id, context)
	})
}

func (a *app) ofContext(use, short string, do func(cmd *cobra.Command, id, context string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " ID CONTEXT", Short: short, Args: cobra.ExactArgs(2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return sandbox.WithOp("code."+use, do(cmd, id, args[1]))
		},
	}
}
