-- simple-workflow 0018: what cannot be settled is kept, and told of.
--
-- An outcome that the database refuses, for one run alone, is no worker's business any more: it is kept here, under the token of its
-- lease, and settled by any worker once nothing refuses it. The lease is not extended; whoever takes leases back passes it over.
--
--   workflow_unsettled_v2     keeps an outcome that is refused
--   workflow_kept_v1          those that are to be tried again
--   workflow_kept_refused_v1  one was refused once more
--   workflow_kept_over_v1     some are settled: the first statement of the transaction that does it
--   process_incidents_v1      incidents of what is set aside
--   workflow_control_v1       a step of a process that is made to see whether settling works at all, and undone
--   workflow_settle_again, workflow_fail   for operators

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- What counts is that the run is leased with this token: everything else is a leftover, which the next look forgets. No foreign
-- key: each run that retention deletes would be looked up here. Whoever adds a row has locked its run, so that
-- who has locked an expired lease sees whether its outcome is kept. A row that is there is locked before all else, the instance included.
CREATE TABLE workflow_kept (
    run        uuid        NOT NULL PRIMARY KEY,
    token      uuid        NOT NULL,
    verdict    text COLLATE "C" NOT NULL,
    result     jsonb,
    error      jsonb,
    last_error text,
    delay      float8      NOT NULL,
    events     jsonb,
    effects    boolean     NOT NULL,
    worker     text        NOT NULL,
    incident   uuid,
    told       boolean     NOT NULL DEFAULT false,
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT workflow_kept_verdict_check CHECK (verdict IN ('succeeded', 'failed', 'retried', 'postponed', 'released')),
    CONSTRAINT workflow_kept_delay_check CHECK (delay BETWEEN 0 AND 3153600000),
    CONSTRAINT workflow_kept_size_check CHECK (pg_column_size(result) <= 16777216 AND pg_column_size(error) <= 262144 AND octet_length(last_error) <= 16384
        AND pg_column_size(events) <= 67108864 AND octet_length(worker) <= 1000),
    CONSTRAINT workflow_kept_since_check CHECK (since BETWEEN '2000-01-01' AND '2200-01-01')
);
COMMENT ON TABLE  workflow_kept IS 'Outcomes that the database refuses to record for their runs. They are kept under the tokens of their leases, and settled by any worker once nothing refuses them: see workflow_unleasable.';
COMMENT ON COLUMN workflow_kept.run IS 'Its row is leased with token: what is kept under another one is forgotten.';
COMMENT ON COLUMN workflow_kept.verdict IS 'What becomes of the run: succeeded, failed, retried, postponed or released.';
COMMENT ON COLUMN workflow_kept.delay IS 'In seconds: after which it is due again.';
COMMENT ON COLUMN workflow_kept.events IS 'What the handler has said with worker.Emit; null: nothing.';
COMMENT ON COLUMN workflow_kept.effects IS 'The outcome had effects, which a worker''s memory alone held. Once it could be recorded, it is not: its lease is taken back as after a crash.';
COMMENT ON COLUMN workflow_kept.worker IS 'Whose handler it was.';
COMMENT ON COLUMN workflow_kept.told IS 'Nothing has refused it: it was said by workflow_complete. What becomes of an error is decided by who settles it, and verdict is what it most likely is.';
COMMENT ON COLUMN workflow_kept.incident IS 'Of the instance whose step it is; null: it is none, or the instance takes none.';

CREATE TRIGGER workflow_kept_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_kept
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_settle_again(id), workflow_fail(id, reason) or workflow_cancel(id, reason): what a handler has done is not thrown away.');
CREATE TRIGGER workflow_kept_kept BEFORE TRUNCATE ON workflow_kept
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('SELECT workflow_cancel(id, reason) for each run: what a handler has done is not thrown away.');

-- Runs that their handlers have handed on, see 0026: each is leased with this token, and no worker has it. As above, all else is a leftover. Whoever
-- adds or removes a row has locked its run.
CREATE TABLE workflow_accepted (
    run   uuid        NOT NULL PRIMARY KEY,
    token uuid        NOT NULL,
    type  text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT workflow_accepted_type_check CHECK (octet_length(type) <= 200),
    CONSTRAINT workflow_accepted_time_check CHECK (until BETWEEN '2000-01-01' AND '2200-01-01' AND since BETWEEN '2000-01-01' AND '2200-01-01')
);
CREATE INDEX workflow_accepted_until_idx ON workflow_accepted (until);
COMMENT ON TABLE  workflow_accepted IS 'Runs whose work goes on elsewhere: their handlers have handed them on, and whoever has the token that the handler got completes them, by workflow_complete.';
COMMENT ON COLUMN workflow_accepted.token IS 'Of the lease, which nobody extends. The handler got another one, made of this.';
COMMENT ON COLUMN workflow_accepted.type IS 'That of the run, for counting.';
COMMENT ON COLUMN workflow_accepted.until IS 'Its lease ends then. After that it is taken back as any other whose lease ran out.';

CREATE TRIGGER workflow_accepted_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_accepted
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_complete(run, token, result) completes one, and SELECT workflow_cancel(run, reason) cancels it.');
CREATE TRIGGER workflow_accepted_kept BEFORE TRUNCATE ON workflow_accepted
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('SELECT workflow_cancel(run, reason) for each.');

-- ---------------------------------------------------------------------------------
-- Incidents: where the row of the instance takes one.
-- ---------------------------------------------------------------------------------

-- It is of no token: one of a token would say that its step is to be done again. The instance is locked. Those of what is set aside are not counted
-- in open_incidents: they go by themselves, and an engine that moves the instance meanwhile knows of none.
CREATE FUNCTION workflow_incident(instance uuid, node text, code text, run uuid, message text) RETURNS uuid
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    opened uuid := workflow_uuid();
    seen   bigint;
BEGIN
    IF workflow_incident.code IN ('not_leased', 'not_reached') THEN
        SELECT i.version INTO seen FROM process_instance i WHERE i.id = workflow_incident.instance AND i.completed_at IS NULL;
    ELSE
        UPDATE process_instance i SET open_incidents = i.open_incidents + 1, version = i.version + 1, updated_at = clock_timestamp()
        WHERE i.id = workflow_incident.instance AND i.completed_at IS NULL
        RETURNING i.version INTO seen;
    END IF;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO incident (id, instance_id, node, code, message)
    VALUES (opened, workflow_incident.instance, coalesce(workflow_incident.node, ''), workflow_incident.code, left(workflow_incident.message, 2000));
    INSERT INTO process_event (instance_id, event_type, node, version, data)
    VALUES (workflow_incident.instance, 'incident.opened', workflow_incident.node, seen, jsonb_strip_nulls(jsonb_build_object('code', workflow_incident.code, 'run', workflow_incident.run)));
    PERFORM outbox_append_v1(ARRAY[NULL::uuid], ARRAY[i.id], '{incident.opened}',
        ARRAY[jsonb_build_object('incident', opened, 'code', workflow_incident.code, 'node', workflow_incident.node, 'instance', i.id, 'process', d.name, 'version', d.version)], ARRAY[process_trace(i.metadata)], '{t}')
    FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id WHERE i.id = workflow_incident.instance;
    RETURN opened;
EXCEPTION WHEN OTHERS OR assert_failure THEN
    IF workflow_remedy(SQLSTATE) <> 'halve' THEN
        RAISE; -- it passes
    END IF;
    RETURN NULL; -- the row takes none: workflow_set_aside tells enough
END
$fn$;

