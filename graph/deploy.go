package graph

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
)

// Deploy stores a definition and returns its id. The same again changes nothing, in whatever way it
// was written and whoever has stored it; another one under the same version is refused. It returns an *InvalidError if the definition cannot
// be used.
func Deploy(ctx context.Context, db run.DB, d *Definition) (uuid.UUID, error) {
	if _, _, err := Compile(d); err != nil {
		return uuid.Nil, err
	}
	text, err := d.JSON()
	if err == nil {
		_, err = Parse(text) // of what was made in Go nobody has asked yet whether it can be read again
	}
	if err != nil {
		return uuid.Nil, err
	}
	rows, _ := db.Query(ctx, `
		INSERT INTO process_definition (definition)
		VALUES ($1::jsonb)
		ON CONFLICT (name, version) DO NOTHING
		RETURNING id`, text)
	id, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[uuid.UUID])
	if !errors.Is(err, pgx.ErrNoRows) {
		return id, err
	}
	rows, _ = db.Query(ctx, `
		SELECT id, definition
		FROM process_definition
		WHERE name = $1 AND version = $2`, d.Process, d.Version)
	var stored []byte
	_, err = pgx.ForEachRow(rows, []any{&id, &stored}, func() error { return nil })
	if err == nil && !same(stored, text) {
		err = fmt.Errorf("graph: process %q version %d is deployed with another text; give the edited one a higher version", d.Process, d.Version)
	}
	return id, err
}

// same reports whether a definition, as somebody has stored it, has this canonical text.
func same(stored, text []byte) bool {
	d, err := Parse(stored)
	if err != nil {
		return false
	}
	canonical, err := d.JSON()
	return err == nil && bytes.Equal(canonical, text)
}
