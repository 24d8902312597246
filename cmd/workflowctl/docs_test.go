package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The configuration page has a row for each command, with the text of its help.
func TestDocsNameEveryCommand(t *testing.T) {
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	var missing strings.Builder
	for _, c := range newRoot().Commands() {
		if line := fmt.Sprintf("| `%s` | %s |\n", c.Use, c.Short); c.Name() != "help" && c.Name() != "completion" && !strings.Contains(string(page), line) {
			missing.WriteString(line)
		}
	}
	if missing.Len() > 0 {
		t.Errorf("docs/configuration.md lacks\n%s", missing.String())
	}
}
