package openapi

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func TestTheCommittedDescriptionIsCurrent(t *testing.T) {
	want, err := Document("../../api/cove/v1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../api/openapi.json")
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("api/openapi.json is not what the protos and routes say (%v); 'make proto' makes it", err)
	}
}

// Every reference leads somewhere, and a proto's words arrive.
func TestTheDescriptionIsWhole(t *testing.T) {
	b, err := Document("../../api/cove/v1")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths      map[string]map[string]struct{ Description string }
		Components struct{ Schemas, Responses map[string]any }
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	refs := 0
	for line := range strings.Lines(string(b)) {
		if _, ref, ok := strings.Cut(line, `"$ref": "#/components/`); ok {
			refs++
			kind, name, _ := strings.Cut(ref[:strings.IndexByte(ref, '"')], "/")
			if kind == "schemas" && doc.Components.Schemas[name] == nil || kind == "responses" && doc.Components.Responses[name] == nil {
				t.Errorf("%s leads nowhere", ref)
			}
		}
	}
	if refs < 100 || len(doc.Paths) < 60 {
		t.Errorf("%d references, %d paths", refs, len(doc.Paths))
	}
	if d := doc.Paths["/cove.v1.Processes/Wait"]["post"].Description; !strings.HasPrefix(d, "Wait returns when the process has ended") {
		t.Errorf("Wait is described as %q", d)
	}
}
