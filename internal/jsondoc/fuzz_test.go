package jsondoc

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Postgres accepts any result that passes CheckResult, and returns it with the same meaning, in no more bytes
// than were counted. A result that does not pass is no JSON, or breaks one of the documented rules.
func FuzzCheckResult(f *testing.F) {
	for _, seed := range []string{
		``, `null`, ` "a\/b" `, `-0`, `1e308`, `1.1e308`, `1e-16383`, `[1,[2],{}]`, `"\u0000"`, `"\\u0000"`, `"\uD83D"`, `{"a":{"b":1,"b":2}}`, `nul`, "\xff", nested(65),
	} {
		f.Add([]byte(seed))
	}
	pool := pgtest.New(f)
	rules := []string{"this key is there twice", `\u0000`, "lone surrogate", "invalid UTF-8", "number ", "nested deeper than", "the limit is"}
	f.Fuzz(func(t *testing.T, result []byte) {
		err := CheckResult(result)
		if err != nil {
			var document *Error
			if !errors.As(err, &document) || document.Reason == "" || document.Fix == "" || !strings.HasPrefix(document.Path, "$") {
				t.Fatalf("unfit error %q", err)
			}
			named := false
			for _, rule := range rules {
				named = named || strings.Contains(document.Reason, rule)
			}
			if !named && json.Valid(result) {
				t.Fatalf("%q is fine, but refused: %v", result, err)
			}
			return
		}
		rows, _ := pool.Query(t.Context(), `SELECT $1::jsonb`, json.RawMessage(result))
		stored, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[json.RawMessage])
		if err != nil {
			t.Fatalf("%q is accepted, but Postgres says: %v", result, err)
		}
		s := scanners.Get().(*scanner)
		if e := s.scan("result", result, MaxResult, false); e != nil || len(stored) > s.stored {
			t.Fatalf("%d bytes are stored, counted were %d: %v", len(stored), s.stored, e)
		}
		if !pgtest.SameJSON(t, result, stored) {
			t.Fatalf("%s was stored as %s", result, stored)
		}
	})
}
