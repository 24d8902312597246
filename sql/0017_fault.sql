-- simple-workflow 0017: whose error it is.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- An error is a row's only if three things hold: the row stands alone, it is not locked, and the same statement then goes through for another
-- row, or for one that is made for this and undone. A class of SQLSTATE says no more than what is tried first. The Go package internal/fault
-- has the same rule for statements that are halved there.
--
--   workflow_remedy             what is tried first
--   workflow_isolate            which runs a statement is refused for
--   workflow_fault              statements that fail for every row, for people to see
--   workflow_extend_refused_v1  of heartbeats, what workflow_lease_refused_v1 is of leases
--   workflow_unremoved_v1       what retention may not remove

CREATE FUNCTION workflow_remedy(sqlstate text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN coalesce(sqlstate, '') = '' OR sqlstate ~ '^(08|28|3D|3F|40|57P|58)' OR sqlstate IN ('25006', '53100', '53300') THEN 'again'
    WHEN sqlstate IN ('26000', '42P05') THEN 'anew'
    WHEN sqlstate = '55P03' THEN 'pass over'
    WHEN sqlstate IN ('53200', '53400', '57014', '25P03', '25P04') THEN 'fewer'
    ELSE 'halve' END;
COMMENT ON FUNCTION workflow_remedy(text) IS 'What is tried first after a statement on many rows has failed with a SQLSTATE: again, anew (its plan is made once more), pass over, fewer, or halve.';

-- ---------------------------------------------------------------------------------
-- Which runs.
-- ---------------------------------------------------------------------------------

-- Whether an error is a cancel that no trigger has raised: it is none of a row's in any case. statement_timeout comes once, and a person must not
-- have to ask twice.
CREATE FUNCTION workflow_is_cancel(sqlstate text, context text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN sqlstate = '57014' AND context !~ '^[^\n]* RAISE(\n|$)';

-- What a worker's statement would do to runs, tried and undone, as that worker and with its terms: those of leases are by type, those of
-- heartbeats by run. It answers with SQLSTATE, message and constraint; null: it goes through. What is no answer about rows is raised, unless any code is
-- to be taken for one.
CREATE OR REPLACE FUNCTION workflow_try(ids uuid[], statement text, any_code boolean, worker text, term_types text[], lengths float8[], timeouts float8[]) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    token  uuid := gen_random_uuid();
    called text := workflow_worker_name(workflow_bound_prefixes(), worker);
    held   uuid[];
    joined uuid[] := ids; -- a suspect may have to join others
    span   float8[];
    done   bigint := cardinality(ids);
    state  text;
    words  text;
    rule   text;
    place  text;
BEGIN
    IF statement = 'take back' THEN
        PERFORM FROM workflow_take_back(ids, '{1}', token, worker, lengths[1]);
    ELSIF statement IN ('extend', 'settle') THEN
        SELECT array_agg(w.lease_token ORDER BY o.place), array_agg(coalesce(t.length, 1) ORDER BY o.place) INTO held, span
        FROM unnest(ids) WITH ORDINALITY AS o (id, place) LEFT JOIN workflow_run w ON w.id = o.id AND w.id = ANY (ids) LEFT JOIN unnest(term_types, lengths) AS t (id, length) ON t.id = o.id::text;
        IF statement = 'extend' THEN
            done := (SELECT count(*) FROM workflow_extend_v1(ids, held, span));
        ELSE -- every other one fails, which has a history and is told of
            done := cardinality(workflow_settle_v2(ids, held, ARRAY(SELECT CASE n % 2 WHEN 1 THEN 'succeeded' ELSE 'failed' END FROM generate_subscripts(ids, 1) AS n),
                array_fill('null'::jsonb, ARRAY[cardinality(ids)]), array_fill('{"code": "tried"}'::jsonb, ARRAY[cardinality(ids)]), array_fill('tried'::text, ARRAY[cardinality(ids)]),
                array_fill(0::float8, ARRAY[cardinality(ids)]), worker, array_fill(2, ARRAY[cardinality(ids)])));
        END IF;
    ELSE -- word for word as in workflow_lease_v1, of which a call would copy all runs once more (TestTriedAsDone)
        UPDATE workflow_run w
        SET status = 'leased', lease_token = token, leased_by = called, lease_no = w.lease_no + 1,
            attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
            alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END,
            started_at = statement_timestamp(), updated_at = statement_timestamp(),
            lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
            deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
        FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
        WHERE w.id = ANY (ids) AND w.type = t.type COLLATE "C";
    END IF;
    SET CONSTRAINTS ALL IMMEDIATE; -- what is deferred is refused at the commit
    PERFORM octet_length(w.payload::text), octet_length(w.metadata::text) FROM workflow_run w WHERE w.id = ANY (ids); -- what a worker would read
    IF done < cardinality(ids) THEN
        RAISE EXCEPTION 'nothing is done to some of them' USING ERRCODE = 'internal_error';
    END IF;
    RAISE EXCEPTION 'tried' USING ERRCODE = 'WF001';
EXCEPTION
    WHEN SQLSTATE 'WF001' THEN
        RETURN NULL;
    WHEN OTHERS OR assert_failure OR query_canceled THEN
        GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, words = MESSAGE_TEXT, rule = CONSTRAINT_NAME, place = PG_EXCEPTION_CONTEXT;
        IF NOT any_code AND workflow_remedy(state) IN ('again', 'anew', 'fewer') OR workflow_is_cancel(state, place) THEN
            RAISE;
        END IF;
        RETURN ARRAY[state, words, rule];
END
$fn$;

DROP FUNCTION workflow_passing(text);

-- Whether a statement goes through for runs that are made for this, and undone. They are of a prefix that the caller may lease. That they cannot even
-- be made says that it does not.
CREATE OR REPLACE FUNCTION workflow_works(statement text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    controls uuid[] := ARRAY[workflow_uuid(), workflow_uuid()];
    kind     text   := coalesce((workflow_bound_prefixes())[1], 'workflow.') || 'control.v1';
    state    text;
    place    text;
BEGIN
    INSERT INTO workflow_run (id, type) SELECT c, kind FROM unnest(controls) AS c;
    IF statement <> 'lease' THEN
        UPDATE workflow_run w
        SET status = 'leased', lease_token = w.id, leased_by = 'control', lease_no = 1, started_at = now(), lease_until = now(), updated_at = clock_timestamp()
        WHERE w.id = ANY (controls);
    END IF;
    IF workflow_try(controls, statement, true, 'control', CASE WHEN statement = 'lease' THEN ARRAY[kind] ELSE controls::text[] END, '{1,1}', '{1,1}') IS NULL THEN
        RAISE EXCEPTION 'it works' USING ERRCODE = 'WF001';
    END IF;
    RAISE EXCEPTION 'it does not' USING ERRCODE = 'WF002';
EXCEPTION
    WHEN SQLSTATE 'WF001' THEN RETURN true;
    WHEN OTHERS OR assert_failure OR query_canceled THEN
        GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, place = PG_EXCEPTION_CONTEXT;
        IF workflow_is_cancel(state, place) THEN
            RAISE;
        END IF;
        RETURN false;
END
$fn$;

-- This runs with the owner's rights: that the caller may not call the statement's function is looked up.
CREATE FUNCTION workflow_works_v1(statement text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN workflow_works(statement)
       AND (SELECT coalesce(bool_and(has_function_privilege(workflow_role(), p.oid, 'EXECUTE')), false) FROM pg_proc p -- those of each version
            WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass)
              AND p.proname ~ ('^workflow_' || replace(statement, ' ', '_') || '_v[0-9]+$'));
END
$fn$;
COMMENT ON FUNCTION workflow_works_v1(text) IS 'For workers: whether a statement (lease, extend, settle, take back) goes through for runs that are made for this, and undone.';

-- Finds the runs among some, which the caller has locked, for which a statement is refused, and sets them aside. What is refused is
-- halved until a row stands alone. Then the statement has to go through for another one: one of these, one of the others, or one that is made for this; and after
-- that it has to be refused for that row once more, as what refused it may have ended between the two. If it goes through for none, it is the statement's
-- fault, and nothing is set aside. After a quarter of a second, and one at least, the rest is left for the next time.
CREATE OR REPLACE FUNCTION workflow_isolate(ids uuid[], others uuid[], statement text, any_code boolean, worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS SETOF workflow_set_aside
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    firsts   integer[] := ARRAY[1]; -- heaps still to be tried
    lasts    integer[] := ARRAY[cardinality(ids)];
    first    integer;
    last     integer;
    middle   integer;
    answer   text[];
    controls uuid[]      := '{}'; -- went through, the latest first
    other    uuid;
    works    boolean     := false;
    alone    uuid[]      := '{}';
    bad      workflow_set_aside[] := '{}';
    until    timestamptz := clock_timestamp() + interval '125 ms'; -- and as long again to try them once more
    before   text        := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    WHILE cardinality(firsts) > 0 AND (clock_timestamp() < until OR cardinality(alone) = 0) LOOP
        first  := firsts[cardinality(firsts)];
        last   := lasts[cardinality(lasts)];
        firsts := trim_array(firsts, 1);
        lasts  := trim_array(lasts, 1);
        IF workflow_try(ids[first:last], statement, any_code, worker, term_types, lengths, timeouts) IS NULL THEN
            controls := ids[last] || controls[1:2];
        ELSIF first < last THEN
            middle := (first + last) / 2;
            firsts := firsts || ARRAY[middle + 1, first];
            lasts  := lasts || ARRAY[last, middle];
        ELSE
            alone := alone || ids[first];
        END IF;
    END LOOP;
    IF cardinality(alone) = 0 THEN
        RETURN;
    END IF;
    FOREACH other IN ARRAY controls || coalesce(others, '{}') LOOP
        CONTINUE WHEN other = ANY (alone);
        works := workflow_try(ARRAY[other], statement, any_code, worker, term_types, lengths, timeouts) IS NULL;
        EXIT WHEN works;
    END LOOP;
    IF NOT works AND NOT workflow_works(statement) THEN
        RETURN;
    END IF;
    FOREACH other IN ARRAY alone LOOP
        answer := workflow_try(ARRAY[other], statement, any_code, worker, term_types, lengths, timeouts);
        CONTINUE WHEN answer IS NULL;
        -- A lease that is refused its heartbeat is nobody's to pass over: it is settled, or taken back.
        bad := bad || (SELECT ROW('run', r.id, left(r.type, 200), statement, answer[1], left(answer[2], 4096), left(answer[3], 200), clock_timestamp(), clock_timestamp(), statement = 'extend', r.xmin, NULL)::workflow_set_aside
                       FROM workflow_run r WHERE r.id = other);
    END LOOP;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard, as below
    INSERT INTO workflow_set_aside AS a
    SELECT (f).* FROM unnest(bad) AS f
    ON CONFLICT (kind, id) DO UPDATE
    SET type = excluded.type, statement = excluded.statement, sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = excluded.due, row_version = excluded.row_version
    WHERE a.statement <> 'settle' OR excluded.statement <> 'extend'; -- that it cannot be settled says more
    PERFORM set_config('workflow.advance', before, true);
    RETURN QUERY SELECT (f).* FROM unnest(bad) AS f;
END
$fn$;

-- What went through at last comes back, and with it all that was set aside for the same reason, if it was tried for all of them. One that somebody has changed
-- tells of itself alone. Of more than ten thousand, one is tried at once, and brings back the next.
CREATE OR REPLACE FUNCTION workflow_put_back(ids uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
    reason record;
    others uuid[];
BEGIN
    PERFORM set_config('workflow.advance', 'on', true);
    FOR reason IN
        WITH back AS (
            DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = ANY (ids) RETURNING a.*
        )
        SELECT DISTINCT b.type, b.statement, b.sqlstate, b."constraint" FROM back b WHERE b.due
    LOOP
        others := ARRAY(SELECT a.id FROM workflow_set_aside a
                        WHERE a.kind = 'run' AND a.type = reason.type AND a.statement = reason.statement AND a.sqlstate = reason.sqlstate AND a."constraint" = reason."constraint"
                        LIMIT 10001 FOR UPDATE SKIP LOCKED);
        DELETE FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = ANY (others[1:10000]);
        UPDATE workflow_set_aside a SET due = true WHERE a.kind = 'run' AND a.id = others[10001];
    END LOOP;
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;

-- After workflow_extend_v1 was refused: which runs it was. They are told of.
CREATE FUNCTION workflow_extend_refused_v1(ids uuid[], tokens uuid[], lengths float8[], any_code boolean) RETURNS TABLE (id uuid, type text, sqlstate text, "constraint" text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound text[]  := workflow_bound_prefixes();
    own   boolean := bound IS NULL;
    mine  uuid[]  := ARRAY(
        SELECT w.id
        FROM workflow_run w JOIN unnest(ids, tokens) AS h (id, token) ON w.id = h.id AND w.lease_token = h.token
        WHERE w.id = ANY (ids) AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
        ORDER BY w.id
        FOR UPDATE OF w SKIP LOCKED);
BEGIN
    IF cardinality(mine) > 0 THEN
        RETURN QUERY SELECT s.id, s.type::text, s.sqlstate::text, s."constraint"::text FROM workflow_isolate(mine, NULL, 'extend', any_code, '', ids::text[], lengths, NULL) AS s;
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_extend_refused_v1(uuid[], uuid[], float8[], boolean) IS
    'For workers: finds the leases that the database refuses to have extended, and notes them. None: it is not the rows'' fault. any_code: whatever the SQLSTATE is.';

-- ---------------------------------------------------------------------------------
-- Statements that fail for every row.
-- ---------------------------------------------------------------------------------

CREATE TABLE workflow_fault (
    statement text COLLATE "C" NOT NULL CHECK (statement IN ('lease', 'extend', 'settle', 'take back', 'mark', 'retention')),
    role      text COLLATE "C" NOT NULL CHECK (octet_length(role) <= 63),
    sqlstate  text COLLATE "C" NOT NULL CHECK (octet_length(sqlstate) <= 5),
    message   text        NOT NULL CHECK (octet_length(message) <= 4096),
    since     timestamptz NOT NULL CHECK (since BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    seen_at   timestamptz NOT NULL CHECK (seen_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    PRIMARY KEY (statement, role)
) WITH (fillfactor = 50);
CREATE TRIGGER workflow_fault_guard BEFORE INSERT OR UPDATE ON workflow_fault
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers and dispatchers note which of their statements fail, by workflow_fault_v1. DELETE forgets one: it is noted again if it still fails.');
CREATE TRIGGER workflow_fault_kept BEFORE TRUNCATE ON workflow_fault
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('DELETE forgets a statement: it is noted again if it still fails.');
COMMENT ON TABLE  workflow_fault IS 'Statements of workers and dispatchers that fail for each and every row: after a bad migration, say. No row is blamed for it, and they are tried again every few seconds.';
COMMENT ON COLUMN workflow_fault.role IS 'The role that the statement fails for.';
COMMENT ON COLUMN workflow_fault.message IS 'The database''s words; they may quote a row.';
COMMENT ON COLUMN workflow_fault.seen_at IS 'When it has last failed, give or take ten seconds. One that was not seen for a minute is over, or nobody has tried.';

CREATE FUNCTION workflow_fault_v1(statement text, sqlstate text, message text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    IF workflow_fault_v1.sqlstate IS NULL THEN
        DELETE FROM workflow_fault f WHERE f.statement = workflow_fault_v1.statement AND f.role = workflow_role();
        RETURN;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard
    INSERT INTO workflow_fault AS f (statement, role, sqlstate, message, since, seen_at)
    VALUES (workflow_fault_v1.statement, workflow_role(), left(workflow_fault_v1.sqlstate, 5), left(workflow_fault_v1.message, 1000), clock_timestamp(), clock_timestamp())
    ON CONFLICT (statement, role) DO UPDATE
    SET sqlstate = excluded.sqlstate, message = excluded.message, seen_at = excluded.seen_at,
        since = CASE WHEN f.seen_at > excluded.seen_at - interval '1 minute' THEN f.since ELSE excluded.since END;
    PERFORM set_config('workflow.advance', before, true);
END
$fn$;
COMMENT ON FUNCTION workflow_fault_v1(text, text, text) IS
    'For workers and dispatchers: says that a statement (lease, extend, settle, take back, mark, retention) fails for every row, and how; SQLSTATE null: it works again.';

CREATE FUNCTION workflow_faults_v1() RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN QUERY SELECT f.statement::text FROM workflow_fault f WHERE f.role = workflow_role() AND f.seen_at > clock_timestamp() - interval '15 seconds';
END
$fn$;
COMMENT ON FUNCTION workflow_faults_v1() IS 'For workers: their statements that fail for every row, as others of the same role have found out. While leases cannot be extended, none is taken back.';

-- ---------------------------------------------------------------------------------
-- What retention may not remove.
-- ---------------------------------------------------------------------------------

COMMENT ON COLUMN workflow_set_aside.kind IS 'run; wait, of which the id is the token''s: see process_unreachable; or retention: a row that is refused its removal, whose type is the table it is of.';
COMMENT ON COLUMN workflow_set_aside.statement IS 'What was refused: lease, extend, settle or take back; of a wait signal; or retention. An outcome that is refused to be settled is kept in workflow_kept, and tried again by any worker.';
COMMENT ON COLUMN workflow_set_aside.id IS 'The row''s. Of an event, whose id is a number, that number; with an f before it, it is below zero.';

-- As the id of something that is set aside. Events have numbers, in decimal digits; of one below zero, an f comes before them.
CREATE FUNCTION workflow_unremoved_id(id text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN id ~ '^\d{1,32}$' THEN lpad(id, 32, '0') WHEN id ~ '^-\d{1,31}$' THEN 'f' || lpad(substr(id, 2), 31, '0') WHEN id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN id END::uuid;

-- Notes rows of a table that are refused their removal. Without any it forgets those that have been removed at last, and those which were set aside for the
-- same reason as one that was tried for all of them. Returns how many it has noted or forgotten.
CREATE FUNCTION workflow_unremoved_v1(from_table text, ids text[], sqlstates text[], messages text[], constraints text[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
    same   text := CASE from_table WHEN 'outbox_event' THEN $q$r.id = CASE a.type WHEN 'outbox_event' THEN regexp_replace(replace(a.id::text, '-', ''), '^f', '-')::bigint END$q$ ELSE 'r.id = a.id' END;
    bound  text[] := workflow_bound_prefixes();
    own    text := CASE WHEN bound IS NULL THEN 'true' ELSE 'r.token_id IS NULL AND r.type ^@ ANY ($5)' END;
    many   bigint;
BEGIN
    IF from_table <> ALL (CASE WHEN bound IS NULL THEN '{workflow_run, outbox_event, message, process_instance}' ELSE '{workflow_run}' END::text[]) THEN
        RAISE EXCEPTION 'workflow_unremoved_v1: % removes nothing of %', workflow_role(), quote_literal(left(from_table, 63)) USING ERRCODE = 'insufficient_privilege', HINT = 'A worker with the rights of the engine does.';
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard
    IF cardinality(ids) > 0 THEN
        EXECUTE format($sql$
            INSERT INTO workflow_set_aside AS a (kind, id, type, statement, sqlstate, message, "constraint", row_version)
            SELECT 'retention', workflow_unremoved_id(r.id::text), %L, 'retention', left(k.sqlstate, 5), left(k.message, 4096), left(k.rule, 200), r.xmin
            FROM unnest($1, $2, $3, $4) AS k (id, sqlstate, message, rule) JOIN %I r ON r.id = k.id::%s
            WHERE %s
            ON CONFLICT (kind, id) DO UPDATE
            SET sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
                last_tried_at = excluded.last_tried_at, due = false, row_version = excluded.row_version$sql$,
            from_table, from_table, CASE from_table WHEN 'outbox_event' THEN 'bigint' ELSE 'uuid' END, own)
        USING ids, sqlstates, messages, constraints, bound;
        GET DIAGNOSTICS many = ROW_COUNT;
    ELSE
        EXECUTE format($sql$
            WITH gone AS (
                DELETE FROM workflow_set_aside a
                WHERE a.kind = 'retention' AND a.type = %L AND NOT EXISTS (SELECT FROM %I r WHERE %s)
                RETURNING a.sqlstate, a."constraint", a.due
            )
            DELETE FROM workflow_set_aside a
            WHERE a.kind = 'retention' AND a.type = %L AND (a.sqlstate, a."constraint") IN (SELECT g.sqlstate, g."constraint" FROM gone g WHERE g.due)
              AND EXISTS (SELECT FROM %I r WHERE %s AND %s)$sql$,
            from_table, from_table, same, from_table, from_table, same, own)
        USING ids, sqlstates, messages, constraints, bound;
        GET DIAGNOSTICS many = ROW_COUNT;
    END IF;
    PERFORM set_config('workflow.advance', before, true);
    RETURN many;
END
$fn$;
COMMENT ON FUNCTION workflow_unremoved_v1(text, text[], text[], text[], text[]) IS
    'For retention: notes rows of a table that the database refuses to have removed. Without any: forgets what is gone, and all that was refused for the same reason. Returns how many rows are noted, or are to be tried again.';

DO $do$
DECLARE
    new regprocedure[] := ARRAY(
        SELECT p.oid::regprocedure FROM pg_proc p
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass)
          AND p.proname = ANY ('{workflow_remedy, workflow_is_cancel, workflow_works_v1, workflow_extend_refused_v1, workflow_fault_v1, workflow_faults_v1, workflow_unremoved_id, workflow_unremoved_v1}'::text[]));
    f regprocedure;
    r regrole;
BEGIN
    FOREACH f IN ARRAY new LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    -- Whoever may call what they go with, until `workflowctl roles` is run again.
    FOR r IN SELECT DISTINCT x.grantee FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) x
             WHERE p.oid IN ('workflow_extend_v1(uuid[], uuid[], float8[])'::regprocedure, 'outbox_wants(text[], text)'::regprocedure) AND x.privilege_type = 'EXECUTE' AND x.grantee <> 0 LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_fault_v1(text, text, text) TO %s', r);
        CONTINUE WHEN NOT has_function_privilege(r, 'workflow_extend_v1(uuid[], uuid[], float8[])', 'EXECUTE');
        FOR f IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.oid = ANY (new) AND p.proname ~ '_v\d+$' LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
        END LOOP;
    END LOOP;
    -- Retention asks what is set aside, and for which row.
    FOR r IN SELECT DISTINCT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) x
             WHERE c.oid = 'process_token'::regclass AND x.privilege_type = 'UPDATE' AND x.grantee NOT IN (0, c.relowner) LOOP
        EXECUTE format('GRANT SELECT ON workflow_set_aside TO %s', r);
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_unremoved_id(text) TO %s', r);
    END LOOP;
END
$do$;
