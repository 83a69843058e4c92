package server

import (
	"maps"
	"slices"
	"testing"

	"github.com/cove-sandbox/cove/internal/openapi"
)

// What is described is what is served.
func TestTheDescriptionNamesEveryRoute(t *testing.T) {
	w := newWorld(t)
	var described []string
	for _, r := range openapi.Routes {
		described = append(described, r.Pattern)
	}
	slices.Sort(described)
	if served := slices.Sorted(maps.Keys(nativeRoutes(w.server))); !slices.Equal(described, served) {
		t.Errorf("served:    %q\ndescribed: %q", served, described)
	}
	if resp, body := w.http("GET", "/openapi.json", nil, "Authorization", ""); resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || len(body) < 10_000 {
		t.Errorf("%d %.100s", resp.StatusCode, body)
	}
}
