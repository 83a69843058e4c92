package native

import (
	"reflect"
	"slices"
	"testing"

	"github.com/cove-sandbox/cove/internal/openapi"
)

// The fields of what is asked and answered without protos are described as they are.
func TestTheDescriptionOfExec(t *testing.T) {
	for schema, typ := range map[string]reflect.Type{"ExecRequest": reflect.TypeFor[execRequest](), "ExecResponse": reflect.TypeFor[execResponse](), "RunCodeRequest": reflect.TypeFor[codeRequest]()} {
		names := jsonNames(typ)
		slices.Sort(names)
		if got := slices.Sorted(slices.Values(openapi.Fields(schema))); !slices.Equal(got, names) {
			t.Errorf("%s is described with %q and has %q", schema, got, names)
		}
	}
}
