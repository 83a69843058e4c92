package server

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cove-sandbox/cove/grade"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

const (
	// setupTimeout bounds what comes before the command: files are taken, a grader
	// is made, for which there may be no room yet, and they are put there.
	setupTimeout = 10 * time.Minute
	// graderMark is the template a grader carries, so that one whose server died is
	// known: see isBuild.
	graderMark = "grade" + buildMark
	// judgedUser is who the work runs as: nobody of any image.
	judgedUser = "64002:64002"
	judgedUID  = 64002
	rootUser   = "0:0"
	// tarBuffer is between a tar and a pipe of ours, which would change goroutines for
	// each header of 512 bytes.
	tarBuffer = 64 << 10
	// removedAtOnce names go with the first artifacts: a sandbox may have removed a million.
	removedAtOnce = 256
)

// gradeWidth is how many are set up at once: freezing, a kernel and unpacking are
// work for a core; two for each, to fill the waits.
var gradeWidth = max(4, 2*runtime.NumCPU())

// grading is one grade under way.
type grading struct {
	*Server
	grade  sandbox.Grade
	cancel context.CancelCauseFunc
	turn   func() // ends its turn to take cores, of setups
	sb     sandbox.Sandbox
	img    sandbox.Image // that it is graded on
	tests  *sandbox.Snapshot

	releases []func() // of what it is made of

	recorded   chan struct{} // closed when the record of its beginning is there, or will not be
	unrecorded bool          // set before recorded is closed
	done       chan struct{} // closed when its verdict is on record

	verdict sandbox.Verdict
	phases  phases
}

// look finds what a grade is made of and refuses what cannot be graded, while the
// caller is there to be told.
func (g *grading) look(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			g.release()
		}
	}()
	spec := g.grade.Spec
	if g.sb, err = g.live(ctx, spec.Sandbox); err != nil {
		return err
	}
	if strings.HasSuffix(g.sb.Spec.Template, buildMark) {
		return &sandbox.Error{Class: sandbox.Precondition, Field: "sandbox", Msg: "it is a grader, or a template is being built in it"}
	}
	if spec.Tests != "" {
		snap, release, err := g.useSnapshot(ctx, spec.Tests)
		if err != nil {
			return sandbox.WithField("tests", err)
		}
		g.releases = append(g.releases, release)
		if snap.Kind != sandbox.DirectorySnapshot {
			return sandbox.InvalidField("tests", "'%s' is of kind %s; one of kind directory is accepted", nameOf(snap), snap.Kind).
				WithHint("PUT /v1/grades/tests makes one of a tar; \"cove grade --tests DIR\" does")
		}
		g.tests = &snap
	}
	var release func()
	switch {
	case spec.Image != "":
		g.img, release, err = g.images.acquire(ctx, spec.Image)
	case spec.Snapshot != "":
		snap, done, serr := g.useSnapshot(ctx, spec.Snapshot)
		if serr != nil {
			return serr
		}
		g.releases = append(g.releases, done)
		if snap.Kind != sandbox.FilesystemSnapshot {
			return sandbox.InvalidField("snapshot", "'%s' is of kind %s; one of kind filesystem is accepted", nameOf(snap), snap.Kind)
		}
		var o origin
		o, err = g.originOf(ctx, "snapshot", snap)
		g.img, release = o.img, o.release
	default:
		g.img, release, err = g.images.acquire(asServer(ctx), g.sb.ImageID) // the sandbox is the caller's, and so what it needs
	}
	if err != nil {
		return err
	}
	g.releases = append(g.releases, release)
	if spec.Image == "" && spec.Snapshot == "" && g.img.Source == sandbox.ImageDerived {
		return &sandbox.Error{Class: sandbox.Precondition, Field: "image",
			Msg:  "the sandbox started from a snapshot, and nobody but you knows whether the agent was in it by then",
			Hint: "say what to trust: image, or snapshot with the snapshot it started from"}
	}
	return nil
}

func (g *grading) release() {
	for _, r := range slices.Backward(g.releases) {
		r()
	}
	g.releases = nil
}

