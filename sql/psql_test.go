package sql_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// A session talks to the database like psql: text over the simple protocol.
type session struct {
	t    testing.TB
	conn *pgx.Conn
}

// psql opens a session on a fresh database, and returns it with a pool for the engine's side.
func psql(t testing.TB) (*session, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.New(t)
	return connect(t, pool.Config().ConnString()), pool
}

func connect(t testing.TB, url string) *session {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return &session{t, conn}
}

// try sends statements and returns the first column of the last row, with null as "".
func (s *session) try(statements string) (string, error) {
	results, err := s.conn.PgConn().Exec(s.t.Context(), statements).ReadAll()
	if err != nil {
		return "", err
	}
	for _, r := range results {
		err = errors.Join(err, r.Err)
	}
	if n := len(results); err == nil && n > 0 && len(results[n-1].Rows) > 0 {
		rows := results[n-1].Rows
		return string(rows[len(rows)-1][0]), nil
	}
	return "", err
}

func (s *session) do(statements string) string {
	s.t.Helper()
	value, err := s.try(statements)
	if err != nil {
		s.t.Fatalf("%.200s: %v %s", statements, err, hintOf(err))
	}
	return value
}

// codeOf returns the SQLSTATE of an error, or "" for other errors.
func codeOf(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

func hintOf(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Hint
	}
	return ""
}

// refused expects an error with the SQLSTATE, with all words in its message, and with a hint that contains the text.
// Errors of Postgres itself have no hint to check.
func (s *session) refused(statement, state, hint string, words ...string) {
	s.t.Helper()
	_, err := s.try(statement)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		s.t.Errorf("%.200s: got %v, want SQLSTATE %s", statement, err, state)
		return
	}
	if pg.Code != state {
		s.t.Errorf("%.200s: SQLSTATE %s (%s), want %s", statement, pg.Code, pg.Message, state)
	}
	for _, word := range words {
		if !strings.Contains(pg.Message, word) {
			s.t.Errorf("%.200s: message %q does not name %q", statement, pg.Message, word)
		}
	}
	if hint != "" && !strings.Contains(pg.Hint, hint) {
		s.t.Errorf("%.200s: hint %q does not say %q", statement, pg.Hint, hint)
	}
	if len(pg.Message) > 1000 {
		s.t.Errorf("%.200s: the message has %d bytes", statement, len(pg.Message))
	}
}

// byHand executes statements that guards refuse, as the owner may, and with a record.
func (s *session) byHand(statements string) string {
	s.t.Helper()
	return s.do(`BEGIN; SET LOCAL workflow.override = 'a test needs it'; ` + statements + `; COMMIT`)
}

// unbound drops the CHECKs that hold the bounds of columns, so that a test can store rows as they were possible
// before.
func (s *session) unbound() {
	s.t.Helper()
	pgtest.Unbound(s.t, s.conn.Config().ConnString())
}

// enqueue inserts a plain run and returns its id.
func (s *session) enqueue() string {
	s.t.Helper()
	return s.do(`INSERT INTO workflow_run (type) VALUES ('a.b') RETURNING id`)
}

// leased returns a run in the state leased, as a statement of the engine leaves it.
func (s *session) leased() string {
	s.t.Helper()
	id := s.enqueue()
	s.lease(id)
	return id
}

func (s *session) lease(id string) {
	s.t.Helper()
	s.do(`UPDATE workflow_run
		SET status = 'leased', lease_token = gen_random_uuid(), lease_no = lease_no + 1, attempt = attempt + 1,
		    lease_until = now() + interval '1 minute', leased_by = 'worker 7', started_at = now()
		WHERE id = '` + id + `'`)
}

// in returns a run that has reached the given state.
func (s *session) in(status string) string {
	s.t.Helper()
	if status == "pending" {
		return s.enqueue()
	}
	id := s.leased()
	if status != "leased" {
		s.do(`UPDATE workflow_run SET status = '` + status + `' WHERE id = '` + id + `'`)
	}
	return id
}

// of returns a column or expression of a run.
func (s *session) of(id, expression string) string {
	s.t.Helper()
	return s.do(`SELECT ` + expression + ` FROM workflow_run WHERE id = '` + id + `'`)
}

// events returns the event types of a run's history, without started, which always follows leased.
func (s *session) events(id string) string {
	s.t.Helper()
	return s.do(`SELECT string_agg(event_type, ' ' ORDER BY id) FROM workflow_event WHERE event_type <> 'started' AND workflow_id = '` + id + `'`)
}

func (s *session) expect(what, got, want string) {
	s.t.Helper()
	if got != want {
		s.t.Errorf("%s = %q, want %q", what, got, want)
	}
}
