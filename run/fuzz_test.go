package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/big"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// What may be enqueued is stored with the same meaning, and in no more bytes than were
// counted. What may not is refused with a path, a reason and a fix, before it is sent: the
// database has nothing left to refuse but the type and the key.
func FuzzEnqueue(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"a":[1.10,-0,-0.0,1e-400,1E+2,9223372036854775808,"é\n\u001b\ud83d\ude00<&>\\u0000"],"":null,"A":{}}`,
		`{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"a":"\u0000"}`, `{"\u0000":1}`, `{"a":"\ud800"}`, "{\"\xff\":1}", `{"a":1e400}`, `{"a":1e-16384}`, `{"a":0e99999}`,
		`[]`, `{} {}`, "\ufeff{}", nested(64), nested(65),
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
			if !same(meaning(t, pair[0]), meaning(t, pair[1])) {
				t.Fatalf("%s was stored as %s", pair[0], pair[1])
			}
		}
		s := scanners.Get().(*scanner)
		if e := s.scan("payload", payload, MaxPayload, true); e != nil || len(stored.Payload) > s.stored {
			t.Fatalf("%d bytes are stored, counted were %d: %v", len(stored.Payload), s.stored, e)
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

// Any result that passes CheckResult is taken by Postgres and comes back with the same
// meaning; one that does not is no JSON, or breaks a rule that has a name.
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
			var document *DocumentError
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
		if !same(meaning(t, result), meaning(t, stored)) {
			t.Fatalf("%s was stored as %s", result, stored)
		}
	})
}

// Whatever an error says, its failure is stored as it is: the code, the message, the stack.
func FuzzNewFailure(f *testing.F) {
	f.Add("", "", "", "")
	f.Add("a\x00b\xff\ud7ff", "my code\x00", "goroutine 1\n\x1b", "worker-1")
	f.Add(strings.Repeat("é", 5000), strings.Repeat("c", 200), strings.Repeat("\xf0\x9f", 20000), "<&>\u2028")
	pool := pgtest.New(f)
	f.Fuzz(func(t *testing.T, text, code, stack, worker string) {
		if !utf8.ValidString(worker) || strings.Contains(worker, "\x00") {
			return // worker.Config refuses it
		}
		err := WithCode(code, &PanicError{Value: text, Stack: []byte(stack)})
		failure := NewFailure(err, Info{Attempt: 1, Worker: worker, LeaseNo: 2})
		columns, err := outcomeColumns([]Outcome{{Verdict: Fail, Failure: failure}})
		if err != nil {
			t.Fatal(err)
		}
		rows, _ := pool.Query(t.Context(), `SELECT ($1::jsonb[])[1], ($2::text[])[1]`, columns[4], columns[5])
		type row struct {
			Error   Failure
			Message string
		}
		stored, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[row])
		if err != nil {
			t.Fatalf("Postgres refuses %+v: %v", failure, err)
		}
		if stored.Error != *failure || stored.Message != failure.Message {
			t.Fatalf("%+v was stored as %+v", failure, stored)
		}
		if failure.Code == "" || failure.Message == "" || len(failure.Message) > maxMessage || len(failure.Stack) > maxStack {
			t.Fatalf("unfit failure %+v", failure)
		}
	})
}

func meaning(t *testing.T, document []byte) (v any) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		t.Fatalf("%q: %v", document, err)
	}
	return v
}

// same reports whether two documents mean the same: numbers their value, all else itself.
func same(a, b any) bool {
	switch a := a.(type) {
	case json.Number:
		b, ok := b.(json.Number)
		x, _ := new(big.Rat).SetString(a.String())
		y, _ := new(big.Rat).SetString(b.String())
		return ok && x.Cmp(y) == 0
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for i := range a {
			if !same(a[i], b[i]) {
				return false
			}
		}
		return true
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for k := range a {
			if v, ok := b[k]; !ok || !same(a[k], v) {
				return false
			}
		}
		return true
	}
	return a == b
}
