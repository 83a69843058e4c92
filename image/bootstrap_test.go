package image_test

import (
	"testing"

	"github.com/cove-sandbox/cove/image/imagetest"
)

func TestBaseImage(t *testing.T) {
	lib, img := imagetest.Base(t)
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(img, path)
}
