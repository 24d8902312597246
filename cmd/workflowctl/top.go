package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// A piece is a table of top, with a title for its first column.
type piece struct{ title, query string }

// pieces are the tables that top shows below what needs a person. If they do not fit, lines are left out of the
// longest first. Both what runs and what a worker holds are read from the leases.
var pieces = []piece{
	{"waits", `SELECT type, due || CASE WHEN or_more THEN '+' ELSE '' END AS due, workflow_span(oldest) AS oldest, coalesce('paused: ' || paused_by, covered_by, 'NOBODY') AS covered_by
	           FROM workflow_waiting WHERE due > 0 ORDER BY workflow_waiting.oldest DESC LIMIT 10`},
	{"works", `SELECT type, id, workflow_span(since) AS since, attempt || ' of ' || max_attempts AS attempt, leased_by FROM workflow_working WHERE NOT expired AND kept IS NULL LIMIT 10`},
	{"workers", `SELECT name, running || ' of ' || concurrency AS running, workflow_span(unseen) AS unseen, array_to_string(prefixes, ',') AS prefixes, host FROM workflow_live_worker ORDER BY name LIMIT 12`},
	{"ends", `SELECT coalesce(type, '') AS type, sum(per_second) FILTER (WHERE status = 'succeeded') AS succeeded, sum(per_second) FILTER (WHERE status = 'failed') AS failed, sum(per_second) FILTER (WHERE status = 'retried') AS retried, 'a second' AS "each"
	           FROM workflow_rate WHERE type IS NOT NULL GROUP BY type ORDER BY sum(of_runs) DESC LIMIT 8`},
	{"fails", `SELECT type, code, CASE WHEN at_least THEN 'at least ' ELSE '' END || failed AS failed, workflow_span(workflow_age(latest)) AS ago, left(last_error, 120) AS last_error FROM workflow_failing ORDER BY latest DESC LIMIT 5`},
	{"outbox", `SELECT sink, CASE WHEN at_least THEN 'at least ' ELSE '' END || open AS open, workflow_span(oldest) AS oldest, failing, parked,
	            CASE WHEN down_for IS NOT NULL THEN 'down for ' || workflow_span(down_for) WHEN back_for < interval '10 minutes' THEN 'back for ' || workflow_span(back_for) ELSE 'up' END AS state FROM outbox_lag ORDER BY sink LIMIT 6`},
}

func newTop() *cobra.Command {
	var t target
	every, once := 2*time.Second, false
	top := &cobra.Command{
		Use:   "top",
		Short: "Watch what waits, runs and fails, live; q quits",
		Args:  takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 200*time.Millisecond {
				return fmt.Errorf("--every=%v: use 200ms or more", every)
			}
			out, ok := cmd.OutOrStdout().(*os.File)
			if !once && (!ok || !term.IsTerminal(int(out.Fd()))) {
				return errors.New("top needs a terminal; use --once, or workflowctl show WHAT")
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				if once {
					screen, err := drawTop(cmd.Context(), conn, 0, 0)
					fmt.Fprint(cmd.OutOrStdout(), screen)
					return err
				}
				return watchTop(cmd.Context(), out, conn, every)
			})
		},
	}
	top.Flags().DurationVar(&every, "every", every, "how often to redraw")
	top.Flags().BoolVar(&once, "once", once, "print all of it once, and exit")
	t.flags(top.Flags())
	return top
}

