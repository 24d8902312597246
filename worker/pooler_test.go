//go:build pooler

package worker_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// Runs are executed in the same way through a transaction pooler.
func TestTransportsThroughAPooler(t *testing.T) {
	t.Parallel()
	transports(t, func(url string) string { return pgtest.Bouncer(t, url) })
}
