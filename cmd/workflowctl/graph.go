package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/sql"
)

func newGraph() *cobra.Command {
	var t target
	var instance string
	show := &cobra.Command{
		Use:   "graph FILE",
		Short: "Print a process as a Mermaid flowchart, or where an instance of it is",
		Long: `Print a process as a Mermaid flowchart:

  workflowctl graph order.json
  workflowctl graph --instance 01890a5d-ac96-774b-bcce-b302099a8057

For an instance it also prints how often each node was visited, where tokens are now, in what
state, and where an incident is open. The definition is read from the database. FILE may be -
for standard input, and its process need not be valid.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			given := cmd.Flags().Changed("instance")
			if given == (len(args) == 1) {
				return errors.New("use either graph FILE, or graph --instance UUID")
			}
			if given {
				id, err := uuid.Parse(instance)
				if err != nil {
					return fmt.Errorf("--instance=%.120q: use a UUID, such as 01890a5d-ac96-774b-bcce-b302099a8057", instance)
				}
				return drawInstance(cmd.Context(), cmd.OutOrStdout(), &t, id)
			}
			text, err := read(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			d, err := graph.Parse(text)
			if err != nil {
				return &failure{fmt.Errorf("%s: %s", args[0], printable(strings.TrimPrefix(err.Error(), "graph: ")))}
			}
			fmt.Fprint(cmd.OutOrStdout(), graph.Mermaid(d, nil))
			return nil
		},
	}
	show.Flags().StringVar(&instance, "instance", "", "id of an instance to show")
	t.flags(show.Flags())
	return show
}

func drawInstance(ctx context.Context, out io.Writer, t *target, id uuid.UUID) error {
	return t.with(ctx, func(conn *pgx.Conn) error {
		if err := sql.Check(ctx, conn); err != nil {
			return err
		}
		picture, err := draw(ctx, conn, id)
		fmt.Fprint(out, picture)
		return err
	})
}

func draw(ctx context.Context, conn *pgx.Conn, id uuid.UUID) (string, error) {
	rows, _ := conn.Query(ctx, `
		SELECT d.definition
		FROM process_instance i
		JOIN process_definition d ON d.id = i.process_definition_id
		WHERE i.id = $1`, id)
	text, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]byte])
	if errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("there is no instance %s", id)
	}
	if err != nil {
		return "", fmt.Errorf("read the definition of instance %s: %w", id, err)
	}
	var compact bytes.Buffer // without the whitespace that Postgres writes, which counts as well
	if err := json.Compact(&compact, text); err != nil {
		return "", err
	}
	d, err := graph.Parse(compact.Bytes())
	if err != nil {
		return "", err
	}
	marks, err := readMarks(ctx, conn, id)
	if err != nil {
		return "", fmt.Errorf("read where instance %s is: %w", id, err)
	}
	return graph.Mermaid(d, marks), nil
}

// readMarks reads what is known about an instance's nodes. It is one statement, so that all marks are of one moment.
func readMarks(ctx context.Context, conn *pgx.Conn, id uuid.UUID) (map[string]graph.Mark, error) {
	rows, _ := conn.Query(ctx, `
		WITH visited AS (
			SELECT node_id AS node, count(*) AS visits, (array_agg(status ORDER BY created_at DESC))[1] AS ended
			FROM activity_instance
			WHERE instance_id = $1
			GROUP BY node_id
		), undone AS (
			SELECT node_id AS node, (array_agg(status ORDER BY "order" DESC))[1] = 'Completed' AS undone
			FROM compensation_record
			WHERE instance_id = $1
			GROUP BY node_id
		), here AS (
			SELECT p.node, count(*) FILTER (WHERE p.state IN ('Created', 'Ready', 'Waiting')) AS live,
			       coalesce(string_agg(DISTINCT t.state, ', ') FILTER (WHERE p.state IN ('Created', 'Ready', 'Waiting')),
			                max(p.state) FILTER (WHERE p.state = 'Failed')) AS state
			FROM process_token p
			JOIN token t ON t.id = p.id
			WHERE p.instance_id = $1
			GROUP BY p.node
		), stopped AS (
			SELECT DISTINCT node
			FROM incident
			WHERE instance_id = $1 AND resolved_at IS NULL
		)
		SELECT node, coalesce(visits, 0), coalesce(live, 0), CASE WHEN stopped IS NOT NULL THEN 'Incident' ELSE coalesce(state, CASE WHEN undone THEN 'undone' END, ended, '') END
		FROM visited
		FULL JOIN here USING (node)
		LEFT JOIN undone USING (node)
		LEFT JOIN stopped USING (node)
		WHERE node IS NOT NULL`, id)
	marks := map[string]graph.Mark{}
	var node string
	var m graph.Mark
	_, err := pgx.ForEachRow(rows, []any{&node, &m.Visits, &m.Live, &m.State}, func() error {
		marks[node] = m
		return nil
	})
	return marks, err
}
