package main_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Roles can be created and bound any number of times. What is not possible is refused with a message.
func TestRolesCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	env := []string{"DATABASE_URL=" + url}
	named := pgtest.RolesName(t, url)
	want(t, cmdtest.Start(t, env, "roles", "worker", named+"_media", "--prefixes", "media.", "--named", named), 1, "workflowctl roles")
	for range 2 {
		want(t, cmdtest.Start(t, env, "roles", "--named", named), 0, "roles "+named+"_owner")
		want(t, cmdtest.Start(t, env, "roles", "worker", named+"_media", "--prefixes", "media.,email.", "--named", named), 0, "role "+named+"_media works on media., email.")
	}
	if got := value[string](t, url, `SELECT pg_get_expr(polqual, polrelid) FROM pg_policy WHERE '`+named+`_media'::regrole = ANY (polroles) AND polqual IS NOT NULL`); got != `((token_id IS NULL) AND ((type ^@ 'email.'::text) OR (type ^@ 'media.'::text)))` {
		t.Errorf("bound by %s", got)
	}
	want(t, cmdtest.Start(t, nil, "roles", "--print", "--schema", "My flows"), 0, `SET LOCAL search_path = "My flows";`)
	want(t, cmdtest.Start(t, nil, "roles", "--print", "--named", named), 0, "SET LOCAL workflow.roles = E'"+named+"';", "COMMIT;")
	want(t, cmdtest.Start(t, env, "roles", "--named", "a-b"), 2, `--named="a-b": use up to 40 of a-z`)
	want(t, cmdtest.Start(t, env, "roles", "worker"), 2, "use: workflowctl roles worker ROLE")
	want(t, cmdtest.Start(t, env, "roles", "worker", "x"), 2, "--prefixes is missing")
	want(t, cmdtest.Start(t, env, "roles", "worker", "x", "--prefixes", "media"), 2, `--prefixes="media": a prefix is lower-case and ends with a dot`)
}
