package pgserver_test

import (
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/pgserver"
)

// A standby has what its server had committed, refuses writes, and continues as a primary when the server is gone. It
// counts as synchronous under its name.
func TestStandby(t *testing.T) {
	server := start(t, pgserver.Options{})
	query(t, server, "CREATE TABLE before (x int)")
	standby, err := server.Standby(t.Context(), "copy")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(standby.Stop)
	query(t, server, "ALTER SYSTEM SET synchronous_standby_names = 'copy'")
	query(t, server, "SELECT pg_reload_conf()::text")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		state := query(t, server, "SELECT sync_state FROM pg_stat_replication WHERE application_name = 'copy'")
		if state == "sync" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the standby is %q, want sync", state)
		}
	}
	query(t, server, "SET synchronous_commit = remote_apply; CREATE TABLE after (x int)")
	if got := query(t, standby, "SELECT concat(pg_is_in_recovery(), to_regclass('before'), to_regclass('after'))"); got != "tbeforeafter" {
		t.Errorf("the standby is %q, want in recovery with both tables", got)
	}
	server.Kill()
	if got := query(t, standby, "SELECT pg_promote()::text"); got != "true" {
		t.Fatalf("promoted: %s", got)
	}
	query(t, standby, "INSERT INTO after VALUES (1)")
}
