package main

// pagesEdits let memory be shared with the checkpoint it was restored from; see
// add/pages_pgalloc.go.in and add/pages_mm.go.in. gVisor reads all of it in the
// background: eight children of 100 MB were 800 MB read and kept.
var pagesEdits = []edit{
	{file: "pkg/sentry/pgalloc/pages.go", add: "pages_pgalloc.go.in"},
	{file: "pkg/sentry/mm/pages.go", add: "pages_mm.go.in"},
	{
		file: "pkg/sentry/state/stateio/fdreader.go",
		old: `// Close implements AsyncReader.Close.
`,
		new: `// FD is the file that is read.
func (r *FDReader) FD() int { return int(r.fd) }

// Close implements AsyncReader.Close.
`,
	},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `	zero zeroRange
`,
		new: `	zero zeroRange

	// restored is set for good once pages of the file are, or were, in a
	// pages file.
	restored atomic.Bool
`,
	},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `			return safemem.BlockSeq{}, err
		}
	}

	chunks :=`,
		new: `			return safemem.BlockSeq{}, err
		}
	}
	return f.mapInternal(fr)
}

func (f *MemoryFile) mapInternal(fr memmap.FileRange) (safemem.BlockSeq, error) {
	chunks :=`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	apfl.lfStatus.Init()
	go apfl.main()
`,
		new: `	apfl.lfStatus.Init()
	apfl.share(ar)
	go apfl.main()
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `type AsyncPagesFileLoad struct {
	mu apflMutex
`,
		new: `type AsyncPagesFileLoad struct {
	mu apflMutex

	shared *pagesFile // nil: cannot be mapped; immutable
	lfDone bool       // no more files come; of the loader goroutine
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `		f.asyncPageLoad.Store(amfl)
		opts.DoneCallback = nil
`,
		new: `		f.asyncPageLoad.Store(amfl)
		f.restored.Store(true)
		opts.DoneCallback = nil
`,
	},
	// The layer of a sandbox is a file on disk, of which a page that finds no room is
	// the kernel's death: it is reserved ahead, and a restore without room fails.
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `			// Record where to read data.
`,
		new: `			if f.opts.DiskBackedFile {
				if err := unix.Fallocate(int(f.file.Fd()), 0, int64(maFR.Start), int64(amount)); err != nil && err != unix.EOPNOTSUPP {
					return fmt.Errorf("failed to reserve disk for pages: %w", err)
				}
			}
			// Record where to read data.
`,
	},
	// Who awaits pages wakes the loader …
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	apfl.mu.Unlock()
	if pending {
		if logAwaitedLoads {
`,
		new: `	apfl.mu.Unlock()
	if pending {
		apfl.lfStatus.Notify(aplLFPending)
		if logAwaitedLoads {
`,
	},
	// … which loads nothing else …
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `		if apfl.canEnqueue() {
			apfl.amflsMu.Lock()
			// Unawaited loads`,
		new: `		if apfl.shared == nil && apfl.canEnqueue() {
			apfl.amflsMu.Lock()
			// Unawaited loads`,
	},
	// … and stays while something is not loaded.
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `			ev := apfl.lfStatus.Wait()
			if ev&aplLFPending != 0 {
				// We may have raced with MemoryFile.LoadFrom() inserting into
				// asyncMemoryFileLoad.unloaded.
				apfl.lfStatus.Ack(aplLFPending)
				continue
			}
			if ev&aplLFDone != 0 {
`,
		new: `			if apfl.wait() {
				continue
			}
			{
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `				apfl.mu.Unlock()
				return
			}
			panic(fmt.Sprintf("unknown events in lfStatus: %#x", ev))
		}
`,
		new: `				apfl.mu.Unlock()
				return
			}
		}
`,
	},
	// A restore is over before all pages are loaded: that may never be.
	{
		file: "runsc/boot/restore.go",
		old: `	if r.asyncMFLoader != nil {
		if err := r.asyncMFLoader.Wait(); err != nil {
			r.cm.onRestoreFailed(fmt.Errorf("async MemoryFile loading failed: %w", err))
			log.Warningf("Killing the sandbox after MemoryFile page loading failed: %v", err)
			k.Kill(linux.WaitStatusTerminationSignal(linux.SIGKILL))
			return
		}
	}
`,
		new: `	if r.asyncMFLoader != nil {
		go func() {
			if err := r.asyncMFLoader.Wait(); err != nil {
				log.Warningf("Killing the sandbox after MemoryFile page loading failed: %v", err)
				k.Kill(linux.WaitStatusTerminationSignal(linux.SIGKILL))
			}
		}()
	}
