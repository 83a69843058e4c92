package main

// tarEdits have the sentry write a file of its layer to a tar in pieces. gVisor reads
// it whole into its own memory first: a sparse file of a terabyte ended the sentry
// ("out of memory"), and a large one took its size in memory beside the sandbox's.
var tarEdits = []edit{
	{
		file: "pkg/sentry/fsimpl/tmpfs/tar.go",
		old: `	data := make([]byte, rf.size.RacyLoad())
	dst := usermem.BytesIOSequence(data)
	rw := getRegularFileReadWriter(rf, 0, 0)
	n, err := dst.CopyOutFrom(ctx, rw)
	putRegularFileReadWriter(rw)
	if err != nil && err != io.EOF {
		return fmt.Errorf("failed to read file content: %w", err)
	}
	if n != int64(len(data)) {
		return fmt.Errorf("failed to read all file content, got %d bytes, want %d", n, len(data))
	}
	if _, err := tw.Write(data); err != nil {
		return fmt.Errorf("failed to write file content to tar: %w", err)
	}
	return nil
`,
		new: `	size := int64(rf.size.RacyLoad())
	data := make([]byte, min(size, 1<<20))
	for off := int64(0); off < size; {
		piece := data[:min(int64(len(data)), size-off)]
		rw := getRegularFileReadWriter(rf, off, 0)
		n, err := usermem.BytesIOSequence(piece).CopyOutFrom(ctx, rw)
		putRegularFileReadWriter(rw)
		if err != nil && err != io.EOF {
			return fmt.Errorf("failed to read file content: %w", err)
		}
		if n != int64(len(piece)) {
			return fmt.Errorf("failed to read all file content, got %d bytes at %d, want %d", n, off, len(piece))
		}
		if _, err := tw.Write(piece); err != nil {
			return fmt.Errorf("failed to write file content to tar: %w", err)
		}
		off += n
	}
	return nil
`,
	},
}
