-- Binds a role to prefixes: it leases, reads and settles runs of these, and sees no others. See
-- create.sql; `workflowctl roles worker` runs this. Settings: workflow.roles, workflow.bind_role,
-- workflow.bind_prefixes (comma-separated).
DO $do$
DECLARE
    named    text := coalesce(nullif(current_setting('workflow.roles', true), ''), 'workflow');
    bound    text := current_setting('workflow.bind_role');
    prefixes text[] := string_to_array(current_setting('workflow.bind_prefixes'), ',');
    mine     text;
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
    IF to_regrole(quote_ident(named || '_worker')) IS NULL THEN
        RAISE EXCEPTION 'there is no role %', named || '_worker' USING HINT = 'Run workflowctl roles first.';
    ELSIF EXISTS (SELECT FROM unnest(prefixes) AS p WHERE p !~ '^([a-z0-9_-]+\.)+$') THEN
        RAISE EXCEPTION 'a prefix ends with a dot, as in billing.: %', prefixes;
    END IF;
    BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', bound);
    EXCEPTION WHEN duplicate_object OR unique_violation THEN -- it is there, and may be one that logs in
    END;
    EXECUTE format('GRANT %I TO %I', named || '_worker', bound);
    SELECT string_agg(format('type ^@ %L', p), ' OR ' ORDER BY p) INTO mine FROM unnest(prefixes) AS p;
    EXECUTE format('DROP POLICY IF EXISTS %I ON workflow_run', 'worker ' || bound);
    EXECUTE format('DROP POLICY IF EXISTS %I ON workflow_history', 'worker ' || bound);
    -- Constants, so that it costs no look at another table for each row.
    EXECUTE format('CREATE POLICY %I ON workflow_run TO %I USING (%s)', 'worker ' || bound, bound, mine);
    EXECUTE format('CREATE POLICY %I ON workflow_history FOR INSERT TO %I WITH CHECK (EXISTS (SELECT FROM workflow_run r WHERE r.id = workflow_id))', 'worker ' || bound, bound);
END
$do$;
