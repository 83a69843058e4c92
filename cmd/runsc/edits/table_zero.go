package main

// zeroEdits make memory that is only read cost nothing; see add/zero_mm.go.in.
// gVisor allocates it: a gigabyte of a sparse array that is looked through was a
// gigabyte used.
var zeroEdits = []edit{
	{file: "pkg/sentry/pgalloc/zero.go", add: "zero_pgalloc.go.in"},
	{file: "pkg/sentry/mm/zero.go", add: "zero_mm.go.in"},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `	mu memoryFileMutex

`,
		new: `	mu memoryFileMutex

	zero zeroRange

`,
	},
	{
		file: "pkg/sentry/mm/mm.go",
		old: `	// maxRSS is the maximum resident set size in bytes of a MemoryManager.
`,
		new: `	// zeros is how much is mapped to zeros that were only read, in bytes.
	// Protected by activeMu. None is in a checkpoint.
	zeros uint64 ` + "`state:\"nosave\"`" + `

	// maxRSS is the maximum resident set size in bytes of a MemoryManager.
`,
	},
	// A read of what is nowhere maps zeros …
	{
		file: "pkg/sentry/mm/pma.go",
		old: `					allocAR := optAR.Intersect(hugeMaskAR)
`,
		new: `					allocAR := optAR.Intersect(hugeMaskAR)
					if fr, ar, ok := mm.zerosLocked(vma, allocAR, at, forPin); ok {
						zeros := pma{
							file:           mm.mf,
							off:            fr.Start,
							translatePerms: hostarch.AnyAccess,
							effectivePerms: vma.effectivePerms,
							maxPerms:       vma.maxPerms,
							needCOW:        true,
						}
						zeros.effectivePerms.Write = false
						zeros.maxPerms.Write = false
						mm.zeros += uint64(ar.Length())
						mm.mf.IncRef(fr, memCgID)
						pseg, pgap = mm.pmas.Insert(pgap, ar, zeros).NextNonEmpty()
						pstart = pmaIterator{} // iterators invalidated
						continue
					}
`,
	},
	// … and a write takes them away and allocates.
	{
		file: "pkg/sentry/mm/pma.go",
		old: `				oldpma := pseg.ValuePtr()
				if (at.Write || forPin) && mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
		new: `				oldpma := pseg.ValuePtr()
				if (at.Write || forPin) && mm.isZerosLocked(oldpma) {
					pseg = mm.pmas.Isolate(pseg, pseg.Range().Intersect(hugeMaskAR).Intersect(vseg.Range()))
					unmapAR = joinAddrRanges(unmapAR, pseg.Range())
					pfdrs = appendPendingFileDecRef(pfdrs, mm.mf, pseg.fileRange())
					mm.forgetLocked(pseg)
					pseg, pgap = pmaIterator{}, mm.pmas.Remove(pseg)
					pstart = pmaIterator{} // iterators invalidated
					continue
				}
				if (at.Write || forPin) && mm.isPMACopyOnWriteLocked(vseg, pseg) {
`,
	},
	{
		file: "pkg/sentry/mm/pma.go",
		old: `			mm.removeRSSLocked(pseg.Range())
`,
		new: `			mm.forgetLocked(pseg)
`,
	},
	{
		file: "pkg/sentry/mm/syscalls.go",
		old: `			pma.file.DecRef(pseg.fileRange())
			mm.removeRSSLocked(pseg.Range())
			pseg = mm.pmas.Remove(pseg).NextSegment()
		}
		if ar.End`,
		new: `			pma.file.DecRef(pseg.fileRange())
			mm.forgetLocked(pseg)
			pseg = mm.pmas.Remove(pseg).NextSegment()
		}
		if ar.End`,
	},
	{
		file: "pkg/sentry/mm/procfs.go",
		old: `		psegAR := pseg.Range().Intersect(vsegAR)
		size`,
		new: `		if mm.isZerosLocked(pseg.ValuePtr()) {
			continue
		}
		psegAR := pseg.Range().Intersect(vsegAR)
		size`,
	},
	// A checkpoint has none: what is read after it is mapped anew.
	{
		file: "pkg/sentry/mm/save_restore.go",
		old: `	defer mm.mappingMu.RUnlock()
	for vseg`,
		new: `	defer mm.mappingMu.RUnlock()
	mm.dropZeros()
	for vseg`,
	},
	{
		file: "pkg/sentry/kernel/kernel.go",
		old: `			return fmt.Errorf("failed to invalidate unsavable mappings: %v", err)
		}
`,
		new: `			return fmt.Errorf("failed to invalidate unsavable mappings: %v", err)
		}
		k.mf.DropZero()
`,
	},
}