// run grades and records the verdict. What it made is gone when it returns.
func (g *grading) run(ctx context.Context) {
	defer g.release()
	defer g.grades.leave(g.grade.ID)
	state := sandbox.GradeInfra
	var err error
	var after []func()
	g.phases.reached("begun")
	release, err := g.holdOff(ctx, g.sb, setupTimeout+g.grade.Spec.Timeout+time.Minute)
	if err == nil {
		state, after, err = g.judge(ctx)
	}
	v := &g.verdict
	if err != nil {
		if cause := context.Cause(ctx); ctx.Err() != nil && cause != nil {
			state, err = sandbox.GradeInfra, cause
			if cause == error(errGradeCanceled) {
				state = sandbox.GradeCanceled
			}
		}
		e := *sandbox.AsError(err)
		if e.Op == "" {
			e.Op = "grade"
		}
		e.Msg, e.Err = sandbox.Plain(&sandbox.Error{Msg: e.Msg, Err: e.Err, Class: e.Class}), nil
		v.Error, v.Reason, v.Reward, v.Rewards = &e, e.Msg, nil, nil
	}
	g.phases.reached("judged")
	<-g.recorded
	if !g.unrecorded {
		now := g.cfg.Clock().UTC()
		g.untilDone("verdict of "+g.grade.ID, func(ctx context.Context) error {
			done, err := g.store.UpdateGrade(ctx, g.grade.ID, func(r *sandbox.Grade) error {
				r.State, r.Verdict, r.FinishedAt, r.Unlogged = state, *v, now, r.Run != ""
				return nil
			})
			if errors.Is(err, sandbox.ErrNotFound) {
				return nil // its tenant is gone
			}
			if err != nil {
				return err
			}
			return g.logGrade(ctx, done)
		})
		g.phases.reached("verdict_recorded")
		g.log.Info("graded", "grade", g.grade.ID, "sandbox", g.sb.ID, "state", state, "reason", v.Reason, "setup", v.Setup, g.phases.group())
	}
	if g.grade.Spec.Stop && state != sandbox.GradeInfra && state != sandbox.GradeCanceled {
		_, err := g.endWith(context.WithoutCancel(ctx), g.sb.ID, sandbox.End{Cause: sandbox.KilledByUser, Detail: "graded", At: g.cfg.Clock().UTC()})
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			g.log.Warn("a sandbox that was to end with its grade did not", "sandbox", g.sb.ID, "err", err)
		}
	}
	close(g.done)
	if release != nil {
		release()
	}
	for _, f := range after {
		f()
	}
}

// judge takes the files, has them judged, and says what of it is to be undone.
func (g *grading) judge(ctx context.Context) (state sandbox.GradeState, after []func(), err error) {
	began := time.Now()
	setup, cancel := context.WithTimeoutCause(ctx, setupTimeout, &sandbox.Error{Class: sandbox.DeadlineReached, Op: "grade", Msg: "no grader was ready after " + setupTimeout.String()})
	defer cancel()
	q, err := g.quotas.of(ctx, g.sb.Tenant)
	if err != nil {
		return sandbox.GradeInfra, nil, err
	}
	if g.turn, err = g.setups.enter(setup, g.sb.Tenant, q.Weight); err != nil {
		return sandbox.GradeInfra, nil, cmpErr(err, setup)
	}
	defer func() { g.turn() }()
	g.phases.reached("turn")
	var box sandbox.Sandbox
	var content sandbox.Content
	var scan *grade.Scanned
	var grp errgroup.Group
	letGo := func() {}
	defer func() { letGo() }() // once the grader has them
	grp.Go(func() (err error) {
		if content, letGo, err = g.take(setup); err == nil {
			g.phases.reached("taken")
			scan, err = g.scan(setup, content)
			g.phases.reached("scanned")
		}
		return err
	})
	var graderErr error
	grp.Go(func() error {
		box, graderErr = g.grader(setup)
		return graderErr
	})
	err = grp.Wait()
	if box.ID != "" {
		after = append(after, func() { g.takeBack(box.ID) })
	}
	g.verdict.ImageID = g.img.ID
	if graderErr != nil {
		return sandbox.GradeInfra, after, cmpErr(graderErr, setup)
	}
	if err != nil {
		return g.untaken(cmpErr(err, setup), after)
	}
	g.verdict.Findings, g.verdict.FindingsDropped = scan.Findings, scan.Dropped
	g.verdict.Carried, g.verdict.Bytes = scan.Files, scan.Bytes
	if err := g.carry(setup, box.ID, content, scan); err != nil {
		return g.untaken(cmpErr(err, setup), after)
	}
	g.phases.reached("carried")
	letGo()
	g.turn()
	g.verdict.Setup = time.Since(began)
	state, err = g.decide(ctx, box.ID)
	return state, after, err
}

// untaken is the end of a grade whose files cannot be had. If that is for what the
// files are, the sandbox has made them so: it is no fault of ours.
func (g *grading) untaken(err error, after []func()) (sandbox.GradeState, []func(), error) {
	switch sandbox.ClassOf(err) {
	case sandbox.TooLarge, sandbox.Invalid, sandbox.Denied:
		zero := 0.0
		g.verdict.Reward, g.verdict.Reason = &zero, "the files cannot be graded: "+sandbox.Plain(sandbox.AsError(err))
		return sandbox.Graded, after, nil
	}
	return sandbox.GradeInfra, after, err
}

