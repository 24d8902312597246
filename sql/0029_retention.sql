-- simple-workflow 0029: retention by every worker.
--
--   workflow_retention           for how long what is over is kept, as workers ask for it: by prefix and kind
--   workflow_retention_turn      whose turn it is to remove what is old of them
--   workflow_retention_v1        for workers: says what it asks for, and takes a turn that is due
--   workflow_removable_v1        plain runs of a prefix that are old
--   workflow_remove_v1           removes some
--   workflow_removes_v1          makes a run, removes it and undoes both: whether removing works at all
--   workflow_retention_done_v1   how far a turn has come
--
-- What is asked for decides, and not who removes: whoever asks for the longest time has it. So a worker cannot remove what another one keeps.
-- Processes, messages and events are removed by roles with the rights of the engine (internal/cleanup).

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE TABLE workflow_retention (
    prefix   text COLLATE "C"  NOT NULL,
    kind     text COLLATE "C"  NOT NULL,
    period   double precision  NOT NULL,
    set_by   text COLLATE "C"  NOT NULL,
    set_at   timestamptz       NOT NULL DEFAULT clock_timestamp(),
    asked_at timestamptz       NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (prefix, kind, period, set_by),
    CONSTRAINT workflow_retention_prefix_check CHECK (octet_length(prefix) <= 200 AND (prefix = '*' OR prefix ~ '^([a-z0-9_-]+\.)+$')),
    CONSTRAINT workflow_retention_kind_check   CHECK (kind IN ('succeeded', 'cancelled', 'failed', 'deleted') OR prefix = '*' AND kind IN ('events', 'messages', 'processes')),
    CONSTRAINT workflow_retention_period_check CHECK (period = 0 OR period BETWEEN 60 AND 3153600000),
    CONSTRAINT workflow_retention_set_check    CHECK (octet_length(set_by) <= 63 AND set_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z' AND asked_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z')
);
COMMENT ON TABLE  workflow_retention IS 'For how long workers ask to have kept what is over. Of all that covers a run the longest counts. What nobody has asked for since a day counts no more, once somebody asks for another time.';
COMMENT ON COLUMN workflow_retention.prefix IS 'Of types; *: types that no other prefix covers, and what is of no type.';
COMMENT ON COLUMN workflow_retention.kind IS 'Plain runs: succeeded, cancelled, failed, deleted; events (published), messages (whose time is over), processes (finished instances).';
COMMENT ON COLUMN workflow_retention.period IS 'Seconds, a minute at least; 0: for ever.';
COMMENT ON COLUMN workflow_retention.set_by IS 'The role of the workers.';
COMMENT ON COLUMN workflow_retention.asked_at IS 'When a worker has asked for it last, give or take ten minutes.';

