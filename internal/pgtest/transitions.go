package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// LogTransitions makes the database record every change of a run's status, by anyone, in the table transition (run,
// was, status, lease_no). It does not depend on the engine's own history.
func LogTransitions(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	for _, query := range []string{
		`CREATE TABLE transition (run uuid NOT NULL, was text NOT NULL, status text NOT NULL, lease_no bigint NOT NULL)`,
		`CREATE FUNCTION log_transition() RETURNS trigger LANGUAGE plpgsql AS $$
		 BEGIN INSERT INTO transition VALUES (NEW.id, OLD.status, NEW.status, NEW.lease_no); RETURN NULL; END $$`,
		`CREATE TRIGGER log_transition AFTER UPDATE ON workflow_run
		 FOR EACH ROW WHEN (NEW.status <> OLD.status) EXECUTE FUNCTION log_transition()`,
	} {
		if _, err := pool.Exec(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
}