// take freezes the files of the sandbox, to be had until letGo. Its memory and
// processes stay behind.
func (g *grading) take(ctx context.Context) (c sandbox.Content, letGo func(), err error) {
	letGo = func() {}
	end, err := g.content.begin(ctx)
	if err != nil {
		return c, letGo, err
	}
	defer end()
	g.phases.reached("take_begins")
	p, err := g.node.PrepareSnapshot(ctx, g.sb.ID, node.SnapshotRequest{Kind: sandbox.FilesystemSnapshot, Most: g.maxBytes()})
	if err == nil {
		g.verdict.Paused = p.Paused
		err = g.node.CommitSnapshot(ctx, p.Token)
	}
	if err != nil {
		return c, letGo, g.gaveUp(ctx, g.sb.ID, err)
	}
	return p.Content, sync.OnceFunc(func() { g.Server.letGo(p.Content) }), nil
}

// maxBytes is the most that is taken: holes count, so that a sparse file is as
// large as it says.
func (g *grading) maxBytes() int64 { return g.sb.Spec.Resources.Disk + g.sb.Spec.Resources.Disk/4 }

// rules are which files the grader is given.
func (g *grading) rules() grade.Rules {
	r := grade.Rules{TestsPath: g.grade.Spec.TestsPath, MaxBytes: g.maxBytes(), Path: g.searchPath()}
	for _, a := range g.grade.Spec.Artifacts {
		r.Artifacts = append(r.Artifacts, path.Clean(a))
	}
	return r
}

// searchPath is the image's PATH without what is an artifact: there the agent's
// programs are, and none of them is the judge's.
func (g *grading) searchPath() (dirs []string) {
	value := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, e := range g.img.Config.Env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			value = v
		}
	}
	for dir := range strings.SplitSeq(value, ":") {
		if !path.IsAbs(dir) || slices.ContainsFunc(g.grade.Spec.Artifacts, func(a string) bool { return sandbox.Within(path.Clean(dir), path.Clean(a)) }) {
			continue
		}
		dirs = append(dirs, path.Clean(dir))
	}
	return dirs
}

func (g *grading) scan(ctx context.Context, c sandbox.Content) (*grade.Scanned, error) {
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(g.node.Tar(ctx, c, pw)) }()
	defer pr.Close()
	sum := sha256.New()
	whole := bufio.NewReaderSize(io.TeeReader(pr, sum), tarBuffer)
	scan, err := grade.Scan(whole, g.rules())
	if err == nil {
		_, err = io.Copy(io.Discard, whole) // what is behind the end is part of the digest
	}
	g.verdict.Digest = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return scan, err
}

// grader makes the machine that is graded on: of the trusted image, without a
// network, and with nothing of the sandbox's.
func (g *grading) grader(ctx context.Context) (sandbox.Sandbox, error) {
	want, res := g.grade.Spec.Resources, g.sb.Spec.Resources
	res.MilliCPU, res.Disk, res.Pids = cmp.Or(want.MilliCPU, res.MilliCPU), cmp.Or(want.Disk, res.Disk), cmp.Or(want.Pids, res.Pids)
	if want.Memory != 0 || want.MemoryLimit != 0 {
		res.Memory, res.MemoryLimit = cmp.Or(want.Memory, want.MemoryLimit), cmp.Or(want.MemoryLimit, want.Memory)
	}
	spec := sandbox.Spec{Image: cmp.Or(g.grade.Spec.Image, g.sb.Spec.Image), Template: graderMark, Resources: res,
		Network: sandbox.Network{Mode: sandbox.NetworkNone}, Timeout: setupTimeout + g.grade.Spec.Timeout + time.Minute}
	if g.tests != nil {
		at := path.Clean(g.grade.Spec.TestsPath)
		if g.grade.Spec.Separate {
			at = grade.SealedTests
		}
		spec.Mounts = []sandbox.DirectoryMount{{Manifest: g.tests.Content.Manifest, Path: at}}
	}
	p := plan{spec: spec, img: g.img, wanted: ctx}
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		one, cancel := context.WithTimeout(context.WithoutCancel(ctx), lineTimeout)
		box, _, err := g.makeSandbox(one, p, store.Idempotency{})
		cancel()
		if err == nil {
			g.phases.reached("grader_made")
			err := g.furnish(ctx, box.ID)
			g.phases.reached("furnished")
			return box, err
		}
		class := sandbox.ClassOf(err)
		if class != sandbox.NoCapacity && class != sandbox.QuotaExceeded {
			return box, err
		}
		g.turn() // whoever has room need not wait for who has none
		select { // others end, and a grade is worth waiting for
		case <-time.After(wait):
		case <-ctx.Done():
			return box, err
		}
	}
}

