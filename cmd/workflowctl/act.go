package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// An action calls a function of the database, which returns a text that says what it did.
type action struct {
	use, short string
	query      string
	args       []func(string) (any, error) // how each argument is read
	done       string                      // a successful answer begins with this, and never with 0
}

var actions = []action{
	{"cancel RUN REASON", "Cancel a run for good", `SELECT workflow_cancel($1, $2)`, arguments(anID, aText), "cancelled"},
	{"retry RUN", "Give a failed run another attempt, now", `SELECT workflow_retry($1)`, arguments(anID), "pending"},
	{"delete RUN REASON", "Soft-delete a run: it is never leased again, and its key is free", `SELECT workflow_delete($1, $2)`, arguments(anID, aText), "deleted"},
	{"reschedule RUN TIME", "Change when a pending run is due, in RFC 3339", `SELECT workflow_reschedule($1, $2)`, arguments(anID, aTime), "due"},
	{"prioritize RUN PRIORITY", "Change the priority of a pending run, from -100 (last) to 100 (first)", `SELECT workflow_prioritize($1, $2::text::int)`, arguments(anID, aText), "priority"},
	{"pause PREFIX REASON", "Stop leasing runs of a type, or of a prefix that ends with a dot", `SELECT workflow_pause($1, $2)`, arguments(aText, aText), "paused"},
	{"resume PREFIX", "End a pause", `SELECT workflow_resume($1)`, arguments(aText), "resumed"},
	{"close-breaker TYPE", "Close the breaker of a type, so that all its runs are leased again", `SELECT workflow_close_breaker($1)`, arguments(aText), "closed"},
	{"release WORKER REASON", "Take a worker's leases away at once", `SELECT workflow_release($1, $2) || ' leases taken away'`, arguments(aText, aText), ""},
	{"hold RUN", "Hold a pending run until let-go", `WITH held AS (UPDATE workflow_run SET held_at = now() WHERE id = $1 AND status = 'pending' AND held_at IS NULL AND deleted_at IS NULL RETURNING 1)
		SELECT CASE WHEN EXISTS (SELECT FROM held) THEN 'held' ELSE coalesce((SELECT CASE WHEN deleted_at IS NOT NULL THEN 'deleted' WHEN held_at IS NOT NULL THEN 'already held'
			WHEN status = 'pending' THEN 'it has changed meanwhile; look again' ELSE 'not pending: ' || status END FROM workflow_run WHERE id = $1), 'not found') END`, arguments(anID), "held"},
	{"let-go RUN", "End a hold", `WITH of AS MATERIALIZED (SELECT r.held_at, i.id FROM workflow_run r JOIN process_token t ON t.id = r.token_id JOIN process_instance i ON i.id = t.instance_id WHERE r.id = $1 AND r.held_at = i.paused_at),
		gone AS (UPDATE workflow_run SET held_at = NULL WHERE id = $1 AND held_at IS NOT NULL AND deleted_at IS NULL AND NOT EXISTS (SELECT FROM of) RETURNING 1)
		SELECT CASE WHEN EXISTS (SELECT FROM gone) THEN 'let go' ELSE coalesce((SELECT 'its process is paused: workflowctl resume-process ' || id FROM of),
			(SELECT CASE WHEN deleted_at IS NOT NULL THEN 'deleted' ELSE 'not held: ' || status END FROM workflow_run WHERE id = $1), 'not found') END`, arguments(anID), "let go"},
	{"settle-again RUN", "Try an outcome that the database refuses again now", `SELECT workflow_settle_again($1)`, arguments(anID), "tried again"},
	{"fail-run RUN REASON", "Fail a run whose outcome the database refuses", `SELECT workflow_fail($1, $2)`, arguments(anID, aText), "to be failed"},
	{"pause-process INSTANCE", "Pause an instance of a process, and the instances that it has called", `SELECT process_pause($1)`, arguments(anID), "paused"},
	{"resume-process INSTANCE", "Resume a paused instance", `SELECT process_resume($1)`, arguments(anID), "resumed"},
	{"correct INSTANCE NODE VALUE REASON", "Replace what a node has returned by another value, in JSON", `SELECT process_correct($1, $2, $3, $4)`, arguments(anID, aText, someJSON, aText), "corrected"},
	{"assign TASK WHO", "Assign a user task to a person", `SELECT process_task_assign($1, $2)`, arguments(anID, aText), "assigned"},
	{"claim TASK", "Claim a task of your groups; tasks lists them", `SELECT process_task_claim($1)`, arguments(anID), "assigned"},
	{"give-back TASK", "Give back a task that you have claimed", `SELECT process_task_release($1)`, arguments(anID), "released"},
	{"join-group ROLE GROUP", "Let a database role see, claim and complete the tasks of a group", `SELECT workflow_join_group($1, $2)`, arguments(aText, aText), "joined"},
	{"leave-group ROLE GROUP", "Remove a database role from a group", `SELECT workflow_leave_group($1, $2)`, arguments(aText, aText), "left"},
	{"replay FROM UNTIL", "Publish the events between two times again, in RFC 3339", `SELECT outbox_replay($1, $2) || ' events are published again'`, arguments(aTime, aTime), ""},
	{"replay-parked SINK", "Publish the parked events of a sink again", `SELECT outbox_replay_parked($1) || ' events are published again'`, arguments(aText), ""},
	{"set-right", "Repair what dispatchers use, after a restore of data alone: lanes, floors, the sequence of ids", `SELECT outbox_set_right_v1()`, arguments(), ""},
}

