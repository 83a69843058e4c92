package cli

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/wire"
)

// docs/cli-json.md is the promise: what the code prints and what the page
// names must be the same, field by field.
func TestTheDocumentedJSONIsTheJSON(t *testing.T) {
	b, err := os.ReadFile("../docs/cli-json.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, s := range strings.Split(string(b), "\n## ")[1:] {
		name, body, _ := strings.Cut(s, "\n")
		body, _, _ = strings.Cut(body, "\n# ")
		sections[name] = body
	}
	for section, types := range map[string][]any{
		"sandbox": {sandboxJSON{}, mountJSON{}, deterministicJSON{}}, "fork": {forkJSON{}, errorJSON{}}, "snapshot": {snapshotJSON{}}, "deleted": {deletedJSON{}},
		"pruned": {prunedJSON{}, prunedSnapshotJSON{}}, "verified": {verifiedJSON{}}, "tree": {treeJSON{}}, "template": {templateJSON{}},
		"volume": {volumeJSON{}, holderJSON{}}, "file": {fileJSON{}},
		"network": {networkJSON{}, replayJSON{}, missJSON{}}, "recording": {recordingJSON{}}, "requests": {exchangeJSON{}}, "flow": {flowJSON{}}, "secret": {secretJSON{}}, "lease": {leaseJSON{}}, "shipment": {shipmentJSON{}, sinkJSON{}, shipPositionJSON{}, errorJSON{}},
		"run": {runJSON{}}, "plan": {planJSON{}, planItemJSON{}, errorJSON{}}, "checkpoint": {checkpointJSON{}}, "step": {stepJSON{}, stepOutputJSON{}, stepFilesJSON{}, stepEgressJSON{}}, "diff": {diffJSON{}, changeJSON{}, fileStateJSON{}}, "replayed": {replayedJSON{}, differenceJSON{}, gapJSON{}}, "cost": {costsJSON{}, costJSON{}}, "build": {buildJSON{}}, "grade": {gradeJSON{}, testJSON{}, findingJSON{}},
		"end": {endJSON{}}, "processes": {psJSON{}, processJSON{}, taskJSON{}}, "executed": {executedJSON{}}, "detached": {detachedJSON{}},
		"stats": {statsJSON{}}, "image": {imageJSON{}}, "prune": {pruneJSON{}}, "registry": {registryJSON{}}, "key": {keyJSON{}}, "tenant": {tenantJSON{}, quotaJSON{}}, "audit": {auditJSON{}}, "info": {infoJSON{}, capacityJSON{}, totalsJSON{}},
		"check": {doctor.Result{}}, "version": {versionJSON{}}, "port": {portJSON{}}, "callback": {callbackJSON{}}, "code": {codeJSON{}, codeErrorJSON{}}, "context": {wire.CodeContext{}},
	} {
		body, ok := sections[section]
		if !ok {
			t.Errorf("no section %q", section)
			continue
		}
		code := map[string]bool{}
		for _, v := range types {
			for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				code[name] = true
				if !strings.Contains(body, "`"+name+"`") {
					t.Errorf("%s: %s is printed and not documented", section, name)
				}
			}
		}
		for _, row := range strings.Split(body, "\n") {
			cell, ok := strings.CutPrefix(row, "| ")
			if !ok {
				continue
			}
			cell, _, _ = strings.Cut(cell, " |")
			for _, m := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(cell, -1) {
				if !code[m[1]] {
					t.Errorf("%s: %s is documented and not printed", section, m[1])
				}
			}
		}
		delete(sections, section)
	}
	for s := range sections {
		t.Errorf("section %q belongs to nothing", s)
	}
}
