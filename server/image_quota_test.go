package server

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Images count for each tenant that names them, and what does not fit is neither
// named nor kept.
func TestImagesCountInTheQuota(t *testing.T) {
	s := newShared(t) // red has one image of 100 bytes
	used := func(who string) int64 {
		t.Helper()
		r, err := s.client.Tenants.Get(t.Context(), connect.NewRequest(&covev1.GetTenantRequest{Name: who}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.Tenant.Used.ImageBytes
	}
	if n := used("red"); n != 100 {
		t.Fatalf("red's image counts %d", n)
	}
	for _, who := range []string{"red", "blue"} {
		s.quota(who, &covev1.Quota{ImageBytes: 150})
	}
	if _, body := s.as("red", "PUT", "/v1/images?name=two", strings.NewReader("redtwo")); classIn(body) != "quota_exceeded" || !strings.Contains(body, "cove image rm") {
		t.Error(body)
	}
	if s.node.lib.Have("sha256:redtwo") {
		t.Error("what was refused takes room")
	}
	if _, body := s.as("red", "PUT", "/v1/images?name=again", strings.NewReader("redsown")); !strings.Contains(body, "again") {
		t.Errorf("the same content by another name: %s", body)
	}
	// Another's content counts as if nobody else had it, and is not taken away.
	if _, body := s.as("blue", "PUT", "/v1/images?name=mine", strings.NewReader("redsown")); !strings.Contains(body, "mine") {
		t.Error(body)
	}
	if r, b := used("red"), used("blue"); r != 100 || b != 100 {
		t.Errorf("red %d, blue %d", r, b)
	}
	if _, err := s.blue.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "mine"})); err != nil {
		t.Fatal(err)
	}
	if b := used("blue"); b != 0 || !s.node.lib.Have("sha256:redsown") {
		t.Errorf("blue %d", b)
	}
	// Who is at the bound does not fetch in vain.
	s.quota("red", &covev1.Quota{ImageBytes: 100})
	if _, body := s.as("red", "PUT", "/v1/images?name=three", strings.NewReader("redthree")); classIn(body) != "quota_exceeded" {
		t.Error(body)
	}
	st, err := s.red.Images.Pull(t.Context(), connect.NewRequest(&covev1.PullImageRequest{Reference: "reg.test/a"}))
	if err == nil {
		for st.Receive() {
		}
		err = st.Err()
	}
	wantError(t, err, sandbox.ErrQuotaExceeded, "images")
	// Everybody's names count for nobody.
	if resp, body := s.http("PUT", "/v1/images?name=common&shared=true", strings.NewReader("redtwo")); resp.StatusCode != 200 {
		t.Error(body)
	}
}
