package grade

import (
	"archive/tar"
	"io"
	"path"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
)

// Names in sandbox.GradeDir.
const (
	JudgeFile   = "judge.py"
	JudgedFile  = "judged"
	RewardFile  = "reward"
	ResultsFile = "results"
)

// JudgeHome is a judge's HOME, where the work puts nothing that programs read by
// themselves.
const JudgeHome = sandbox.GradeDir + "/home"

// SealedTests is where tests are that nobody but the judge may read.
const SealedTests = sandbox.GradeDir + "/tests"

// judgedScript runs a program as the judged user, without a way back.
const judgedScript = `#!/bin/sh
# $COVE_JUDGED PROGRAM [ARGUMENT]... runs what is graded as a user of its own.
unset COVE_REWARD COVE_RESULTS COVE_JUDGED
if [ "$HOME" = ` + JudgeHome + ` ]; then
	HOME=/tmp
	unset PYTHONNOUSERSITE
fi
if command -v setpriv >/dev/null 2>&1; then
	exec setpriv --reuid=64002 --regid=64002 --clear-groups --no-new-privs -- "$@"
fi
exec python3 -I -S -c 'import os, sys
os.setgroups([]); os.setresgid(64002, 64002, 64002); os.setresuid(64002, 64002, 64002)
os.execvp(sys.argv[1], sys.argv[1:])' "$@"
`

// Furniture writes a tar of what a judge apart has: a directory that is root's
// alone, with the way to run the work, and the tests' name.
func Furniture(w io.Writer, spec sandbox.GradeSpec) error {
	tw := tar.NewWriter(w)
	for _, dir := range []string{sandbox.GradeDir, JudgeHome} {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: 0o700}); err != nil {
			return err
		}
	}
	if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(sandbox.GradeDir[1:], JudgedFile), Mode: 0o700, Size: int64(len(judgedScript))}); err != nil {
		return err
	}
	if _, err := io.WriteString(tw, judgedScript); err != nil {
		return err
	}
	if spec.Tests != "" {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: spec.TestsPath[1:], Linkname: SealedTests}); err != nil {
			return err
		}
	}
	return tw.Close()
}

// Leaves are the carried names that are no directories, sorted.
func (s *Scanned) Leaves() (names []string) {
	for p, leaf := range s.carried {
		if leaf {
			names = append(names, p)
		}
	}
	slices.Sort(names)
	return names
}
