package pgtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Elapse moves every timestamp of every table by the same amount, in spite of triggers, and changes nothing else.
func TestElapse(t *testing.T) {
	pool := pgtest.New(t)
	exec1(t, pool, `
		CREATE TABLE "Odd Name" (
			"at" timestamptz UNIQUE DEFERRABLE, until timestamptz, day date,
			later timestamptz GENERATED ALWAYS AS ("at") STORED);
		INSERT INTO "Odd Name" VALUES
			('2030-01-01 12:00Z', 'infinity', '2030-01-01'),
			('2030-01-01 11:00Z', NULL, NULL);
		CREATE TABLE parts (at timestamptz) PARTITION BY RANGE (at);
		CREATE TABLE old_part PARTITION OF parts FOR VALUES FROM (MINVALUE) TO ('2030-01-01');
		CREATE TABLE new_part PARTITION OF parts FOR VALUES FROM ('2030-01-01') TO (MAXVALUE);
		INSERT INTO parts VALUES ('2030-01-01 00:30Z');
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			RAISE 'refused';
		END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON "Odd Name" FOR EACH ROW EXECUTE FUNCTION refuse();
		CREATE VIEW looked_at AS SELECT * FROM "Odd Name"`)
	migrated := query[*time.Time](t, pool, "SELECT min(applied_at) FROM workflow_schema")

	pgtest.Elapse(t, pool, time.Hour+time.Microsecond)

	for sql, want := range map[string]string{
		`SELECT string_agg(to_char("at" AT TIME ZONE 'UTC', 'HH24:MI:SS.US'), ' ' ORDER BY "at") FROM "Odd Name"`: "09:59:59.999999 10:59:59.999999",
		`SELECT string_agg(coalesce(until::text, 'null'), ' ' ORDER BY "at") FROM "Odd Name"`:                     "null infinity",
		`SELECT max(day)::text FROM "Odd Name"`:                                                                   "2030-01-01",
		`SELECT (later = "at")::text FROM "Odd Name" LIMIT 1`:                                                     "true",
		`SELECT tableoid::regclass::text FROM parts`:                                                              "old_part",
	} {
		if got := query[string](t, pool, sql); got != want {
			t.Errorf("%s = %q, want %q", sql, got, want)
		}
	}
	if got := query[*time.Time](t, pool, "SELECT min(applied_at) FROM workflow_schema"); !got.Equal(*migrated) {
		t.Errorf("migrated at %v, want %v", got, migrated)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE "Odd Name" SET day = NULL`); err == nil {
		t.Error("the trigger is still disabled")
	}
}

// Elapse waits for a writer, and does not make it fail.
func TestElapseWaits(t *testing.T) {
	pool := pgtest.New(t)
	exec1(t, pool, "CREATE TABLE busy AS SELECT timestamptz '2030-01-01 12:00Z' AS at")
	conn, err := pgx.Connect(t.Context(), pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	writer, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Exec(t.Context(), "UPDATE busy SET at = at + interval '1 day'"); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pgtest.Elapse(t, pool, time.Hour)
	}()
	pgtest.Blocked(t, pool, 1)
	if err := writer.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-done
	want := time.Date(2030, 1, 2, 11, 0, 0, 0, time.UTC)
	if got := query[time.Time](t, pool, "SELECT at FROM busy"); !got.Equal(want) {
		t.Errorf("at = %v, want %v", got, want)
	}
}
