-- simple-workflow 0028: what comes in and goes out, by type and minute.
--
--   workflow_minute       what workers have leased, and what became of it: they say it with their presence, and it is kept for a week
--   workflow_rate         reads it, and counts no runs; so steps of processes are in it as all other runs are
--   workflow_erring       types of which many attempts fail
--   workflow_growing      types that are covered, and of which more and more is due
--   workflow_backlog      how much of a prefix is due, and since when: for autoscalers

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Each role has rows of its own, so none waits for another, or adds to what is another's.
CREATE TABLE workflow_minute (
    minute     timestamptz NOT NULL CHECK (minute BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    role       text COLLATE "C" NOT NULL CHECK (octet_length(role) <= 63),
    type       text COLLATE "C" NOT NULL CHECK (octet_length(type) <= 800),
    leased     bigint      NOT NULL DEFAULT 0,
    succeeded  bigint      NOT NULL DEFAULT 0,
    failed     bigint      NOT NULL DEFAULT 0,
    retried    bigint      NOT NULL DEFAULT 0,
    seconds    float8      NOT NULL DEFAULT 0,
    waited     float8      NOT NULL DEFAULT 0,
    counted_at timestamptz CHECK (counted_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    due        bigint,
    oldest     float8,
    PRIMARY KEY (minute, role, type),
    CONSTRAINT workflow_minute_count_check CHECK (least(leased, succeeded, failed, retried, due) >= 0 AND greatest(leased, succeeded, failed, retried, due) <= 1000000000000000
                                                  AND least(seconds, waited, oldest) >= 0 AND greatest(seconds, waited, oldest) <= 1000000000000000)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0.01);
CREATE TRIGGER workflow_minute_guard BEFORE INSERT OR UPDATE ON workflow_minute
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers count what they lease and settle, by workflow_count_v1. DELETE forgets a minute.');
CREATE TRIGGER workflow_minute_kept BEFORE TRUNCATE ON workflow_minute
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('DELETE forgets a minute.');
COMMENT ON TABLE  workflow_minute IS 'What workers have leased of each type in a minute, and what became of it. They say it with their presence, every few seconds, for the minute in which they say it: one that is killed takes its last interval''s counts with it. Kept for a week. How much was enqueued nobody counts; what was leased, less what was tried again or put off, and the change of what is due tell it about.';
COMMENT ON COLUMN workflow_minute.role IS 'The workers'' role.';
COMMENT ON COLUMN workflow_minute.type IS 'A type; or ''other'', for those of a role beyond the first 200 of a minute, and of a worker beyond 100.';
COMMENT ON COLUMN workflow_minute.succeeded IS 'Runs that have succeeded; steps of processes and the engine''s own runs, too, as in all columns.';
COMMENT ON COLUMN workflow_minute.failed IS 'Runs that have failed for good.';
COMMENT ON COLUMN workflow_minute.retried IS 'Attempts that have failed, and are followed by another. Leases that ran out are not counted, unless the run has failed by that.';
COMMENT ON COLUMN workflow_minute.seconds IS 'How long handlers took, all together, whose outcomes were recorded.';
COMMENT ON COLUMN workflow_minute.waited IS 'How long what was leased had been due, all together.';
COMMENT ON COLUMN workflow_minute.counted_at IS 'When a worker last told of any. Null: none has; something was due.';
COMMENT ON COLUMN workflow_minute.due IS 'How many were due at some time in this minute, counted up to a limit. Null: none, or nobody has looked.';
COMMENT ON COLUMN workflow_minute.oldest IS 'For how many seconds the first of them had been due.';

-- It fails for nobody: a worker whose counts cannot be written says all the same that it lives, and goes on to count. The rows of a minute are locked in one order.
CREATE FUNCTION workflow_count_v1(types text[], leased bigint[], succeeded bigint[], failed bigint[], retried bigint[], seconds float8[], waited float8[]) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '500ms' AS $fn$
#variable_conflict use_column
DECLARE
    most   constant float8 := 1e12; -- of one call
    bound  text[]      := workflow_bound_prefixes();
    own    text        := workflow_role();
    this   timestamptz := date_trunc('minute', clock_timestamp());
    before text;
    named  text[];
BEGIN
    IF coalesce(cardinality(types), 0) = 0 THEN
        RETURN true;
    END IF;
    named := ARRAY(SELECT m.type FROM workflow_minute m WHERE m.minute = this AND m.role = own);
    before := workflow_advance('on'); -- for the guard
    INSERT INTO workflow_minute AS m (minute, role, type, leased, succeeded, failed, retried, seconds, waited, counted_at)
    SELECT this, own, t.type, least(sum(t.leased), most), least(sum(t.succeeded), most), least(sum(t.failed), most), least(sum(t.retried), most), least(sum(t.seconds), most), least(sum(t.waited), most), clock_timestamp()
    FROM (SELECT CASE WHEN c.known OR row_number() OVER (PARTITION BY c.known ORDER BY c.place) <= 200 - cardinality(named) THEN c.type ELSE 'other' END COLLATE "C" AS type,
                 greatest(c.leased, 0) AS leased, greatest(c.succeeded, 0) AS succeeded, greatest(c.failed, 0) AS failed, greatest(c.retried, 0) AS retried,
                 CASE WHEN c.seconds BETWEEN 0 AND most THEN c.seconds ELSE 0 END AS seconds, CASE WHEN c.waited BETWEEN 0 AND most THEN c.waited ELSE 0 END AS waited
          FROM (SELECT u.*, u.type = ANY (named) AS known
                FROM unnest(workflow_count_v1.types, workflow_count_v1.leased, workflow_count_v1.succeeded, workflow_count_v1.failed, workflow_count_v1.retried, workflow_count_v1.seconds, workflow_count_v1.waited)
                     WITH ORDINALITY AS u (type, leased, succeeded, failed, retried, seconds, waited, place)
                WHERE u.place <= 101 AND octet_length(u.type) <= 800 AND (bound IS NULL OR u.type = 'other' OR u.type ^@ ANY (bound))) AS c) AS t
    GROUP BY t.type
    ORDER BY t.type
    ON CONFLICT (minute, role, type) DO UPDATE
    SET leased = least(m.leased + excluded.leased, 1000000000000000), succeeded = least(m.succeeded + excluded.succeeded, 1000000000000000),
        failed = least(m.failed + excluded.failed, 1000000000000000), retried = least(m.retried + excluded.retried, 1000000000000000),
        seconds = least(m.seconds + excluded.seconds, 1e15), waited = least(m.waited + excluded.waited, 1e15), counted_at = excluded.counted_at;
    DELETE FROM workflow_minute m
    WHERE (m.minute, m.role, m.type) IN (SELECT o.minute, o.role, o.type FROM workflow_minute o WHERE o.minute < now() - interval '7 days' ORDER BY o.minute LIMIT 1000 FOR UPDATE SKIP LOCKED);
    PERFORM workflow_advance(before);
    RETURN true;
EXCEPTION WHEN OTHERS OR assert_failure THEN
    RETURN false;
END
$fn$;
COMMENT ON FUNCTION workflow_count_v1(text[], bigint[], bigint[], bigint[], bigint[], float8[], float8[]) IS
    'For workers: adds to workflow_minute what one has counted since it last said so. Of types that its role may lease; others are passed over. False: it could not be written, and is to be said again.';

-- Due runs by type, of what is not paused, and for how long the first of them has been due. Few lanes are counted far, many up to a thousand each; the index alone
-- is read, unless something is set aside.
CREATE FUNCTION workflow_due_types(lows text[]) RETURNS TABLE (type text, due bigint, or_more boolean, oldest float8)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    aside boolean := EXISTS (SELECT FROM workflow_set_aside);
    most  integer;
    lanes record;
    n     bigint;
BEGIN
    SELECT array_agg(l.suspect) AS suspects, array_agg(l.type) AS types, array_agg(l.priority) AS priorities, array_agg(-l.due_in) AS ages INTO lanes
    FROM workflow_lanes(lows) AS l
    WHERE l.due_in <= 0 AND NOT EXISTS (SELECT FROM unnest(l.paused) AS p WHERE workflow_covers(p, l.type));
    most := greatest(10000 / greatest(cardinality(lanes.types), 1), 1000);
    FOR i IN 1..coalesce(cardinality(lanes.types), 0) LOOP
        IF aside THEN
            SELECT count(*) INTO n
            FROM (SELECT FROM workflow_run r
                  WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
                    AND r.suspect = lanes.suspects[i] AND r.type = lanes.types[i] COLLATE "C" AND r.priority = lanes.priorities[i] AND r.run_at <= now()
                    AND (SELECT a.due FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = r.id AND a.row_version = r.xmin) IS NOT false
                  LIMIT most) AS x;
        ELSE
            SELECT count(*) INTO n
            FROM (SELECT FROM workflow_run r
                  WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL
                    AND r.suspect = lanes.suspects[i] AND r.type = lanes.types[i] COLLATE "C" AND r.priority = lanes.priorities[i] AND r.run_at <= now()
                  LIMIT most) AS x;
        END IF;
        type := lanes.types[i];
        due := n;
        or_more := n >= most;
        oldest := least(lanes.ages[i], 1e12);
        RETURN NEXT;
    END LOOP;
END
$fn$;
COMMENT ON FUNCTION workflow_due_types(text[]) IS 'Lanes of some prefixes in which something is due: how much, counted up to a limit, and for how many seconds the first has been. Read it as workflow_backlog.';

CREATE FUNCTION workflow_backlog(prefix text, OUT due bigint, OUT or_more boolean, OUT seconds float8)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF prefix IS NULL OR prefix !~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$' THEN
        RAISE EXCEPTION 'workflow_backlog: % is neither a type nor a prefix that ends with a dot', coalesce(quote_literal(left(prefix, 120)), 'null')
            USING ERRCODE = 'check_violation', HINT = 'Use billing. for all its types, or one type such as billing.invoice_charge.v1.';
    END IF;
    SELECT coalesce(sum(d.due), 0), coalesce(bool_or(d.or_more), false), coalesce(max(d.oldest), 0) INTO due, or_more, seconds
    FROM workflow_due_types(ARRAY[regexp_replace(prefix, '[^.]+$', '')]) AS d
    WHERE workflow_covers(prefix, d.type);
END
$fn$;
COMMENT ON FUNCTION workflow_backlog(text) IS
    'How many runs of a type, or of a prefix that ends with a dot, are due and not leased yet, without those that are paused; whether there may be more (ten thousand are counted, shared among its types and priorities, but a thousand of each); and for how many seconds the first of them has been due. For autoscalers: SELECT due FROM workflow_backlog(''billing.'').';

-- By prefix, for a worker's metrics; and by type, once a minute, for workflow_growing.
CREATE FUNCTION workflow_backlog_v1(prefixes text[]) RETURNS TABLE (prefix text, due bigint, or_more boolean, seconds float8)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '500ms' AS $fn$
#variable_conflict use_column
DECLARE
    own    text        := workflow_role();
    this   timestamptz := date_trunc('minute', clock_timestamp());
    before text;
    lows   text[]      := workflow_narrow(prefixes);
    found  jsonb;
BEGIN
    found := (SELECT jsonb_agg(d) FROM workflow_due_types(lows) AS d);
    BEGIN
        before := workflow_advance('on'); -- for the guard
        INSERT INTO workflow_minute AS m (minute, role, type, due, oldest)
        SELECT this, own, d.type, sum(d.due), max(d.oldest)
        FROM jsonb_to_recordset(found) AS d (type text, due bigint, oldest float8)
        WHERE (SELECT count(*) FROM workflow_minute c WHERE c.minute = this AND c.role = own) <= 200
          AND NOT EXISTS (SELECT FROM workflow_minute s WHERE s.minute = this AND s.role = own AND s.type = d.type COLLATE "C" AND s.due IS NOT NULL)
        GROUP BY d.type
        ORDER BY d.type COLLATE "C"
        LIMIT 200
        ON CONFLICT (minute, role, type) DO UPDATE SET due = excluded.due, oldest = excluded.oldest WHERE m.due IS NULL;
        PERFORM workflow_advance(before);
    EXCEPTION WHEN OTHERS OR assert_failure THEN -- what is due is told all the same
    END;
    RETURN QUERY
    SELECT p, coalesce(sum(d.due), 0)::bigint, coalesce(bool_or(d.or_more), false), coalesce(max(d.oldest), 0)
    FROM unnest(lows) AS p LEFT JOIN jsonb_to_recordset(found) AS d (type text, due bigint, or_more boolean, oldest float8) ON workflow_covers(p, d.type)
    GROUP BY p;
END
$fn$;
COMMENT ON FUNCTION workflow_backlog_v1(text[]) IS 'For workers: workflow_backlog of each of some prefixes. It notes what is due by type in workflow_minute, once a minute.';

-- As before, but of what workers have counted.
CREATE OR REPLACE VIEW workflow_rate AS
    WITH counted AS MATERIALIZED (
        SELECT m.type, min(m.minute) AS since, max(m.counted_at) AS latest, sum(m.leased) AS leased, sum(m.succeeded) AS succeeded, sum(m.failed) AS failed, sum(m.retried) AS retried
        FROM workflow_minute m
        WHERE m.minute >= date_trunc('minute', now() - interval '4 minutes') AND m.minute <= now() AND m.counted_at IS NOT NULL
        GROUP BY m.type
    )
    SELECT s.status, round(coalesce(c.n, 0) / greatest(extract(epoch FROM now() - min(c.since) OVER ()), 5), 2) AS per_second,
           coalesce(c.n, 0)::bigint AS of_runs, workflow_age(c.latest) AS latest, c.type
    FROM unnest('{leased,succeeded,failed,retried}'::text[]) AS s (status)
    LEFT JOIN (SELECT x.type, x.since, x.latest, v.status, v.n
               FROM counted x CROSS JOIN LATERAL (VALUES ('leased', x.leased), ('succeeded', x.succeeded), ('failed', x.failed), ('retried', x.retried)) AS v (status, n)
               WHERE v.n > 0) AS c ON c.status = s.status;
COMMENT ON VIEW   workflow_rate IS 'How many runs of each type are leased and end in a second, steps of processes included: what workers have counted in the last four to five minutes. The sum over the types is the rate of all.';
COMMENT ON COLUMN workflow_rate.status IS 'leased, succeeded, failed (for good), or retried: an attempt that failed, and is followed by another.';
COMMENT ON COLUMN workflow_rate.latest IS 'How long ago a worker last told of its type.';
COMMENT ON COLUMN workflow_rate.type IS 'Null: there was none of this kind.';

-- Of what waits for its next attempt, one is named: those are due last.
CREATE VIEW workflow_erring AS
    SELECT e.type, e.percent, e.failed, e.retried, e.succeeded, e.latest, x.id AS such_as,
           CASE WHEN x.last_error IS NULL OR has_table_privilege('workflow_history'::regclass, 'SELECT') THEN x.last_error ELSE '(hidden)' END AS last_error -- it may quote a payload
    FROM (SELECT m.type, round(100 * sum(m.failed + m.retried) / sum(m.failed + m.retried + m.succeeded))::integer AS percent,
                 sum(m.failed)::bigint AS failed, sum(m.retried)::bigint AS retried, sum(m.succeeded)::bigint AS succeeded, workflow_age(max(m.counted_at)) AS latest
          FROM workflow_minute m
          WHERE m.minute > now() - interval '15 minutes' AND m.minute <= now()
          GROUP BY m.type
          HAVING sum(m.failed + m.retried) >= 5 AND 10 * sum(m.failed + m.retried) >= sum(m.failed + m.retried + m.succeeded)) AS e
    LEFT JOIN LATERAL (
        SELECT l.id, l.last_error
        FROM (SELECT r.id, r.last_error FROM workflow_run r
              WHERE r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL AND NOT r.suspect AND r.type = e.type
              ORDER BY r.priority, r.run_at DESC, r.id DESC LIMIT 20) AS l
        WHERE l.last_error IS NOT NULL
        LIMIT 1) AS x ON true;
COMMENT ON VIEW   workflow_erring IS 'Types of which five attempts or more have failed within fifteen minutes, and a tenth of all or more: what workers have counted. Steps of processes included.';
COMMENT ON COLUMN workflow_erring.percent IS 'How many of a hundred attempts have failed.';
COMMENT ON COLUMN workflow_erring.such_as IS 'A run that waits for its next attempt. Null: none was found at once.';

CREATE VIEW workflow_growing AS
    WITH sample AS MATERIALIZED (
        SELECT m.type, m.minute, max(m.due) AS due, max(m.oldest) AS oldest FROM workflow_minute m
        WHERE m.minute > now() - interval '10 minutes' AND m.minute <= now() AND m.due IS NOT NULL
        GROUP BY m.type, m.minute
    )
    SELECT n.type, n.due, n.oldest * interval '1 second' AS oldest, b.due AS due_before, n.minute - b.minute AS within, l.covered_by
    FROM (SELECT DISTINCT ON (s.type) s.* FROM sample s WHERE s.minute > now() - interval '2 minutes' ORDER BY s.type, s.minute DESC) AS n
    JOIN (SELECT DISTINCT ON (s.type) s.* FROM sample s WHERE s.minute <= now() - interval '3 minutes' ORDER BY s.type, s.minute) AS b ON b.type = n.type
    CROSS JOIN LATERAL (SELECT string_agg(w.name, ', ' ORDER BY w.name) AS covered_by FROM workflow_live_worker w
                        WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS p WHERE workflow_covers(p, n.type))) AS l
    WHERE l.covered_by IS NOT NULL AND n.due >= 100 AND n.oldest >= 60
      AND (10 * n.due > 11 * b.due OR n.due >= 1000 AND 10 * n.due >= 9 * b.due AND n.oldest > b.oldest + 60) -- a lane is counted to a limit, and others of the type vary
      AND NOT EXISTS (SELECT FROM workflow_pause p WHERE p.resumed_at IS NULL AND workflow_covers(p.prefix, n.type))
      AND NOT EXISTS (SELECT FROM workflow_breaker x WHERE x.type = n.type);
COMMENT ON VIEW   workflow_growing IS 'Types that live workers cover, and of which more is due than some minutes ago, for a minute and longer: they do not keep up. What is due is counted up to a limit, a thousand or more: of so many it is enough that about as many are due as before, and the first of them for longer.';
COMMENT ON COLUMN workflow_growing.within IS 'How long before due there were due_before.';

-- As in 0018; and something was leased or has ended if a worker has told of it, steps of processes included.
CREATE OR REPLACE FUNCTION workflow_stalled_types(prefixes text[]) RETURNS TABLE (type text, due_for interval, covered_by text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
    SELECT l.type, max(-l.due_in) * interval '1 second', string_agg(DISTINCT w.name, ', ')
    FROM workflow_lanes(prefixes) AS l
    JOIN workflow_run r ON r.id = l.id
    JOIN workflow_worker w ON w.id IN (SELECT v.id FROM workflow_live_worker v) AND w.started_at < now() - interval '30 seconds' AND w.running < w.concurrency
        AND (w.steps OR r.token_id IS NULL) AND EXISTS (SELECT FROM unnest(w.prefixes) AS p WHERE workflow_covers(p, l.type))
    CROSS JOIN unnest(w.handlers) AS h (pattern)
    WHERE NOT l.suspect AND l.due_in < -30 AND workflow_covers(h.pattern, l.type)
      AND NOT EXISTS (SELECT FROM unnest(l.paused) AS p WHERE workflow_covers(p, l.type)) AND NOT EXISTS (SELECT FROM workflow_breaker b WHERE b.type = l.type)
      AND NOT EXISTS (SELECT FROM workflow_run x WHERE x.status = 'leased' AND workflow_covers(h.pattern, x.type)
                      AND NOT EXISTS (SELECT FROM workflow_accepted a WHERE a.run = x.id AND a.token = x.lease_token)) -- which no worker has
      AND NOT EXISTS (SELECT FROM workflow_minute m WHERE m.minute > now() - interval '2 minutes' AND m.counted_at > now() - interval '30 seconds' AND workflow_covers(h.pattern, m.type))
      AND NOT EXISTS (SELECT FROM unnest('{succeeded,failed}'::text[]) AS s (status) CROSS JOIN LATERAL ( -- by a worker of the version before
              SELECT x.type, x.finished_at FROM workflow_run x
              WHERE x.status = s.status COLLATE "C" AND x.finished_at IS NOT NULL AND x.token_id IS NULL ORDER BY x.finished_at DESC LIMIT 1000) f
          WHERE f.finished_at > now() - interval '30 seconds' AND workflow_covers(h.pattern, f.type))
    GROUP BY l.type
$fn$;

-- ---------------------------------------------------------------------------------
-- Since when a sink takes nothing, and when it was back. What it said last is kept until then, and no longer.
-- ---------------------------------------------------------------------------------

ALTER TABLE outbox_sink ADD COLUMN down_since timestamptz, ADD COLUMN back_at timestamptz,
    ADD CONSTRAINT outbox_sink_down_check CHECK (least(down_since, back_at) >= '1900-01-01 00:00Z' AND greatest(down_since, back_at) <= '9999-01-01 00:00Z');
COMMENT ON COLUMN outbox_sink.down_since IS 'Since when it takes nothing: dispatchers leave it alone, and try it from time to time. Null: it takes what it gets.';
COMMENT ON COLUMN outbox_sink.back_at IS 'When it last took something after that.';
COMMENT ON COLUMN outbox_sink.last_error IS 'Why it takes nothing, in its own words.';

CREATE OR REPLACE VIEW outbox_lag AS
    SELECT s.name AS sink, n.open, workflow_age(n.oldest) AS oldest,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NULL LIMIT 1000) AS x) AS failing,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NOT NULL LIMIT 1000) AS x) AS parked,
           CASE WHEN s.paused_until > now() THEN s.paused_until END AS paused_until,
           CASE WHEN s.last_error IS NULL OR has_table_privilege('workflow_history'::regclass, 'SELECT') THEN s.last_error ELSE '(hidden)' END AS last_error, workflow_age(s.seen_at) AS unserved,
           n.at_least, workflow_age(s.down_since) AS down_for, CASE WHEN s.down_since IS NULL THEN workflow_age(s.back_at) END AS back_for
    FROM outbox_sink s CROSS JOIN LATERAL outbox_behind(s.name) AS n;