CREATE TABLE workflow_retention_turn (
    prefix   text COLLATE "C"  NOT NULL,
    kind     text COLLATE "C"  NOT NULL,
    taken_at timestamptz       NOT NULL,
    every    double precision  NOT NULL,
    reached  timestamptz,
    swept_at timestamptz,
    removed  bigint            NOT NULL DEFAULT 0,
    PRIMARY KEY (prefix, kind),
    CONSTRAINT workflow_retention_turn_name_check  CHECK (octet_length(prefix) <= 200 AND octet_length(kind) <= 20),
    CONSTRAINT workflow_retention_turn_time_check  CHECK (taken_at BETWEEN '1900-01-01 00:00Z' AND '2200-01-01 00:00Z' AND reached BETWEEN '1900-01-01 00:00Z' AND '2200-01-01 00:00Z'
        AND swept_at BETWEEN '1900-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    CONSTRAINT workflow_retention_turn_every_check CHECK (every BETWEEN 0 AND 31536000),
    CONSTRAINT workflow_retention_turn_count_check CHECK (removed BETWEEN 0 AND 1000000000000000)
);
COMMENT ON TABLE  workflow_retention_turn IS 'Whose turn it is to remove what is old, for each prefix and kind: one worker has it at a time.';
COMMENT ON COLUMN workflow_retention_turn.taken_at IS 'When a worker took the last turn. The next is every seconds after that, or what seconds the worker that takes it has.';
COMMENT ON COLUMN workflow_retention_turn.reached IS 'Nothing that finished before this has to be looked at until the next sweep; null: all has.';
COMMENT ON COLUMN workflow_retention_turn.swept_at IS 'When a turn that began with the oldest came to its end; a day later one begins there again. Null: one is under way.';
COMMENT ON COLUMN workflow_retention_turn.removed IS 'How many rows the last turn has removed.';

CREATE TRIGGER workflow_retention_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_retention
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers write what they are set to: WORKER_KEEP_…, or Retention of worker.Config. The owner may delete a row of workers that there are no more, on record: SET LOCAL workflow.override = ''why''.');
CREATE TRIGGER workflow_retention_kept BEFORE TRUNCATE ON workflow_retention
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('Workers write what they are set to: WORKER_KEEP_…, or Retention of worker.Config.');
CREATE TRIGGER workflow_retention_turn_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_retention_turn
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers take turns by themselves; a run of type default.cleanup.v1 takes all at once.');
CREATE TRIGGER workflow_retention_turn_kept BEFORE TRUNCATE ON workflow_retention_turn
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('Workers take turns by themselves; a run of type default.cleanup.v1 takes all at once.');

-- What finished before old may go; null: nothing. Of types that a prefix of inner covers it is what finished before inner_old, too; of * none of these goes.
CREATE FUNCTION workflow_retention_of(prefix text, kind text, OUT old timestamptz, OUT inner_prefixes text[], OUT inner_old timestamptz[])
LANGUAGE sql STABLE AS $fn$
    SELECT (SELECT CASE WHEN min(a.period) > 0 THEN statement_timestamp() - max(a.period) * interval '1 second' END
            FROM workflow_retention a
            WHERE a.kind = workflow_retention_of.kind AND (a.prefix = workflow_retention_of.prefix OR a.prefix <> '*' AND workflow_retention_of.prefix ^@ a.prefix)),
           coalesce(array_agg(x.prefix), '{}'), coalesce(array_agg(x.old), '{}')
    FROM (SELECT a.prefix::text, CASE WHEN workflow_retention_of.prefix <> '*' AND min(a.period) > 0 THEN statement_timestamp() - max(a.period) * interval '1 second' END AS old
          FROM workflow_retention a
          WHERE a.kind = workflow_retention_of.kind AND a.prefix <> workflow_retention_of.prefix AND (workflow_retention_of.prefix = '*' OR a.prefix ^@ workflow_retention_of.prefix)
          GROUP BY a.prefix) x
$fn$;

-- What is asked of plain runs r of a prefix ($1) and kind, whoever asks: old is $2, inner prefixes are $3, and their old is $4. The rule about signals is that of internal/cleanup:
-- what something alive may still read is kept. alive tells whether nothing may.
CREATE FUNCTION workflow_retention_where(kind text, OUT at text, OUT which text, OUT mine text, OUT unheard text)
LANGUAGE plpgsql AS $fn$
BEGIN
    IF (workflow_retention_where.kind IN ('succeeded', 'cancelled', 'failed', 'deleted')) IS NOT TRUE THEN
        RAISE EXCEPTION 'workflow_remove: kind % is none of plain runs', coalesce(quote_literal(left(workflow_retention_where.kind, 40)), 'null')
            USING ERRCODE = 'check_violation', HINT = 'Use succeeded, cancelled, failed or deleted.';
    END IF;
    at      := CASE workflow_retention_where.kind WHEN 'deleted' THEN 'deleted_at' ELSE 'finished_at' END;
    which   := CASE workflow_retention_where.kind WHEN 'deleted' THEN $q$r.status <> 'leased'$q$ ELSE format('r.status = %L', workflow_retention_where.kind) END || ' AND r.token_id IS NULL';
    mine    := format($q$($1 = '*' OR r.type ^@ $1) AND NOT EXISTS (SELECT FROM unnest($3, $4) AS x (prefix, old) WHERE r.type ^@ x.prefix AND (x.old IS NULL OR r.%s >= x.old))$q$, at);
    unheard := $q$(r.type <> 'graph.signal.v1' OR r.id::text NOT IN (
        SELECT a.payload->>'signal'
        FROM process_token t JOIN workflow_run a ON a.token_id = t.id
        WHERE t.state IN ('Created', 'Ready', 'Waiting') AND a.type = 'graph.arrive.v1' AND a.finished_at IS NULL AND a.payload->>'signal' IS NOT NULL
        UNION ALL
        SELECT u.signal_id::text FROM process_unreached u))$q$;
END
$fn$;

-- Refuses a prefix that is not the caller's.
CREATE FUNCTION workflow_retention_mine(prefix text) RETURNS void
LANGUAGE plpgsql STABLE AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    IF bound IS NOT NULL AND (prefix ^@ ANY (bound)) IS NOT TRUE THEN
        RAISE EXCEPTION 'workflow_retention: role % is not bound to prefix %', workflow_role(), coalesce(quote_literal(left(prefix, 200)), 'null')
            USING ERRCODE = 'insufficient_privilege', HINT = 'A worker removes what is of its own prefixes: see workflowctl roles worker.';
    END IF;
END
$fn$;

-- ---------------------------------------------------------------------------------
-- For workers.
-- ---------------------------------------------------------------------------------

-- Writes what the caller asks for, each ten minutes, and takes a turn among these. prefix is null if none is due. since: those that nobody has had for so
-- many seconds are due, whatever every says. A role that is bound
-- asks for plain runs of its own prefixes alone.
CREATE FUNCTION workflow_retention_v1(prefixes text[], kinds text[], periods float8[], every float8, since float8,
    OUT prefix text, OUT kind text, OUT period float8, OUT reached timestamptz, OUT until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before  text;
    bound   text[] := workflow_bound_prefixes();
    me      text   := workflow_role();
    problem text;
    fix     text;
    p       text[];
    k       text[];
    s       float8[];
    silent  text[];
BEGIN
    IF array_position(prefixes, NULL) > 0 OR cardinality(prefixes) > 101 OR prefixes IS NULL THEN
        problem := 'prefixes has nulls, or more than 101 elements';
        fix := 'Give the prefixes of the worker.';
    ELSIF EXISTS (SELECT FROM unnest(prefixes) AS x WHERE x <> '*' AND x !~ '^([a-z0-9_-]+\.)+$' OR octet_length(x) > 200) THEN
        problem := format('prefix %L is none', left((SELECT x FROM unnest(prefixes) AS x WHERE x <> '*' AND x !~ '^([a-z0-9_-]+\.)+$' OR octet_length(x) > 200 LIMIT 1), 120));
        fix := 'Prefixes end with a dot, as in billing.; * is for types that no other prefix covers.';
    ELSIF cardinality(kinds) = cardinality(periods) IS NOT TRUE OR cardinality(kinds) > 7 OR array_position(kinds, NULL) > 0 OR array_position(periods, NULL) > 0
       OR NOT kinds <@ '{succeeded,cancelled,failed,deleted,events,messages,processes}' THEN
        problem := format('kinds %s do not go with periods %s', left(kinds::text, 120), left(periods::text, 120));
        fix := 'Kinds are succeeded, cancelled, failed, deleted, events, messages and processes; each has one period.';
    ELSIF EXISTS (SELECT FROM unnest(periods) AS x WHERE x NOT BETWEEN 60 AND 3153600000 AND x <> 0)
       AND EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = 'workflow_retention'::regclass AND c.conname = 'workflow_retention_period_check') THEN -- whoever drops it means seconds
        problem := format('period %s is outside 60 to 3153600000 seconds', (SELECT x FROM unnest(periods) AS x WHERE x NOT BETWEEN 60 AND 3153600000 AND x <> 0 LIMIT 1));
        fix := 'Keep things for a minute at least, so that people can see them; 0 is for ever.';
    ELSIF every BETWEEN 0 AND 31536000 IS NOT TRUE OR since NOT BETWEEN 0 AND 31536000 THEN
        problem := format('every %s or since %s is outside 0 to 31536000', coalesce(every::text, 'null'), coalesce(since::text, 'null'));
        fix := 'Say how many seconds are between two turns.';
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'workflow_retention: %', problem USING ERRCODE = 'check_violation', HINT = fix;
    END IF;

    SELECT array_agg(w.prefix ORDER BY w.prefix, w.kind), array_agg(w.kind ORDER BY w.prefix, w.kind), array_agg(w.period ORDER BY w.prefix, w.kind) INTO p, k, s
    FROM (
        SELECT DISTINCT ON (x.prefix, o.kind) x.prefix, o.kind, o.period
        FROM unnest(kinds, periods) AS o (kind, period)
        CROSS JOIN LATERAL (
            SELECT y FROM unnest(prefixes) AS y WHERE bound IS NULL AND o.kind NOT IN ('events', 'messages', 'processes')
            UNION
            SELECT CASE WHEN y ^@ b THEN y ELSE b END FROM unnest(prefixes) AS y JOIN unnest(bound) AS b ON y ^@ b OR b ^@ y WHERE o.kind NOT IN ('events', 'messages', 'processes')
            UNION
            SELECT '*' WHERE bound IS NULL AND o.kind IN ('events', 'messages', 'processes')
        ) AS x (prefix)
        ORDER BY 1, 2, CASE o.period WHEN 0 THEN 'Infinity' ELSE o.period END DESC
    ) w;
    IF p IS NULL THEN
        RETURN;
    END IF;

    before := workflow_advance('on'); -- for the guards
    -- Where nobody has asked for an hour, all were away, or the database was, or it is a copy of another day: who comes back first does not speak for the others.
    silent := ARRAY(
        SELECT w.prefix || ' ' || w.kind FROM unnest(p, k) AS w (prefix, kind)
        WHERE NOT EXISTS (SELECT FROM workflow_retention x WHERE x.prefix = w.prefix AND x.kind = w.kind AND x.asked_at > clock_timestamp() - interval '1 hour'));
    INSERT INTO workflow_retention AS a (prefix, kind, period, set_by)
    SELECT w.prefix, w.kind, w.period, me FROM unnest(p, k, s) AS w (prefix, kind, period)
    WHERE NOT EXISTS (SELECT FROM workflow_retention x WHERE x.prefix = w.prefix AND x.kind = w.kind AND x.period = w.period AND x.set_by = me AND x.asked_at > clock_timestamp() - interval '10 minutes')
    ORDER BY 1, 2
    ON CONFLICT (prefix, kind, period, set_by) DO UPDATE SET asked_at = excluded.asked_at;
    IF FOUND THEN
        UPDATE workflow_retention a SET asked_at = clock_timestamp() -- they have another day
        WHERE a.ctid = ANY (ARRAY(
            SELECT x.ctid FROM workflow_retention x WHERE x.prefix || ' ' || x.kind = ANY (silent) AND x.asked_at < clock_timestamp() - interval '1 hour' FOR UPDATE SKIP LOCKED));
        DELETE FROM workflow_retention a
        WHERE a.ctid = ANY (ARRAY(
            SELECT x.ctid FROM workflow_retention x JOIN unnest(p, k) AS w (prefix, kind) ON x.prefix = w.prefix AND x.kind = w.kind
            WHERE x.asked_at < clock_timestamp() - interval '1 day' AND x.prefix || ' ' || x.kind <> ALL (silent) FOR UPDATE OF x SKIP LOCKED)); -- we have just asked for another
        IF (SELECT count(*) FROM workflow_retention a WHERE a.set_by = me) > 2000 THEN
            RAISE EXCEPTION 'workflow_retention: role % asks for more than 2000 periods', me
                USING ERRCODE = 'check_violation', HINT = 'Use fewer prefixes, or the same settings for all workers; see workflow_retention.';
        END IF;
        -- The first turn is not due at once: others that ask for longer may be starting just now.
        INSERT INTO workflow_retention_turn (prefix, kind, taken_at, every)
        SELECT w.prefix, w.kind, clock_timestamp() - interval '1 minute', workflow_retention_v1.every FROM unnest(p, k) AS w (prefix, kind)
        ORDER BY 1, 2
        ON CONFLICT DO NOTHING;
    END IF;

    UPDATE workflow_retention_turn t
    SET taken_at = clock_timestamp(), every = workflow_retention_v1.every, removed = 0,
        reached = CASE WHEN t.swept_at < clock_timestamp() - interval '1 day' THEN NULL ELSE t.reached END,
        swept_at = CASE WHEN t.swept_at < clock_timestamp() - interval '1 day' THEN NULL ELSE t.swept_at END
    WHERE t.ctid = ANY (ARRAY(
        SELECT x.ctid FROM workflow_retention_turn x JOIN unnest(p, k) AS w (prefix, kind) ON x.prefix = w.prefix AND x.kind = w.kind
        WHERE x.taken_at <= clock_timestamp() - coalesce(since, workflow_retention_v1.every) * interval '1 second' AND (workflow_retention_of(x.prefix, x.kind)).old IS NOT NULL
        ORDER BY x.taken_at, x.prefix, x.kind LIMIT 1 FOR UPDATE OF x SKIP LOCKED))
    RETURNING t.prefix, t.kind, t.reached, (workflow_retention_of(t.prefix, t.kind)).old INTO prefix, kind, reached, until;
    period := extract(epoch FROM statement_timestamp() - until);
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_retention_v1(text[], text[], float8[], float8, float8) IS
    'For workers: asks to have kept what is over, by prefix and kind, for seconds (0: for ever), and takes a turn to remove what is old, if the last is every seconds ago.';

-- The first rows behind a position, by index, whatever their types: of these the caller's, whether each may go, and whether there are more. The last one is there
-- in any case, as the position to go on from; free is null if it is not the caller's.
CREATE FUNCTION workflow_removable_v1(prefix text, kind text, from_at timestamptz, from_id uuid, most integer)
RETURNS TABLE (id text, at timestamptz, free boolean, more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    q record := workflow_retention_where(kind);
    o record := workflow_retention_of(prefix, kind);
BEGIN
    PERFORM workflow_retention_mine(prefix);
    RETURN QUERY EXECUTE format($sql$
        WITH old AS MATERIALIZED (
            SELECT r.xmin AS row_version, r.id, r.%1$s AS at, r.type, %3$s AS mine
            FROM workflow_run r
            WHERE %2$s AND r.%1$s < $2 AND r.%1$s >= $5 AND (r.%1$s, r.id) > ($5, $6)
            ORDER BY r.%1$s, r.id
            LIMIT $7
        ), last AS (
            SELECT o.at, o.id FROM old o ORDER BY 1 DESC, 2 DESC LIMIT 1
        )
        SELECT r.id::text, r.at, CASE WHEN r.mine THEN %4$s AND NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'retention' AND a.id = r.id AND a.row_version = r.row_version AND NOT a.due) END,
               (SELECT count(*) FROM old) >= $7
        FROM old r
        WHERE r.mine OR (r.at, r.id) = (SELECT l.at, l.id FROM last l)
        ORDER BY 2, r.id$sql$, q.at, q.which, q.mine, q.unheard)
    USING prefix, o.old, o.inner_prefixes, o.inner_old, from_at, from_id, least(most, 10000);
END
$fn$;
COMMENT ON FUNCTION workflow_removable_v1(text, text, timestamptz, uuid, integer) IS 'For workers: which plain runs of a prefix and kind are older than anybody asks to have kept.';

-- Those that are not old, locked, or of other prefixes stay. The history goes with them.
CREATE FUNCTION workflow_remove_v1(prefix text, kind text, ids text[]) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text;
    q      record := workflow_retention_where(kind);
    o      record := workflow_retention_of(prefix, kind);
    gone   integer;
BEGIN
    PERFORM workflow_retention_mine(prefix);
    before := workflow_advance('on'); -- for the guards
    EXECUTE format($sql$
        WITH gone AS (
            DELETE FROM workflow_run
            WHERE id = ANY (ARRAY(SELECT r.id FROM workflow_run r WHERE r.id = ANY ($5::uuid[]) AND %2$s AND r.%1$s < $2 AND %3$s AND %4$s ORDER BY r.id FOR UPDATE SKIP LOCKED))
            RETURNING id
        ), history AS (
            DELETE FROM workflow_history WHERE workflow_id = ANY (ARRAY(SELECT id FROM gone))
        )
        SELECT count(*) FROM gone$sql$, q.at, q.which, q.mine, q.unheard)
    INTO gone USING prefix, o.old, o.inner_prefixes, o.inner_old, ids;
    PERFORM workflow_advance(before);
    RETURN gone;
END
$fn$;
COMMENT ON FUNCTION workflow_remove_v1(text, text, text[]) IS 'For workers: removes those of some plain runs that are older than anybody asks to have kept, with their history. Returns how many.';

-- Its error is the one that any run meets. All of it is undone.
CREATE FUNCTION workflow_removes_v1(kind text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text;
    q      record := workflow_retention_where(kind);
    made   uuid := gen_random_uuid();
BEGIN
    before := workflow_advance('on'); -- for the guards
    BEGIN
        INSERT INTO workflow_run (id, type) VALUES (made, 'default.control.v1');
        UPDATE workflow_run r SET status = 'leased', lease_token = r.id, lease_until = now(), leased_by = 'control', lease_no = 1, started_at = now() WHERE r.id = made;
        IF kind = 'deleted' THEN
            UPDATE workflow_run r SET status = 'pending', deleted_at = now() WHERE r.id = made;
        ELSE
            EXECUTE format('UPDATE workflow_run SET status = %L WHERE id = $1', kind) USING made;
        END IF;
        WITH gone AS (DELETE FROM workflow_run r WHERE r.id = made RETURNING r.id)
        DELETE FROM workflow_history h WHERE h.workflow_id IN (SELECT g.id FROM gone g);
        IF EXISTS (SELECT FROM workflow_run r WHERE r.id = made) THEN
            RAISE EXCEPTION 'a run that was made to be removed is not removed' USING ERRCODE = 'no_data_found';
        END IF;
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE EXCEPTION 'undone' USING ERRCODE = 'WFOUT';
    EXCEPTION WHEN SQLSTATE 'WFOUT' THEN -- it went well
    END;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_removes_v1(text) IS 'For workers: fails as the removal of any plain run would. It makes one, removes it, and undoes both.';

-- again: how many seconds later the next turn is; null: as ever, and this one has come to its end.
CREATE FUNCTION workflow_retention_done_v1(prefix text, kind text, reached timestamptz, removed bigint, again float8) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text;
BEGIN
    PERFORM workflow_retention_mine(prefix);
    IF removed BETWEEN 0 AND 1000000000000000 IS NOT TRUE OR again NOT BETWEEN 0 AND 31536000 OR reached NOT BETWEEN '1900-01-01 00:00Z' AND '2200-01-01 00:00Z' THEN
        RAISE EXCEPTION 'workflow_retention_done: removed %, again % or reached % is out of bounds', coalesce(removed::text, 'null'), coalesce(again::text, 'null'), coalesce(reached::text, 'null')
            USING ERRCODE = 'check_violation', HINT = 'Say how many rows are removed, in how many seconds the next turn is, and up to when all is removed.';
    END IF;
    before := workflow_advance('on'); -- for the guards
    UPDATE workflow_retention_turn t
    SET removed = workflow_retention_done_v1.removed, reached = workflow_retention_done_v1.reached,
        swept_at = CASE WHEN again IS NULL THEN coalesce(t.swept_at, clock_timestamp()) ELSE t.swept_at END,
        taken_at = CASE WHEN again IS NULL THEN t.taken_at ELSE clock_timestamp() + (again - t.every) * interval '1 second' END
    WHERE t.prefix = workflow_retention_done_v1.prefix AND t.kind = workflow_retention_done_v1.kind;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_retention_done_v1(text, text, timestamptz, bigint, float8) IS 'For workers: how many rows a turn has removed, and how far it has come.';

-- Whoever may settle removes what is old, until `workflowctl roles` is run again.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f   regprocedure;
    g   record;
BEGIN
    REVOKE ALL ON workflow_retention, workflow_retention_turn FROM PUBLIC;
    FOR f IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = own
             AND p.proname = ANY ('{workflow_retention_of, workflow_retention_where, workflow_retention_mine, workflow_retention_v1, workflow_removable_v1, workflow_remove_v1, workflow_removes_v1, workflow_retention_done_v1}'::text[]) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    FOR g IN
        SELECT n.oid::regprocedure AS name, a.grantee::regrole AS holder
        FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
        JOIN pg_proc n ON n.pronamespace = own AND n.proname = ANY ('{workflow_retention_v1, workflow_removable_v1, workflow_remove_v1, workflow_removes_v1, workflow_retention_done_v1}'::text[])
        WHERE p.pronamespace = own AND p.proname = 'workflow_settle_v2' AND a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', g.name, g.holder);
    END LOOP;
    FOR g IN
        SELECT DISTINCT x.grantee::regrole AS holder FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
        WHERE c.oid = 'workflow_policy'::regclass AND x.privilege_type = 'SELECT' AND x.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON workflow_retention, workflow_retention_turn TO %s', g.holder);
    END LOOP;
END
$do$;
