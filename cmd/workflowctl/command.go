package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// An order is a command that the engine executes: a run of one of its types, which a worker that covers graph.
// leases.
type order struct {
	use, short, long string
	typ              string
	fields           []string          // what the arguments are, in the payload
	options          map[string]string // flags, and what each is for
}

var orders = []order{
	{"start PROCESS", "Start an instance of a process", `Start an instance of a process, and print a JSON object with its id.

  workflowctl start order --input '{"order": "o-17"}' --key o-17`, "graph.start.v1", []string{"process"},
		map[string]string{"input": "a JSON object", "key": "at most one instance of the process has it: the same start again returns that instance, one with another input fails", "again": "allow another instance with the key once the one that has it is over", "version": "of the process (default: the highest)", "priority": "of all its steps, -100 to 100", "tenant": "tenant of the instance"}},
	{"message NAME KEY", "Send a message to the token that waits for its name and key", `Send a message to the token that has waited longest for its name and key. If none waits, it is kept for a day, or for --ttl.

  workflowctl message collected o-17 --payload '{"by": "van"}'`, "graph.message.v1", []string{"name", "key"},
		map[string]string{"payload": "a JSON object", "id": "id chosen by the sender: the same id again changes nothing", "ttl": "how long it is kept, such as PT2H"}},
	{"signal NAME", "Send a signal to all tokens that wait for it now", "", "graph.signal.v1", []string{"name"}, map[string]string{"payload": "a JSON object"}},
	{"complete TASK", "Complete a user task", `Complete a user task; show tasks lists them. Without --by it must be a task of your own, or of your groups; tasks lists those.

  workflowctl complete 0191… --by anna --output '{"ok": true}'
  workflowctl complete 0191… --output '{"ok": true}'`, "graph.complete_task.v1", []string{"task"},
		map[string]string{"by": "who has completed it (default: the role that is logged in, if it is a task of its groups)", "output": "a JSON object", "version": "version that you saw: another one is a conflict"}},
	{"cancel-process INSTANCE REASON", "Cancel an instance of a process for good", "", "graph.cancel.v1", []string{"instance", "reason"},
		map[string]string{"compensate": "undo what was done first", "by": "who requests it"}},
	{"fail INSTANCE", "Undo what an instance of a process has done, and fail it for good", "", "graph.fail.v1", []string{"instance"},
		map[string]string{"reason": "why it has failed (default: the error of its latest open incident)", "by": "who requests it"}},
	{"restart INSTANCE", "Start a failed instance of a process again from where it failed, as another instance", `Start a FAILED instance of a process again, as another instance with its key. Steps that are done are not repeated; steps that were undone, and those after them, are executed again.

  workflowctl restart 0191…`, "graph.restart.v1", []string{"instance"}, map[string]string{"by": "who requests it"}},
	{"retry-incident INCIDENT", "Retry what an incident has stopped; show incidents lists them", "", "graph.retry.v1", []string{"incident"},
		map[string]string{"force": "a join continues with the tokens that have arrived", "by": "who requests it"}},
}

// ofJSON, counts and switches are the fields that are JSON objects, whole numbers and booleans.
var (
	ofJSON   = map[string]bool{"input": true, "payload": true, "output": true}
	counts   = map[string]bool{"version": true, "priority": true}
	switches = map[string]bool{"again": true, "compensate": true, "force": true}
)

// isID are the fields that are ids.
var isID = map[string]bool{"task": true, "instance": true, "incident": true}

func newOrders() (all []*cobra.Command) {
	for _, o := range orders {
		all = append(all, o.command())
	}
	return all
}

