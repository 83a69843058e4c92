package sandbox

import (
	"strings"
	"testing"
)

func TestSuggest(t *testing.T) {
	images := []string{"base", "python:3.12", "python:3.11", "ubuntu", "node"}
	for name, want := range map[string]string{
		"bse": "base", "baes": "base", "bass": "base", "bases": "base", "Base": "base",
		"ubunut": "ubuntu", "pyton:3.12": "python:3.12", "python:3.13": "python:3.12",
		"base": "", "": "", "x": "", "redis": "", "b": "", "completely-different": "",
		strings.Repeat("a", 1<<20): "",
	} {
		if got := Suggest(name, images); got != want {
			t.Errorf("Suggest(%.40q) = %q, want %q", name, got, want)
		}
	}
	if got := Suggest("base", nil); got != "" {
		t.Errorf("from nothing: %q", got)
	}
	if got := DidYouMean("bse", images); got != "did you mean 'base'?" {
		t.Error(got)
	}
	if got := DidYouMean("redis", images); got != "" {
		t.Error(got)
	}
}
