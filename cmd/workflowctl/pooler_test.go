//go:build pooler

package main_test

import (
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// doctor reports a pooler in transaction mode and its consequences, and reports nothing of the kind where there is no
// pooler.
func TestDoctorSeesThePooler(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	for address, want := range map[string]bool{url: false, pgtest.Bouncer(t, url): true} {
		p, _ := cmdtest.Run(t, []string{"DATABASE_URL=" + address}, "doctor")
		said := p.Stdout.String()
		if strings.Contains(said, "a pooler is between, in transaction mode") != want || !want && strings.Contains(said, "pooler") {
			t.Errorf("through a pooler: %t; it says %s", want, said)
		}
	}
}
