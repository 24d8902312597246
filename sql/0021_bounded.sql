-- simple-workflow 0021: every column is bounded.
--
-- workflowctl migrate up and sql.Up bring rows that are beyond a bound back within it before this, a thousand at a time, and add the
-- CHECKs table by table; here those are added that are still missing. By hand: SELECT * FROM workflow_mend_v1('workflow_run', NULL, 1000), and so
-- on with the key that it returns, for each relation of workflow_bound_check.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

DO $do$
DECLARE
    t text;
BEGIN
    FOR t IN SELECT DISTINCT c.relation FROM workflow_bound_check c WHERE c.valid IS NULL ORDER BY 1 LOOP
        PERFORM workflow_add_bounds_v1(t);
    END LOOP;
END
$do$;