// furnish puts the judge's things and the tests into a grader. With a judge apart,
// nobody but root can read them.
func (g *grading) furnish(ctx context.Context, id string) error {
	spec := g.grade.Spec
	root := sandbox.WriteOptions{User: rootUser}
	switch {
	case spec.Separate:
		err := pipeTar(func(w io.Writer) error { return grade.Furniture(w, spec) }, func(r io.Reader) error {
			return g.node.Upload(ctx, id, node.Upload{Path: "/", Tar: true, Write: root}, r)
		})
		if err != nil {
			return err
		}
	case spec.Results == sandbox.PytestResults: // by two calls, which take a fifth of an upload's time
		root.Mode, root.Parents = 0o700, true
		if _, err := g.node.MakeDir(ctx, id, sandbox.GradeDir, root); err != nil {
			return err
		}
		root.Mode, root.Parents = 0o600, false
		if _, err := g.node.WriteFile(ctx, id, path.Join(sandbox.GradeDir, grade.JudgeFile), grade.Judge, root); err != nil {
			return err
		}
	}
	return nil
}

// carry puts the artifacts into a grader, as the judged user's.
func (g *grading) carry(ctx context.Context, id string, c sandbox.Content, scan *grade.Scanned) error {
	// Each below itself: unpacked at /, a directory of the sandbox's where the image
	// has a link would be unpacked wherever that leads. With the first, and before
	// anything of the sandbox's is there that could lead it elsewhere, what the sandbox
	// removed is removed and all are opened to the judged user: the agent was root, and
	// /root is nobody else's.
	// In their order: what is below a link of the image's is gone with the link.
	early := max(0, len(scan.Removed)-removedAtOnce)
	for _, p := range scan.Removed[:early] {
		if err := g.node.RemoveFile(ctx, id, p, true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	removed, open := scan.Removed[early:], g.rules().Artifacts
	put := func(dir string, write func(io.Writer) error) error {
		to := node.Upload{Path: dir, Tar: true, Write: sandbox.WriteOptions{User: judgedUser, Parents: true}, Remove: removed, Open: open}
		removed, open = nil, []string{}
		return pipeTar(write, func(r io.Reader) error { return g.node.Upload(ctx, id, to, r) })
	}
	for _, root := range scan.Roots() {
		dir, empty := scan.Below(root)
		if empty {
			continue
		}
		write := func(w io.Writer) error {
			pr, pw := io.Pipe()
			go func() { pw.CloseWithError(g.node.Tar(ctx, c, pw)) }()
			defer pr.Close()
			return scan.Write(bufio.NewReaderSize(pr, tarBuffer), w, root)
		}
		if err := put(dir, write); err != nil {
			// A directory of the image where the sandbox has a file is the one thing
			// that is in the way.
			cleared, cerr := g.clearWay(ctx, id, scan)
			if cerr != nil || !cleared {
				return err
			}
			if err := put(dir, write); err != nil {
				return err
			}
		}
	}
	if len(open) > 0 { // nothing is carried: what the image has there, and still has, is judged
		return put("/", func(w io.Writer) error { return tar.NewWriter(w).Close() })
	}
	return nil
}

// clearWay removes directories of the image where the sandbox has something else.
func (g *grading) clearWay(ctx context.Context, id string, scan *grade.Scanned) (cleared bool, err error) {
	for _, p := range scan.Leaves() {
		info, err := g.node.StatFile(ctx, id, p)
		if errors.Is(err, sandbox.ErrNotFound) {
			continue
		}
		if err != nil {
			return cleared, err
		}
		if info.Type == sandbox.Directory {
			if err := g.node.RemoveFile(ctx, id, p, true); err != nil {
				return cleared, err
			}
			cleared = true
		}
	}
	return cleared, nil
}

// pipeTar gives what write writes to read. The writer's error is the reason, where
// it has one of its own.
func pipeTar(write func(io.Writer) error, read func(io.Reader) error) error {
	pr, pw := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		buffered := bufio.NewWriterSize(pw, tarBuffer)
		err := write(buffered)
		if err == nil {
			err = buffered.Flush()
		}
		pw.CloseWithError(err)
		wrote <- err
	}()
	err := read(pr)
	pr.CloseWithError(errTarStopped)
	if werr := <-wrote; werr != nil && !errors.Is(werr, errTarStopped) {
		return werr
	}
	return err
}

// errTarStopped is what a writer meets whose reader has what it wants.
var errTarStopped = fmt.Errorf("the reader has stopped: %w", io.ErrClosedPipe)
