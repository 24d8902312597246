package model

import (
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"
)

// A row is a run as the database has it.
type row struct {
	state
	id             uuid.UUID
	token, settled uuid.NullUUID
	history        []event
}

// compare checks that the database and the model agree about each run and its history.
func (w *world) compare(*rapid.T) {
	rows := w.rows()
	for _, s := range w.runs {
		got := rows[slices.IndexFunc(rows, func(r row) bool { return r.id == s.id })]
		got.Timeout, got.Policy = s.Timeout, s.Policy // which are not columns
		got.Token, got.Settled = slices.Index(s.tokens, got.token.UUID), slices.Index(s.tokens, got.settled.UUID)
		if got.state != s.state {
			w.Fatalf("%s:\nthe row is   %s\nthe model is %s", s.name, got.state, s)
		}
		if !slices.Equal(got.history, s.history) {
			w.Fatalf("%s:\nits history is %v\nof the model   %v", s.name, got.history, s.history)
		}
	}
}

func (w *world) rows() []row {
	rows, _ := w.pool.Query(w.test.Context(), `
		SELECT id, status, attempt, max_attempts, coalesce(policy_attempts, 0), coalesce(policy_attempts = 0, false), postponed, lease_no, lease_token, settled_token, coalesce(deadline_at = started_at, false),
		       suspect, held_at IS NOT NULL, deleted_at IS NOT NULL, priority,
		       coalesce(greatest(ceil(extract(epoch FROM run_at - clock_timestamp()) / 3600), 0), 0)::int,
		       coalesce(greatest(ceil(extract(epoch FROM lease_until - clock_timestamp()) / 3600), 0), 0)::int,
		       coalesce(greatest(ceil(extract(epoch FROM deadline_at - clock_timestamp()) / 3600), 0), 0)::int,
		       (SELECT jsonb_agg(jsonb_build_object('Type', event_type, 'Attempt', attempt, 'LeaseNo', lease_no,
		                                            'Actor', CASE WHEN actor = ANY ($1) THEN actor ELSE 'someone' END) ORDER BY e.id)
		        FROM workflow_event e
		        WHERE workflow_id = r.id AND event_type <> 'started')
		FROM workflow_run r`, workers)
	all, err := pgx.CollectRows(rows, func(from pgx.CollectableRow) (is row, err error) {
		err = from.Scan(&is.id, &is.Status, &is.Attempt, &is.Max, &is.Written, &is.Granted, &is.Postponed, &is.LeaseNo, &is.token, &is.settled, &is.Uncharged,
			&is.Suspect, &is.Held, &is.Deleted, &is.Priority, &is.Due, &is.Left, &is.Limit, &is.history)
		return is, err
	})
	w.must(err)
	return all
}
