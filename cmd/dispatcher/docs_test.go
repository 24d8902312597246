package main_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The configuration page links to the page of every sink.
func TestDocsNameEverySink(t *testing.T) {
	text, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob("../../docs/sinks/*.md")
	if err != nil || len(pages) < 6 {
		t.Fatalf("%d pages of sinks, %v", len(pages), err)
	}
	for _, page := range pages {
		if link := "(sinks/" + filepath.Base(page) + ")"; !strings.Contains(string(text), link) {
			t.Errorf("docs/configuration.md has no link %s", link)
		}
	}
}
