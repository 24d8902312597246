-- simple-workflow 0036: steps that are carried on.
--
-- The transaction that settles a step of a process stores the runs of the next steps. The worker that settles may store them as leased by itself. So nobody
-- has to be told of them, and they need not be found, locked and leased.
--
--   workflow_carry_v1            stores such runs
--   workflow_run_refuse_insert   lets the engine alone store them
--
-- A worker never learns of the leases if the answer to its commit is lost. It gives them back by their tokens, as those of a poll: workflow_give_back_v2.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- It runs with the rights of who calls it: only the engine may insert such runs. It wakes nobody, because nobody else has to do anything about them.
CREATE FUNCTION workflow_carry_v1(
    token_ids uuid[], types text[], nodes text[], payloads jsonb[], most integer[], priorities integer[], tenants text[], traces jsonb[],
    lease_tokens uuid[], lengths float8[], timeouts float8[], worker text)
RETURNS TABLE (token uuid, follows boolean, created_at timestamptz, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    woken text := coalesce(current_setting('workflow.woken', true), ''); -- see workflow_run_wakeup
BEGIN
    PERFORM set_config('workflow.woken', 'on', true);
    RETURN QUERY
    INSERT INTO workflow_run AS w (token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, created_at, run_at,
                                   status, attempt, lease_no, lease_token, leased_by, started_at, lease_until, deadline_at)
    SELECT n.step, n.type, n.node, n.payload, n.most, n.priority, n.tenant, n.trace, statement_timestamp(), statement_timestamp(),
           'leased', 1, 1, n.token, worker, statement_timestamp(),
           statement_timestamp() + least(n.length, n.timeout) * interval '1 second', statement_timestamp() + n.timeout * interval '1 second'
    FROM unnest(token_ids, types, nodes, payloads, most, priorities, tenants, traces, lease_tokens, lengths, timeouts)
      AS n (step, type, node, payload, most, priority, tenant, trace, token, length, timeout)
    RETURNING w.lease_token, workflow_follows(w.max_attempts, w.policy_attempts), w.created_at,
              w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, false, w.run_at, w.token_id;
    PERFORM set_config('workflow.woken', woken, true);
END
$fn$;
COMMENT ON FUNCTION workflow_carry_v1(uuid[], text[], text[], jsonb[], integer[], integer[], text[], jsonb[], uuid[], float8[], float8[], text) IS
    'For the engine: stores runs of process tokens as leased by the worker that settles the steps before them. Their attempts are charged, unless a lease is one ahead (workflow_begin_v1).';

-- As in 0014. A run that is carried on is leased for the first time, in the moment in which it is stored.
DO $do$
DECLARE
    was text := pg_get_functiondef('workflow_run_refuse_insert()'::regprocedure);
    now text;
BEGIN
    now := replace(was, $q$ELSIF NEW.status <> 'pending' THEN$q$, $q$ELSIF NEW.status <> 'pending' AND NOT carried THEN$q$);
    now := replace(now, $q$ELSIF NEW.attempt <> 0 OR NEW.postponed <> 0 OR NEW.suspect OR NEW.lease_no <> 0
       OR NEW.lease_token IS NOT NULL OR NEW.lease_until IS NOT NULL OR NEW.leased_by IS NOT NULL
       OR NEW.settled_token IS NOT NULL OR NEW.settled_by IS NOT NULL OR NEW.started_at IS NOT NULL OR NEW.deadline_at IS NOT NULL
$q$, $q$ELSIF NEW.attempt <> carried::integer OR NEW.postponed <> 0 OR NEW.suspect OR NEW.lease_no <> carried::integer
       OR NOT carried AND (NEW.lease_token IS NOT NULL OR NEW.lease_until IS NOT NULL OR NEW.leased_by IS NOT NULL OR NEW.started_at IS NOT NULL OR NEW.deadline_at IS NOT NULL)
       OR NEW.settled_token IS NOT NULL OR NEW.settled_by IS NOT NULL
$q$);
    now := replace(now, $q$    problem text;
$q$, $q$    problem text;
    carried boolean := NEW.status = 'leased' AND NEW.token_id IS NOT NULL AND NEW.started_at = statement_timestamp()
        AND coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege(workflow_role()::name, 'process_token'::regclass, 'UPDATE'); -- workflow_at_work(), of who asks
$q$);
    IF length(now) - length(was) < 150 THEN
        RAISE EXCEPTION 'workflow_run_refuse_insert is not that of 0014';
    END IF;
    EXECUTE now;
END
$do$;

-- As in 0014, but for what a lease sets, and for runs of processes: they are created when they are inserted, and not when the transaction begins.
CREATE OR REPLACE TRIGGER workflow_run_insert_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.type ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND length(NEW.type) <= 200
        AND NEW.created_by = session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000
        AND NEW.postponed = 0 AND NOT NEW.suspect
        AND (NEW.status = 'pending' AND NEW.attempt = 0 AND NEW.lease_no = 0
             AND NEW.lease_token IS NULL AND NEW.leased_by IS NULL AND coalesce(NEW.lease_until, NEW.started_at, NEW.deadline_at) IS NULL
             OR NEW.status = 'leased' AND NEW.attempt = 1 AND NEW.lease_no = 1 AND NEW.token_id IS NOT NULL AND NEW.started_at = statement_timestamp()
             AND coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE'))
        AND coalesce(NEW.settled_token::text, NEW.settled_by) IS NULL AND NEW.finished_at IS NULL
        AND NEW.result IS NULL AND NEW.error IS NULL AND NEW.last_error IS NULL
        AND coalesce(NEW.held_at, NEW.deleted_at) IS NULL AND NEW.delete_reason IS NULL AND NEW.created_at BETWEEN now() AND clock_timestamp()
        AND NEW.run_at BETWEEN '2000-01-01' AND now() + interval '10 years'
        AND length(NEW.idempotency_key) BETWEEN 1 AND 200 -- null passes
        AND length(NEW.tenant_id) BETWEEN 1 AND 200
        AND jsonb_typeof(NEW.payload) = 'object'
        -- The text is the dear part: it is made once. Without 32 zeros in a row it has at most six times the bytes that are stored, so that
        -- it is within its limit; and an exponent above 308 spells out more of them. What has them, is large or comes compressed is looked at there.
        AND pg_column_size(NEW.payload) < 40000 AND pg_column_compression(NEW.payload) IS NULL
        AND strpos(NEW.payload::text, '00000000000000000000000000000000') = 0
        -- 64 levels and one more are stored in 520 bytes, or written in 130. Nothing that could hold more lies 64 levels below the top.
        AND (pg_column_size(NEW.payload) < 512
             OR NOT jsonb_path_exists(NEW.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
        AND jsonb_typeof(NEW.metadata) = 'object' AND octet_length(NEW.metadata::text) < 130
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_insert();

-- What is new is ours, in the list of 0020, and belongs to whom the rest belongs to.
DO $do$
BEGIN
    EXECUTE replace(pg_get_functiondef('workflow_functions()'::regprocedure), $q$'{$q$, $q$'{workflow_carry_v1, $q$);
END
$do$;
REVOKE ALL ON FUNCTION workflow_carry_v1(uuid[], text[], text[], jsonb[], integer[], integer[], text[], jsonb[], uuid[], float8[], float8[], text) FROM PUBLIC;
DO $do$
DECLARE
    own   oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f     constant regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.proname = 'workflow_carry_v1' AND p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass));
    r     regrole;
    thing text;
BEGIN
    FOR r IN -- whoever leases goes on to, until `workflowctl roles` is run again
        SELECT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        WHERE o.proname = 'workflow_lease_v2' AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
    END LOOP;
    FOR thing IN SELECT p.oid::regprocedure FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proowner <> own LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %s', thing, own::regrole);
    END LOOP;
END
$do$;