// watchTop draws until a person types q or ctx ends, and then restores the terminal.
func watchTop(ctx context.Context, out *os.File, conn *pgx.Conn, every time.Duration) error {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	if in := int(os.Stdin.Fd()); term.IsTerminal(in) {
		before, err := term.MakeRaw(in)
		if err != nil {
			return fmt.Errorf("read keys: %w", err)
		}
		defer func() { _ = term.Restore(in, before) }()
		go leaveAt(os.Stdin, leave)
	}
	fmt.Fprint(out, "\x1b[?1049h\x1b[?25l") // switches to the alternate screen and hides the cursor
	defer fmt.Fprint(out, "\x1b[?25h\x1b[?1049l")
	for {
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil || width < 1 || height < 1 {
			width, height = 80, 24
		}
		screen, err := drawTop(ctx, conn, width, height)
		if err != nil && ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		// In a raw terminal a line feed does not return to the left margin. No line feed follows the last line,
		// because it would scroll.
		fmt.Fprint(out, "\x1b[H\x1b[2J"+strings.ReplaceAll(strings.TrimSuffix(screen, "\n"), "\n", "\r\n"))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

// leaveAt calls leave when a person types q, ^C or ^D. In a raw terminal the latter two are ordinary keys and send no
// signal.
func leaveAt(keys io.Reader, leave func()) {
	key := make([]byte, 1)
	for {
		n, err := keys.Read(key)
		if err != nil || n == 1 && strings.ContainsRune("qQ\x03\x04", rune(key[0])) {
			leave()
			return
		}
	}
}

// drawTop draws as much as fits in width and height, or all of it if height is 0.
func drawTop(ctx context.Context, conn *pgx.Conn, width, height int) (screen string, err error) {
	err = uncompiled(ctx, conn, func(tx pgx.Tx) error {
		screen, err = drawTopOf(ctx, tx, width, height)
		return err
	})
	return screen, err
}

func drawTopOf(ctx context.Context, conn pgx.Tx, width, height int) (string, error) {
	found, err := collectNeeds(ctx, conn)
	if err != nil {
		return "", err
	}
	all := make([][]string, 1, len(pieces)+1)
	for _, f := range found {
		mark := "- "
		if f.Grave {
			mark = "! "
		}
		all[0] = append(all[0], mark+printable(f.What))
	}
	switch len(found) {
	case 0:
		all[0] = []string{"NEEDS YOU  nothing"}
	default:
		all[0] = append([]string{fmt.Sprintf("NEEDS YOU  %d; what to do: workflowctl doctor", len(found))}, all[0]...)
	}
	for _, p := range pieces {
		lines, err := p.lines(ctx, conn)
		if err != nil {
			return "", err
		}
		all = append(all, lines)
	}
	var b strings.Builder
	fmt.Fprintln(&b, clip(fmt.Sprintf("%s  %s  q quits", conn.Conn().Config().Database, time.Now().Format(time.TimeOnly)), width))
	for k, n := range fit(all, height-1) {
		for _, line := range all[k][:n] {
			fmt.Fprintln(&b, clip(line, width))
		}
	}
	return b.String(), nil
}

// lines returns a head and rows; nothing if there are no rows.
func (p piece) lines(ctx context.Context, conn querier) ([]string, error) {
	head, rows, err := readTable(ctx, conn, p.query)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	head[0] = strings.ToUpper(p.title)
	var b bytes.Buffer
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, cells := range append([][]string{head}, rows...) {
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	table.Flush()
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n"), nil
}

// fit returns how many lines of each piece there is room for. Each piece gets its head and first row before any gets
// a second row. If room is 0 or less, everything is shown.
func fit(all [][]string, room int) []int {
	shown, bounded := make([]int, len(all)), room > 0
	for more := true; more; {
		more = false
		for k, lines := range all {
			n := min(len(lines)-shown[k], 1)
			if shown[k] == 0 {
				n = min(len(lines), 2) // a head without a row says nothing
			}
			if n == 0 || bounded && n > room {
				continue
			}
			shown[k] += n
			room -= n
			more = true
		}
	}
	return shown
}

// clip cuts a line at the width; 0 means no limit.
func clip(line string, width int) string {
	line = strings.TrimRight(line, " ")
	if runes := []rune(line); width > 0 && len(runes) > width {
		return string(runes[:width-1]) + "…"
	}
	return line
}
