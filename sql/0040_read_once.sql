-- simple-workflow 0040: what an insert has to read.
--
-- PostgreSQL parses the conditions of all triggers of a table anew for each statement. Those of the insert guards were 26 kB, which took most of the time of
-- an insert of one run. What a function in PL/pgSQL asks is planned once in a session.
--
--   workflow_run_is_new          whether a row is what a new run looks like: true or null for nearly all
--   workflow_run_refuse_insert,
--   workflow_run_refuse_reserved look at the others, as before, and say in words what they refuse
--   workflow_run_guard_insert    asks them for each row
DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- The conditions of the triggers of 0036 and 0010, in one. The names in it were resolved when it was created, so that nobody can replace an operator by one
-- that comes first in his search_path. It is put in place of its call, as a function is that has neither SET nor SECURITY DEFINER and is called volatile. Its
-- parameters are columns, because to take them out of a row takes longer.
CREATE FUNCTION workflow_run_is_new(
    type text, created_by text, priority integer, max_attempts integer, postponed integer, suspect boolean, status text, attempt integer, lease_no bigint,
    lease_token uuid, leased_by text, lease_until timestamptz, started_at timestamptz, deadline_at timestamptz, token_id uuid, node text,
    settled_token uuid, settled_by text, finished_at timestamptz, result jsonb, error jsonb, last_error text, held_at timestamptz, deleted_at timestamptz,
    delete_reason text, created_at timestamptz, run_at timestamptz, idempotency_key text, tenant_id text, payload jsonb, metadata jsonb)