COMMENT ON COLUMN outbox_lag.down_for IS 'For how long it has taken nothing. Null: it takes what it gets.';
COMMENT ON COLUMN outbox_lag.back_for IS 'For how long it has been back. Null: it is down, or was never.';

-- Who works goes on to work, and who looks may look, until `workflowctl roles` is run again.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    g record;
BEGIN
    REVOKE ALL ON FUNCTION workflow_count_v1(text[], bigint[], bigint[], bigint[], bigint[], float8[], float8[]), workflow_due_types(text[]), workflow_backlog(text), workflow_backlog_v1(text[]) FROM PUBLIC;
    FOR g IN SELECT x.grantee::regrole AS holder FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS x
             WHERE p.pronamespace = own AND p.proname = 'workflow_present_v1' AND x.grantee NOT IN (0, p.proowner) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_count_v1(text[], bigint[], bigint[], bigint[], bigint[], float8[], float8[]), workflow_backlog_v1(text[]) TO %s', g.holder);
    END LOOP;
    FOR g IN SELECT DISTINCT x.grantee::regrole AS holder FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
             WHERE c.oid = 'workflow_rate'::regclass AND x.privilege_type = 'SELECT' AND x.grantee NOT IN (0, c.relowner) LOOP
        EXECUTE format('GRANT SELECT ON workflow_minute, workflow_erring, workflow_growing TO %s', g.holder);
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_backlog(text) TO %s', g.holder);
    END LOOP;
END
$do$;
