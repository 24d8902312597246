package graph

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
)

// Deploy stores a definition and returns its id. The same text again changes nothing; another
// text under the same version is refused. It returns an *InvalidError if the definition cannot
// be used.
func Deploy(ctx context.Context, db run.DB, d *Definition) (uuid.UUID, error) {
	if _, _, err := Compile(d); err != nil {
		return uuid.Nil, err
	}
	text, err := d.JSON()
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
		SELECT id, definition = $3::jsonb
		FROM process_definition
		WHERE name = $1 AND version = $2`, d.Process, d.Version, text)
	var same bool
	_, err = pgx.ForEachRow(rows, []any{&id, &same}, func() error { return nil })
	if err == nil && !same {
		err = fmt.Errorf("graph: process %q version %d is deployed with another text; give the edited one a higher version", d.Process, d.Version)
	}
	return id, err
}
