-- simple-workflow 0039: less to read for each statement.
--
-- PostgreSQL parses the conditions of all triggers of a table anew for each statement. Of an update of workflow_run, half of them were those of
-- workflow_run_update_guard: a third of what it takes to lease or to settle a single run.
--
--   workflow_run_update_guard   asks whether one of the engine's own statements is at work: workflow.transition = on. Else its function judges the row
--   workflow_lease_v2, workflow_lease_ahead_v1, workflow_extend_v1, workflow_settle_v1
--                               say so, for the time of their update alone
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

-- It is said before the update and taken back after it, because a SET clause of the function would take a superuser to create it.
DO $do$
DECLARE
    f       text;
    was     text;
    now     text;
    started CONSTANT text := $q$    PERFORM set_config('workflow.transition', 'on', true);
$q$;
    ended   CONSTANT text := $q$    PERFORM set_config('workflow.transition', '', true);
$q$;
BEGIN
    FOREACH f IN ARRAY '{workflow_lease_v2, workflow_lease_ahead_v1, workflow_extend_v1}'::text[] LOOP
        was := pg_get_functiondef(f::regproc);
        now := replace(was, E'    RETURN QUERY\n', started || E'    RETURN QUERY\n');
        now := replace(now, E'ELSE \'1900-01-01\' END, w.token_id;\n', E'ELSE \'1900-01-01\' END, w.token_id;\n' || ended);
        now := replace(now, E'    RETURNING w.id;\n', E'    RETURNING w.id;\n' || ended);
        IF length(now) <> length(was || started || ended) THEN
            RAISE EXCEPTION 'the function % is not that of 0035 or 0014', f;
        END IF;
        EXECUTE now;
    END LOOP;
    was := pg_get_functiondef('workflow_settle_v1'::regproc);
    now := replace(was, E'    done := workflow_as_worker(bound, silent);\n', E'    done := workflow_as_worker(bound, silent);\n' || started);
    now := regexp_replace(now, $q$( +)(done := set_config\('workflow.audit', before, true\);)$q$, $q$\1done := set_config('workflow.transition', '', true);
\1\2$q$, 'g');
    IF length(now) - length(was || started) <> length($q$        done := set_config('workflow.transition', '', true);
$q$) * 2 - 4 THEN
        RAISE EXCEPTION 'the function workflow_settle_v1 is not that of 0018';
    END IF;
    EXECUTE now;
END
$do$;
