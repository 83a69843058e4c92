package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cove-sandbox/cove/sandbox"
)

// applyFile gives flags that are not on the command line what a TOML file says.
// Every flag of the command has a key of its name and there are no others, so
// that a new flag is a new key by itself and nothing is checked twice.
func applyFile(cmd *cobra.Command, file string) error {
	values := map[string]any{}
	_, err := toml.DecodeFile(file, &values)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return err
	}
	if err != nil {
		return usagef("lines are: flag = value, with strings and durations in quotes", "%s: %v", file, err)
	}
	var known []string
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if isOption(f) {
			known = append(known, f.Name)
		}
	})
	keys := make([]string, 0, len(values))
	for key := range values {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		if !slices.Contains(known, key) {
			hint := sandbox.DidYouMean(key, known)
			if hint == "" {
				hint = "the keys are the flags of '" + cmd.CommandPath() + "'"
			}
			return usagef(hint, "%s: there is no option %q", file, key)
		}
		if cmd.Flags().Changed(key) {
			continue // the command line comes first
		}
		text, err := optionText(values[key])
		if err == nil {
			err = cmd.Flags().Set(key, text)
		}
		if err != nil {
			return usagef("see '"+cmd.CommandPath()+" --help'", "%s: %s: %v", file, key, err)
		}
	}
	return nil
}

// isOption says that a flag may stand in the file: it does not say where that is.
func isOption(f *pflag.Flag) bool {
	return f.Name != "config" && f.Name != "save-config" && f.Name != "help"
}

// saveFile writes the flags of the command line into a file that applyFile reads.
// What else is in it stays, comments too. Flags that do not parse never come here,
// and the whole is read back before it takes the old one's place.
func saveFile(cmd *cobra.Command, file string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	lines := strings.Split(strings.TrimSuffix(string(old), "\n"), "\n")
	if len(old) == 0 {
		lines = nil
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Changed || !isOption(f) || f.Name == "data" { // the file is in it
			return
		}
		text := f.Value.String()
		if s, ok := f.Value.(pflag.SliceValue); ok {
			text = strings.Join(s.GetSlice(), ",")
		}
		line := fmt.Sprintf("%s = %q", f.Name, text)
		at := slices.IndexFunc(lines, func(l string) bool {
			key, _, _ := strings.Cut(l, "=")
			return strings.TrimSpace(key) == f.Name
		})
		if at >= 0 {
			lines[at] = line
		} else {
			lines = append(lines, line)
		}
	})
	content := strings.Join(lines, "\n") + "\n"
	if _, err := toml.Decode(content, &map[string]any{}); err != nil {
		return usagef("mend or remove it", "%s is no TOML: %v", file, err)
	}
	if err := os.WriteFile(file+".new", []byte(content), 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// optionText is a value as a flag takes it.
func optionText(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case bool, int64, float64:
		return fmt.Sprint(v), nil
	case time.Time:
		return "", errors.New("a date is no option's value")
	}
	return "", errors.New("a list or table is no option's value")
}

// defaultConfig is DATA/cove.toml where it is there.
func defaultConfig(data string) string {
	file := data + "/cove.toml"
	if _, err := os.Stat(file); err != nil {
		return ""
	}
	return file
}
