-- simple-workflow 0026: work that goes on elsewhere.
--
-- A handler may hand its run on: the run stays leased, without a worker, until whoever got the handler's token completes it, or until its time is
-- over and it is taken back as any other whose lease ran out. SQL alone cannot move a process: so an outcome is stored in workflow_kept, and any worker
-- settles it within two seconds, as it does what is kept there for other reasons.
--
--   workflow_accepted_v1   a worker hands a run on; workflow_accepted (0018) has those
--   workflow_complete      stores the outcome
--   workflow_elsewhere_v1  counts them
--   workflow_extend_v1     does not shorten the lease of one: a heartbeat may be under way when it is handed on

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- What a handler gets in place of the lease's own token. Runs that are leased by one statement have the same token, and with that a worker could settle them:
-- this one is of a single run, and good for nothing but workflow_complete. worker.Token makes it, too; a test compares the two.
CREATE FUNCTION workflow_handed(run uuid, token uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN encode(substring(sha256(uuid_send(token) || uuid_send(run)) FROM 1 FOR 16), 'hex')::uuid;

-- That its time limit is when its lease ends tells such a row from others that a heartbeat may extend: see below. It has outlived its handler, so it is no suspect.
-- Called again, since the answer was lost, it changes nothing.
CREATE FUNCTION workflow_accepted_v1(run uuid, token uuid, seconds float8) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    ends   timestamptz := clock_timestamp() + least(greatest(coalesce(seconds, 86400), 1), 86400) * interval '1 second';
    before text;
    kind   text;
BEGIN
    SELECT w.type INTO kind FROM workflow_run w
    WHERE w.id = workflow_accepted_v1.run AND w.lease_token = workflow_accepted_v1.token AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF EXISTS (SELECT FROM workflow_accepted a WHERE a.run = workflow_accepted_v1.run AND a.token = workflow_accepted_v1.token)
       OR EXISTS (SELECT FROM workflow_kept k WHERE k.run = workflow_accepted_v1.run AND k.token = workflow_accepted_v1.token) THEN
        RETURN true;
    END IF;
    UPDATE workflow_run w SET lease_until = ends, deadline_at = ends, suspect = false, alone = NULL, updated_at = clock_timestamp() WHERE w.id = workflow_accepted_v1.run;
    before := workflow_advance('on'); -- for the guards
    INSERT INTO workflow_accepted (run, token, type, until) VALUES (workflow_accepted_v1.run, workflow_accepted_v1.token, left(kind, 200), ends)
    ON CONFLICT (run) DO UPDATE SET token = excluded.token, type = excluded.type, until = excluded.until, since = excluded.since;
    PERFORM workflow_advance(before);
    RETURN true;
END
$fn$;
COMMENT ON FUNCTION workflow_accepted_v1(uuid, uuid, float8) IS
    'For workers: a leased run goes on elsewhere for so many seconds, a day at most, and is no worker''s until then. False: it is not the caller''s any more.';

CREATE FUNCTION workflow_elsewhere_v1(prefixes text[]) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    RETURN (SELECT count(*) FROM workflow_accepted a
            WHERE a.until > clock_timestamp() AND a.type ^@ ANY (prefixes) AND (bound IS NULL OR a.type ^@ ANY (bound))
              AND (SELECT w.lease_token FROM workflow_run w WHERE w.id = a.run) = a.token); -- or it is a leftover; by key, whatever the planner thinks
END
$fn$;
COMMENT ON FUNCTION workflow_elsewhere_v1(text[]) IS 'For workers: how many runs of some prefixes go on elsewhere.';

-- Nobody learns more of a run than that it is there, unless he has its token. What has not got the token is not locked.
CREATE FUNCTION workflow_complete(run uuid, token uuid, result jsonb DEFAULT NULL, error jsonb DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    given   jsonb := workflow_complete.error;
    known   text;
    problem text;
    fix     text;
    bound   text[];
    before  text;
    what    text;
    r       workflow_run;
    k       workflow_kept;
BEGIN
    PERFORM workflow_behalf(workflow_complete.on_behalf_of, 'workflow_complete(uuid, uuid, jsonb, jsonb, text)'::regprocedure);
    IF workflow_complete.run IS NULL OR workflow_complete.token IS NULL THEN
        RAISE EXCEPTION 'workflow_complete: % is null', CASE WHEN workflow_complete.run IS NULL THEN 'run' ELSE 'token' END
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Its handler got both: as headers Workflow-Run-Id and Workflow-Token, as WORKFLOW_RUN_ID and WORKFLOW_TOKEN, or by worker.Token.';
    ELSIF given IS NOT NULL THEN
        SELECT e.key INTO known FROM jsonb_each(CASE jsonb_typeof(given) WHEN 'object' THEN given ELSE '{}' END) AS e
        WHERE NOT CASE e.key
            WHEN 'code' THEN jsonb_typeof(e.value) = 'string' AND e.value #>> '{}' ~ '^[A-Za-z0-9_.:-]{1,100}$'
            WHEN 'message' THEN jsonb_typeof(e.value) = 'string' AND octet_length(e.value #>> '{}') <= 4096
            WHEN 'permanent' THEN jsonb_typeof(e.value) = 'boolean'
            WHEN 'retry_after' THEN jsonb_typeof(e.value) = 'number' AND e.value >= '0' AND e.value <= '31536000'
            WHEN 'again_after' THEN jsonb_typeof(e.value) = 'number' AND e.value >= '0' AND e.value <= '31536000'
            ELSE false END
        ORDER BY e.key LIMIT 1;
        IF workflow_complete.result IS NOT NULL THEN
            problem := 'there is a result and an error';
            fix := 'Give one of the two.';
        ELSIF jsonb_typeof(given) <> 'object' THEN
            problem := format('error is a JSON %s, an object is required', jsonb_typeof(given));
            fix := 'Write it as {"code": "CARD_DECLINED", "message": "no money left", "permanent": true}.';
        ELSIF known IS NOT NULL THEN
            problem := format('error: %s is not what may stand there', left(to_jsonb(known)::text, 200));
            fix := 'There are code (at most 100 letters, digits and _.:-), message (a text of at most 4096 bytes), permanent (true or false), retry_after and again_after (seconds, a year at most).';
        END IF;
    ELSIF octet_length(workflow_complete.result::text) > 1048576 THEN
        problem := format('result has %s bytes, the limit is 1048576', octet_length(workflow_complete.result::text));
        fix := 'Store large data elsewhere and give a reference.';
    ELSIF jsonb_path_exists(workflow_complete.result, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
        problem := 'result has more than 64 levels';
        fix := 'Make it flatter.';
    ELSE
        SELECT 'result: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(workflow_complete.result, workflow_complete.result::text) AS p;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'workflow_complete: %', problem USING ERRCODE = 'check_violation', HINT = fix;
    END IF;
    what := CASE WHEN given IS NULL THEN 'succeeded' WHEN given ? 'again_after' THEN 'postponed' WHEN given->'permanent' = 'true' THEN 'failed' ELSE 'retried' END;
    -- Whoever works on some prefixes completes runs of these alone. Of all others the token says enough.
    IF EXISTS (SELECT FROM workflow_binding b WHERE pg_has_role(workflow_role(), b.role, 'USAGE')) THEN
        bound := workflow_bound_prefixes();
    END IF;

    -- Before all else, as by all: also what is kept of an earlier lease, in whose place this one comes.
    PERFORM FROM workflow_kept x JOIN workflow_run w ON w.id = x.run WHERE x.run = workflow_complete.run AND workflow_handed(w.id, w.lease_token) = workflow_complete.token FOR UPDATE OF x;
    SELECT w.* INTO r FROM workflow_run w
    WHERE w.id = workflow_complete.run AND w.status = 'leased' AND workflow_handed(w.id, w.lease_token) = workflow_complete.token
      AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        SELECT w.* INTO r FROM workflow_run w WHERE w.id = workflow_complete.run AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound));
        IF NOT FOUND THEN
            RAISE EXCEPTION 'workflow_complete: there is no run %', workflow_complete.run
                USING ERRCODE = 'no_data_found', HINT = 'It has another id, retention has removed it, or it is of another prefix than those of your role.';
        ELSIF workflow_handed(r.id, r.settled_token) IS DISTINCT FROM workflow_complete.token THEN
            RAISE EXCEPTION 'workflow_complete: run % is not leased with this token', r.id
                USING ERRCODE = 'insufficient_privilege', HINT = 'It is the token of another run; or the time of its lease was over, it was cancelled, or given back: then it was or will be started again, and that start has a token of its own.';
        ELSIF (CASE WHEN given IS NULL THEN r.status = 'succeeded' AND coalesce(r.result, 'null') = coalesce(workflow_complete.result, 'null')
                   ELSE r.status <> 'succeeded' AND (given ? 'again_after' OR r.error->>'code' = coalesce(given->>'code', 'handler_error')) END) THEN
            RETURN 'completed already';
        END IF;
        RAISE EXCEPTION 'workflow_complete: run % was completed with another outcome', r.id USING ERRCODE = 'unique_violation', HINT = 'What was said first counts.';
    END IF;
    SELECT x.* INTO k FROM workflow_kept x WHERE x.run = r.id AND x.token = r.lease_token;
    IF FOUND AND k.told AND k.verdict = what AND coalesce(k.result, 'null') = coalesce(workflow_complete.result, 'null') AND k.error IS NOT DISTINCT FROM given THEN
        RETURN 'completed already';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'workflow_complete: run % was completed with another outcome', r.id USING ERRCODE = 'unique_violation', HINT = 'What was said first counts.';
    END IF;
    before := workflow_advance('on'); -- for the guards
    DELETE FROM workflow_accepted a WHERE a.run = r.id AND a.token = r.lease_token;
    IF NOT FOUND THEN
        PERFORM workflow_advance(before);
        RAISE EXCEPTION 'workflow_complete: run % is not handed on: its handler is at work', r.id
            USING ERRCODE = 'object_in_use', HINT = 'A handler hands it on by the status 202, the exit code 202 or run.ErrElsewhere. If it is just about to, try again in a second.';
    END IF;
    INSERT INTO workflow_kept (run, token, verdict, result, error, last_error, delay, effects, worker, told)
    VALUES (r.id, r.lease_token, what, workflow_complete.result, given, given->>'message', 0, false, left(coalesce(r.leased_by, ''), 200), true)
    ON CONFLICT (run) DO UPDATE -- one of another lease, which is forgotten
    SET token = excluded.token, verdict = excluded.verdict, result = excluded.result, error = excluded.error, last_error = excluded.last_error, delay = excluded.delay,
        events = NULL, effects = false, worker = excluded.worker, told = true, since = excluded.since;
    DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id; -- it is to be tried at once
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    VALUES (r.id, 'edited', workflow_actor(), r.attempt, r.lease_no, jsonb_build_object('completed_elsewhere', what));
    PERFORM workflow_advance(before);
    RETURN 'completed';
END
$fn$;
COMMENT ON FUNCTION workflow_complete(uuid, uuid, jsonb, jsonb, text) IS
    'Completes a run whose work goes on elsewhere, with the token that its handler got: with a result, or with an error, an object of code, message, permanent, retry_after and again_after. A worker records it within two seconds. Answers completed, or completed already; all else is refused in words.';

-- As in 0008. A lease that ends with its time limit is extended by nobody: where no more is left of it, least has it so anyway, and where more is, it was handed on
-- a moment ago, while this was on its way.
CREATE OR REPLACE FUNCTION workflow_extend_v1(ids uuid[], tokens uuid[], lengths float8[]) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
DECLARE
    bound text[]  := workflow_bound_prefixes();
    own   boolean := bound IS NULL;
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT h.id, h.token, h.length FROM unnest(ids, tokens, lengths) AS h (id, token, length)
    ), mine AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w JOIN held h ON w.id = h.id AND w.lease_token = h.token
        WHERE w.id = ANY (ids) AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
        ORDER BY w.id
        FOR UPDATE OF w SKIP LOCKED
    )
    UPDATE workflow_run w
    SET lease_until = CASE WHEN w.lease_until = w.deadline_at AND w.deadline_at > w.started_at THEN w.lease_until
                           ELSE least(clock_timestamp() + h.length * interval '1 second', CASE WHEN w.deadline_at > w.started_at THEN w.deadline_at END) END,
        updated_at = statement_timestamp()
    FROM held h
    WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.id = h.id
    RETURNING w.id;
END
$fn$;

-- Who works goes on to work, and who may enqueue or cancel may complete what he has the token of, until `workflowctl roles` is run again.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f   regprocedure;
    g   record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = own
             AND p.proname = ANY ('{workflow_handed, workflow_accepted_v1, workflow_elsewhere_v1, workflow_complete}'::text[]) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    FOR g IN
        SELECT DISTINCT n.oid::regprocedure AS name, a.grantee::regrole AS holder
        FROM (VALUES ('workflow_kept_v1', '{workflow_accepted_v1, workflow_elsewhere_v1, workflow_complete}'::text[]),
                     ('workflow_cancel', '{workflow_complete}'), ('workflow_enqueue', '{workflow_complete}')) AS x (as_before, names)
        JOIN pg_proc p ON p.pronamespace = own AND p.proname = x.as_before
        CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        JOIN pg_proc n ON n.pronamespace = own AND n.proname = ANY (x.names)
        WHERE a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', g.name, g.holder);
    END LOOP;
END
$do$;
