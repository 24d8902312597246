package run

import (
	"errors"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A document that Enqueue accepts is stored with the same meaning. Any other document is refused before it is sent, with
// a path, a reason and a fix. The database itself refuses only types and keys, never a document.
func FuzzEnqueue(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"a":[1.10,-0,-0.0,1e-400,1E+2,9223372036854775808,"é\n\u001b\ud83d\ude00<&>\\u0000"],"":null,"A":{}}`,
		`{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"a":"\u0000"}`, `{"\u0000":1}`, `{"a":"\ud800"}`, "{\"\xff\":1}", `{"a":1e400}`, `{"a":1e-16384}`, `{"a":0e99999}`,
		`[]`, `{} {}`, "\ufeff{}", strings.Repeat(`{"a":`, 64) + "1" + strings.Repeat("}", 64), strings.Repeat(`{"a":`, 65) + "1" + strings.Repeat("}", 65),
	} {
		f.Add([]byte(seed), []byte(`{"tag":"x"}`), "a.b", "key")
	}
	f.Add([]byte(`{}`), []byte(`{"a":`), "A", "\x00")
	pool := pgtest.New(f)
	f.Fuzz(func(t *testing.T, payload, metadata []byte, typ, key string) {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context())
		added, err := Enqueue(t.Context(), tx, New{Type: typ, Payload: payload, Metadata: metadata, IdempotencyKey: key})
		var document *DocumentError
		var pg *pgconn.PgError
		switch {
		case errors.As(err, &document):
			if !strings.HasPrefix(document.Path, "$") || document.Reason == "" || document.Fix == "" || !utf8.ValidString(err.Error()) ||
				strings.ContainsFunc(err.Error(), unicode.IsControl) {
				t.Fatalf("unfit error %q", err)
			}
			return
		case errors.As(err, &pg):
			if strings.Contains(typ+key, "\x00") && pg.Code == "22021" || !validType(typ) && strings.Contains(pg.Message, "type") ||
				utf8.RuneCountInString(key) > 200 && strings.Contains(pg.Message, "idempotency_key") {
				return
			}
			t.Fatalf("the database refuses what was accepted: %v", err)
		case err != nil && !(utf8.ValidString(typ) && utf8.ValidString(key)):
			return
		case err != nil:
			t.Fatal(err)
		}
		stored, err := Read(t.Context(), tx, added.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, pair := range [][2][]byte{{payload, stored.Payload}, {metadata, stored.Metadata}} {
			if !pgtest.SameJSON(t, pair[0], pair[1]) {
				t.Fatalf("%s was stored as %s", pair[0], pair[1])
			}
		}
	})
}

func validType(typ string) bool {
	segments := strings.Split(typ, ".")
	for _, s := range segments {
		if s == "" || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_-") != "" {
			return false
		}
	}
	return len(segments) > 1 && len(typ) <= 200
}
