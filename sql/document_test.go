package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
)

// SQL refuses documents in metadata, events and corrections for exactly the reasons for which jsondoc.CheckPayload
// refuses them. For a payload, by INSERT and by function, SQL checks only what is cheap to find: numbers by their
// zeros, and the number of the payload's own members. The test lists what else could be wrong, and nothing more gets
// by.
func TestDocumentsBySQL(t *testing.T) {
	s, _ := psql(t)
	s.byHand(strings.ReplaceAll(`
		INSERT INTO process_definition (id, definition) VALUES ('$', '{"process": "p", "version": 1, "start": "a", "nodes": {"a": {"do": "a.x"}}}');
		INSERT INTO process_instance (id, process_definition_id) VALUES ('$', '$')`, "$", nobody))
	members := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"%x":1,`, i)
		}
		return "{" + strings.TrimSuffix(b.String(), ",") + "}"
	}
	key := func(k string) string { return `{"` + k + `":1}` }
	fill := `"fill":"` + strings.Repeat("x", 400) + `",` // the shortest documents are not checked
	refused, passed := 0, 0
	for _, document := range []string{
		`{"n":1e308}`, `{"n":-1e308}`, `{"n":1` + strings.Repeat("0", 308) + `}`, `{"n":1e309}`, `{"n":-1e309}`, `{"a":[[{"n":1e400}]]}`, `{"n":1.7e308}`,
		`{"n":` + strings.Repeat("9", 309) + `}`, `{"n":` + strings.Repeat("9", 308) + `.5}`, `{"n":0.` + strings.Repeat("9", 400) + `}`, `{"n":1e-400}`,
		`{"n":"` + strings.Repeat("9", 400) + `"}`, `{"n":"` + strings.Repeat("9", 90_000) + `"}`, key(strings.Repeat("9", 400)),
		key(strings.Repeat("k", 512)), key(strings.Repeat("k", 513)), key(strings.Repeat("k", 100_000)), `{"a":[{"b":` + key(strings.Repeat("k", 513)) + `}]}`,
		key(strings.Repeat("𝄞", 128)), key(strings.Repeat("𝄞", 129)), key(strings.Repeat(`\"`, 512)), key(strings.Repeat(`\"`, 513)), key(strings.Repeat(`\"k\n`, 171)), key(strings.Repeat(`\\`, 513)),
		key(strings.Repeat(`\u0001`, 512)), key(strings.Repeat(`\u0001`, 513)), key(strings.Repeat(":", 513)), key(strings.Repeat(", ", 257)),
		`{"v":"` + strings.Repeat("k", 1000) + `\":"}`, `{"v":"` + strings.Repeat("k", 1000) + `","w":1}`,
		members(10_000), members(10_001), `{"a":[` + members(10_001) + `]}`, `{"a":` + members(6000) + `,"b":` + members(6000) + `}`, members(20_000),
	} {
		for _, document := range []string{document, "{" + fill + document[1:]} {
			if strings.Count(document, ":1,") > 9000 && strings.Contains(document, "fill") {
				continue // fill would make it one member too many
			}
			err := jsondoc.CheckPayload([]byte(document))
			if err != nil {
				refused++
			}
			for how, statement := range map[string]string{
				"INSERT":    `INSERT INTO workflow_run (type, payload) VALUES ('a.b', '` + document + `')`,
				"function":  `SELECT workflow_enqueue('a.b', '` + document + `')`,
				"metadata":  `INSERT INTO workflow_run (type, metadata) VALUES ('a.b', '` + document + `')`,
				"UPDATE":    `UPDATE workflow_run SET metadata = '` + document + `' WHERE id = (SELECT id FROM workflow_run LIMIT 1)`,
				"event":     `SELECT outbox_emit(gen_random_uuid(), 'a.b', '` + document + `')`,
				"corrected": `SELECT process_correct('` + nobody + `', 'a', '` + document + `', 'why')`,
			} {
				if len(document) > 12_000 && (how == "metadata" || how == "UPDATE") {
					continue // these refuse it because of its size
				}
				if err == nil {
					if _, refusal := s.try(statement); refusal != nil {
						t.Errorf("%s of %.60s… (%d bytes): %v", how, document, len(document), refusal)
					}
					continue
				}
				if payload := how == "INSERT" || how == "function"; payload && !cheaplySeen(document) {
					if _, refusal := s.try(statement); refusal != nil {
						t.Errorf("%s of %.60s… (%d bytes) is refused, which is not what documents say: %v", how, document, len(document), refusal)
					}
					passed++
					continue
				}
				s.refused(statement, "23514", "", map[bool]string{true: "process_correct"}[how == "corrected" && strings.Contains(err.Error(), "1e308")])
			}
		}
	}
	if refused < 20 {
		t.Errorf("%d documents were refused: too few to prove anything", refused)
	}
	t.Logf("%d documents refused by Go, %d payloads of them stored by SQL", refused, passed)
}

// cheaplySeen reports whether SQL refuses a payload that Go refuses: it has a number with an exponent, or with as
// many zeros, or too many members of its own.
func cheaplySeen(document string) bool {
	return strings.Contains(document, "e308") || strings.Contains(document, "e309") || strings.Contains(document, "e400") || strings.Contains(document, strings.Repeat("0", 32)) ||
		strings.Count(document, ":1,") >= 10_000 && !strings.Contains(document, `"a":[`)
}
