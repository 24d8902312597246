package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/sql"
)

func newDefine() *cobra.Command {
	var t target
	check := false
	define := &cobra.Command{
		Use:   "define FILE...",
		Short: "Check definitions of processes and deploy them",
		Long: `Check definitions of processes and deploy them, all or none. All errors in the nodes of all files are
printed, and, for files whose nodes are correct, all errors in the ways between them:

  workflowctl define --check order.json
  workflowctl define order.json refund.json
  generate | workflowctl define -

Deploying the same definition again changes nothing. An edited one needs a higher version.`,
		Args: files,
		RunE: func(cmd *cobra.Command, args []string) error {
			var address error
			if !check {
				_, address = t.parse()
			}
			texts, unread := readAll(cmd.InOrStdin(), args)
			all, err := inspect(cmd.OutOrStdout(), texts)
			if wrong := errors.Join(address, unread); wrong != nil {
				return wrong
			}
			if err != nil || check {
				return err
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error { return deploy(cmd.Context(), cmd.OutOrStdout(), conn, all) })
		},
	}
	define.Flags().BoolVar(&check, "check", check, "only check: no database is needed")
	t.flags(define.Flags())
	return define
}

func files(_ *cobra.Command, args []string) error {
	stdin := 0
	for _, name := range args {
		if name == "-" {
			stdin++
		}
	}
	switch {
	case len(args) == 0:
		return errors.New("no file is named: use define FILE..., or - for standard input")
	case stdin > 1:
		return errors.New("standard input can be read once: name - once")
	}
	return nil
}

// A file is a definition together with the name and text it was read from.
type file struct {
	name string
	text []byte
	*graph.Definition
}

func readAll(stdin io.Reader, names []string) ([]*file, error) {
	var all []*file
	var unread []error
	for _, name := range names {
		text, err := read(stdin, name)
		if err != nil {
			unread = append(unread, err)
			continue
		}
		all = append(all, &file{name: name, text: text})
	}
	return all, errors.Join(unread...)
}

// enough is more than the maximum size of a definition, in bytes. Nothing beyond it is read into memory.
const enough = 2 << 20

// read reads a file, or standard input if its name is -.
func read(stdin io.Reader, name string) ([]byte, error) {
	if name == "-" {
		text, err := io.ReadAll(io.LimitReader(stdin, enough))
		if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		return text, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, enough))
}

// inspect prints all findings about the files. It returns an error if one of them cannot be used.
func inspect(out io.Writer, all []*file) ([]*file, error) {
	bad := 0
	for _, f := range all {
		findings, err := f.check()
		for _, finding := range findings {
			severity := "error"
			if finding.Note {
				severity = "note"
			}
			fmt.Fprintf(out, "%s: %s: %s\n", f.name, severity, printable(finding.String()))
		}
		if err != nil {
			bad++
		}
		var invalid *graph.InvalidError
		if err != nil && !errors.As(err, &invalid) { // it has no findings
			fmt.Fprintf(out, "%s: error: %s\n", f.name, printable(strings.TrimPrefix(err.Error(), "graph: ")))
		}
	}
	if bad > 0 {
		return nil, &failure{fmt.Errorf("%d of %d definitions cannot be used", bad, len(all))}
	}
	return all, nil
}

func (f *file) check() (findings []graph.Finding, err error) {
	if f.Definition, err = graph.Parse(f.text); err != nil {
		var invalid *graph.InvalidError
		if errors.As(err, &invalid) {
			findings = invalid.Findings
		}
		return findings, err
	}
	_, findings, err = graph.Compile(f.Definition)
	return findings, err
}

// deploy deploys all of the definitions or none.
func deploy(ctx context.Context, out io.Writer, conn *pgx.Conn, all []*file) error {
	if err := sql.Check(ctx, conn); err != nil {
		return err
	}
	// Always in the same order, so that two such commands cannot deadlock.
	slices.SortStableFunc(all, func(a, b *file) int {
		return cmp.Or(cmp.Compare(a.Process, b.Process), cmp.Compare(a.Version, b.Version))
	})
	var done []string
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		for _, f := range all {
			line, err := deployOne(ctx, tx, f.Definition)
			if err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
			done = append(done, line)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("nothing was deployed: %w", err)
	}
	for _, line := range done {
		fmt.Fprintln(out, line)
	}
	return nil
}

func deployOne(ctx context.Context, tx pgx.Tx, d *graph.Definition) (string, error) {
	id, err := graph.Deploy(ctx, tx, d)
	if err != nil {
		return "", inWords(err)
	}
	var ours bool
	var highest int
	if err := tx.QueryRow(ctx, `
		SELECT xmin = pg_current_xact_id()::xid, (SELECT max(h.version) FROM process_definition h WHERE h.name = d.name)
		FROM process_definition d
		WHERE id = $1`, id).Scan(&ours, &highest); err != nil {
		return "", err
	}
	what := "is deployed"
	if !ours {
		what = "was there already"
	}
	line := fmt.Sprintf("%s version %d %s: %s", d.Process, d.Version, what, id)
	if highest > d.Version {
		line += fmt.Sprintf("\n%s: note: version %d is the highest, and new instances take it", d.Process, highest)
	}
	return line, nil
}

// printable replaces characters that are not printable by blanks, so that text from a file stays on one line and
// cannot control the terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}
