package sql_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/sql"
)

// Everything that the head of a migration lists exists under that name, unless a later one drops it, and the list is
// aligned. The comments of workflow_set_aside name each kind, and say that the refused outcome is not with one worker
// alone.
func TestWords(t *testing.T) {
	s, _ := psql(t)
	listed := regexp.MustCompile(`(?m)^--   ([a-z]+_[a-z_0-9]+)( +)`)
	migrations := sql.Migrations()
	for i, m := range migrations {
		width := 0
		dropped := func(name string) bool {
			return slices.ContainsFunc(migrations[i+1:], func(later sql.Migration) bool { return strings.Contains(later.SQL, "DROP TRIGGER "+name+" ") })
		}
		for _, found := range listed.FindAllStringSubmatch(m.SQL, -1) {
			if s.do(strings.ReplaceAll(`SELECT to_regclass('$') IS NOT NULL OR EXISTS (SELECT FROM pg_proc WHERE proname = '$' OR '$' = ANY (proargnames)) OR EXISTS (SELECT FROM pg_trigger WHERE tgname = '$')`,
				"$", found[1])) != "t" && !dropped(found[1]) {
				t.Errorf("%s lists %s, which is not there", m.Name, found[1])
			}
			if width > 0 && len(found[0]) != width {
				t.Errorf("%s: %s is out of line", m.Name, found[1])
			}
			width = len(found[0])
		}
	}
	kind := s.do(`SELECT col_description('workflow_set_aside'::regclass, attnum) FROM pg_attribute WHERE attrelid = 'workflow_set_aside'::regclass AND attname = 'kind'`)
	for _, word := range []string{"run", "wait", "retention"} {
		if !strings.Contains(kind, word) {
			t.Errorf("the comment of kind does not tell of %s: %s", word, kind)
		}
	}
	statement := s.do(`SELECT col_description('workflow_set_aside'::regclass, attnum) FROM pg_attribute WHERE attrelid = 'workflow_set_aside'::regclass AND attname = 'statement'`)
	if !strings.Contains(statement, "workflow_kept") || !strings.Contains(statement, "extend") {
		t.Errorf("the comment of statement: %s", statement)
	}
}
