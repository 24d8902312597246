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

// Deploy stores a definition and returns its id. If the same definition is stored already, Deploy changes nothing and
// returns the id of the stored one; two texts with the same canonical form are the same definition. If another
// definition is stored under this name and version, Deploy returns an error. It returns an *InvalidError if the
// definition does not compile.
func Deploy(ctx context.Context, db run.DB, d *Definition) (uuid.UUID, error) {
	if _, _, err := Compile(d); err != nil {
		return uuid.Nil, err
	}
	text, err := d.JSON()
	if err == nil {
		_, err = Parse(text) // a definition made in Go has never been parsed: make sure that its text can be read back
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

// same reports whether stored, a definition in any form, has the canonical form text.
func same(stored, text []byte) bool {
	d, err := Parse(stored)
	if err != nil {
		return false
	}
	canonical, err := d.JSON()
	return err == nil && bytes.Equal(canonical, text)
}
