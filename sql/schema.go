package sql

import (
	"context"
	"fmt"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/schema"
)

// elsewhere returns a text that says in which schemas the tables are, if not in the first schema of search_path; ""
// if there are none.
func elsewhere(ctx context.Context, db Querier) (string, error) {
	schemas, err := schema.Installations(ctx, db)
	if err != nil || len(schemas) == 0 {
		return "", err
	}
	quoted := make([]string, len(schemas))
	for i, s := range schemas {
		quoted[i] = fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("tables are in schema %s; have the address lead there by ?%s", strings.Join(quoted, ", "), schema.InAddress(schemas[0])), nil
}