func arguments(all ...func(string) (any, error)) []func(string) (any, error) { return all }

func aText(text string) (any, error) {
	if strings.TrimSpace(text) == "" {
		return nil, errors.New("it is empty")
	}
	return text, nil
}

func anID(text string) (any, error) {
	id, err := uuid.Parse(text)
	if err != nil {
		return nil, errors.New("use an id, a uuid")
	}
	return id, nil
}

func someJSON(text string) (any, error) {
	if !json.Valid([]byte(text)) {
		return nil, errors.New("use JSON, with quotes around a text")
	}
	return json.RawMessage(text), nil
}

func aTime(text string) (any, error) {
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return nil, errors.New("use a time such as 2027-01-31T12:00:00Z")
	}
	return at, nil
}

func newActions() (all []*cobra.Command) {
	for _, a := range actions {
		all = append(all, a.command())
	}
	return all
}

func (a action) command() *cobra.Command {
	var t target
	names := strings.Fields(a.use)
	command := &cobra.Command{
		Use:   a.use,
		Short: a.short,
		Args:  takes(len(a.args)),
		RunE: func(cmd *cobra.Command, texts []string) error {
			var args []any
			for k, text := range texts {
				arg, err := a.args[k](text)
				if err != nil {
					return fmt.Errorf("%s=%.120q: %w", names[k+1], text, err)
				}
				args = append(args, arg)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				var answer string
				if err := conn.QueryRow(cmd.Context(), a.query, args...).Scan(&answer); err != nil {
					return inWords(err)
				}
				if !strings.HasPrefix(answer, a.done) || strings.HasPrefix(answer, "0 ") {
					return errors.New(answer)
				}
				fmt.Fprintln(cmd.OutOrStdout(), answer)
				return nil
			})
		},
	}
	t.flags(command.Flags())
	return command
}