CREATE FUNCTION workflow_incident_over(id uuid, "by" text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    x    incident;
    seen bigint;
BEGIN
    PERFORM FROM process_instance i WHERE i.id = (SELECT c.instance_id FROM incident c WHERE c.id = workflow_incident_over.id) FOR NO KEY UPDATE;
    UPDATE incident c SET resolved_at = clock_timestamp(), resolved_by = workflow_incident_over."by"
    WHERE c.id = workflow_incident_over.id AND c.resolved_at IS NULL
    RETURNING c.* INTO x;
    IF NOT FOUND THEN
        RETURN; -- with the end of the instance, or by a person
    END IF;
    IF x.code IN ('not_leased', 'not_reached') THEN
        SELECT i.version INTO seen FROM process_instance i WHERE i.id = x.instance_id;
    ELSE
        UPDATE process_instance i SET open_incidents = i.open_incidents - 1, version = i.version + 1, updated_at = clock_timestamp()
        WHERE i.id = x.instance_id
        RETURNING i.version INTO seen;
    END IF;
    INSERT INTO process_event (instance_id, event_type, node, version, data)
    VALUES (x.instance_id, 'incident.resolved', nullif(x.node, ''), seen, jsonb_build_object('incident', x.id, 'code', x.code, 'by', x.resolved_by));
    PERFORM outbox_append_v1(ARRAY[NULL::uuid], ARRAY[i.id], '{incident.resolved}',
        ARRAY[jsonb_build_object('incident', x.id, 'code', x.code, 'node', x.node, 'by', x.resolved_by, 'instance', i.id, 'process', d.name, 'version', d.version)], ARRAY[process_trace(i.metadata)], '{t}')
    FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id WHERE i.id = x.instance_id;
END
$fn$;

-- The same, unless the row of the instance refuses it: then it stays.
CREATE FUNCTION workflow_incident_end(id uuid, "by" text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    PERFORM workflow_incident_over(id, "by");
EXCEPTION WHEN OTHERS OR assert_failure THEN
    IF workflow_remedy(SQLSTATE) <> 'halve' THEN
        RAISE; -- it passes: all of this is done the next time
    END IF;
    RAISE LOG 'incident % stays open: the row of its instance refuses that it ends (SQLSTATE %)', id, SQLSTATE;
END
$fn$;

-- ---------------------------------------------------------------------------------
-- For workers.
-- ---------------------------------------------------------------------------------

-- As in 0008. Most batches have nothing but successes, and these have a statement of their own: what an UPDATE does not name, no guard is asked about.
CREATE OR REPLACE FUNCTION workflow_settle_v1(ids uuid[], tokens uuid[], verdicts text[], results jsonb[], errors jsonb[], last_errors text[], delays float8[], worker text)
RETURNS integer[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
DECLARE
    bound  text[]  := workflow_bound_prefixes();
    own    boolean := bound IS NULL;
    before text    := coalesce(current_setting('workflow.audit', true), '');
    silent boolean := before = 'off' AND workflow_unrecorded();
    called text    := workflow_worker_name(bound, worker);
    places integer[];
    done   text;
BEGIN
    IF (verdicts <@ '{succeeded,failed,retried,postponed,released}' AND cardinality(verdicts) = cardinality(ids)) IS NOT TRUE THEN
        RAISE EXCEPTION 'workflow_settle: each run needs one verdict, which is succeeded, failed, retried, postponed or released' USING ERRCODE = 'check_violation';
    END IF;
    done := workflow_as_worker(bound, silent);
    IF verdicts <@ '{succeeded}' THEN
        WITH settled AS (
            UPDATE workflow_run w
            SET status = 'succeeded', result = s.result, suspect = false, finished_at = statement_timestamp(),
                settled_token = w.lease_token, settled_by = called, updated_at = statement_timestamp(),
                lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
            FROM unnest(ids, tokens, results) WITH ORDINALITY AS s (id, token, result, place)
            WHERE w.id = ANY (ids) AND w.id = s.id AND w.lease_token = s.token AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
            RETURNING s.place
        )
        SELECT array_agg(s.place::integer) INTO places FROM settled s;
        done := set_config('workflow.audit', before, true); -- the transaction may be the caller's, and go on
        RETURN coalesce(places, '{}');
    END IF;
    WITH outcome AS MATERIALIZED (
        SELECT *
        FROM unnest(ids, tokens, verdicts, results, errors, last_errors, delays) WITH ORDINALITY AS o (id, token, verdict, result, error, last_error, delay, place)
    ), settled AS (
        UPDATE workflow_run w
        SET status = CASE o.verdict WHEN 'succeeded' THEN 'succeeded' WHEN 'failed' THEN 'failed' ELSE 'pending' END,
            result = CASE o.verdict WHEN 'succeeded' THEN o.result ELSE w.result END,
            error = coalesce(o.error, w.error),
            last_error = coalesce(o.last_error, w.last_error),
            attempt = w.attempt - CASE WHEN o.verdict IN ('postponed', 'released') AND w.attempt > 0
                                       AND w.deadline_at IS DISTINCT FROM w.started_at THEN 1 ELSE 0 END,
            postponed = w.postponed + CASE o.verdict WHEN 'postponed' THEN 1 ELSE 0 END,
            suspect = w.suspect AND o.verdict = 'released',
            run_at = CASE WHEN o.verdict IN ('succeeded', 'failed') THEN w.run_at
                          ELSE statement_timestamp() + o.delay * interval '1 second' END,
            finished_at = CASE WHEN o.verdict IN ('succeeded', 'failed') THEN statement_timestamp() END,
            settled_token = w.lease_token, settled_by = called, updated_at = statement_timestamp(),
            lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
        FROM outcome o
        WHERE w.id = ANY (ids) AND w.id = o.id AND w.lease_token = o.token AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
        RETURNING w.id, o.place, o.verdict, w.lease_no, w.started_at, o.error, o.delay,
                  CASE WHEN o.verdict IN ('postponed', 'released') THEN least(w.attempt + 1, w.max_attempts) ELSE w.attempt END AS attempt
    ), history AS (
        INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
        SELECT s.id, s.verdict, s.attempt, s.lease_no, s.started_at, called,
               coalesce(s.error - 'stack', '{}') || CASE WHEN s.verdict = 'failed' THEN '{}' ELSE jsonb_build_object('delay_seconds', s.delay) END
        FROM settled s
        WHERE NOT silent AND s.verdict <> 'succeeded'
    )
    SELECT array_agg(s.place::integer) INTO places FROM settled s;
    done := set_config('workflow.audit', before, true);
    RETURN coalesce(places, '{}');
END
$fn$;

-- Fenced by the token of the lease, as all is. With the error of an effect or of the engine itself there is no SQLSTATE. If no run's
-- outcome can be recorded it is not this one that is at fault.
CREATE FUNCTION workflow_unsettled_v2(run uuid, token uuid, verdict text, result jsonb, error jsonb, last_error text, delay float8, events jsonb, effects boolean, worker text,
    sqlstate text, message text, "constraint" text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text;
    r      record;
    t      record;
    open   uuid;
BEGIN
    IF NOT workflow_works('settle') THEN
        RETURN false;
    END IF;
    -- Whoever settles it appends the events with rights of his own: so they are judged here, as outbox_append_v1 judges the caller's.
    IF workflow_unsettled_v2.events IS NOT NULL AND NOT has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') AND EXISTS (
        SELECT FROM jsonb_to_recordset(workflow_unsettled_v2.events) AS e (aggregate uuid, type text)
        WHERE (e.type !~ '^(run\.|process\.|incident\.|no_handler_registered( |$))') IS NOT TRUE
           OR NOT has_function_privilege(workflow_role(), 'outbox_emit(uuid, text, jsonb, jsonb)', 'EXECUTE')
              AND NOT EXISTS (SELECT FROM workflow_run x WHERE x.id = e.aggregate AND x.token_id IS NULL AND x.type ^@ ANY (bound)))
    THEN
        RAISE EXCEPTION 'workflow_unsettled: role % may not append such events', workflow_role()
            USING ERRCODE = 'insufficient_privilege', HINT = 'Events of a worker are of its own runs, and of other types than the engine''s: see docs/roles.md.';
    END IF;
    PERFORM FROM workflow_kept k WHERE k.run = workflow_unsettled_v2.run FOR UPDATE;
    SELECT k.instance_id, k.node INTO t FROM workflow_run w JOIN process_token k ON k.id = w.token_id
    WHERE w.id = workflow_unsettled_v2.run AND w.lease_token = workflow_unsettled_v2.token AND bound IS NULL;
    IF FOUND THEN
        PERFORM FROM process_instance i WHERE i.id = t.instance_id FOR NO KEY UPDATE;
    END IF;
    SELECT w.type, w.xmin AS row_version, w.node INTO r
    FROM workflow_run w
    WHERE w.id = workflow_unsettled_v2.run AND w.status = 'leased' AND w.lease_token = workflow_unsettled_v2.token AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    before := workflow_advance('on'); -- for the guards
    INSERT INTO workflow_set_aside AS a (kind, id, type, statement, sqlstate, message, "constraint", row_version)
    VALUES ('run', workflow_unsettled_v2.run, left(r.type, 200), 'settle', left(workflow_unsettled_v2.sqlstate, 5), left(workflow_unsettled_v2.message, 4096), left(workflow_unsettled_v2."constraint", 200), r.row_version)
    ON CONFLICT (kind, id) DO UPDATE
    SET type = excluded.type, statement = excluded.statement, sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = false, row_version = excluded.row_version;
    IF t.instance_id IS NOT NULL AND NOT EXISTS (SELECT FROM workflow_kept k JOIN incident x ON x.id = k.incident WHERE k.run = workflow_unsettled_v2.run AND x.resolved_at IS NULL) THEN
        open := workflow_incident(t.instance_id, t.node, 'not_settled', workflow_unsettled_v2.run, format('what run %s has come to is kept, and refused: %s',
            workflow_unsettled_v2.run, concat_ws(' ', 'SQLSTATE ' || nullif(workflow_unsettled_v2.sqlstate, ''), left(workflow_unsettled_v2.message, 1000))));
    END IF;
    INSERT INTO workflow_kept AS k (run, token, verdict, result, error, last_error, delay, events, effects, worker, incident)
    VALUES (workflow_unsettled_v2.run, workflow_unsettled_v2.token, workflow_unsettled_v2.verdict, workflow_unsettled_v2.result, workflow_unsettled_v2.error, workflow_unsettled_v2.last_error,
            least(greatest(workflow_unsettled_v2.delay, 0), 3153600000), workflow_unsettled_v2.events, workflow_unsettled_v2.effects, workflow_worker_name(bound, workflow_unsettled_v2.worker), open)
    ON CONFLICT (run) DO UPDATE
    SET token = excluded.token, verdict = excluded.verdict, result = excluded.result, error = excluded.error, last_error = excluded.last_error, delay = excluded.delay,
        events = excluded.events, effects = excluded.effects, worker = excluded.worker, incident = coalesce(excluded.incident, k.incident), told = false, since = excluded.since
    WHERE k.token <> excluded.token; -- kept already, by a call whose answer was lost; somebody may have had it fail since
    PERFORM workflow_advance(before);
    RETURN true;
END
$fn$;
COMMENT ON FUNCTION workflow_unsettled_v2(uuid, uuid, text, jsonb, jsonb, text, float8, jsonb, boolean, text, text, text, text) IS
    'For workers: keeps the outcome of a leased run that is refused, and says why, in the words of who refuses it. The lease is nobody''s from then on: it is not to be extended. False: it is not the caller''s any more, or nothing can be settled.';

-- Due is what somebody has said so of (workflow_try_again_v1, workflow_settle_again), whose row has changed, or of which nothing is noted. What is returned is due
-- no more. steps: the caller moves processes.
CREATE FUNCTION workflow_kept_v1(prefixes text[], steps boolean, most integer)
RETURNS TABLE (token uuid, verdict text, result jsonb, error jsonb, delay float8, events jsonb, effects boolean, worker text, follows boolean, told boolean,
    id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text;
    runs   uuid[];
BEGIN
    IF NOT EXISTS (SELECT FROM workflow_kept) THEN
        RETURN;
    END IF;
    runs := ARRAY(
        SELECT k.run
        FROM workflow_kept k
        JOIN workflow_run w ON w.id = k.run AND w.status = 'leased' AND w.lease_token = k.token
        LEFT JOIN workflow_set_aside a ON a.kind = 'run' AND a.id = k.run
        WHERE (a.id IS NULL OR a.due OR a.row_version <> w.xmin)
          AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound)) AND (steps OR w.token_id IS NULL) AND w.type ^@ ANY (prefixes)
        ORDER BY a.last_tried_at NULLS FIRST, k.since -- who was refused just now comes last
        LIMIT most
        FOR UPDATE OF k SKIP LOCKED);
    before := workflow_advance('on');
    UPDATE workflow_set_aside a SET due = false, row_version = w.xmin
    FROM workflow_run w
    WHERE a.kind = 'run' AND a.id = ANY (runs) AND w.id = a.id;
    PERFORM workflow_advance(before);
    RETURN QUERY
    SELECT k.token, k.verdict::text, k.result, k.error, k.delay, k.events, k.effects, k.worker, workflow_follows(w.max_attempts, w.policy_attempts), k.told,
           w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata,
           CASE WHEN isfinite(w.started_at) THEN w.started_at ELSE statement_timestamp() END, w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at,
           CASE WHEN isfinite(w.run_at) THEN w.run_at ELSE '1900-01-01' END, w.token_id
    FROM workflow_kept k JOIN workflow_run w ON w.id = k.run AND w.lease_token = k.token
    WHERE k.run = ANY (runs);
END
$fn$;
COMMENT ON FUNCTION workflow_kept_v1(text[], boolean, integer) IS
    'For workers: the outcomes kept for runs of some prefixes whose settling is to be tried again now, with what a lease of these runs brings.';

CREATE FUNCTION workflow_kept_refused_v1(run uuid, token uuid, sqlstate text, message text, "constraint" text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text   := workflow_advance('on');
    noted  bigint;
BEGIN
    INSERT INTO workflow_set_aside AS a (kind, id, type, statement, sqlstate, message, "constraint", row_version)
    SELECT 'run', w.id, left(w.type, 200), 'settle', left(workflow_kept_refused_v1.sqlstate, 5), left(workflow_kept_refused_v1.message, 4096), left(workflow_kept_refused_v1."constraint", 200), w.xmin
    FROM workflow_kept k JOIN workflow_run w ON w.id = k.run AND w.status = 'leased' AND w.lease_token = k.token
    WHERE k.run = workflow_kept_refused_v1.run AND k.token = workflow_kept_refused_v1.token AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    ON CONFLICT (kind, id) DO UPDATE
    SET type = excluded.type, statement = excluded.statement, sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = false, row_version = excluded.row_version;
    GET DIAGNOSTICS noted = ROW_COUNT;
    PERFORM workflow_advance(before);
    RETURN noted > 0;
END
$fn$;
COMMENT ON FUNCTION workflow_kept_refused_v1(uuid, uuid, text, text, text) IS 'For workers: says that an outcome which is kept was refused once more, and why. False: it is not kept under this token.';

-- Called before anything else is locked, with what the caller has read of each: a person may have had one fail since. What was refused for the same reasons is due, too. Where the transaction is rolled back, all is kept as before.
CREATE FUNCTION workflow_kept_over_v1(runs uuid[], tokens uuid[], verdicts text[], effects boolean[]) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text   := workflow_advance('on');
    mine   uuid[];
    open   uuid;
BEGIN
    mine := ARRAY(
        SELECT k.run FROM unnest(runs, tokens, verdicts, workflow_kept_over_v1.effects) AS g (run, token, verdict, effects)
        JOIN workflow_kept k ON k.run = g.run AND k.token = g.token AND k.verdict = g.verdict AND k.effects = g.effects JOIN workflow_run w ON w.id = k.run
        WHERE bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound)
        ORDER BY k.run FOR UPDATE OF k);
    FOR open IN SELECT x.id FROM workflow_kept k JOIN incident x ON x.id = k.incident WHERE k.run = ANY (mine) ORDER BY x.instance_id LOOP
        PERFORM workflow_incident_over(open, 'its outcome could be recorded');
    END LOOP;
    WITH gone AS (
        DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = ANY (mine) RETURNING a.*
    ), others AS (
        SELECT y.kind, y.id
        FROM workflow_set_aside y
        WHERE y.kind = 'run' AND NOT y.due AND y.id <> ALL (mine)
          AND (y.type, y.statement, y.sqlstate, y."constraint") IN (SELECT g.type, g.statement, g.sqlstate, g."constraint" FROM gone g)
        LIMIT 10000
        FOR UPDATE SKIP LOCKED
    )
    UPDATE workflow_set_aside a SET due = true FROM others o WHERE a.kind = o.kind AND a.id = o.id;
    RETURN QUERY DELETE FROM workflow_kept k USING unnest(runs, tokens) AS g (run, token) WHERE k.run = ANY (mine) AND k.run = g.run AND k.token = g.token RETURNING k.run;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_kept_over_v1(uuid[], uuid[], text[], boolean[]) IS 'For workers: outcomes are kept no more, as the caller''s transaction records them, or as they had effects and could be recorded. Returns the runs of which one was kept under these tokens.';

-- A process of two steps, and two of it: one at the first, which goes on, and one at the last, which ends. It is the same definition each time: engines
-- remember what they have read.
CREATE FUNCTION workflow_control_v1() RETURNS TABLE (id uuid, token uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_variable
DECLARE
    definition uuid := '6d0c2f0a-6b1e-4b43-9d0f-5a7e2f1c9b11';
    before     text;
    place      text;
BEGIN
    IF workflow_bound_prefixes() IS NOT NULL THEN
        RAISE EXCEPTION 'workflow_control: role % may not settle steps of processes', workflow_role() USING ERRCODE = 'insufficient_privilege';
    END IF;
    before := workflow_advance('on');
    INSERT INTO process_definition (id, definition)
    VALUES (definition, '{"process": "workflow-control", "version": 1, "start": "a", "nodes": {"a": {"do": "workflow.control.v1", "to": "b"}, "b": {"do": "workflow.control.v1"}}}');
    FOREACH place IN ARRAY '{a,b}'::text[] LOOP
        id := workflow_uuid();
        token := workflow_uuid();
        INSERT INTO process_instance (id, process_definition_id, status, live_tokens, ready_tokens, started_at) VALUES (id, definition, 'IN_PROGRESS', 1, 1, now());
        INSERT INTO process_token (id, instance_id, node, state) VALUES (id, id, place, 'Ready');
        INSERT INTO workflow_run (id, type, token_id, node) VALUES (id, 'workflow.control.v1', id, place);
        UPDATE workflow_run w
        SET status = 'leased', lease_token = token, leased_by = 'control', lease_no = 1, started_at = now(), lease_until = now(), updated_at = clock_timestamp()
        WHERE w.id = workflow_control_v1.id;
        RETURN NEXT;
    END LOOP;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_control_v1() IS 'For workers: makes leased steps of a process, to see whether settling such works at all. The caller''s transaction is to be rolled back.';
CREATE TRIGGER process_definition_control_guard BEFORE INSERT ON process_definition
    FOR EACH ROW WHEN ((NEW.definition->>'process' = 'workflow-control' OR NEW.id = '6d0c2f0a-6b1e-4b43-9d0f-5a7e2f1c9b11') AND NOT workflow_at_work())
    EXECUTE FUNCTION workflow_guard('Give the process another name: workers make one of this name to see whether steps can be settled.');

-- ---------------------------------------------------------------------------------
-- What is kept is passed over, tried again, and forgotten.
-- ---------------------------------------------------------------------------------

-- What was kept counts no more.
CREATE FUNCTION workflow_kept_forget(gone workflow_kept[], "by" text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    k workflow_kept;
BEGIN
    FOREACH k IN ARRAY coalesce(gone, '{}') LOOP
        DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = k.run AND a.statement = 'settle';
        IF k.incident IS NOT NULL THEN
            PERFORM workflow_incident_end(k.incident, workflow_kept_forget."by");
        END IF;
    END LOOP;
END
$fn$;

CREATE OR REPLACE VIEW process_miscounted AS
    SELECT i.id AS instance_id, i.live_tokens, t.live, i.ready_tokens, t.ready, i.joining_tokens, t.joining, i.open_incidents, x.open, g.groups
    FROM process_instance i
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE t.state IN ('Created', 'Ready', 'Waiting')) AS live,
               count(*) FILTER (WHERE t.state = 'Ready') AS ready,
               count(*) FILTER (WHERE t.state = 'Waiting' AND EXISTS (SELECT FROM join_arrival a WHERE a.token_id = t.id)) AS joining
        FROM process_token t WHERE t.instance_id = i.id) t
    CROSS JOIN LATERAL (SELECT count(*) AS open FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL AND x.code NOT IN ('not_leased', 'not_reached')) x
    CROSS JOIN LATERAL (
        SELECT count(*) AS groups
        FROM parallel_group g
        WHERE g.instance_id = i.id AND i.completed_at IS NULL AND i.ending IS NULL
          AND g.live <> (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = g.id AND t.state IN ('Created', 'Ready', 'Waiting'))
                      + (SELECT count(*) FROM parallel_group c WHERE c.parent_group_id = g.id AND c.live > 0)) g
    WHERE (i.live_tokens, i.ready_tokens, i.joining_tokens, i.open_incidents, 0) IS DISTINCT FROM (t.live, t.ready, t.joining, x.open, g.groups);
COMMENT ON COLUMN process_instance.open_incidents IS 'Incidents that are not resolved, those of what is set aside (not_leased, not_reached) left out.';

CREATE INDEX incident_aside_idx ON incident (uuid_hash(id)) WHERE resolved_at IS NULL AND code IN ('not_leased', 'not_reached');
CREATE INDEX workflow_set_aside_incident_idx ON workflow_set_aside (incident) WHERE incident IS NOT NULL;

-- Whoever met the error had locked the run, and an instance is locked first: so incidents come after it, in transactions of their own. An instance
-- that somebody has locked, and one that takes none, is left for the next time.
CREATE FUNCTION process_incidents_v1() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '200ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    most   constant integer := 30; -- a subtransaction each
    spot   integer := workflow_anywhere();
    before text;
    done   integer := 0;
    opened uuid;
    x      record;
BEGIN
    IF NOT has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') THEN
        RAISE EXCEPTION 'process_incidents: this is for the engine alone' USING ERRCODE = 'insufficient_privilege', HINT = 'Workers call it every second.';
    END IF;
    IF NOT EXISTS (SELECT FROM workflow_set_aside) AND NOT EXISTS (SELECT FROM incident c WHERE c.resolved_at IS NULL AND c.code IN ('not_leased', 'not_reached')) THEN
        RETURN 0;
    END IF;
    before := workflow_advance('on');
    FOR x IN
        SELECT a.kind, a.id, t.instance_id AS instance, t.node, 'not_leased' AS code, a.id AS run, format('the database refuses a lease of run %s: SQLSTATE %s %s', a.id, a.sqlstate, a.message) AS message
        FROM unnest(workflow_aside_some('run')) AS s (id) JOIN workflow_set_aside a ON a.kind = 'run' AND a.id = s.id JOIN workflow_run r ON r.id = a.id JOIN process_token t ON t.id = r.token_id
        WHERE a.statement IN ('lease', 'take back') AND workflow_remedy(a.sqlstate) <> 'pass over' AND r.status IN ('pending', 'leased')
          AND NOT EXISTS (SELECT FROM incident c WHERE c.id = a.incident AND c.resolved_at IS NULL)
        UNION ALL
        SELECT a.kind, a.id, t.instance_id, t.node, 'not_reached', NULL, 'a signal does not reach it: ' || concat_ws(' ', 'SQLSTATE ' || nullif(a.sqlstate, ''), a.message)
        FROM unnest(workflow_aside_some('wait')) AS s (id) JOIN workflow_set_aside a ON a.kind = 'wait' AND a.id = s.id JOIN process_token t ON t.id = a.id
        WHERE a.message <> '' AND NOT EXISTS (SELECT FROM incident c WHERE c.id = a.incident AND c.resolved_at IS NULL)
    LOOP
        BEGIN
            PERFORM FROM process_instance i WHERE i.id = x.instance AND i.completed_at IS NULL FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            PERFORM FROM workflow_set_aside a
            WHERE a.kind = x.kind AND a.id = x.id AND a.statement IN ('lease', 'take back', 'signal') AND NOT EXISTS (SELECT FROM incident c WHERE c.id = a.incident AND c.resolved_at IS NULL)
            FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            opened := workflow_incident(x.instance, x.node, x.code, x.run, x.message);
            UPDATE workflow_set_aside a SET incident = opened WHERE opened IS NOT NULL AND a.kind = x.kind AND a.id = x.id;
            done := done + CASE WHEN opened IS NULL THEN 0 ELSE 1 END;
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            NULL; -- workflow_set_aside tells enough
        END;
        EXIT WHEN done = most;
    END LOOP;
    FOR x IN
        SELECT c.id, c.instance_id AS instance
        FROM ((SELECT i.* FROM incident i WHERE i.resolved_at IS NULL AND i.code IN ('not_leased', 'not_reached') AND uuid_hash(i.id) >= spot ORDER BY uuid_hash(i.id) LIMIT 500)
              UNION ALL
              (SELECT i.* FROM incident i WHERE i.resolved_at IS NULL AND i.code IN ('not_leased', 'not_reached') AND uuid_hash(i.id) < spot ORDER BY uuid_hash(i.id) LIMIT 500)) AS c
        WHERE NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.incident = c.id AND a.statement IN ('lease', 'take back', 'signal') AND workflow_remedy(a.sqlstate) <> 'pass over')
    LOOP
        BEGIN
            PERFORM FROM process_instance i WHERE i.id = x.instance FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            PERFORM workflow_incident_over(x.id, 'nothing refuses it any more');
            done := done + 1;
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            NULL;
        END;
        EXIT WHEN done >= 2 * most;
    END LOOP;
    PERFORM workflow_advance(before);
    RETURN done;
END
$fn$;
COMMENT ON FUNCTION process_incidents_v1() IS
    'For the engine: opens incidents of steps that no worker may lease (not_leased) and of waits that a signal does not reach (not_reached), and ends those of which nothing is refused any more; some at a time. Workers call it every second, and again while it returns more than 0.';

-- A lease of more than a day is none that a worker takes: it counts as expired, as one without an end does.
CREATE OR REPLACE FUNCTION workflow_expired(from_at timestamptz, steps boolean, most integer, OUT ids uuid[], OUT oldest timestamptz, OUT passing boolean)
LANGUAGE plpgsql AS $fn$
DECLARE
    bound text[]      := workflow_bound_prefixes();
    own   boolean     := bound IS NULL;
    plain boolean     := bound IS NOT NULL;
    keeps boolean     := EXISTS (SELECT FROM workflow_kept);
    kept  uuid[];
    since timestamptz := CASE WHEN from_at < '1901-01-01' THEN '-infinity' ELSE from_at END;
BEGIN
    passing := EXISTS (SELECT FROM workflow_set_aside);
    SELECT w.started_at INTO oldest
    FROM workflow_run w
    WHERE w.status = 'leased' AND w.started_at >= since AND (own OR w.type ^@ ANY (bound))
    ORDER BY w.started_at
    LIMIT 1;
    IF pg_postmaster_start_time() >= clock_timestamp() - interval '2 seconds' THEN
        RETURN; -- living owners use the time to reconnect and extend their leases
    END IF;
    SELECT array_agg(e.id) INTO ids
    FROM (
        SELECT w.id
        FROM workflow_run w
        WHERE w.status = 'leased' AND w.started_at >= oldest AND (w.lease_until < clock_timestamp() OR w.lease_until > clock_timestamp() + interval '25 hours')
          AND (steps OR w.token_id IS NULL OR w.attempt < workflow_most(w.type, w.max_attempts, w.policy_attempts, w.attempt, w.suspect))
          AND (own OR w.type ^@ ANY (bound)) AND (NOT plain OR w.token_id IS NULL)
          AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
          AND (NOT keeps OR NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = w.id AND k.token = w.lease_token))
        ORDER BY w.started_at
        LIMIT most
        FOR UPDATE SKIP LOCKED) e;
    IF since = '-infinity' AND coalesce(cardinality(ids), 0) < most THEN -- those without a beginning, which no worker has made
        ids := ids || ARRAY(
            SELECT w.id
            FROM workflow_run w
            WHERE w.status = 'leased' AND w.started_at IS NULL AND (w.lease_until IS NULL OR w.lease_until < clock_timestamp() OR w.lease_until > clock_timestamp() + interval '25 hours')
              AND (steps OR w.token_id IS NULL OR w.attempt < workflow_most(w.type, w.max_attempts, w.policy_attempts, w.attempt, w.suspect))
              AND (own OR w.type ^@ ANY (bound)) AND (NOT plain OR w.token_id IS NULL)
              AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
              AND (NOT keeps OR NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = w.id AND k.token = w.lease_token))
            LIMIT most - coalesce(cardinality(ids), 0)
            FOR UPDATE SKIP LOCKED);
    END IF;
    -- Once more, now that they are locked: an outcome may have been kept since the statement above began to look.
    IF cardinality(ids) > 0 AND EXISTS (SELECT FROM workflow_kept) THEN
        kept := ARRAY(SELECT k.run FROM workflow_kept k JOIN workflow_run w ON w.id = k.run AND w.lease_token = k.token WHERE k.run = ANY (ids) AND w.id = ANY (ids));
        ids  := ARRAY(SELECT i FROM unnest(ids) AS i WHERE i <> ALL (kept));
    END IF;
