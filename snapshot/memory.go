package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// chunkSize is the unit in which successive checkpoints share pages. Smaller
// shares more and costs a file each: 4 MiB is 25 files for 100 MiB.
const chunkSize = 4 << 20

// Memory stores and restores the files of a kernel checkpoint.
type Memory struct {
	// Compress stores smaller and restores slower. Off by default: a restore is
	// what somebody waits for.
	Compress bool
	// Workers at a time; 0 is one per processor.
	Workers int
}

func (m Memory) workers() int {
	if m.Workers > 0 {
		return m.Workers
	}
	return runtime.GOMAXPROCS(0)
}

// PackDir stores the named files of a directory, which nobody writes meanwhile.
// Chunks of zeros take no space.
func (m Memory) PackDir(ctx context.Context, store cas.Store, dir string, files []string) (Manifest, error) {
	return m.PackSince(ctx, store, dir, files, nil)
}

// Since is a file whose beginning is that of an earlier snapshot.
type Since struct {
	ID   cas.ID // of that snapshot
	Name string // of the file, in both
	Size int64  // of the earlier one's; what is in the directory follows it
}

// PackSince is PackDir of a file of which only the end is there.
func (m Memory) PackSince(ctx context.Context, store cas.Store, dir string, files []string, since *Since) (Manifest, error) {
	const op = "snapshot.pack"
	before, err := since.load(ctx, store)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	batch, err := cas.Begin(store)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	defer batch.Abort()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	defer root.Close()
	p := newPacker(batch)
	c, err := m.pack(ctx, p, root, slices.Sorted(slices.Values(files)), before)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	done, err := p.finish(ctx, c)
	return done, asError(op, err)
}

// chunkBuffers serve all packs. One for each worker of each pack were 16 times
// chunkSize to be zeroed for 3 MB of content: with 96 clients on 16 cores two
// thirds of the server's CPU, and what all of them waited for.
var chunkBuffers = sync.Pool{New: func() any { return new([chunkSize]byte) }}

func (m Memory) pack(ctx context.Context, p *packer, root *os.Root, names []string, before *before) (*content, error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(m.workers())
	var opts []cas.PutOption
	if !m.Compress {
		opts = append(opts, cas.Uncompressed)
	}
	c := &content{kind: KindMemory}
	var infos [][]cas.Info // per file and chunk; no id: zeros
	err := func() error {
		for i, name := range names {
			if checkPath(name) != nil || name == "" || strings.Contains(name, "/") || i > 0 && names[i-1] == name {
				return sandbox.InvalidField("files", "%.100q is not the name of a file, or is there twice", name)
			}
			f, st, err := openRegular(root, name)
			if err != nil {
				return err
			}
			defer f.Close() // after the workers: g.Wait is below, in here
			size := st.Size()
			var shared []cas.Info // chunks that are as they were
			var all io.ReaderAt = f
			if before != nil && before.name == name {
				size += before.size
				shared, all = before.chunks, before.followed(f)
			}
			c.files = append(c.files, memoryFile{name: name, mode: uint32(st.Mode().Perm()), size: size})
			chunks := make([]cas.Info, (size+chunkSize-1)/chunkSize)
			infos = append(infos, chunks)
			for j := copy(chunks, shared); j < len(chunks); j++ {
				if ctx.Err() != nil {
					break
				}
				g.Go(func() error {
					buf := chunkBuffers.Get().(*[chunkSize]byte)
					defer chunkBuffers.Put(buf)
					off := int64(j) * chunkSize
					chunk := buf[:min(chunkSize, size-off)]
					if _, err := all.ReadAt(chunk, off); err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					if allZero(chunk) {
						return nil
					}
					var err error
					chunks[j], err = p.put(ctx, bytes.NewReader(chunk), opts...)
					return err
				})
			}
		}
		return g.Wait()
	}()
	if err = errors.Join(err, g.Wait()); err != nil {
		return nil, err
	}
	table := blobTable{c: c, index: map[cas.ID]int{}}
	for i := range c.files {
		for _, info := range infos[i] {
			blob := -1
			if info.ID != "" {
				blob = table.add(info)
			}
			c.files[i].chunks = append(c.files[i].chunks, blob)
		}
	}
	return c, nil
}

func openRegular(root *os.Root, name string) (*os.File, os.FileInfo, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	if err == nil && (!st.Mode().IsRegular() || st.Size() > maxFile) {
		err = sandbox.InvalidField("files", "%s is not a regular file of at most 16 TiB", name)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, st, nil
}

// zeros is compared against; bytes.Equal runs at the speed of memory.
var zeros [64 << 10]byte

func allZero(p []byte) bool {
	for len(p) > 0 {
		n := min(len(p), len(zeros))
		if !bytes.Equal(p[:n], zeros[:n]) {
			return false
		}
		p = p[n:]
	}
	return true
}

// UnpackDir writes the files of a checkpoint into a directory, where none of
// them may be yet. On error those it made are removed. They are not synced: a
// restore that is interrupted starts again.
func (m Memory) UnpackDir(ctx context.Context, store cas.Store, id cas.ID, dir string) (err error) {
	const op = "snapshot.unpack"
	c, err := load(ctx, store, id, KindMemory)
	if err != nil {
		return asError(op, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return asError(op, err)
	}
	defer root.Close()
	var made []string
	defer func() {
		if err != nil {
			for _, name := range made {
				_ = root.Remove(name) // the first error is the one to tell
			}
		}
	}()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(m.workers())
	var open []*os.File
	defer func() {
		for _, f := range open {
			err = errors.Join(err, f.Close())
		}
		err = asError(op, err)
	}()
	for i := range c.files {
		file := &c.files[i]
		f, err := root.OpenFile(file.name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, os.FileMode(file.mode)|0o600)
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		open, made = append(open, f), append(made, file.name)
		if err := f.Truncate(file.size); err != nil { // what is zero stays a hole
			return errors.Join(err, g.Wait())
		}
		for j, blob := range file.chunks {
			if blob < 0 || gctx.Err() != nil {
				continue
			}
			g.Go(func() error {
				return copyBlob(gctx, store, c.blobs[blob], io.NewOffsetWriter(f, int64(j)*chunkSize))
			})
		}
	}
	return errors.Join(g.Wait(), ctx.Err())
}

// ReadFile is one file of a checkpoint, which is smaller than a chunk. A
// manifest of another kind has none: sandbox.ErrNotFound.
func (Memory) ReadFile(ctx context.Context, store cas.Store, id cas.ID, name string) ([]byte, error) {
	const op = "snapshot.read"
	c, err := load(ctx, store, id, "")
	if err != nil {
		return nil, asError(op, err)
	}
	i := slices.IndexFunc(c.files, func(f memoryFile) bool { return f.name == name })
	if i < 0 {
		return nil, sandbox.Errorf(sandbox.NotFound, op, "snapshot %s has no file %q", id, name)
	}
	f := c.files[i]
	if f.size >= chunkSize {
		return nil, sandbox.Errorf(sandbox.TooLarge, op, "file %q of snapshot %s has %d bytes", name, id, f.size)
	}
	var b bytes.Buffer
	if f.size > 0 && f.chunks[0] >= 0 {
		err = copyBlob(ctx, store, c.blobs[f.chunks[0]], &b)
	} else {
		b.Write(make([]byte, f.size))
	}
	return b.Bytes(), asError(op, err)
}
