package main_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// doctor, top and show turn JIT compilation off for their queries. It is on by default, and compiling one of these
// views takes seconds each time, while reading it takes milliseconds.
func TestNothingIsCompiled(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	// This view shows whether JIT is on.
	if _, err := connect(t, url).Exec(t.Context(), `
		DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET jit = on', current_database()); END $$;
		CREATE OR REPLACE VIEW workflow_coverage AS SELECT 'compiler' COLLATE "C" AS subject, current_setting('jit') COLLATE "C" AS problem`); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"doctor"}, {"top", "--once"}, {"show", "coverage"}, {"show", "coverage", "--json"}} {
		p, _ := cmdtest.Run(t, []string{"DATABASE_URL=" + url}, args...)
		if text := p.Stdout.String(); !strings.Contains(text, "compiler") || !strings.Contains(text, "off") {
			t.Errorf("%v says %s", args, text)
		}
	}
}

// A command that only looks says that nothing was changed.
func TestLookIsToldFromDeed(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=" + pgtest.URL(t)}
	for _, args := range [][]string{{"retry-incidents", "--process", "trip"}, {"redrive", "billing."}} {
		p, _ := cmdtest.Run(t, env, args...)
		if !strings.Contains(p.Stderr.String(), "nothing was changed; the same command with --do retries these, at most 100 of them (--most)") {
			t.Errorf("%v says %q", args, p.Stderr.String())
		}
		if p, _ = cmdtest.Run(t, env, append(args, "--do")...); p.Stderr.String() != "" {
			t.Errorf("%v --do says %q", args, p.Stderr.String())
		}
	}
}
