package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// An action calls a function of the database, which answers what it did.
type action struct {
	use, short string
	query      string
	args       []func(string) (any, error) // how each argument is read
	done       string                      // the answer begins so if it was done
}

var actions = []action{
	{"cancel RUN REASON", "Cancel a run for good", `SELECT workflow_cancel($1, $2)`, arguments(anID, aText), "cancelled"},
	{"retry RUN", "Give a failed run another attempt, now", `SELECT workflow_retry($1)`, arguments(anID), "pending"},
	{"delete RUN REASON", "Soft-delete a run: it is never leased again, and its key is free", `SELECT workflow_delete($1, $2)`, arguments(anID, aText), "deleted"},
	{"reschedule RUN TIME", "Have a pending run be due at another time, in RFC 3339", `SELECT workflow_reschedule($1, $2)`, arguments(anID, aTime), "due"},
	{"prioritize RUN PRIORITY", "Have a pending run go first, or last: -100 to 100", `SELECT workflow_prioritize($1, $2::text::int)`, arguments(anID, aText), "priority"},
	{"pause PREFIX REASON", "Have no run of a type, or of a prefix that ends with a dot, be leased any more", `SELECT workflow_pause($1, $2)`, arguments(aText, aText), "paused"},
	{"resume PREFIX", "End a pause", `SELECT workflow_resume($1)`, arguments(aText), "resumed"},
	{"release WORKER REASON", "Take a worker's leases away at once", `SELECT workflow_release($1, $2) || ' leases taken away'`, arguments(aText, aText), ""},
	{"set-right", "Set right what dispatchers go by, after a restore of data alone: lanes, floors, the sequence of ids", `SELECT outbox_set_right_v1()`, arguments(), ""},
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
		return nil, errors.New("use the id of a run, a uuid")
	}
	return id, nil
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
				if !strings.HasPrefix(answer, a.done) {
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
		Short: "Give failed runs of a type or prefix further attempts: first look, then a few, then the rest at a rate",
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
				return printQuery(cmd.Context(), cmd.OutOrStdout(), conn, query, false, args[0], code, from, most, perSecond, attempts, !do)
			})
		},
	}
	redrive.Flags().StringVar(&code, "code", "", "only those that failed with this code")
	redrive.Flags().StringVar(&since, "since", "", "only those that failed since then, in RFC 3339")
	redrive.Flags().IntVar(&most, "most", most, "at most so many")
	redrive.Flags().Float64Var(&perSecond, "per-second", perSecond, "spread them over time (default: all now)")
	redrive.Flags().IntVar(&attempts, "attempts", attempts, "how many further attempts each may have")
	redrive.Flags().BoolVar(&do, "do", do, "do it; without, it only shows what would be done")
	t.flags(redrive.Flags())
	return redrive
}

// inWords adds to the database's error what it advises.
func inWords(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	if pg.Hint == "" {
		return errors.New(pg.Message)
	}
	return fmt.Errorf("%s. %s", strings.TrimSuffix(pg.Message, "."), pg.Hint)
}