`,
	},
	// Nor has its timeline theirs, the end of which was looked for every millisecond for
	// as long as the child lived: 7 % of a core each, and a hundred had nothing else left.
	{
		file: "runsc/boot/controller.go",
		old:  `cm.restorer.mainMF, timer.Fork("PagesFileLoader")) //`,
		new:  `cm.restorer.mainMF, nil) //`,
	},
	{
		file: "pkg/sentry/mm/mm.go",
		old: `	// maxRSS is the maximum resident set size in bytes of a MemoryManager.
`,
		new: `	// units is how often a part of restored memory was taken to be written.
	// Protected by activeMu.
	units int ` + "`state:\"nosave\"`" + `

	// pieces is how many mappings of pages files were made for it.
	pieces atomicbitops.Int64 ` + "`state:\"nosave\"`" + `

	// maxRSS is the maximum resident set size in bytes of a MemoryManager.
`,
	},
	{
		file: "pkg/sentry/mm/save_restore.go",
		old: `	mm.haveASIO = mm.p.SupportsAddressSpaceIO()
`,
		new: `	mm.haveASIO = mm.p.SupportsAddressSpaceIO()
	mm.shareRestored()
`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `				if (at.Write || forPin) && mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
		new: `				taken := (at.Write || forPin) && oldpma.needCOW && oldpma.private && mm.mf.WasRestored()
				if taken {
					pseg = mm.takeLocked(pseg, ar)
					oldpma = pseg.ValuePtr()
					unmapAR = joinAddrRanges(unmapAR, pseg.Range())
					pstart = pmaIterator{} // iterators invalidated
				}
				if (at.Write || forPin) && mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `					// We have a usable pma; continue.
`,
		new: `					// We have a usable pma; continue.
					if taken {
						mm.mf.Dirty(pseg.fileRange())
						pseg = mm.joinLocked(pseg)
					}
`,
	},
	// Nobody else takes such memory, and what is dropped is not zeroed in place: it
	// may not be there yet.
	{
		file: "pkg/sentry/mm/syscalls.go",
		old: `			if vma.mappable == nil && pma.huge && !mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
		new: `			if vma.mappable == nil && pma.huge && !mm.mf.WasRestored() && !mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `		ims, err := pma.file.MapInternal(pseg.fileRange(), perms)
`,
		new: `		ims, err := pseg.mapLater(perms)
`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `		offset := uint64(ar.Start - pseg.Start())
		return pseg`,
		new: `		pseg.load(ar)
		offset := uint64(ar.Start - pseg.Start())
		return pseg`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `		pr := pseg.Range().Intersect(ar)
		for`,
		new: `		pr := pseg.Range().Intersect(ar)
		pseg.load(pr)
		for`,
	},
	{
		file: "pkg/sentry/mm/io.go",
		old: `		offset := uint64(ar.Start - pseg.Start())
		return pseg`,
		new: `		pseg.load(ar)
		offset := uint64(ar.Start - pseg.Start())
		return pseg`,
	},
	{
		file: "pkg/sentry/mm/io.go",
		old: `			// Iterate the subset of the PMA's cached internal mappings that
`,
		new: `			pseg.load(pmaAR)
			// Iterate the subset of the PMA's cached internal mappings that
`,
	},
	{
		file: "pkg/sentry/mm/address_space.go",
		old: `		setMapUnit(32 << 20)
`,
		new: `		if p := pseg.ValuePtr(); p.private && p.needCOW {
			setMapUnit(hostarch.HugePageSize) // what is mapped is not loaded
		} else if mapAR = mm.unitLocked(mf, pseg, ar); !mapAR.IsSupersetOf(ar) {
			setMapUnit(pgalloc.LoadUnit)
		}
`,
	},
	{
		file: "pkg/sentry/mm/address_space.go",
		old: `				if err := mm.as.MapFile(pmaMapAR.Start, pma.file, pseg.fileRangeOf(pmaMapAR), perms, platformEffect == memmap.PlatformEffectCommit); err != nil {
`,
		new: `				if err := mm.mapFileLocked(pmaMapAR.Start, pma, pseg.fileRangeOf(pmaMapAR), perms, platformEffect == memmap.PlatformEffectCommit); err != nil {
`,
	},
	{
		file: "pkg/sentry/mm/address_space.go",
		old: `					if err := mm.as.MapFile(thisMapAR.Start, pma.file, pseg.fileRangeOf(thisMapAR), perms, platformEffect == memmap.PlatformEffectCommit); err != nil {
`,
		new: `					if err := mm.mapFileLocked(thisMapAR.Start, pma, pseg.fileRangeOf(thisMapAR), perms, platformEffect == memmap.PlatformEffectCommit); err != nil {
`,
	},
}

