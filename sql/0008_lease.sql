-- simple-workflow 0008: what workers do to runs, as functions.
--
-- A worker's role may execute these and update nothing: each statement checks the token of the
-- lease, and keeps to the prefixes that the caller's role is bound to. Names carry a version, so
-- that workers of the version before go on while an upgrade is under way.
--
--   workflow_lanes_v1       the lanes that have open runs, and the first of each
--   workflow_lease_v1       lease due runs of some lanes
--   workflow_extend_v1      the heartbeat
--   workflow_settle_v1      record outcomes
--   workflow_take_back_v1   expired leases
--   workflow_give_back_v1   leases whose answer was lost
--   workflow_unsettled_v1   an outcome that is refused, for people to see
--   workflow_held_v1, workflow_recorded_v1, workflow_locked_v1   what became of leases and outcomes
--
-- Their plans are kept: made of index scans and hash joins, which are right whatever else is in the
-- table (see docs/decisions.md). The settings for that hold within the functions alone, so it is
-- the same behind a pooler.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- Whose runs.
-- ---------------------------------------------------------------------------------

CREATE TABLE workflow_binding (
    role     regrole NOT NULL PRIMARY KEY,
    prefixes text[] COLLATE "C" NOT NULL
);
COMMENT ON TABLE workflow_binding IS 'Which prefixes the roles of worker groups are bound to: see workflowctl roles worker.';

-- In PL/pgSQL, which keeps the plan: a function in SQL that is not inlined is planned anew in each transaction.
CREATE FUNCTION workflow_binding_of(role text) RETURNS text[]
LANGUAGE plpgsql STABLE AS $fn$
BEGIN
    RETURN (SELECT coalesce(array_agg(p), '{}') FROM workflow_binding b CROSS JOIN unnest(b.prefixes) AS p WHERE pg_has_role(workflow_binding_of.role, b.role, 'USAGE'));
END
$fn$;

-- Who may update tokens is the engine, or the owner: all runs are theirs. This is inlined: each statement of a worker asks it.
CREATE FUNCTION workflow_bound_prefixes() RETURNS text[]
LANGUAGE sql STABLE
RETURN CASE WHEN has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') THEN NULL ELSE workflow_binding_of(workflow_role()) END;
COMMENT ON FUNCTION workflow_bound_prefixes() IS 'The prefixes of the runs that the role in effect may lease; null: all of them, and steps of processes, too.';

-- Those bound before this migration have policies made of constants.
DO $do$
DECLARE
    p record;
BEGIN
    FOR p IN SELECT polroles[1] AS role, pg_get_expr(polqual, polrelid) AS mine
             FROM pg_policy WHERE polrelid = 'workflow_run'::regclass AND polname ~ '^worker_\d+$' LOOP
        INSERT INTO workflow_binding
        SELECT p.role, array_agg(m[1]) FROM regexp_matches(p.mine, '\^@ ''([a-z0-9_.-]+)''', 'g') AS m
        HAVING count(*) > 0;
    END LOOP;
END
$do$;

-- Who leases what is on record, too.
CREATE TRIGGER workflow_binding_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_binding
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('workflowctl roles worker binds a role to prefixes.', 'recorded');
CREATE TRIGGER workflow_binding_kept BEFORE TRUNCATE ON workflow_binding
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('workflowctl roles worker binds a role to other prefixes.', 'recorded');

-- ---------------------------------------------------------------------------------
-- Which runs can be leased: this is the one definition.
-- ---------------------------------------------------------------------------------

-- Pending, not deleted, not held. A row that no rule allows is among them, too: its lease is
-- refused, and so it is set aside, for people to see.
DROP INDEX workflow_run_lane_idx;
CREATE INDEX workflow_run_lane_idx ON workflow_run (suspect, type, priority DESC, run_at, id)
    WHERE status = 'pending' AND deleted_at IS NULL AND held_at IS NULL;

-- What the database refuses to have leased, settled or taken back, although others in its place are
-- not refused. It stands here and not in the row itself, which may refuse every update.
CREATE TABLE workflow_set_aside (
    kind          text COLLATE "C" NOT NULL,
    id            uuid        NOT NULL,
    type          text COLLATE "C" NOT NULL,
    statement     text COLLATE "C" NOT NULL,
    sqlstate      text COLLATE "C" NOT NULL,
    message       text        NOT NULL,
    "constraint"  text COLLATE "C" NOT NULL,
    since         timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_tried_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    due           boolean     NOT NULL DEFAULT false,
    row_version   xid         NOT NULL,
    PRIMARY KEY (kind, id)
) WITH (fillfactor = 70, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0.1);
CREATE TRIGGER workflow_set_aside_kept BEFORE TRUNCATE ON workflow_set_aside
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('DELETE forgets a row: it is found again if it is still refused.');
CREATE INDEX workflow_set_aside_reason_idx ON workflow_set_aside (kind, type, statement, sqlstate, "constraint", last_tried_at);
COMMENT ON TABLE  workflow_set_aside IS 'What the database refuses to change, so that no worker can take it: which, since when, and why in the database''s words. It is tried again when its row changes, every ten minutes, and every ten seconds one for all with the same reason.';
COMMENT ON COLUMN workflow_set_aside.kind IS 'run.';
COMMENT ON COLUMN workflow_set_aside.statement IS 'What was refused: lease, settle or take back. What is refused to be settled is tried again by the worker that has its lease.';
COMMENT ON COLUMN workflow_set_aside.due IS 'It is to be tried again.';
COMMENT ON COLUMN workflow_set_aside.row_version IS 'The xmin of the row that was refused. With another one it is tried again.';

-- A scalar subquery, which the planner leaves where it is: walks of the index stay walks.
CREATE OR REPLACE VIEW workflow_open AS
    SELECT r.id, r.suspect, r.type, r.priority, r.run_at, r.token_id, r.payload
    FROM workflow_run r
    WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
      AND (SELECT a.due FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id AND a.row_version = r.xmin) IS NOT false;
COMMENT ON VIEW workflow_open IS 'Runs that are leased when they are due: pending, not deleted, not held, and not set aside.';

