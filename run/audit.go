package run

// Audit returns two CTEs that bracket a statement which changes runs and writes their history
// itself, which is cheaper than a trigger by far. audit tells the triggers to stay out; the
// UPDATE selects from it so as to come after it, and the INSERT into workflow_history obeys its
// writer, as the history may be off; the guard of that table asks for the setting, too. done puts
// it back when all rows of the CTEs named changed and history are there, because the transaction
// may be the caller's and go on; the final SELECT must read it. See sql/0002_event.sql.
func Audit(changed string) (audit, done string) {
	return `audit AS MATERIALIZED (
			SELECT coalesce(current_setting('workflow.audit', true), '') AS before,
			       set_config('workflow.audit', CASE current_setting('workflow.audit', true)
			                  WHEN 'off' THEN 'off' ELSE 'self' END, true) AS writer
		)`, `done AS (
			SELECT set_config('workflow.audit', audit.before, true)
			FROM audit, (SELECT count(*) FROM ` + changed + `) AS all_of_them, (SELECT count(*) FROM history) AS all_of_theirs
		)`
}