func newRedrive() *cobra.Command {
	var t target
	var code, since string
	most, perSecond, attempts, do := 100, 0.0, 1, false
	redrive := &cobra.Command{
		Use:   "redrive PREFIX",
		Short: "Retry failed runs of a type or prefix: first look, then a few, then the rest at a limited rate",
		Long: `Give failed runs of a type, or of a prefix that ends with a dot, further attempts, the oldest first.
Without --do it only shows them:

  workflowctl redrive billing. --code timeout
  workflowctl redrive billing. --code timeout --most 10 --do
  workflowctl redrive billing. --code timeout --most 100000 --per-second 50 --do`,
		Args: takes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			from := "-infinity"
			if since != "" {
				if _, err := aTime(since); err != nil {
					return fmt.Errorf("--since=%.120q: %w", since, err)
				}
				from = since
			}
			if perSecond < 0 {
				return fmt.Errorf("--per-second=%g: use more than 0, or leave it out", perSecond)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				query := `SELECT * FROM workflow_redrive($1::text, nullif($2::text, ''), since => $3::text::timestamptz, most => $4::int, per_second => nullif($5::float8, 0),
					attempts => $6::int, dry_run => $7::boolean)`
				err := printQuery(cmd.Context(), cmd.OutOrStdout(), conn, query, false, args[0], code, from, most, perSecond, attempts, !do)
				return looked(cmd, err, do, most)
			})
		},
	}
	redrive.Flags().StringVar(&code, "code", "", "only those that failed with this code")
	redrive.Flags().StringVar(&since, "since", "", "only those that failed since then, in RFC 3339")
	redrive.Flags().IntVar(&most, "most", most, "maximum number")
	redrive.Flags().Float64Var(&perSecond, "per-second", perSecond, "spread them over time (default: all now)")
	redrive.Flags().IntVar(&attempts, "attempts", attempts, "how many further attempts each may have")
	redrive.Flags().BoolVar(&do, "do", do, "do it; without this flag, only show what would be done")
	t.flags(redrive.Flags())
	return redrive
}

func newRetryIncidents() *cobra.Command {
	var t target
	var process, node, code string
	version, most, perSecond, do, asJSON := 0, 100, 0.0, false, false
	retry := &cobra.Command{
		Use:   "retry-incidents",
		Short: "Retry many incidents of processes: first look, then a few, then the rest at a limited rate",
		Long: `Retry open incidents of a process, node, version or code, the oldest first. Incidents whose retry is under way are left out.
Without --do it only shows them:

  workflowctl retry-incidents --process order --node pay --code handler_error
  workflowctl retry-incidents --process order --node pay --most 10 --do
  workflowctl retry-incidents --process order --node pay --most 100000 --per-second 50 --do`,
		Args: takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if perSecond < 0 {
				return fmt.Errorf("--per-second=%g: use more than 0, or leave it out", perSecond)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				query := `SELECT * FROM process_retry_incidents(nullif($1::text, ''), nullif($2::text, ''), nullif($3::text, ''), nullif($4::int, 0), most => $5::int,
					per_second => nullif($6::float8, 0), dry_run => $7::boolean)`
				err := printQuery(cmd.Context(), cmd.OutOrStdout(), conn, query, asJSON, process, node, code, version, most, perSecond, !do)
				return looked(cmd, err, do, most)
			})
		},
	}
	retry.Flags().StringVar(&process, "process", "", "only those of a process")
	retry.Flags().StringVar(&node, "node", "", "only those at a node")
	retry.Flags().StringVar(&code, "code", "", "only those with this code")
	retry.Flags().IntVar(&version, "version", version, "only those of this version of the process (default: of all)")
	retry.Flags().IntVar(&most, "most", most, "maximum number")
	retry.Flags().Float64Var(&perSecond, "per-second", perSecond, "spread them over time (default: all now)")
	retry.Flags().BoolVar(&do, "do", do, "do it; without this flag, only show what would be done")
	retry.Flags().BoolVar(&asJSON, "json", asJSON, "print one JSON array")
	t.flags(retry.Flags())
	return retry
}

// looked says below a list that nothing was changed, if do is false. An operator who was told to run the command may
// otherwise think that it was done.
func looked(cmd *cobra.Command, err error, do bool, most int) error {
	if err == nil && !do {
		fmt.Fprintf(cmd.ErrOrStderr(), "workflowctl: nothing was changed; the same command with --do retries these, at most %d of them (--most)\n", most)
	}
	return err
}

// refused reports whether the error is a missing privilege of the role that asked.
func refused(err error) bool {
	const insufficientPrivilege = pgerrcode.InsufficientPrivilege
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == insufficientPrivilege
}

// inWords reduces a database error to its message and hint.
func inWords(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	if pg.Hint == "" && refused(err) {
		return fmt.Errorf("%s: the role that you are logged in as may not do this; docs/roles.md says which may", pg.Message)
	}
	if pg.Hint == "" {
		return errors.New(pg.Message)
	}
	return fmt.Errorf("%s. %s", strings.TrimSuffix(pg.Message, "."), pg.Hint)
}