END
$fn$;

-- At most ten seconds apart, if it is called every second: one for each reason, and those that have waited for ten minutes, as far as the caller
-- may lease them. What is over is forgotten.
CREATE OR REPLACE FUNCTION workflow_try_again_v1() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '200ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
    before text := coalesce(current_setting('workflow.advance', true), '');
    slice  uuid[];
    gone   workflow_kept;
    home   uuid;
BEGIN
    PERFORM set_config('workflow.advance', 'on', true);
    DELETE FROM workflow_accepted a WHERE a.run = ANY (ARRAY( -- what has ended past workflow_complete, workflow_cancel and the take-back
        SELECT x.run FROM workflow_accepted x LEFT JOIN workflow_run r ON r.id = x.run AND r.status = 'leased' AND r.lease_token = x.token
        WHERE x.until < clock_timestamp() - interval '1 minute' AND r.id IS NULL LIMIT 100 FOR UPDATE OF x SKIP LOCKED));
    IF NOT EXISTS (SELECT FROM workflow_set_aside) AND NOT EXISTS (SELECT FROM workflow_kept) THEN
        PERFORM set_config('workflow.advance', before, true);
        RETURN;
    END IF;
    FOR gone IN SELECT k.* FROM workflow_kept k LEFT JOIN workflow_run r ON r.id = k.run -- settled by who had it still, cancelled, released: the run goes on without what is kept
                WHERE (r.status = 'leased' AND r.lease_token = k.token) IS NOT TRUE AND (bound IS NULL OR r.token_id IS NULL AND r.type ^@ ANY (bound))
                LIMIT 60 FOR UPDATE OF k SKIP LOCKED LOOP -- a subtransaction each
        BEGIN
            home := (SELECT c.instance_id FROM incident c WHERE c.id = gone.incident);
            PERFORM FROM process_instance i WHERE i.id = home FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND AND EXISTS (SELECT FROM process_instance i WHERE i.id = home); -- somebody has locked it: the next time
            DELETE FROM workflow_kept k WHERE k.run = gone.run;
            PERFORM workflow_kept_forget(ARRAY[gone], 'its run has gone on');
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            NULL; -- the next time; what else is set aside does not wait for it
        END;
    END LOOP;
    slice := workflow_aside_some('run') || workflow_aside_some('retention');
    DELETE FROM workflow_set_aside a
    WHERE a.ctid = ANY (ARRAY(
        SELECT x.ctid FROM workflow_set_aside x LEFT JOIN workflow_run r ON r.id = x.id
        WHERE x.kind = 'run' AND x.id = ANY (slice) AND (r.id IS NULL OR r.status NOT IN ('pending', 'leased') OR r.deleted_at IS NOT NULL) AND (bound IS NULL OR x.type ^@ ANY (bound))
        FOR UPDATE OF x SKIP LOCKED));
    slice := workflow_aside_turn('run', bound) || workflow_aside_turn('retention', bound) || ARRAY(
        SELECT x.id FROM workflow_set_aside x
        WHERE x.kind IN ('run', 'retention') AND x.id = ANY (slice) AND x.last_tried_at < clock_timestamp() - interval '10 minutes' AND (bound IS NULL OR x.type ^@ ANY (bound)));
    UPDATE workflow_set_aside a
    SET due = true, last_tried_at = clock_timestamp()
    WHERE a.ctid = ANY (ARRAY(SELECT x.ctid FROM workflow_set_aside x WHERE x.kind IN ('run', 'retention') AND x.id = ANY (slice) FOR UPDATE SKIP LOCKED));
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;

