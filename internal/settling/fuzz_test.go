package settling

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/simple-workflow/simple-workflow/internal/clean"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/run"
)

// The failure of any error is stored unchanged: its code, message and stack.
func FuzzNewFailure(f *testing.F) {
	f.Add("", "", "", "")
	f.Add("a\x00b\xff\ud7ff", "my code\x00", "goroutine 1\n\x1b", "worker-1")
	f.Add(strings.Repeat("é", 5000), strings.Repeat("c", 200), strings.Repeat("\xf0\x9f", 20000), "<&>\u2028")
	pool := pgtest.New(f)
	f.Fuzz(func(t *testing.T, text, code, stack, worker string) {
		if !utf8.ValidString(worker) || strings.Contains(worker, "\x00") {
			return // worker.Config refuses it
		}
		err := run.WithCode(code, &run.PanicError{Value: text, Stack: []byte(stack)})
		failure := NewFailure(err, run.Info{Attempt: 1, Worker: worker, LeaseNo: 2})
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
		if failure.Code == "" || failure.Message == "" || len(failure.Message) > clean.MaxMessage || len(failure.Stack) > maxStack {
			t.Fatalf("unfit failure %+v", failure)
		}
	})
}
