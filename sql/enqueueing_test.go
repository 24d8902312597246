package sql_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var (
	sqlBlock = regexp.MustCompile("(?s)```sql\n(.*?)```")
	anID     = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`)
)

// The SQL blocks of docs/enqueueing.md can be executed in order, and return what the page shows below them.
func TestEnqueueingPage(t *testing.T) {
	var page []byte
	for _, name := range []string{"enqueueing.md", "how-to/unique.md"} {
		text, err := os.ReadFile("../docs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		page = append(page, text...)
	}
	s, _ := psql(t)
	answered := 0
	for _, block := range sqlBlock.FindAllStringSubmatch(string(page), -1) {
		statement, said, _ := strings.Cut(strings.TrimSpace(block[1]), "\n-- ")
		got, err := s.try(statement)
		want, hint, _ := strings.Cut(said, "\n-- HINT: ")
		message, refused := strings.CutPrefix(want, "ERROR: ")
		switch {
		case refused:
			text := ""
			if err != nil {
				text = anID.ReplaceAllString(err.Error()+" "+hintOf(err), "…")
			}
			if !strings.Contains(text, message) || !strings.Contains(text, hint) {
				t.Errorf("%s\nsays %s\nwant %s, %s", statement, text, message, hint)
			}
			answered++
		case err != nil:
			t.Errorf("%s: %v", statement, err)
		case want == "(0 rows)" && got != "", want != "" && want != "(0 rows)" && got != want, want == "" && got == "":
			t.Errorf("%s\nanswers %q, want %q", statement, got, want)
		case want != "":
			answered++
		}
	}
	if answered != 4 {
		t.Errorf("%d blocks have an answer, want 4", answered)
	}
}
