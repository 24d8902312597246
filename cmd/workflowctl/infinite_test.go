package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// If any time of any row is infinite, show, top and doctor still work.
func TestInfiniteTimes(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	do := func(statements string) error {
		_, err := conn.PgConn().Exec(t.Context(), statements).ReadAll()
		return err
	}
	all := append(append([]string{}, examinations...), outboxExaminations...)
	for _, l := range looks {
		all = append(all, l.query)
	}
	for _, p := range pieces {
		all = append(all, p.query)
	}
	once := make([]string, len(all)) // each is planned only once, or planning would take most of the time
	for n, query := range all {
		if err := do(fmt.Sprintf(`PREPARE q%d AS %s`, n, query)); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		once[n] = fmt.Sprintf(`EXECUTE q%d`, n)
	}
	pgtest.Infinite(t, conn, func(what string) {
		if do(`SAVEPOINT here; `+strings.Join(once, "; ")) == nil {
			return
		}
		for _, query := range all { // find out which query fails
			if err := do(`ROLLBACK TO here; ` + query); err != nil {
				t.Errorf("%s: %s: %v", what, query, err)
			}
		}
		if err := do(`ROLLBACK TO here`); err != nil {
			t.Fatal(err)
		}
	})
}