func (o order) command() *cobra.Command {
	var t target
	var patience time.Duration
	command := &cobra.Command{
		Use:   o.use,
		Short: o.short,
		Long:  o.long,
		Args:  takes(len(o.fields)),
		RunE: func(cmd *cobra.Command, texts []string) error {
			payload := map[string]any{}
			for k, text := range texts {
				read := aText
				if isID[o.fields[k]] {
					read = anID
				}
				value, err := read(text)
				if err != nil {
					return fmt.Errorf("%s=%.120q: %w", strings.ToUpper(o.fields[k]), text, err)
				}
				payload[o.fields[k]] = value
			}
			for name := range o.options {
				if !cmd.Flags().Changed(name) {
					continue
				}
				text := cmd.Flags().Lookup(name).Value.String()
				switch {
				case ofJSON[name]:
					if !json.Valid([]byte(text)) || !strings.HasPrefix(strings.TrimSpace(text), "{") {
						return fmt.Errorf("--%s=%.120q: use a JSON object", name, text)
					}
				case counts[name], switches[name]:
				case strings.TrimSpace(text) == "":
					return fmt.Errorf("--%s: it is empty", name)
				}
				payload[name] = text
				if ofJSON[name] || counts[name] || switches[name] {
					payload[name] = json.RawMessage(text)
				}
			}
			if patience < 0 {
				return fmt.Errorf("--wait=%s: use 0 or more", patience)
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				if o.typ == "graph.complete_task.v1" && payload["by"] == nil {
					return completeOwn(cmd.Context(), cmd.OutOrStdout(), conn, payload)
				}
				return carryOut(cmd.Context(), cmd.OutOrStdout(), conn, o.typ, payload, patience)
			})
		},
	}
	for name, purpose := range o.options {
		switch {
		case counts[name]:
			command.Flags().Int(name, 0, purpose)
		case switches[name]:
			command.Flags().Bool(name, false, purpose)
		default:
			command.Flags().String(name, "", purpose)
		}
	}
	command.Flags().DurationVar(&patience, "wait", 10*time.Second, "how long to wait for a worker to execute it; 0: do not wait")
	t.flags(command.Flags())
	return command
}

// carryOut enqueues a command and prints its outcome. Once the command may be enqueued, each error names its run,
// because repeating the command would execute it twice.
func carryOut(ctx context.Context, out io.Writer, conn *pgx.Conn, typ string, payload map[string]any, patience time.Duration) error {
	id, err := uuid.NewV7()
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `INSERT INTO workflow_run (id, type, payload) VALUES ($1, $2, $3)`, id, typ, payload); err != nil {
		if conn.IsClosed() {
			return fmt.Errorf("it may be enqueued, as run %s: %w", id, err)
		}
		return inWords(err)
	}
	if patience == 0 {
		fmt.Fprintf(out, "enqueued as run %s\n", id)
		return nil
	}
	if err := carriedOut(ctx, out, conn, id, patience); err != nil {
		return fmt.Errorf("run %s: %w", id, err)
	}
	return nil
}

func carriedOut(ctx context.Context, out io.Writer, conn *pgx.Conn, id uuid.UUID, patience time.Duration) error {
	for until := time.Now().Add(patience); ; {
		late := time.Now().After(until)
		var status, result, failure, why, instance string
		if err := conn.QueryRow(ctx, `SELECT status, coalesce(result::text, ''), coalesce(last_error, ''), workflow_why(id),
			coalesce((SELECT i.status FROM process_instance i WHERE type IN ($2, $3) AND i.id::text = payload->>'instance' AND i.completed_at IS NOT NULL
				AND i.status <> CASE type WHEN $2 THEN 'CANCELLED' ELSE 'FAILED' END), '')
			FROM workflow_run WHERE id = $1`, id, "graph.cancel.v1", "graph.fail.v1").Scan(&status, &result, &failure, &why, &instance); refused(err) {
			return errors.New("it is enqueued, but this role may not see its outcome: use --wait 0")
		} else if err != nil {
			return fmt.Errorf("it is enqueued; ask workflowctl why: %w", inWords(err))
		}
		switch {
		case status == "succeeded" && instance != "":
			return errors.New("too late: " + instance)
		case status == "succeeded":
			fmt.Fprintln(out, result)
			return nil
		case status == "failed" || status == "cancelled":
			return errors.New(status + ": " + printable(failure))
		case late:
			return fmt.Errorf("it is enqueued, but not executed yet: %s", printable(why))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it is enqueued; ask workflowctl why: %w", ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