RETURNS boolean
LANGUAGE sql VOLATILE
RETURN
    type ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND length(type) <= 200
    AND created_by = session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')
    AND priority BETWEEN -100 AND 100 AND max_attempts BETWEEN 1 AND 1000
    AND postponed = 0 AND NOT suspect
    AND (status = 'pending' AND attempt = 0 AND lease_no = 0 AND num_nonnulls(lease_token, leased_by, lease_until, started_at, deadline_at) = 0
         OR status = 'leased' AND attempt = 1 AND lease_no = 1 AND token_id IS NOT NULL AND started_at = statement_timestamp()) -- by the engine alone, see the end
    AND num_nonnulls(settled_token, settled_by, finished_at, result, error, last_error, held_at, deleted_at, delete_reason) = 0
    AND created_at BETWEEN now() AND clock_timestamp()
    AND run_at BETWEEN '2000-01-01' AND now() + interval '10 years'
    AND length(idempotency_key) BETWEEN 1 AND 200 -- null passes
    AND length(tenant_id) BETWEEN 1 AND 200
    AND jsonb_typeof(payload) = 'object'
    -- The text is the dear part: it is made once. Without 32 zeros in a row it has at most six times the bytes that are stored, so that
    -- it is within its limit; and an exponent above 308 spells out more of them. What has them, is large or comes compressed is looked at there.
    AND pg_column_size(payload) < 40000 AND pg_column_compression(payload) IS NULL
    AND strpos(payload::text, '00000000000000000000000000000000') = 0
    -- 64 levels and one more are stored in 520 bytes, or written in 130. Nothing that could hold more lies 64 levels below the top.
    AND (pg_column_size(payload) < 512
         OR NOT jsonb_path_exists(payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
    AND jsonb_typeof(metadata) = 'object' AND octet_length(metadata::text) < 130
    -- What the engine alone may enqueue.
    AND (token_id IS NULL AND node IS NULL AND (NOT type ^@ 'graph.' OR type = 'graph.start.v1' AND NOT payload ? 'parent')
         OR coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE'));

-- As before, but of a row that they are given, and they return if they have nothing against it. The second one asks first what the condition of its trigger
-- asked. It runs with the rights of who inserts, so that is written out and calls no function of ours.
DO $do$
DECLARE
    f    record;
    made text;
BEGIN
    FOR f IN SELECT * FROM (VALUES
        ('workflow_run_refuse_insert', E'\nBEGIN\n'),
        ('workflow_run_refuse_reserved', $q$
BEGIN
    IF ((new.token_id IS NOT NULL OR new.node IS NOT NULL OR new.type ^@ 'graph.' AND (new.type <> 'graph.start.v1' OR new.payload ? 'parent'))
        AND NOT (coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE'))) IS NOT TRUE THEN
        RETURN; -- null: NOT NULL says which column lacks its value
    END IF;
$q$)) AS x (name, begins)
    LOOP
        made := replace(pg_get_functiondef((f.name || '()')::regprocedure), f.name || '()', f.name || '(new workflow_run)');
        made := replace(replace(made, 'RETURNS trigger', 'RETURNS void'), 'RETURN NEW;', 'RETURN;');
        made := replace(replace(made, 'TG_TABLE_NAME, TG_OP', $q$'workflow_run', 'INSERT'$q$), E'\nBEGIN\n', f.begins);
        IF strpos(made, '(new workflow_run)') * strpos(made, 'RETURNS void') * strpos(made, f.begins) = 0 OR made ~ 'TG_|RETURN NEW' THEN
            RAISE EXCEPTION 'the function % is not that of an earlier migration', f.name;
        END IF;
        EXECUTE made;
    END LOOP;
END
$do$;

DROP TRIGGER workflow_run_reserved_guard ON workflow_run;
DROP FUNCTION workflow_run_refuse_reserved();

-- Its calls name their schema for the same reason. A SET clause would take longer than all that is asked. It is called stable, so that PL/pgSQL takes no
-- snapshot for what is asked.
DO $do$
DECLARE
    is_new pg_proc := (SELECT p FROM pg_proc p WHERE p.proname = 'workflow_run_is_new' AND p.pronamespace = quote_ident(current_schema())::regnamespace);
BEGIN
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', is_new.oid::regprocedure,
        'Whether a row is what a new run looks like. False: workflow_run_refuse_insert and workflow_run_refuse_reserved look at it. Null, like true, lets it pass: columns that may be null are, or NOT NULL refuses it.');
    EXECUTE format($q$
        CREATE FUNCTION workflow_run_guard_insert() RETURNS trigger
        LANGUAGE plpgsql STABLE AS $fn$
        BEGIN
            IF %1$I.workflow_run_is_new(%2$s) IS FALSE THEN
                PERFORM %1$I.workflow_run_refuse_insert(NEW);
                PERFORM %1$I.workflow_run_refuse_reserved(NEW);
            END IF;
            RETURN NEW;
        END
        $fn$
    $q$, current_schema(), (SELECT string_agg('NEW.' || name, ', ' ORDER BY place) FROM unnest(is_new.proargnames) WITH ORDINALITY AS p (name, place)));
END
$do$;
CREATE OR REPLACE TRIGGER workflow_run_insert_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW EXECUTE FUNCTION workflow_run_guard_insert();
DROP FUNCTION workflow_run_refuse_insert();

-- What is new is ours, in the list of 0020, belongs to whom the rest belongs to, and is called with the rights of whoever inserts a run.
DO $do$
DECLARE
    own   oid  := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    asked text := (SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc p WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                   AND p.proname = ANY ('{workflow_run_is_new, workflow_run_refuse_insert, workflow_run_refuse_reserved}'));
    r     regrole;
    thing text;
BEGIN
    EXECUTE format('REVOKE ALL ON FUNCTION workflow_run_guard_insert(), %s FROM PUBLIC', asked);
    EXECUTE replace(pg_get_functiondef('workflow_functions()'::regprocedure), $q$'{$q$, $q$'{workflow_run_is_new, workflow_run_guard_insert, $q$);
    FOR r IN
        SELECT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
        WHERE c.oid = 'workflow_run'::regclass AND x.privilege_type = 'INSERT' AND x.grantee <> own
        UNION
        SELECT x.grantee FROM pg_attribute a CROSS JOIN LATERAL aclexplode(a.attacl) AS x
        WHERE a.attrelid = 'workflow_run'::regclass AND x.privilege_type = 'INSERT' AND x.grantee <> own
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', asked, CASE WHEN r = 0::regrole THEN 'PUBLIC' ELSE r::text END);
    END LOOP;
    FOR thing IN SELECT p.oid::regprocedure FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proowner <> own LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %s', thing, own::regrole);
    END LOOP;
END
$do$;
