-- simple-workflow 0039: less to read for each statement.
--
-- PostgreSQL parses the conditions of all triggers of a table anew for each statement. Of what an update of workflow_run reads, a third were those of
-- workflow_run_update_guard.
--
--   workflow_run_update_guard   asks whether one of the engine's own statements is at work: workflow.transition = on. Else its function judges the row
--   workflow_lease_v2, workflow_lease_ahead_v1, workflow_extend_v1, workflow_settle_v1
--                               say so, for the time of their update alone
--   workflow_try                says so, too: what it tries is judged as what is done
DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- As in 0014. The function has judged all of this before, too; a condition of its own spared calls of it. It refuses the retry of a failed run, which is
-- allowed to workflow_retry and workflow_redrive. The settings are believed of roles that may update tokens, as workflow.advance is.
CREATE OR REPLACE TRIGGER workflow_run_update_guard BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN ((
        (current_setting('workflow.transition', true) = 'on'
         OR OLD.status = 'failed' AND NEW.status = 'pending' AND current_setting('workflow.retry', true) = 'on')
        AND has_table_privilege('process_token'::regclass, 'UPDATE')
    ) IS NOT TRUE)
    EXECUTE FUNCTION workflow_run_refuse_update();

-- It is said before the update and taken back after it, because a SET clause of the function would take a superuser to create it. workflow_try rolls back.
DO $do$
DECLARE
    started CONSTANT text := $q$    PERFORM set_config('workflow.transition', 'on', true);
$q$;
    ended   CONSTANT text := $q$    PERFORM set_config('workflow.transition', '', true);
$q$;
    f       record;
    now     text;
BEGIN
    FOR f IN SELECT * FROM (VALUES
        ('workflow_lease_v2',       E'    RETURN QUERY\n', E'END, w.token_id;\n'),
        ('workflow_lease_ahead_v1', E'    RETURN QUERY\n', E'END, w.token_id;\n'),
        ('workflow_extend_v1',      E'    RETURN QUERY\n', E'    RETURNING w.id;\n'),
        ('workflow_settle_v1',      E'    IF verdicts <@ \'{succeeded}\' THEN\n', E' INTO places FROM settled s;\n'),
        ('workflow_try',            E'        UPDATE workflow_run w\n', NULL)) AS x (name, update_begins, update_ends)
    LOOP
        now := replace(pg_get_functiondef(f.name::regproc), f.update_begins, started || f.update_begins);
        now := coalesce(replace(now, f.update_ends, f.update_ends || ended), now);
        IF strpos(now, started) = 0 OR f.update_ends IS NOT NULL AND strpos(now, ended) = 0 THEN
            RAISE EXCEPTION 'the function % is not that of an earlier migration', f.name;
        END IF;
        EXECUTE now;
    END LOOP;
END
$do$;
