package store

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
)

// AuditHash is the hash of an entry, with its number and the hash of the entry
// before: whoever changes, adds or takes out an entry has to write all later
// ones anew, and whoever has kept one hash elsewhere sees it.
func AuditHash(e sandbox.AuditEntry) string {
	e.Hash, e.At = "", e.At.UTC()
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // strings and numbers only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// CheckAudit says whether entries of one chain, oldest first and without gaps,
// are as they were written; sandbox.ErrCorrupt names the first that is not.
func CheckAudit(entries []sandbox.AuditEntry) error {
	for i, e := range entries {
		switch {
		case AuditHash(e) != e.Hash:
			return &sandbox.Error{Class: sandbox.Corrupt, Msg: fmt.Sprintf("audit entry %d was changed", e.Seq)}
		case i > 0 && (e.Prev != entries[i-1].Hash || e.Seq != entries[i-1].Seq+1):
			return &sandbox.Error{Class: sandbox.Corrupt, Msg: fmt.Sprintf("between audit entries %d and %d something is missing or was added", entries[i-1].Seq, e.Seq)}
		}
	}
	return nil
}