// sinceEdits let a checkpoint leave out what an earlier one has; see
// add/since_pgalloc.go.in.
var sinceEdits = []edit{
	{file: "pkg/sentry/pgalloc/since.go", add: "since_pgalloc.go.in"},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `	restored atomic.Bool
`,
		new: `	restored atomic.Bool

	kept keptPages
`,
	},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `				// Cancel any pending async load on waste pages.
`,
		new: `				f.Dirty(wasteFR)
				// Cancel any pending async load on waste pages.
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	if err := f.AwaitLoadAll(); err != nil {
		return fmt.Errorf("previous async page loading failed: %w", err)
	}
`,
		new: `	var since *since
	if opts.PagesFile == nil {
		if err := f.AwaitLoadAll(); err != nil {
			return fmt.Errorf("previous async page loading failed: %w", err)
		}
	} else {
		since = f.beginSince(opts.PagesFile)
	}
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `			amfs.pf.saveOff += amount
`,
		new: `			since.wrote(fr, amfs.pf.saveOff)
			amfs.pf.saveOff += amount
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `		wasCommitted := ma.knownCommitted
		if !opts`,
		new: `		wasCommitted := ma.knownCommitted
		if wasCommitted && since != nil {
			part, out, unloaded := since.part(fr)
			fr, unscannedStart = part, part.End
			if out || unloaded {
				if unloaded {
					maseg = updateAddRange(maseg, fr, true /* wasCommitted */, true /* nowCommitted */)
					maseg = updateFlush(maseg)
				}
				if maseg.End() == unscannedStart {
					maseg = maseg.NextSegment()
				}
				continue
			}
		}
		if !opts`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	if _, err := w.Write(lengthBuf[:]); err != nil {
		return fmt.Errorf("failed to write metadata length: %w", err)
	}
`,
		new: `	if since != nil {
		if err := since.writeTo(w, len(data)); err != nil {
			return fmt.Errorf("failed to write what is left out: %w", err)
		}
		since.end()
	} else if _, err := w.Write(lengthBuf[:]); err != nil {
		return fmt.Errorf("failed to write metadata length: %w", err)
	}
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	mfr.amfs.f.forEachMappingSlice(mfr.FileRange, func(bs []byte) {
`,
		new: `	mfr.amfs.f.forEachSavedSlice(mfr.FileRange, func(bs []byte) {
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `type AsyncPagesFileSave struct {
	mu apfsMutex
`,
		new: `type AsyncPagesFileSave struct {
	mu apfsMutex

	next next // what the checkpoint continues; of SaveTo
`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `	length := binary.LittleEndian.Uint64(lengthBuf[:])
	data := make`,
		new: `	length := binary.LittleEndian.Uint64(lengthBuf[:])
	placed, err := readPlaced(r, &length, &opts.PagesFileOffset)
	if err != nil {
		return fmt.Errorf("failed to read what is left out: %w", err)
	}
	f.kept.mu.Lock()
	f.kept.id = placed.id
	f.kept.mu.Unlock()
	data := make`,
	},
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `			amfl.unloaded.InsertRange(maFR, aplUnloadedInfo{
				off: opts.PagesFileOffset,
			})
			amfl.pf.mu.Unlock()
			opts.PagesFileOffset += amount
`,
		new: `			opts.PagesFileOffset = amfl.place(&placed, maFR, opts.PagesFileOffset)
			amfl.pf.mu.Unlock()
`,
	},
	// What is loaded may be written next, unseen.
	{
		file: "pkg/sentry/pgalloc/save_restore.go",
		old: `		ullen := ulFR.Length()
		if len(ul.waiters) == 0 {
`,
		new: `		ullen := ulFR.Length()
		amfl.f.Dirty(ulFR)
		if len(ul.waiters) == 0 {
`,
	},
	{
		file: "pkg/sentry/mm/save_restore.go",
		old: `	mm.dropZeros()
`,
		new: `	mm.dropZeros()
	mm.keepPrivate()
`,
	},
	{
		file: "pkg/sentry/state/state.go",
		old: `		// Save the kernel.
`,
		new: `		// Save the kernel.
		k.MemoryFile().ContinuePages(opts.Metadata)
`,
	},
}
