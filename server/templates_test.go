package server

import (
	"fmt"
	"slices"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// A version with all the tags there may be still takes those that it has.
func TestTagsOfATemplateCountOnce(t *testing.T) {
	w := newWorld(t)
	for range 2 {
		if _, _, _, err := w.build(t.Context(), &covev1.BuildTemplateRequest{Name: "web"}); err != nil {
			t.Fatal(err)
		}
	}
	tag := func(ref string, tags ...string) ([]string, error) {
		r, err := w.client.Templates.Tag(t.Context(), connect.NewRequest(&covev1.TagTemplateRequest{Name: ref, Tags: tags}))
		if err != nil {
			return nil, err
		}
		return r.Msg.Template.Tags, nil
	}
	var all []string
	for i := range maxTags {
		all = append(all, fmt.Sprintf("t%03d", i))
	}
	if _, err := tag("web@1", all[:maxTags/2]...); err != nil {
		t.Fatal(err)
	}
	for _, tags := range [][]string{all, all, all[:1], {all[0], all[0]}} {
		if have, err := tag("web@1", tags...); err != nil || !slices.Equal(have, all) {
			t.Errorf("%d tags: %q, %v", len(tags), have, err)
		}
	}
	_, err := tag("web@1", "more", all[0])
	if e := wantError(t, err, sandbox.ErrInvalid, "101 tags"); e.Field != "tags" {
		t.Errorf("field %q", e.Field)
	}
	// What another version takes over makes room.
	if have, err := tag("web@2", all[0]); err != nil || !slices.Equal(have, all[:1]) {
		t.Errorf("%q, %v", have, err)
	}
	if have, err := tag("web@1", "more"); err != nil || len(have) != maxTags || slices.Contains(have, all[0]) {
		t.Errorf("%q, %v", have, err)
	}
}