-- Trouble that has nothing to do with rows: the server is out of reach, out of room or going down, the session or
-- the transaction is at fault, somebody holds a lock. Of all other codes no class tells whose error it is.
CREATE FUNCTION workflow_passing(sqlstate text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN sqlstate ~ '^(08|25|28|2D|3B|3D|3F|40|53|57|58)' OR sqlstate IN ('55P03', '26000', '42P05');

-- What a worker's statement would do to runs, tried and undone, as that worker and with the lengths of its leases. It answers with
-- SQLSTATE, message and constraint; null: it goes through. What passes by itself is raised, unless any code is to be taken for an answer.
CREATE FUNCTION workflow_try(ids uuid[], statement text, any_code boolean, worker text, term_types text[], lengths float8[], timeouts float8[]) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    token  uuid := gen_random_uuid();
    called text := workflow_worker_name(workflow_bound_prefixes(), worker);
    state  text;
    words  text;
    rule   text;
BEGIN
    IF statement = 'take back' THEN
        PERFORM FROM workflow_take_back(ids, '{1}', token, worker, lengths[1]);
    ELSIF statement = 'settle' THEN -- as workflow_settle_v1
        UPDATE workflow_run w
        SET status = 'succeeded', result = 'null', finished_at = statement_timestamp(), settled_token = w.lease_token, settled_by = 'tried',
            updated_at = statement_timestamp(), lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
        WHERE w.id = ANY (ids);
    ELSE -- word for word as in workflow_lease_v1, of which a call would copy all runs once more (TestTriedAsDone)
        UPDATE workflow_run w
        SET status = 'leased', lease_token = token, leased_by = called, lease_no = w.lease_no + 1,
            attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
            started_at = statement_timestamp(), updated_at = statement_timestamp(),
            lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
            deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
        FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
        WHERE w.id = ANY (ids) AND w.type = t.type COLLATE "C";
    END IF;
    SET CONSTRAINTS ALL IMMEDIATE; -- what is deferred is refused at the commit
    PERFORM octet_length(w.payload::text), octet_length(w.metadata::text) FROM workflow_run w WHERE w.id = ANY (ids); -- what a worker would read
    RAISE EXCEPTION 'tried' USING ERRCODE = 'WF001';
EXCEPTION
    WHEN SQLSTATE 'WF001' THEN
        RETURN NULL;
    WHEN OTHERS OR assert_failure THEN
        GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, words = MESSAGE_TEXT, rule = CONSTRAINT_NAME;
        IF workflow_passing(state) AND NOT any_code THEN
            RAISE;
        END IF;
        RETURN ARRAY[state, words, rule];
END
$fn$;

-- Whether a statement goes through for a run that is made for this, and undone; null: it cannot be made.
CREATE FUNCTION workflow_works(statement text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    control uuid := workflow_uuid();
    made    boolean := false;
BEGIN
    INSERT INTO workflow_run (id, type) VALUES (control, 'workflow.control.v1');
    made := true;
    IF statement <> 'lease' THEN
        UPDATE workflow_run w
        SET status = 'leased', lease_token = control, leased_by = 'control', lease_no = 1, started_at = now(), lease_until = now(), updated_at = clock_timestamp()
        WHERE w.id = control;
    END IF;
    IF workflow_try(ARRAY[control], statement, true, 'control', '{workflow.control.v1}', '{1}', '{1}') IS NULL THEN
        RAISE EXCEPTION 'it works' USING ERRCODE = 'WF001';
    END IF;
    RAISE EXCEPTION 'it does not' USING ERRCODE = 'WF002';
EXCEPTION
    WHEN SQLSTATE 'WF001' THEN RETURN true;
    WHEN OTHERS THEN RETURN CASE WHEN made THEN false END;
END
$fn$;

-- Finds the runs among some, which the caller has locked, for which a statement is refused, and sets them aside. What is refused is
-- halved until a row stands alone. That row is at fault if the statement goes through for another one, one of the others if need be; if
-- it goes through for none, and not for a run made for this either, it is the statement's fault, and nothing is set aside. After a
-- quarter of a second, and one at least, the rest is left for the next time.
CREATE FUNCTION workflow_isolate(ids uuid[], others uuid[], statement text, any_code boolean, worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS SETOF workflow_set_aside
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    firsts integer[] := ARRAY[1]; -- heaps still to be tried
    lasts  integer[] := ARRAY[cardinality(ids)];
    first  integer;
    last   integer;
    middle integer;
    answer text[];
    works  boolean := false;
    other  uuid;
    bad    workflow_set_aside[] := '{}';
    until  timestamptz := clock_timestamp() + interval '250 ms';
    before text        := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    WHILE cardinality(firsts) > 0 AND (clock_timestamp() < until OR cardinality(bad) = 0) LOOP
        first  := firsts[cardinality(firsts)];
        last   := lasts[cardinality(lasts)];
        firsts := trim_array(firsts, 1);
        lasts  := trim_array(lasts, 1);
        answer := workflow_try(ids[first:last], statement, any_code, worker, term_types, lengths, timeouts);
        IF answer IS NULL THEN
            works := true;
        ELSIF first < last THEN
            middle := (first + last) / 2;
            firsts := firsts || ARRAY[middle + 1, first];
            lasts  := lasts || ARRAY[last, middle];
        ELSE
            bad := bad || (SELECT ROW('run', r.id, left(r.type, 200), statement, answer[1], left(answer[2], 4096), left(answer[3], 200), clock_timestamp(), clock_timestamp(), false, r.xmin)::workflow_set_aside
                           FROM workflow_run r WHERE r.id = ids[first]);
        END IF;
    END LOOP;
    IF cardinality(bad) > 0 AND NOT works THEN
        FOREACH other IN ARRAY coalesce(others, '{}') LOOP
            works := workflow_try(ARRAY[other], statement, any_code, worker, term_types, lengths, timeouts) IS NULL;
            EXIT WHEN works;
        END LOOP;
        works := works OR coalesce(workflow_works(statement), true);
    END IF;
    IF cardinality(bad) = 0 OR NOT works THEN
        RETURN;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard, as below
    RETURN QUERY
    INSERT INTO workflow_set_aside AS a
    SELECT (f).* FROM unnest(bad) AS f
    ON CONFLICT (kind, id) DO UPDATE
    SET type = excluded.type, statement = excluded.statement, sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = false, row_version = excluded.row_version
    RETURNING a.*;
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;

-- What went through at last comes back, and with it some of what was set aside for the same reason: more each time, so that
-- one row which somebody has mended does not bring back all that are as bad as before.
CREATE FUNCTION workflow_put_back(ids uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    PERFORM set_config('workflow.advance', 'on', true);
    WITH back AS (
        DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = ANY (ids) RETURNING a.*
    ), others AS (
        SELECT o.kind, o.id
        FROM (SELECT type, statement, sqlstate, "constraint", count(*) AS many FROM back GROUP BY 1, 2, 3, 4) b
        CROSS JOIN LATERAL (
            SELECT a.kind, a.id FROM workflow_set_aside a
            WHERE a.kind = 'run' AND NOT a.due AND (a.type, a.statement, a.sqlstate, a."constraint") = (b.type, b.statement, b.sqlstate, b."constraint")
              AND a.id NOT IN (SELECT x.id FROM back x)
            ORDER BY a.last_tried_at
            LIMIT 10 + 2 * b.many
            FOR UPDATE SKIP LOCKED) o
    )
    UPDATE workflow_set_aside a SET due = true FROM others o WHERE a.kind = o.kind AND a.id = o.id;
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;

-- Every ten seconds, whoever calls it: one for each reason, and those that have waited for ten minutes, a hundred at a time, as far as the caller
-- may lease them. What is over is forgotten.
CREATE FUNCTION workflow_try_again_v1() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
    before text := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    IF NOT EXISTS (SELECT FROM workflow_set_aside) THEN
        RETURN;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true);
    DELETE FROM workflow_set_aside a
    WHERE a.kind = 'run' AND a.id IN (
        SELECT x.id FROM workflow_set_aside x LEFT JOIN workflow_run r ON r.id = x.id
        WHERE x.kind = 'run' AND (r.id IS NULL OR r.status NOT IN ('pending', 'leased') OR r.deleted_at IS NOT NULL) AND (bound IS NULL OR x.type ^@ ANY (bound))
        LIMIT 1000 FOR UPDATE OF x SKIP LOCKED);
    UPDATE workflow_set_aside a
    SET due = true, last_tried_at = clock_timestamp()
    WHERE (a.kind, a.id) IN (
        SELECT x.kind, x.id
        FROM workflow_set_aside x
        WHERE (x.kind, x.id) IN (
            (SELECT y.kind, (array_agg(y.id ORDER BY y.last_tried_at))[1]
             FROM workflow_set_aside y
             WHERE bound IS NULL OR y.type ^@ ANY (bound)
             GROUP BY y.kind, y.type, y.statement, y.sqlstate, y."constraint"
             HAVING max(y.last_tried_at) < clock_timestamp() - interval '9 seconds')
            UNION
            (SELECT y.kind, y.id FROM workflow_set_aside y
             WHERE y.last_tried_at < clock_timestamp() - interval '10 minutes' AND (bound IS NULL OR y.type ^@ ANY (bound))
             ORDER BY y.last_tried_at LIMIT 100))
        FOR UPDATE SKIP LOCKED);
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;
-- The worker goes on trying, and nobody passes over the run: due is true. With the error of an effect or of the engine itself there is no
-- SQLSTATE. If no run's outcome can be recorded it is not this one that is at fault.
CREATE FUNCTION workflow_unsettled_v1(id uuid, token uuid, sqlstate text, message text, "constraint" text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text   := coalesce(current_setting('workflow.advance', true), '');
    noted  bigint;
BEGIN
    IF NOT coalesce(workflow_works('settle'), true) THEN
        RETURN false;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard
    INSERT INTO workflow_set_aside AS a (kind, id, type, statement, sqlstate, message, "constraint", due, row_version)
    SELECT 'run', w.id, left(w.type, 200), 'settle', left(workflow_unsettled_v1.sqlstate, 5), left(workflow_unsettled_v1.message, 4096), left(workflow_unsettled_v1."constraint", 200), true, w.xmin
    FROM workflow_run w
    WHERE w.id = workflow_unsettled_v1.id AND w.status = 'leased' AND w.lease_token = workflow_unsettled_v1.token AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    ON CONFLICT (kind, id) DO UPDATE
    SET type = excluded.type, statement = excluded.statement, sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = true, row_version = excluded.row_version;
    GET DIAGNOSTICS noted = ROW_COUNT;
    PERFORM set_config('workflow.advance', before, true);
    RETURN noted > 0;
END
$fn$;
COMMENT ON FUNCTION workflow_unsettled_v1(uuid, uuid, text, text, text) IS
    'For workers: says that an outcome is refused, and why, in the words of who refuses it. False: the lease is not theirs any more, or nothing can be settled.';

COMMENT ON FUNCTION workflow_try_again_v1() IS 'For workers: has runs that are set aside be tried again, when it is time. They call it every ten seconds.';

-- ---------------------------------------------------------------------------------
-- Lease.
-- ---------------------------------------------------------------------------------

-- Those of some prefixes that the caller's role may lease.
CREATE FUNCTION workflow_narrow(prefixes text[]) RETURNS text[]
LANGUAGE plpgsql STABLE AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    IF bound IS NULL THEN
        RETURN prefixes;
    END IF;
    RETURN ARRAY(SELECT p FROM unnest(prefixes) AS p WHERE p ^@ ANY (bound) UNION SELECT b FROM unnest(bound) AS b WHERE b ^@ ANY (prefixes));
END
$fn$;

CREATE FUNCTION workflow_lanes(lows text[])
RETURNS TABLE (paused text[], suspect boolean, type text, priority integer, run_at timestamptz, id uuid, due_in float8)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
BEGIN
    -- Bytes are compared: everything that starts with "billing." lies below "billing/".
    --
    -- From each lane on to the next: of the same type, or else the first of the next type. It
    -- is one recursion because the planner takes two, one in the other, for so much work that
    -- it would have them compiled.
    RETURN QUERY
    WITH RECURSIVE lane AS (
        SELECT f.*, p.high
        FROM (SELECT u, left(u, -1) || '/' FROM unnest(lows) AS u) AS p (low, high) CROSS JOIN unnest('{f,t}'::boolean[]) AS s (suspect)
        CROSS JOIN LATERAL (
            SELECT r.suspect, r.type, r.priority, r.run_at, r.id FROM workflow_run r
            WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
              AND r.suspect = s.suspect AND r.type >= p.low COLLATE "C" AND r.type < p.high COLLATE "C"
              AND (SELECT a.due FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id AND a.row_version = r.xmin) IS NOT false
            ORDER BY r.type, r.priority DESC, r.run_at, r.id LIMIT 1) AS f
        UNION ALL
        SELECT n.*, l.high
        FROM lane l CROSS JOIN LATERAL (
            (SELECT r.suspect, r.type, r.priority, r.run_at, r.id FROM workflow_run r
             WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
               AND r.suspect = l.suspect AND r.type = l.type AND r.priority < l.priority
               AND (SELECT a.due FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id AND a.row_version = r.xmin) IS NOT false
             ORDER BY r.priority DESC, r.run_at, r.id LIMIT 1)
            UNION ALL
            (SELECT r.suspect, r.type, r.priority, r.run_at, r.id FROM workflow_run r
             WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
               AND r.suspect = l.suspect AND r.type > l.type AND r.type < l.high COLLATE "C"
               AND (SELECT a.due FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id AND a.row_version = r.xmin) IS NOT false
             ORDER BY r.type, r.priority DESC, r.run_at, r.id LIMIT 1)
            LIMIT 1) AS n
    )
    SELECT p.paused, l.suspect, l.type::text, l.priority, CASE WHEN isfinite(l.run_at) THEN l.run_at WHEN l.run_at < now() THEN '1900-01-01' ELSE '9999-01-01' END, l.id,
           CASE WHEN isfinite(l.run_at) THEN extract(epoch FROM l.run_at - clock_timestamp())::float8 WHEN l.run_at < now() THEN -1e9 ELSE 1e9 END
    FROM (SELECT array_agg(x.prefix)::text[] AS paused FROM workflow_pause x WHERE x.resumed_at IS NULL) AS p LEFT JOIN lane l ON true;
END
$fn$;
CREATE FUNCTION workflow_lanes_v1(prefixes text[])
RETURNS TABLE (paused text[], suspect boolean, type text, priority integer, run_at timestamptz, id uuid, due_in float8)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN QUERY SELECT * FROM workflow_lanes(workflow_narrow(prefixes));
END
$fn$;
COMMENT ON FUNCTION workflow_lanes_v1(text[]) IS
    'For workers: the first open run of each lane (suspect, type, priority) under some prefixes, and what is paused, which is the same in all rows. One row at least.';

-- due pulls row by row: the limit outside stops it in the middle of a lane, and no row too many is
-- locked, except where lanes share their room, or some suspects are passed over: then what is chosen drops
-- these. statement_timestamp is now(), but right in an old transaction.
--
-- A suspect at its last attempt is leased alone, when it is the first of all and none is watched;
-- the others pass it over. They wait, too, once it is late, but only until one has had its turn:
-- then they go first, so that neither kind waits for long.
CREATE FUNCTION workflow_due(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean, OUT ids uuid[], OUT many integer, OUT passing boolean)
LANGUAGE plpgsql AS $fn$
DECLARE
    bound text[]  := workflow_bound_prefixes();
    own   boolean := bound IS NULL;
    plain boolean := bound IS NOT NULL OR NOT steps;
BEGIN
    passing := EXISTS (SELECT FROM workflow_set_aside);
    IF NOT shared THEN
        SELECT array_agg(d.id), count(*) INTO ids, many
        FROM (
            SELECT r.id
            FROM unnest(suspects, types, priorities, from_at, from_id, graces, rooms) AS l (suspect, type, priority, from_at, from_id, grace, room)
            CROSS JOIN LATERAL (
                SELECT w.id FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
                  AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
                  AND w.run_at <= statement_timestamp() - l.grace * interval '1 second'
                  AND (w.run_at, w.id) >= (CASE WHEN l.from_at < '1901-01-01' THEN '-infinity' ELSE l.from_at END, l.from_id)
                  AND (NOT plain OR w.token_id IS NULL) AND (own OR w.type ^@ ANY (bound))
                  AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
                ORDER BY w.run_at, w.id
                LIMIT l.room
                FOR UPDATE SKIP LOCKED) r
            LIMIT most) d;
        RETURN;
    END IF;
    WITH due AS MATERIALIZED (
        SELECT r.id, r.run_at, r.attempt::bigint + 1 = least(r.max_attempts, l.most) AS last, l.place, l.suspect, l.room, l.team
        FROM unnest(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts)
          WITH ORDINALITY AS l (suspect, type, priority, from_at, from_id, grace, room, team, most, place)
        CROSS JOIN LATERAL (
            SELECT w.id, w.run_at, w.attempt, w.max_attempts FROM workflow_run w
            WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
              AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
              AND w.run_at <= statement_timestamp() - l.grace * interval '1 second'
              AND (w.run_at, w.id) >= (CASE WHEN l.from_at < '1901-01-01' THEN '-infinity' ELSE l.from_at END, l.from_id)
              AND (NOT plain OR w.token_id IS NULL) AND (own OR w.type ^@ ANY (bound))
              AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
            ORDER BY w.run_at, w.id
            LIMIT CASE WHEN l.suspect THEN least(l.room, most_suspects + 20) ELSE l.room END
            FOR UPDATE SKIP LOCKED) r
        LIMIT workflow_due.most
    ), placed AS (
        SELECT d.*,
               row_number() OVER (PARTITION BY d.team ORDER BY d.place, d.run_at, d.id) AS in_team,
               row_number() OVER kind AS in_kind,
               row_number() OVER (PARTITION BY d.suspect, d.last ORDER BY d.place, d.run_at, d.id) AS in_group,
               first_value(d.last) OVER kind AS first,
               count(*) FILTER (WHERE NOT d.last) OVER (PARTITION BY d.suspect) AS groups,
               count(*) FILTER (WHERE d.last AND d.run_at < statement_timestamp() - interval '5 seconds') OVER kind AS late
        FROM due d
        WINDOW kind AS (PARTITION BY d.suspect ORDER BY d.place, d.run_at, d.id)
    )
    SELECT array_agg(p.id) FILTER (WHERE p.in_team <= p.room AND (NOT p.suspect OR CASE
               WHEN watched AND alone THEN NOT p.last AND p.in_group <= most_suspects
               WHEN watched           THEN NOT p.last AND p.in_group <= most_suspects AND p.late = 0
               WHEN alone             THEN CASE WHEN p.groups = 0 THEN p.in_kind = 1 ELSE NOT p.last AND p.in_group <= most_suspects END
               ELSE CASE WHEN p.first THEN p.in_kind = 1 ELSE NOT p.last AND p.in_group <= most_suspects AND p.late = 0 END END)),
           count(*)
    INTO ids, many
    FROM placed p;
END
$fn$;

-- The ids go through an array so that rows are found by primary key, whatever the planner thinks of
-- the table. No history is written: while a run is leased its row says so, and what ends the lease tells of it.
CREATE FUNCTION workflow_lease_v1(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean,
    token uuid, worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS TABLE (due integer, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    called text;
    ripe   record := workflow_due(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts, steps, most_suspects, most, shared, watched, alone);
BEGIN
    IF ripe.ids IS NULL THEN
        RETURN;
    END IF;
    called := workflow_worker_name(workflow_bound_prefixes(), worker);
    RETURN QUERY
    UPDATE workflow_run w
    SET status = 'leased', lease_token = token, leased_by = called, lease_no = w.lease_no + 1,
        attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
        started_at = statement_timestamp(), updated_at = statement_timestamp(),
        lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
        deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
    FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
    WHERE w.id = ANY (ripe.ids) AND w.type = t.type COLLATE "C"
    RETURNING ripe.many, w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at,
              CASE WHEN isfinite(w.run_at) THEN w.run_at ELSE '1900-01-01' END, w.token_id;
    IF ripe.passing THEN
        PERFORM workflow_put_back(ripe.ids);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_lease_v1(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean, uuid, text, text[], float8[], float8[]) IS
    'For workers: leases due runs of some lanes, in their order.';

-- After workflow_lease_v1 was refused: which runs it was. They are set aside.
CREATE FUNCTION workflow_lease_refused_v1(suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], steps boolean, most integer, any_code boolean,
    worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS TABLE (id uuid, type text, sqlstate text, "constraint" text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    ids uuid[] := (SELECT d.ids FROM workflow_due(suspects, types, priorities, from_at, from_id, graces, array_fill(most, ARRAY[cardinality(types)]), NULL, NULL,
                                                  steps, 0, most, false, false, false) AS d);
    others uuid[];
BEGIN
    IF ids IS NOT NULL THEN
        others := ARRAY( -- the last of each lane: those behind many that are refused
            SELECT o.id
            FROM unnest(suspects, types, priorities) AS l (suspect, type, priority)
            CROSS JOIN LATERAL (
                SELECT w.id FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
                ORDER BY w.run_at DESC, w.id DESC LIMIT 3 FOR UPDATE SKIP LOCKED) o
            LIMIT 30);
        RETURN QUERY SELECT s.id, s.type::text, s.sqlstate::text, s."constraint"::text FROM workflow_isolate(ids, others, 'lease', any_code, worker, term_types, lengths, timeouts) AS s;
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_lease_refused_v1(boolean[], text[], integer[], timestamptz[], uuid[], float8[], boolean, integer, boolean, text, text[], float8[], float8[]) IS
    'For workers: finds the runs at the head of some lanes that the database refuses to have leased, and sets them aside. None: it is not the rows'' fault. any_code: whatever the SQLSTATE is.';

-- ---------------------------------------------------------------------------------
-- While it is leased, and afterwards.
-- ---------------------------------------------------------------------------------

-- Each lease is extended to its length from now, never beyond its run's deadline_at. A row that somebody
-- has locked is left out, not waited for. An exhausted run has its start as its deadline, which is no limit for who is to fail it.
CREATE FUNCTION workflow_extend_v1(ids uuid[], tokens uuid[], lengths float8[]) RETURNS SETOF uuid
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
    SET lease_until = least(clock_timestamp() + h.length * interval '1 second', CASE WHEN w.deadline_at > w.started_at THEN w.deadline_at END),
        updated_at = statement_timestamp()
    FROM held h
    WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.id = h.id
    RETURNING w.id;
END
$fn$;
COMMENT ON FUNCTION workflow_extend_v1(uuid[], uuid[], float8[]) IS 'For workers: the heartbeat. Extends leases by their tokens, and returns the runs of which it did.';

CREATE FUNCTION workflow_held_v1(ids uuid[], tokens uuid[]) RETURNS TABLE (id uuid, held boolean, status text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    RETURN QUERY
    SELECT h.id, w.lease_token IS NOT DISTINCT FROM h.token, w.status::text
    FROM unnest(ids, tokens) AS h (id, token) JOIN workflow_run w ON w.id = h.id
    WHERE w.id = ANY (ids) AND (bound IS NULL OR w.type ^@ ANY (bound));
END
$fn$;
COMMENT ON FUNCTION workflow_held_v1(uuid[], uuid[]) IS 'For workers: which runs are still leased with these tokens, and the status of the others. No lock is waited for.';

CREATE FUNCTION workflow_locked_v1(ids uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    RETURN QUERY
    WITH free AS MATERIALIZED (
        SELECT w.id FROM workflow_run w WHERE w.id = ANY (ids) AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound)) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT w.id FROM workflow_run w
    WHERE w.id = ANY (ids) AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound)) AND w.id NOT IN (SELECT f.id FROM free f);
END
$fn$;
COMMENT ON FUNCTION workflow_locked_v1(uuid[]) IS 'For workers: which of these runs somebody has locked. It does not wait.';

-- Whether nobody records: the owner or the engine have said so, or it is set for the whole database. Who may not do what the engine
-- does cannot spare himself the history.
CREATE FUNCTION workflow_unrecorded() RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN coalesce(current_setting('workflow.audit', true), '') = 'off'
       AND (has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE')
            OR EXISTS (SELECT FROM pg_db_role_setting s WHERE s.setrole = 0 AND s.setdatabase IN (0, (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
                       AND 'workflow.audit=off' = ANY (s.setconfig)));
END
$fn$;

-- What a worker calls itself. One that is bound says its role before: under another's name it tells nothing.
CREATE FUNCTION workflow_worker_name(bound text[], name text) RETURNS text
LANGUAGE sql STABLE
RETURN CASE WHEN bound IS NULL THEN left(name, 200) ELSE left(workflow_role() || '/' || regexp_replace(name, '\s', '_', 'g'), 200) END;

-- The engine's settings are not for those who are bound.
CREATE FUNCTION workflow_as_worker(bound text[], silent boolean) RETURNS text
LANGUAGE sql
RETURN set_config('workflow.audit', CASE WHEN silent THEN 'off' ELSE 'self' END, true)
    || CASE WHEN bound IS NULL THEN '' ELSE set_config('workflow.advance', '', true) || set_config('workflow.retry', '', true) END;

-- No condition on status: the token says it all, and the planner would be tempted into the index
-- of leased rows, which is full of dead entries while a snapshot is held. A release gives the attempt back, unless
-- the lease was that of an exhausted run, which is not charged: its deadline_at is its started_at.
CREATE FUNCTION workflow_settle_v1(ids uuid[], tokens uuid[], verdicts text[], results jsonb[], errors jsonb[], last_errors text[], delays float8[], worker text)
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
    done := set_config('workflow.audit', before, true); -- the transaction may be the caller's, and go on
    RETURN coalesce(places, '{}');
END
$fn$;
COMMENT ON FUNCTION workflow_settle_v1(uuid[], uuid[], text[], jsonb[], jsonb[], text[], float8[], text) IS
    'For workers: records the outcomes of leased runs by the tokens of their leases, and returns the places of those that it recorded. The others are no longer the caller''s, and unchanged.';

CREATE FUNCTION workflow_recorded_v1(ids uuid[], tokens uuid[]) RETURNS SETOF integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
    SELECT o.place::integer
    FROM unnest(ids, tokens) WITH ORDINALITY AS o (id, token, place) JOIN workflow_run w ON w.id = o.id AND w.settled_token = o.token
    WHERE w.id = ANY (ids)
$fn$;
COMMENT ON FUNCTION workflow_recorded_v1(uuid[], uuid[]) IS 'For workers: the places of those outcomes that are the last which their runs have recorded, by the tokens of their leases.';

-- ---------------------------------------------------------------------------------
-- What nobody holds any more.
-- ---------------------------------------------------------------------------------

-- A lease of more than a day is none that a worker takes: it counts as expired, as one without an end does.
CREATE FUNCTION workflow_expired(from_at timestamptz, steps boolean, most integer, OUT ids uuid[], OUT oldest timestamptz, OUT passing boolean)
LANGUAGE plpgsql AS $fn$
DECLARE
    bound text[]      := workflow_bound_prefixes();
    own   boolean     := bound IS NULL;
    plain boolean     := bound IS NOT NULL;
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
          AND (w.attempt < w.max_attempts OR steps OR w.token_id IS NULL)
          AND (own OR w.type ^@ ANY (bound)) AND (NOT plain OR w.token_id IS NULL)
          AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
        ORDER BY w.started_at
        LIMIT most
        FOR UPDATE SKIP LOCKED) e;
    IF since = '-infinity' AND coalesce(cardinality(ids), 0) < most THEN -- those without a beginning, which no worker has made
        ids := ids || ARRAY(
            SELECT w.id
            FROM workflow_run w
            WHERE w.status = 'leased' AND w.started_at IS NULL AND (w.lease_until IS NULL OR w.lease_until < clock_timestamp() OR w.lease_until > clock_timestamp() + interval '25 hours')
              AND (w.attempt < w.max_attempts OR steps OR w.token_id IS NULL)
              AND (own OR w.type ^@ ANY (bound)) AND (NOT plain OR w.token_id IS NULL)
              AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
            LIMIT most - coalesce(cardinality(ids), 0)
            FOR UPDATE SKIP LOCKED);
    END IF;
END
$fn$;

-- One statement, so that what workflow_isolate tries is what is done.
CREATE FUNCTION workflow_take_back(ids uuid[], delays float8[], token uuid, worker text, length float8)
RETURNS TABLE (id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text    := coalesce(current_setting('workflow.audit', true), '');
    silent boolean := before = 'off' AND workflow_unrecorded();
    called text    := workflow_worker_name(workflow_bound_prefixes(), worker);
    done   text    := workflow_as_worker(workflow_bound_prefixes(), silent);
BEGIN
    RETURN QUERY
    WITH expired AS MATERIALIZED (
        SELECT w.id, w.started_at, left(w.leased_by, 200) AS loser FROM workflow_run w WHERE w.id = ANY (ids)
    ), taken AS (
        UPDATE workflow_run w
        SET status = CASE WHEN w.attempt < w.max_attempts THEN 'pending' ELSE 'leased' END,
            suspect = true, updated_at = statement_timestamp(),
            error = jsonb_build_object('code', 'lease_expired', 'message', 'no sign of life from ' || left(w.leased_by, 200),
                                       'attempt', w.attempt, 'worker', left(w.leased_by, 200), 'lease_no', w.lease_no),
            last_error = 'lease_expired: no sign of life from ' || left(w.leased_by, 200),
            run_at = CASE WHEN w.attempt < w.max_attempts THEN statement_timestamp() + interval '1 second' * (1 + random() / 2)
                          * delays[least(greatest(w.attempt, 1), cardinality(delays))] ELSE w.run_at END,
            lease_token = CASE WHEN w.attempt >= w.max_attempts THEN workflow_take_back.token END,
            lease_no = w.lease_no + CASE WHEN w.attempt >= w.max_attempts THEN 1 ELSE 0 END,
            leased_by = CASE WHEN w.attempt >= w.max_attempts THEN called END,
            lease_until = CASE WHEN w.attempt >= w.max_attempts THEN clock_timestamp() + workflow_take_back.length * interval '1 second' END,
            started_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() ELSE w.started_at END,
            deadline_at = CASE WHEN w.attempt >= w.max_attempts THEN statement_timestamp() END
        WHERE w.id = ANY (ids)
        RETURNING w.id, w.type, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
                  w.payload, w.priority, w.postponed, w.suspect, w.status = 'leased' AS exhausted, w.run_at, w.token_id
    ), history AS (
        INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by)
        SELECT t.id, statement_timestamp(), 'expired', t.attempt, t.lease_no - CASE WHEN t.exhausted THEN 1 ELSE 0 END,
               CASE WHEN isfinite(e.started_at) THEN e.started_at END, called, e.loser
        FROM taken t JOIN expired e ON e.id = t.id
        WHERE NOT silent
    )
    SELECT t.id, t.type::text, t.attempt, t.max_attempts, t.lease_no, t.idempotency_key,
           t.tenant_id, t.metadata, CASE WHEN isfinite(t.started_at) THEN t.started_at ELSE statement_timestamp() END, t.payload, t.priority, t.postponed, t.suspect, t.exhausted,
           CASE WHEN isfinite(t.run_at) THEN t.run_at ELSE statement_timestamp() END, t.token_id
    FROM taken t;
    done := set_config('workflow.audit', before, true);
END
$fn$;

CREATE FUNCTION workflow_take_back_v1(from_at timestamptz, steps boolean, most integer, delays float8[], token uuid, worker text, length float8)
RETURNS TABLE (oldest timestamptz, held boolean, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    over   record  := workflow_expired(from_at, steps, most);
    ids    uuid[]  := over.ids;
    alive  boolean := over.oldest IS NOT NULL;
    since  timestamptz := CASE WHEN over.oldest < '1900-01-01' THEN '1900-01-01' ELSE least(over.oldest, statement_timestamp()) END;
BEGIN
    IF coalesce(cardinality(ids), 0) = 0 THEN
        oldest := coalesce(since, statement_timestamp());
        held   := alive;
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT coalesce(since, statement_timestamp()), alive, t.*
    FROM workflow_take_back(ids, delays, workflow_take_back_v1.token, workflow_take_back_v1.worker, workflow_take_back_v1.length) AS t;
    IF over.passing THEN
        PERFORM workflow_put_back(ids);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_take_back_v1(timestamptz, boolean, integer, float8[], uuid, text, float8) IS
    'For workers: takes back expired leases. Runs with attempts left are due again; the others are leased by the caller, who is to fail them. One row at least: since when the oldest lease is held.';

-- After workflow_take_back_v1 was refused: which runs it was. They are set aside.
CREATE FUNCTION workflow_take_back_refused_v1(from_at timestamptz, steps boolean, any_code boolean, worker text, length float8) RETURNS TABLE (id uuid, type text, sqlstate text, "constraint" text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    ids uuid[] := (SELECT e.ids FROM workflow_expired(from_at, steps, 500) AS e);
BEGIN
    IF cardinality(ids) > 0 THEN
        RETURN QUERY SELECT s.id, s.type::text, s.sqlstate::text, s."constraint"::text FROM workflow_isolate(ids, NULL, 'take back', any_code, worker, NULL, ARRAY[length], NULL) AS s;
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_take_back_refused_v1(timestamptz, boolean, boolean, text, float8) IS
    'For workers: finds the expired leases that the database refuses to have taken back, and sets their runs aside. None: it is not the rows'' fault.';

-- No attempt is charged: the handlers were never started. Exhausted runs, whose deadline is their start, have no attempt to be
-- given back: their leases expire at once, and whoever takes those back fails them. A row that somebody else has locked is left out.
CREATE FUNCTION workflow_give_back_v1(token uuid, within float8, worker text, OUT given integer, OUT locked integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[]  := workflow_bound_prefixes();
    own    boolean := bound IS NULL;
    before text    := coalesce(current_setting('workflow.audit', true), '');
    silent boolean := before = 'off' AND workflow_unrecorded();
    done   text;
BEGIN
    done := workflow_as_worker(bound, silent);
    WITH held AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w
        WHERE w.status = 'leased' AND w.started_at > now() - within * interval '1 second' AND w.lease_token = workflow_give_back_v1.token
          AND (own OR w.type ^@ ANY (bound))
    ), mine AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w
        WHERE w.id = ANY (ARRAY(SELECT h.id FROM held h)) AND w.status = 'leased' AND w.lease_token = workflow_give_back_v1.token
        FOR UPDATE SKIP LOCKED
    ), ended AS ( -- not leased again here: the caller may have no handler for them
        UPDATE workflow_run w SET lease_until = clock_timestamp(), updated_at = now()
        WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.deadline_at = w.started_at
        RETURNING w.id
    ), returned AS (
        UPDATE workflow_run w
        SET status = 'pending', run_at = now(), updated_at = now(), attempt = w.attempt - 1,
            lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
        WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.deadline_at IS DISTINCT FROM w.started_at
        RETURNING w.id, least(w.attempt + 1, w.max_attempts) AS attempt, w.lease_no, w.started_at
    ), history AS (
        INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
        SELECT r.id, 'released', r.attempt, r.lease_no, r.started_at, workflow_worker_name(bound, worker), '{"reason": "the answer to the lease was lost"}'
        FROM returned r
        WHERE NOT silent
    )
    SELECT count(*), (SELECT count(*) FROM held) - count(*) INTO given, locked FROM (SELECT FROM returned UNION ALL SELECT FROM ended) AS done;
    done := set_config('workflow.audit', before, true);
END
$fn$;
COMMENT ON FUNCTION workflow_give_back_v1(uuid, float8, text) IS 'For workers: gives back the leases that were taken with a token and whose answer was lost. Returns how many, and how many somebody has locked.';

-- ---------------------------------------------------------------------------------
-- Who is there.
-- ---------------------------------------------------------------------------------

-- A worker draws a secret when it starts. Its row is written by those alone who know it.
ALTER TABLE workflow_worker ADD COLUMN secret_hash bytea;
COMMENT ON COLUMN workflow_worker.secret_hash IS 'SHA-256 of the secret that the worker drew when it started: only with that is its row changed.';

CREATE FUNCTION workflow_present_v1(id uuid, secret uuid, name text, prefixes text[], handlers text[], steps boolean, concurrency integer, running integer,
    version text, host text, pid integer, uptime float8) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound text[] := workflow_bound_prefixes();
    hash  bytea  := sha256(uuid_send(secret));
BEGIN
    DELETE FROM workflow_worker w
    WHERE w.id IN (SELECT o.id FROM workflow_worker o WHERE o.seen_at < now() - interval '1 day' AND o.id <> workflow_present_v1.id LIMIT 100 FOR UPDATE SKIP LOCKED); -- those that died long ago
    INSERT INTO workflow_worker AS w (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, started_at, secret_hash)
    VALUES (workflow_present_v1.id, workflow_worker_name(bound, workflow_present_v1.name),
            ARRAY(SELECT left(p, 200) FROM unnest(workflow_present_v1.prefixes) AS p WHERE bound IS NULL OR p ^@ ANY (bound) LIMIT 1000),
            ARRAY(SELECT left(h, 200) FROM unnest(workflow_present_v1.handlers) AS h WHERE bound IS NULL OR h ^@ ANY (bound) LIMIT 10000),
            workflow_present_v1.steps AND bound IS NULL, greatest(workflow_present_v1.concurrency, 0), greatest(workflow_present_v1.running, 0),
            left(workflow_present_v1.version, 200), left(workflow_present_v1.host, 200), workflow_present_v1.pid,
            now() - least(greatest(uptime, 0), 1e9) * interval '1 second', hash)
    ON CONFLICT (id) DO UPDATE SET seen_at = now(), running = excluded.running
    WHERE w.secret_hash = hash;
    RETURN FOUND;
END
$fn$;
COMMENT ON FUNCTION workflow_present_v1(uuid, uuid, text, text[], text[], boolean, integer, integer, text, text, integer, float8) IS
    'For workers: says that one is alive, under an id and a secret that it drew when it started. Of its prefixes those are told that its role may lease. False: the id is another worker''s.';

CREATE FUNCTION workflow_absent_v1(id uuid, secret uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
    DELETE FROM workflow_worker w WHERE w.id = workflow_absent_v1.id AND w.secret_hash = sha256(uuid_send(secret))
$fn$;
COMMENT ON FUNCTION workflow_absent_v1(uuid, uuid) IS 'For workers: takes away the row of one that stops.';

-- ---------------------------------------------------------------------------------
-- What should move, and does not.
-- ---------------------------------------------------------------------------------

-- Due for half a minute, not paused, and no suspect; a live worker has a handler for it, and had a slot free; and yet nothing that
-- this handler takes is leased, or was a moment ago. Whether a handler has a limit of its own only its worker knows: hence «nothing».
CREATE FUNCTION workflow_stalled_types(prefixes text[]) RETURNS TABLE (type text, due_for interval, covered_by text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
    SELECT l.type, max(-l.due_in) * interval '1 second', string_agg(DISTINCT w.name, ', ')
    FROM workflow_lanes(prefixes) AS l
    JOIN workflow_run r ON r.id = l.id
    JOIN workflow_worker w ON w.seen_at > now() - interval '45 seconds' AND w.started_at < now() - interval '30 seconds' AND w.running < w.concurrency
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
COMMENT ON FUNCTION workflow_stalled_types(text[]) IS 'Types under some prefixes of which nothing is leased, although they are due, and a live worker could take them.';

CREATE FUNCTION workflow_stalled_v1(prefixes text[]) RETURNS TABLE (type text, due_for interval, covered_by text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
    SELECT * FROM workflow_stalled_types(workflow_narrow(prefixes))
$fn$;
COMMENT ON FUNCTION workflow_stalled_v1(text[]) IS 'For workers: workflow_stalled, of some prefixes.';

CREATE VIEW workflow_stalled AS
    SELECT s.type, s.due_for, s.covered_by
    FROM workflow_stalled_types(ARRAY(SELECT DISTINCT p FROM workflow_live_worker w CROSS JOIN unnest(w.prefixes) AS p)) AS s;
COMMENT ON VIEW workflow_stalled IS 'Types of which nothing is leased although they have been due for half a minute, and a live worker with a free slot could take them. Empty, or something is badly wrong: workers'' logs tell what.';

-- Runs that wait, and that no worker will ever lease as they are: which column it is, and what to do.
CREATE VIEW workflow_unleasable AS
    SELECT a.id, a.type, a.statement, a.sqlstate, CASE WHEN has_table_privilege('workflow_history'::regclass, 'SELECT') THEN a.message ELSE '(hidden)' END AS message, -- it may quote a payload
           a.since, a.last_tried_at, x.problem, x.fix
    FROM workflow_set_aside a
    LEFT JOIN workflow_run r ON a.kind = 'run' AND r.id = a.id
    CROSS JOIN LATERAL (
        SELECT p.problem, p.fix FROM (VALUES
            (1, r.priority NOT BETWEEN -100 AND 100, 'priority is ' || r.priority, 'priority = 0'),
            (2, r.attempt < 0 OR r.attempt > 1000, 'attempt is ' || r.attempt, 'attempt = 0'),
            (3, r.max_attempts NOT BETWEEN 1 AND 1000, 'max_attempts is ' || r.max_attempts, 'max_attempts = 3'),
            (4, r.lease_no < 0 OR r.lease_no > 9223372036854775000, 'lease_no is ' || r.lease_no, 'lease_no = 0'),
            (5, NOT isfinite(r.run_at) OR r.run_at < '2000-01-01', 'run_at is ' || r.run_at, 'run_at = now()'),
            (6, r.postponed < 0 OR r.postponed = 2147483647, 'postponed is ' || r.postponed, 'postponed = 0'),
            (7, r.finished_at IS NOT NULL, 'finished_at is set, though it has not finished', 'finished_at = NULL'),
            (8, a.statement = 'settle' AND a.sqlstate = '', 'what its handler returned cannot be recorded', NULL),
            (9, true, 'the database refuses ' || CASE a.statement WHEN 'lease' THEN 'its lease' WHEN 'settle' THEN 'what its handler returned' ELSE 'to take its lease back' END || coalesce(' by ' || nullif(a."constraint", ''), ''), NULL)
        ) AS p (place, holds, problem, fix)
        WHERE p.holds
        ORDER BY p.place LIMIT 1) AS x
    WHERE a.statement <> 'settle' OR r.status = 'leased'; -- it has been settled at last
COMMENT ON VIEW   workflow_unleasable IS 'Runs that are set aside: the database refuses to have them leased, settled or taken back.';
COMMENT ON COLUMN workflow_unleasable.problem IS 'What is wrong with the row, if that can be told, or else what refuses it.';
COMMENT ON COLUMN workflow_unleasable.fix IS 'What an UPDATE of the row should set, past the guards if need be; null: see message.';

DO $do$
DECLARE
    new regprocedure[] := ARRAY(
        SELECT p.oid::regprocedure FROM pg_proc p
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND p.proname = ANY ('{workflow_bound_prefixes, workflow_binding_of, workflow_passing, workflow_try, workflow_take_back, workflow_works, workflow_isolate, workflow_put_back,
        workflow_try_again_v1, workflow_narrow, workflow_lanes, workflow_lanes_v1, workflow_due, workflow_lease_v1,
        workflow_lease_refused_v1, workflow_extend_v1, workflow_held_v1, workflow_locked_v1, workflow_unrecorded,
        workflow_worker_name, workflow_as_worker, workflow_settle_v1, workflow_unsettled_v1, workflow_recorded_v1, workflow_expired,
        workflow_take_back_v1, workflow_take_back_refused_v1, workflow_give_back_v1, workflow_present_v1, workflow_absent_v1,
        workflow_stalled_types, workflow_stalled_v1}'::text[]));
    f regprocedure;
    r regrole;
BEGIN
    FOREACH f IN ARRAY new LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    -- Roles of workers have been granted updates so far, and keep them until `workflowctl roles` is run again: so
    -- workers of the version before go on, beside those that execute functions.
    FOR r IN SELECT DISTINCT x.grantee FROM pg_attribute a CROSS JOIN LATERAL aclexplode(a.attacl) x
             WHERE a.attrelid = 'workflow_run'::regclass AND a.attname = 'lease_token' AND x.privilege_type = 'UPDATE' AND x.grantee <> 0
             UNION
             SELECT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) x
             WHERE c.oid = 'process_token'::regclass AND x.privilege_type = 'UPDATE' AND x.grantee <> 0 LOOP
        FOR f IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.oid = ANY (new) AND p.proname ~ '_v\d+$' LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
        END LOOP;
    END LOOP;
END
$do$;