-- ---------------------------------------------------------------------------------
-- For people.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_settle_again(id uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text;
    many   bigint;
    seen   workflow_run;
BEGIN
    PERFORM workflow_behalf(workflow_settle_again.on_behalf_of, 'workflow_settle_again(uuid, text)'::regprocedure);
    before := workflow_advance('on');
    WITH again AS (
        UPDATE workflow_set_aside a SET due = true, last_tried_at = clock_timestamp() WHERE a.incident = workflow_settle_again.id RETURNING a.kind, a.id
    ), told AS (
        INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
        SELECT r.id, 'edited', workflow_actor(), r.attempt, r.lease_no, jsonb_build_object('tried_again', true, 'statement', left(current_query(), 1000))
        FROM again JOIN workflow_run r ON again.kind = 'run' AND r.id = again.id
    )
    SELECT count(*) INTO many FROM again;
    IF many > 0 THEN
        PERFORM workflow_advance(before);
        RETURN 'tried again';
    END IF;
    SELECT * INTO seen FROM workflow_run r WHERE r.id = coalesce((SELECT k.run FROM workflow_kept k WHERE k.incident = workflow_settle_again.id), workflow_settle_again.id);
    IF NOT FOUND THEN
        PERFORM workflow_advance(before);
        RETURN 'not found';
    END IF;
    UPDATE workflow_set_aside a SET due = true, last_tried_at = clock_timestamp() WHERE a.kind = 'run' AND a.id = seen.id;
    IF NOT FOUND THEN
        PERFORM workflow_advance(before);
        RETURN 'not set aside: ' || seen.status;
    END IF;
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    VALUES (seen.id, 'edited', workflow_actor(), seen.attempt, seen.lease_no, jsonb_build_object('tried_again', true, 'statement', left(current_query(), 1000)));
    PERFORM workflow_advance(before);
    RETURN 'tried again';
END
$fn$;
COMMENT ON FUNCTION workflow_settle_again(uuid, text) IS
    'Has a run that is set aside be tried again within seconds, by any worker: its outcome, or its lease. It is named by its id, or by that of its incident. Answers tried again, not set aside: <status>, or not found.';

CREATE FUNCTION workflow_fail(id uuid, reason text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text;
    seen   workflow_run;
    was    text;
BEGIN
    PERFORM workflow_behalf(workflow_fail.on_behalf_of, 'workflow_fail(uuid, text, text)'::regprocedure);
    IF workflow_fail.reason IS NULL OR workflow_fail.reason !~ '\S' THEN
        RAISE EXCEPTION 'workflow_fail: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why it fails.';
    END IF;
    PERFORM FROM workflow_kept k WHERE k.run = workflow_fail.id FOR UPDATE;
    SELECT * INTO seen FROM workflow_run r WHERE r.id = workflow_fail.id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    END IF;
    SELECT k.verdict INTO was FROM workflow_kept k WHERE k.run = seen.id AND k.token = seen.lease_token FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'not kept: ' || seen.status;
    END IF;
    before := workflow_advance('on');
    UPDATE workflow_kept k
    SET verdict = 'failed', result = NULL, events = NULL, effects = false, told = false, delay = 0,
        error = jsonb_build_object('code', 'failed_by_hand', 'message', left(workflow_actor() || ': ' || workflow_fail.reason, 4096), 'attempt', seen.attempt, 'lease_no', seen.lease_no, 'permanent', true),
        last_error = left(workflow_actor() || ': ' || workflow_fail.reason, 4096)
    WHERE k.run = seen.id;
    UPDATE workflow_set_aside a SET due = true WHERE a.kind = 'run' AND a.id = seen.id;
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    VALUES (seen.id, 'edited', workflow_actor(), seen.attempt, seen.lease_no, jsonb_build_object('outcome_was', was, 'reason', workflow_fail.reason, 'statement', left(current_query(), 1000)));
    PERFORM workflow_advance(before);
    RETURN 'to be failed';
END
$fn$;
COMMENT ON FUNCTION workflow_fail(uuid, text, text) IS
    'Has a run fail whose outcome is refused and kept: what its handler returned is dropped, and a worker records the failure, with all that follows for its process. Answers to be failed, not kept: <status>, or not found.';

CREATE OR REPLACE FUNCTION workflow_cancel(id uuid, reason text DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    seen text;
    kept workflow_kept;
BEGIN
    PERFORM workflow_behalf(workflow_cancel.on_behalf_of, 'workflow_cancel(uuid, text, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    PERFORM FROM workflow_kept k WHERE k.run = workflow_cancel.id FOR UPDATE;
    IF FOUND THEN
        PERFORM FROM process_instance i -- before the run, as all do
        WHERE i.id = (SELECT t.instance_id FROM workflow_run r JOIN process_token t ON t.id = r.token_id WHERE r.id = workflow_cancel.id) FOR NO KEY UPDATE;
    END IF;
    LOOP
        UPDATE workflow_run r
        SET status = 'cancelled', finished_at = now(), updated_at = clock_timestamp(), suspect = false,
            lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL,
            last_error = left(concat_ws(': ', 'cancelled', workflow_cancel.reason), 4096)
        WHERE r.id = workflow_cancel.id AND r.status IN ('pending', 'leased');
        IF FOUND THEN
            PERFORM set_config('workflow.advance', 'on', true);
            DELETE FROM workflow_kept k WHERE k.run = workflow_cancel.id RETURNING k.* INTO kept; -- what its handler has done is dropped
            IF FOUND THEN
                PERFORM workflow_kept_forget(ARRAY[kept], 'its step was cancelled');
            END IF;
            DELETE FROM workflow_accepted a WHERE a.run = workflow_cancel.id;
            PERFORM set_config('workflow.advance', '', true);
            RETURN 'cancelled';
        END IF;
        SELECT r.status INTO seen FROM workflow_run r WHERE r.id = workflow_cancel.id;
        IF NOT FOUND THEN
            RETURN 'not found';
        ELSIF seen NOT IN ('pending', 'leased') THEN
            RETURN 'too late: ' || seen;
        END IF;
        -- It was finished a moment ago and has been retried since: cancel it now.
    END LOOP;
END
$fn$;

CREATE OR REPLACE FUNCTION workflow_release(worker text, reason text, on_behalf_of text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    held uuid[];
    n    bigint;
BEGIN
    PERFORM workflow_behalf(workflow_release.on_behalf_of, 'workflow_release(text, text, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF reason !~ '\S' OR reason IS NULL THEN
        RAISE EXCEPTION 'workflow_release: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why the leases are taken away.';
    END IF;
    held := ARRAY(SELECT h.id FROM workflow_run h WHERE h.status = 'leased' AND h.leased_by = workflow_release.worker ORDER BY h.id FOR NO KEY UPDATE);
    -- Now that they are locked, no outcome of theirs is kept that this does not see.
    UPDATE workflow_run r
    SET status = 'pending', lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, run_at = now(), updated_at = clock_timestamp(),
        -- As the policy says by now, or the attempt that was charged would be the last one of a run that was never tried again.
        (max_attempts, policy_attempts) = (SELECT coalesce(p.most, r.max_attempts), coalesce(p.most, r.policy_attempts)
            FROM (SELECT CASE WHEN workflow_follows(r.max_attempts, r.policy_attempts) THEN greatest((workflow_policy_of(r.type)).attempts, r.attempt) END AS most) AS p),
        last_error = left('released by ' || workflow_actor() || ': ' || workflow_release.reason, 4096)
    WHERE r.id = ANY (held) AND NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = r.id AND k.token = r.lease_token AND k.run = ANY (held)) -- no worker has that one
      AND NOT EXISTS (SELECT FROM workflow_accepted a WHERE a.run = r.id AND a.token = r.lease_token AND a.run = ANY (held)); -- nor that
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$fn$;

-- Runs that wait, and that no worker will ever lease as they are: which column it is, and what to do.
CREATE OR REPLACE VIEW workflow_unleasable AS
    SELECT a.id, a.type, a.statement, a.sqlstate, CASE WHEN has_table_privilege('workflow_history'::regclass, 'SELECT') THEN a.message ELSE '(hidden)' END AS message, -- it may quote a payload
           a.since, a.last_tried_at, x.problem, x.fix, k.verdict AS kept, k.effects
    FROM workflow_set_aside a
    LEFT JOIN workflow_run r ON a.kind = 'run' AND r.id = a.id
    LEFT JOIN workflow_kept k ON k.run = r.id AND k.token = r.lease_token
    CROSS JOIN LATERAL (
        SELECT p.problem, p.fix FROM (VALUES
            (1, r.priority NOT BETWEEN -100 AND 100, 'priority is ' || r.priority, 'priority = 0'),
            (2, r.attempt < 0 OR r.attempt > 1000, 'attempt is ' || r.attempt, 'attempt = 0'),
            (3, r.max_attempts NOT BETWEEN 1 AND 1000, 'max_attempts is ' || r.max_attempts, 'max_attempts = 3'),
            (4, r.lease_no < 0 OR r.lease_no >= 1000000000000000, 'lease_no is ' || r.lease_no, 'lease_no = 0'),
            (5, NOT isfinite(r.run_at) OR r.run_at < '2000-01-01', 'run_at is ' || r.run_at, 'run_at = now()'),
            (6, r.postponed < 0 OR r.postponed >= 1000000000, 'postponed is ' || r.postponed, 'postponed = 0'),
            (7, r.finished_at IS NOT NULL, 'finished_at is set, though it has not finished', 'finished_at = NULL'),
            (8, r.created_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00', 'created_at is ' || r.created_at, 'created_at = now()'),
            (9, r.started_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00', 'started_at is ' || r.started_at, 'started_at = now()'),
            (10, r.deadline_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00', 'deadline_at is ' || r.deadline_at, 'deadline_at = NULL'),
            (11, a.statement = 'settle' AND a.sqlstate = '', 'what its handler returned cannot be recorded', NULL),
            (12, true, 'the database refuses ' || CASE a.statement WHEN 'lease' THEN 'its lease' WHEN 'settle' THEN 'what its handler returned' WHEN 'extend' THEN 'its heartbeat' WHEN 'retention' THEN 'its removal'
                                                               WHEN 'signal' THEN 'its signal' ELSE 'to take its lease back' END || coalesce(' by ' || nullif(a."constraint", ''), ''), NULL)
        ) AS p (place, holds, problem, fix)
        WHERE p.holds
        ORDER BY p.place LIMIT 1) AS x
    WHERE a.statement <> 'settle' OR r.status = 'leased'; -- it has been settled at last
COMMENT ON COLUMN workflow_unleasable.kept IS 'What becomes of the run once nothing refuses it: the verdict of the outcome that is kept. Null: none is kept.';
COMMENT ON COLUMN workflow_unleasable.effects IS 'The outcome that is kept had effects, which are lost: its handler is started again once an outcome could be recorded.';

CREATE OR REPLACE FUNCTION workflow_why(id uuid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    r      workflow_run;
    p      workflow_pause;
    most   text;
    tries  text;
    error  text;
    names  text;
    able   boolean;
    busy   boolean;
    ahead  bigint;
    aside  text;
    k      workflow_kept;
    a      workflow_accepted;
    broken record;
BEGIN
    SELECT * INTO r FROM workflow_run w WHERE w.id = workflow_why.id;
    IF NOT FOUND THEN
        RETURN 'there is no such run, or retention has removed it';
    END IF;
    most := r.max_attempts;
    IF r.status IN ('pending', 'leased') AND NOT r.suspect AND workflow_follows(r.max_attempts, r.policy_attempts) THEN -- as it is by now
        SELECT greatest(o.attempts, r.attempt + CASE r.status WHEN 'pending' THEN 1 ELSE 0 END) || ' (policy ' || o.attempts_from || ')' INTO most FROM workflow_policy_of(r.type) AS o;
    END IF;
    tries := r.attempt || ' of ' || most;
    error := coalesce(' after «' || left(r.last_error, 200) || '»', '');
    IF r.deleted_at IS NOT NULL THEN
        RETURN 'deleted ' || workflow_span(workflow_age(r.deleted_at)) || ' ago' || coalesce(': ' || r.delete_reason, '');
    END IF;
    CASE r.status
    WHEN 'succeeded' THEN
        RETURN 'succeeded ' || workflow_span(workflow_age(r.finished_at)) || ' ago, at attempt ' || tries || coalesce(', by ' || r.settled_by, '');
    WHEN 'cancelled' THEN
        RETURN 'cancelled ' || workflow_span(workflow_age(r.finished_at)) || ' ago: ' || coalesce(r.last_error, '');
    WHEN 'failed' THEN
        RETURN 'failed ' || workflow_span(workflow_age(r.finished_at)) || ' ago, at attempt ' || tries || error || CASE
            WHEN r.token_id IS NOT NULL THEN '; it is a step of a process, see SELECT process_why(' || coalesce(
                (SELECT quote_literal(t.instance_id) FROM process_token t WHERE t.id = r.token_id), 'instance') || ')'
            ELSE '; SELECT workflow_retry(' || quote_literal(r.id) || ') tries again' END;
    WHEN 'leased' THEN
        SELECT * INTO k FROM workflow_kept x WHERE x.run = r.id AND x.token = r.lease_token;
        IF FOUND THEN
            SELECT coalesce(u.problem || ' for ' || workflow_span(workflow_age(u.since)) || coalesce(' (' || coalesce('SQLSTATE ' || nullif(u.sqlstate, '') || ', ', '') || '«' || left(u.message, 200) || '»)', ''),
                            'what its handler returned is about to be recorded') INTO aside
            FROM (SELECT) AS one LEFT JOIN workflow_unleasable u ON u.id = r.id;
            IF k.told AND aside = 'what its handler returned is about to be recorded' THEN
                RETURN 'it was completed elsewhere ' || workflow_span(workflow_age(k.since)) || ' ago, which any worker that covers ' || r.type || ' records';
            END IF;
            RETURN aside || CASE WHEN k.effects THEN '; its effects are lost, and its handler is started again once an outcome could be recorded'
                                 ELSE '; it has ' || k.verdict || ': that is kept, and recorded once nothing refuses it' END
                || ': mend what refuses it, SELECT workflow_settle_again(' || quote_literal(r.id) || ') has it tried at once; or workflow_fail, workflow_cancel';
        END IF;
        SELECT * INTO a FROM workflow_accepted x WHERE x.run = r.id AND x.token = r.lease_token AND x.until > clock_timestamp();
        IF FOUND THEN
            RETURN 'goes on elsewhere: ' || coalesce(r.leased_by, 'nobody') || ' has handed it on ' || workflow_span(workflow_age(a.since)) || ' ago, attempt ' || tries
                || '; whoever has its token completes it by workflow_complete, or it is taken back in ' || workflow_span(-workflow_age(a.until, clock_timestamp()));
        END IF;
        IF r.lease_until IS NULL THEN
            RETURN 'leased by ' || coalesce(r.leased_by, 'nobody') || ' without an end, so it is never taken back: lease_until is null; set lease_until = now(), past the guards if need be';
        ELSIF r.lease_until > clock_timestamp() THEN
            SELECT u.problem || ' for ' || workflow_span(workflow_age(u.since)) || ' (' || coalesce('SQLSTATE ' || nullif(u.sqlstate, '') || ', ', '') || '«' || left(u.message, 200) || '»); '
                || r.leased_by || ' keeps it, and tries again every half a minute: mend what refuses it, or cancel the run'
            INTO aside FROM workflow_unleasable u WHERE u.id = r.id AND u.statement = 'settle';
            IF FOUND THEN
                RETURN aside;
            END IF;
            RETURN 'runs at ' || coalesce(r.leased_by, 'nobody') || ' for ' || workflow_span(workflow_age(r.started_at)) || ', attempt ' || tries
                || '; its lease goes until ' || coalesce(to_char(r.lease_until, 'HH24:MI:SS'), r.lease_until::text) || ', and is extended while that worker lives';
        END IF;
    WHEN 'pending' THEN
    ELSE
        RETURN 'status ' || quote_literal(left(r.status, 40)) || ' does not exist, so nobody takes it: set status = ''pending'', past the guards if need be';
    END CASE;
    SELECT 'set aside for ' || workflow_span(workflow_age(u.since)) || ': ' || u.problem || ' (SQLSTATE ' || u.sqlstate || ', «' || left(u.message, 200) || '»); '
        || coalesce('set ' || u.fix || ', then it is tried again at once', 'it is tried again when its row changes, and every ten minutes')
    INTO aside FROM workflow_unleasable u WHERE u.id = r.id;
    IF FOUND THEN
        RETURN aside;
    END IF;

    SELECT array_to_string((array_agg(w.name ORDER BY w.name))[1:10], ', ') || CASE WHEN count(*) > 10 THEN ' and ' || count(*) - 10 || ' more' ELSE '' END, bool_or(EXISTS (SELECT FROM unnest(w.handlers) AS h WHERE workflow_covers(h, r.type))),
           bool_and(w.running >= w.concurrency)
    INTO names, able, busy
    FROM workflow_live_worker w
    WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, r.type)) AND (w.steps OR r.token_id IS NULL);

    IF r.status = 'leased' THEN
        RETURN 'its lease at ' || coalesce(r.leased_by, 'nobody') || ' ran out ' || workflow_span(workflow_age(r.lease_until, clock_timestamp())) || ' ago: '
            || CASE WHEN NOT EXISTS (SELECT FROM workflow_live_worker) THEN 'no worker lives to take it back; start one that covers ' || r.type
                    WHEN names IS NULL THEN 'it will be taken back, but no live worker covers ' || r.type
                    ELSE 'it will be taken back, for ' || names END;
    END IF;
    IF r.held_at IS NOT NULL THEN
        RETURN coalesce((SELECT 'its process is paused since ' || coalesce(to_char(r.held_at, 'YYYY-MM-DD HH24:MI'), r.held_at::text) || ': SELECT process_resume(' || quote_literal(process_paused_with(i.id)) || ')'
                         FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE t.id = r.token_id AND i.paused_at = r.held_at),
                        'held since ' || coalesce(to_char(r.held_at, 'YYYY-MM-DD HH24:MI'), r.held_at::text) || ': UPDATE workflow_run SET held_at = NULL WHERE id = ' || quote_literal(r.id));
    END IF;
    SELECT * INTO p FROM workflow_pause x WHERE x.resumed_at IS NULL AND workflow_covers(x.prefix, r.type) ORDER BY x.paused_at LIMIT 1;
    IF FOUND THEN
        RETURN 'prefix ' || p.prefix || ' is paused since ' || coalesce(to_char(p.paused_at, 'YYYY-MM-DD HH24:MI'), p.paused_at::text) || ' by ' || p.paused_by || ': ' || p.reason
            || '; SELECT workflow_resume(' || quote_literal(p.prefix) || ')';
    END IF;
    SELECT b.* INTO broken FROM workflow_breaker b WHERE b.type = r.type AND (r.token_id IS NULL OR NOT b.bound) ORDER BY b.since LIMIT 1;
    IF FOUND AND r.run_at < clock_timestamp() + interval '1 minute' THEN
        RETURN 'the breaker of ' || r.type || ' is open for ' || workflow_span(workflow_age(broken.since)) || ' (' || broken.code || '): what its runs need is out of reach, so one at a time is started, as a probe, '
            || CASE WHEN broken.next_probe > clock_timestamp() THEN 'the next in ' || workflow_span(-workflow_age(broken.next_probe, clock_timestamp())) ELSE 'the next now' END
            || ', and no attempt is charged; one success closes it, and so does SELECT workflow_close_breaker(' || quote_literal(r.type) || ')';
    END IF;
    IF r.run_at > clock_timestamp() THEN
        RETURN 'due in ' || workflow_span(-workflow_age(r.run_at, clock_timestamp())) || CASE
            WHEN r.attempt > 0 THEN ': attempt ' || r.attempt::bigint + 1 || ' of ' || most || error
            WHEN r.postponed > 0 THEN ': its handler has put it off, ' || r.postponed || ' times so far'
            ELSE '' END;
    END IF;
    IF names IS NULL THEN
        RETURN 'no live worker covers ' || r.type || '; ' || coalesce(
            'those that live cover ' || (SELECT string_agg(y.x, ', ') FROM (SELECT DISTINCT x FROM workflow_live_worker w CROSS JOIN unnest(w.prefixes) AS x ORDER BY x LIMIT 20) AS y), 'none lives at all');
    ELSIF NOT able THEN
        RETURN names || ' will take it and fail it: no handler for ' || r.type || ' is registered there';
    END IF;
    ahead := (SELECT sum(l.due) FROM workflow_lane l
              WHERE l.priority > r.priority AND NOT l.suspect
                AND EXISTS (SELECT FROM workflow_live_worker w
                            WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, r.type))
                              AND EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, l.type))));
    RETURN 'due for ' || workflow_span(workflow_age(r.run_at, clock_timestamp())) || ': ' || CASE
        WHEN r.suspect AND r.alone THEN 'two runs whose leases ran out were at work together, so it is started alone: when no other such run is at ' || names
        WHEN r.suspect THEN 'its last lease ran out, so it is watched: such runs are started one at a time by ' || names
        WHEN ahead > 0 THEN ahead || ' runs of higher priority go first at ' || names
        WHEN busy THEN names || ' cover it, and have no slot free'
        ELSE names || ' cover it, and will take it in its turn' END;
END
$fn$;

-- A worker whose lease ran out, and which was not seen since, has died, whatever it reported before.
ALTER TABLE workflow_worker ADD COLUMN lost_at timestamptz;
COMMENT ON COLUMN workflow_worker.lost_at IS 'When a lease of it ran out that was taken back later. If it was not seen since, it is dead.';

-- Who lives is said here, and nowhere else. What a worker runs, its leases tell: what it reports of itself is some seconds old. Whoever does not ask for that does not pay for it: the planner leaves out the join.
CREATE OR REPLACE VIEW workflow_live_worker AS
    SELECT w.id, w.name, w.prefixes, w.handlers, w.steps, w.concurrency, coalesce(h.n, 0) AS running, w.version, w.host, w.pid, w.started_at, w.seen_at, workflow_age(w.seen_at) AS unseen
    FROM workflow_worker w
    LEFT JOIN (SELECT l.leased_by, count(*)::integer AS n
               FROM (SELECT r.leased_by FROM workflow_run r
                     WHERE r.status = 'leased' AND r.lease_until > now() AND NOT EXISTS (SELECT FROM workflow_kept k WHERE k.run = r.id AND k.token = r.lease_token)
                       AND NOT EXISTS (SELECT FROM workflow_accepted a WHERE a.run = r.id AND a.token = r.lease_token) LIMIT 10000) AS l
               GROUP BY l.leased_by) AS h ON h.leased_by = w.name
    WHERE w.seen_at > now() - interval '12 seconds' AND w.seen_at > coalesce(w.lost_at, '-infinity');
COMMENT ON VIEW workflow_live_worker IS 'Workers that were seen within the last 12 seconds, and since a lease of theirs ran out; they report every five. running is counted from the first ten thousand leases.';

-- As in 0008, but who lives is said by the view. How many handlers are at work is said by the worker itself: those whose leases are over have a slot, too.
CREATE OR REPLACE FUNCTION workflow_stalled_types(prefixes text[]) RETURNS TABLE (type text, due_for interval, covered_by text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
    SELECT l.type, max(-l.due_in) * interval '1 second', string_agg(DISTINCT w.name, ', ')
    FROM workflow_lanes(prefixes) AS l
    JOIN workflow_run r ON r.id = l.id
    JOIN workflow_worker w ON w.id IN (SELECT v.id FROM workflow_live_worker v) AND w.started_at < now() - interval '30 seconds' AND w.running < w.concurrency
        AND (w.steps OR r.token_id IS NULL) AND EXISTS (SELECT FROM unnest(w.prefixes) AS p WHERE workflow_covers(p, l.type))
    CROSS JOIN unnest(w.handlers) AS h (pattern)
    WHERE NOT l.suspect AND l.due_in < -30 AND workflow_covers(h.pattern, l.type)
      AND NOT EXISTS (SELECT FROM unnest(l.paused) AS p WHERE workflow_covers(p, l.type))
      AND NOT EXISTS (SELECT FROM workflow_run x WHERE x.status = 'leased' AND workflow_covers(h.pattern, x.type))
      AND NOT EXISTS (SELECT FROM unnest('{succeeded,failed}'::text[]) AS s (status) CROSS JOIN LATERAL (
              SELECT x.type, x.finished_at FROM workflow_run x
              WHERE x.status = s.status COLLATE "C" AND x.finished_at IS NOT NULL AND x.token_id IS NULL ORDER BY x.finished_at DESC LIMIT 1000) f
          WHERE f.finished_at > now() - interval '30 seconds' AND workflow_covers(h.pattern, f.type))
    GROUP BY l.type
$fn$;

COMMENT ON COLUMN workflow_prefix.failed IS 'How many of what workflow_failing counts are of it.';

CREATE OR REPLACE VIEW workflow_working AS
    SELECT r.id, r.type, r.leased_by, workflow_age(r.started_at) AS since, r.attempt,
           CASE WHEN NOT r.suspect AND workflow_follows(r.max_attempts, r.policy_attempts) THEN greatest(r.attempt, (workflow_policy_of(r.type)).attempts) -- as it is by now
                ELSE r.max_attempts END AS max_attempts, r.lease_until, r.deadline_at,
           r.lease_until < now() AND k.run IS NULL AS expired, r.token_id IS NOT NULL AS step, k.verdict AS kept, a.since AS elsewhere
    FROM workflow_run r
    LEFT JOIN workflow_kept k ON k.run = r.id AND k.token = r.lease_token
    LEFT JOIN workflow_accepted a ON a.run = r.id AND a.token = r.lease_token
    WHERE r.status = 'leased'
    ORDER BY r.started_at;
COMMENT ON COLUMN workflow_working.kept IS 'It does not run any more: this is what it has come to, which the database refuses to record, or which is about to be. Null: it runs.';
COMMENT ON COLUMN workflow_working.elsewhere IS 'Since when it goes on elsewhere: its handler has handed it on. Null: it has not.';

-- The reason is written once, with the end: no other change of an instance touches this index.
CREATE INDEX process_instance_failed_idx ON process_instance (completed_at) WHERE failure_reason IS NOT NULL;

-- A step whose failure an edge of its process takes has not failed anything.
CREATE OR REPLACE VIEW workflow_failing AS
    SELECT f.type, f.code, count(*) AS failed, max(f.finished_at) AS latest, CASE WHEN has_table_privilege('workflow_history'::regclass, 'SELECT') -- it may quote a payload
                THEN (array_agg(f.last_error ORDER BY f.finished_at DESC))[1] ELSE '(hidden)' END AS last_error,
           (array_agg(f.id ORDER BY f.finished_at DESC))[1] AS last_run, count(*) FILTER (WHERE f.finished_at > now() - interval '1 hour') AS within_hour,
           bool_or(f.full) AS at_least
    FROM (SELECT p.*, count(*) OVER () >= 1000 AS full FROM (
              SELECT r.id, r.type, coalesce(r.error->>'code', 'unknown') AS code, r.finished_at, r.last_error
              FROM workflow_run r
              WHERE r.status = 'failed' AND r.finished_at IS NOT NULL AND r.token_id IS NULL AND r.deleted_at IS NULL
              ORDER BY r.finished_at DESC LIMIT 1000) AS p
          UNION ALL
          SELECT s.*, count(*) OVER () >= 1000 FROM (
              SELECT r.id, r.type, coalesce(r.error->>'code', 'unknown'), r.finished_at, r.last_error
              FROM (SELECT i.id FROM process_instance i WHERE i.failure_reason IS NOT NULL ORDER BY i.completed_at DESC LIMIT 1000) i
              -- By its index, whatever the planner thinks of the table.
              CROSS JOIN LATERAL (SELECT t.id, t.node FROM process_token t WHERE t.instance_id = i.id AND t.state = 'Failed' LIMIT 100) t
              CROSS JOIN LATERAL (SELECT r.* FROM workflow_run r WHERE r.token_id = t.id ORDER BY r.created_at DESC LIMIT 1) r
              WHERE r.status = 'failed' AND r.node IN (t.node, t.node || '/item') AND r.deleted_at IS NULL LIMIT 1000) AS s
          UNION ALL
          SELECT h.*, count(*) OVER () >= 1000 FROM (
              SELECT r.id, r.type, coalesce(r.error->>'code', 'unknown'), r.finished_at, r.last_error
              FROM (SELECT x.token_id, x.node, x.code FROM incident x WHERE x.resolved_at IS NULL ORDER BY x.created_at DESC LIMIT 1000) x
              CROSS JOIN LATERAL (SELECT r.* FROM workflow_run r WHERE r.token_id = x.token_id ORDER BY r.created_at DESC LIMIT 1) r
              WHERE r.status = 'failed' AND r.deleted_at IS NULL AND (r.node IN (x.node, x.node || '/item') OR x.code = 'compensation_failed')) AS h) AS f
    GROUP BY f.type, f.code;
COMMENT ON VIEW workflow_failing IS 'What has failed for good, by type and code: the last thousand plain runs, and steps of the last thousand instances that have failed or that an incident holds up.';
COMMENT ON COLUMN workflow_failing.at_least IS 'Whether there may be more, which are not counted.';

-- Who works goes on to work, and who may cancel may do this, until `workflowctl roles` is run again.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f   regprocedure;
    g   record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = own
             AND p.proname = ANY ('{workflow_unsettled_v2, workflow_kept_v1, workflow_kept_refused_v1, workflow_kept_over_v1, workflow_control_v1, workflow_incident, workflow_incident_over,
                 workflow_incident_end, process_incidents_v1,
                 workflow_kept_forget, workflow_settle_again, workflow_fail}'::text[]) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    FOR g IN
        SELECT f.name, a.grantee::regrole AS holder
        FROM (VALUES ('workflow_unsettled_v1', '{workflow_unsettled_v2, workflow_kept_v1, workflow_kept_refused_v1, workflow_kept_over_v1, workflow_control_v1}'::text[]), ('workflow_cancel', '{workflow_settle_again, workflow_fail}')) AS x (as_before, names)
        JOIN pg_proc p ON p.pronamespace = own AND p.proname = x.as_before
        CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        JOIN pg_proc n ON n.pronamespace = own AND n.proname = ANY (x.names)
        CROSS JOIN LATERAL (SELECT n.oid::regprocedure AS name) AS f
        WHERE a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', g.name, g.holder);
    END LOOP;
    FOR g IN SELECT x.grantee::regrole AS holder FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
             WHERE c.oid = 'process_token'::regclass AND x.privilege_type = 'UPDATE' AND x.grantee NOT IN (0, c.relowner) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION process_incidents_v1() TO %s', g.holder);
    END LOOP;
END
$do$;
