-- simple-workflow 0006: what operators see, ask and do.
--
-- Nothing here counts a table: what could be many is looked at up to a limit, and says so. Each
-- view costs about the same beside ten million other rows.
--
--   see   workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
--         workflow_rate, workflow_live_worker, workflow_overlap, outbox_lag, workflow_blocker, workflow_bloat
--   why   workflow_why(run), process_why(instance)
--   act   workflow_pause, workflow_resume, workflow_redrive, workflow_release, workflow_reschedule,
--         workflow_prioritize; and from before: workflow_cancel, workflow_retry, workflow_delete

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- What is ours: later migrations that add to it replace this.
CREATE FUNCTION workflow_relations() RETURNS SETOF regclass
LANGUAGE sql STABLE SET search_path FROM CURRENT
BEGIN ATOMIC
    SELECT to_regclass(n) FROM unnest('{workflow_schema, workflow_run, workflow_history, workflow_worker, workflow_pause,
    workflow_open, workflow_event, workflow_live_worker, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
    workflow_overview, workflow_rate, workflow_blocker, workflow_bloat,
    outbox_event, outbox_sink, outbox_lane, outbox_delivery, outbox_lag,
    process_definition, process_instance, process_token, process_state_history, process_event, process_correction,
    parallel_group, parallel_join, join_arrival, each_progress, message, message_wait, user_task, incident, compensation_record,
    token, activity_instance, timer, process_node, process_starting, process_without_mover, process_miscounted, process_undead, process_untimed, process_misjoined,
    process_misundone, process_unearned, process_mismatched, process_misrecorded, process_stuck, process_duration, process_rate, process_overview}'::text[]) AS n
    WHERE to_regclass(n) IS NOT NULL;
END;
COMMENT ON FUNCTION workflow_relations() IS 'The tables and views of simple-workflow.';

-- ---------------------------------------------------------------------------------
-- Who is there.
-- ---------------------------------------------------------------------------------

CREATE TABLE workflow_worker (
    id          uuid        NOT NULL PRIMARY KEY,
    name        text COLLATE "C" NOT NULL,
    prefixes    text[]      NOT NULL,
    handlers    text[]      NOT NULL,
    steps       boolean     NOT NULL,
    concurrency integer     NOT NULL,
    running     integer     NOT NULL,
    version     text        NOT NULL,
    host        text        NOT NULL,
    pid         integer     NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
COMMENT ON TABLE  workflow_worker IS 'Workers say here that they are alive, for people to read: nothing is decided by it. One that stops takes its row away.';
COMMENT ON COLUMN workflow_worker.handlers IS 'Run types that it has handlers for, or prefixes of them, which end with a dot.';
COMMENT ON COLUMN workflow_worker.steps IS 'Whether it leases steps of processes, too.';
COMMENT ON COLUMN workflow_worker.running IS 'Handlers at work when it was last seen, of at most concurrency.';

CREATE VIEW workflow_live_worker AS
    SELECT w.*, now() - w.seen_at AS unseen
    FROM workflow_worker w
    WHERE w.seen_at > now() - interval '45 seconds';
COMMENT ON VIEW workflow_live_worker IS 'Workers that were seen within the last 45 seconds; they report every ten.';

-- What nobody leases, for now.
CREATE TABLE workflow_pause (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    prefix     text COLLATE "C" NOT NULL,
    reason     text        NOT NULL,
    paused_at  timestamptz NOT NULL DEFAULT now(),
    paused_by  text        NOT NULL DEFAULT concat_ws(' ', session_user, nullif(current_setting('application_name'), '')),
    resumed_at timestamptz,
    resumed_by text,
    CONSTRAINT workflow_pause_prefix_check CHECK (prefix ~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$' AND length(prefix) <= 200),
    CONSTRAINT workflow_pause_reason_check CHECK (reason ~ '\S')
);
CREATE UNIQUE INDEX workflow_pause_open_idx ON workflow_pause (prefix) WHERE resumed_at IS NULL;
COMMENT ON TABLE  workflow_pause IS 'Types, and prefixes of types, that are not leased until they are resumed; and those that were.';
COMMENT ON COLUMN workflow_pause.prefix IS 'A type, or a prefix that ends with a dot.';

-- Whether a prefix that ends with a dot covers a type, or is it.
CREATE FUNCTION workflow_covers(prefix text, type text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN prefix = type OR right(prefix, 1) = '.' AND type ^@ prefix;

-- 3 s, 5 min, 2 h, 4 d.
CREATE FUNCTION workflow_span(d interval) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN abs(extract(epoch FROM d)) < 119.5    THEN round(extract(epoch FROM d)) || ' s'
            WHEN abs(extract(epoch FROM d)) < 7199.5   THEN round(extract(epoch FROM d) / 60) || ' min'
            WHEN abs(extract(epoch FROM d)) < 172799.5 THEN round(extract(epoch FROM d) / 3600) || ' h'
            ELSE round(extract(epoch FROM d) / 86400) || ' d' END;

-- ---------------------------------------------------------------------------------
-- See.
-- ---------------------------------------------------------------------------------

-- From each lane on to the next, as workers find them: a probe or two of the index for each.
CREATE VIEW workflow_lane AS
    WITH RECURSIVE lane AS (
        SELECT f.*
        FROM unnest('{f,t}'::boolean[]) AS s (suspect)
        CROSS JOIN LATERAL (
            SELECT r.suspect, r.type, r.priority, r.run_at, r.token_id IS NOT NULL AS steps FROM workflow_open r
            WHERE r.suspect = s.suspect
            ORDER BY r.type, r.priority DESC, r.run_at, r.id LIMIT 1) AS f
        UNION ALL
        SELECT n.*
        FROM lane l CROSS JOIN LATERAL (
            (SELECT r.suspect, r.type, r.priority, r.run_at, r.token_id IS NOT NULL AS steps FROM workflow_open r
             WHERE r.suspect = l.suspect AND r.type = l.type AND r.priority < l.priority
             ORDER BY r.priority DESC, r.run_at, r.id LIMIT 1)
            UNION ALL
            (SELECT r.suspect, r.type, r.priority, r.run_at, r.token_id IS NOT NULL AS steps FROM workflow_open r
             WHERE r.suspect = l.suspect AND r.type > l.type
             ORDER BY r.type, r.priority DESC, r.run_at, r.id LIMIT 1)
            LIMIT 1) AS n
    )
    SELECT l.type, l.priority, l.suspect, l.steps, l.run_at AS first_run_at,
           (SELECT count(*)
            FROM (SELECT FROM workflow_open r
                  WHERE r.suspect = l.suspect AND r.type = l.type AND r.priority = l.priority AND r.run_at <= now()
                  ORDER BY r.run_at LIMIT 1000) AS x) AS due
    FROM lane l;
COMMENT ON VIEW   workflow_lane IS 'What waits, by type and priority.';
COMMENT ON COLUMN workflow_lane.first_run_at IS 'When the first of them is, or was, due.';
COMMENT ON COLUMN workflow_lane.due IS 'How many are due; 1000 means that many or more.';
COMMENT ON COLUMN workflow_lane.steps IS 'The first of them is a step of a process, for workers that take such.';
COMMENT ON COLUMN workflow_lane.suspect IS 'Those whose last lease expired; they are leased one at a time.';

CREATE VIEW workflow_waiting AS
    SELECT l.type, sum(l.due)::bigint AS due, bool_or(l.due >= 1000) AS or_more,
           now() - min(l.first_run_at) FILTER (WHERE l.due > 0) AS oldest,
           min(l.first_run_at) FILTER (WHERE l.due = 0) AS next_run_at,
           count(*) AS lanes, bool_or(l.steps) AS steps,
           (SELECT string_agg(w.name, ', ' ORDER BY w.name)
            FROM workflow_live_worker w
            WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS p WHERE workflow_covers(p, l.type)) AND (w.steps OR NOT bool_or(l.steps))) AS covered_by,
           (SELECT p.prefix FROM workflow_pause p WHERE p.resumed_at IS NULL AND workflow_covers(p.prefix, l.type) LIMIT 1) AS paused_by
    FROM workflow_lane l
    GROUP BY l.type;
COMMENT ON VIEW   workflow_waiting IS 'What waits, by type: how much is due, since when, and who covers it.';
COMMENT ON COLUMN workflow_waiting.or_more IS 'A priority of it has a thousand or more due; they are not counted further.';
COMMENT ON COLUMN workflow_waiting.steps IS 'Steps of processes are among the first of them.';
COMMENT ON COLUMN workflow_waiting.next_run_at IS 'When the first is due of the priorities that have nothing due now.';
COMMENT ON COLUMN workflow_waiting.covered_by IS 'Live workers whose prefixes cover it; null: nobody will take it.';
COMMENT ON COLUMN workflow_waiting.paused_by IS 'The prefix in workflow_pause that keeps it from being leased.';

-- What is wrong with who covers what.
CREATE VIEW workflow_coverage AS
    SELECT w.type AS subject,
           CASE WHEN w.covered_by IS NULL THEN 'no live worker covers this type' || CASE WHEN w.steps THEN ', whose runs are steps of processes: ' ELSE ': ' END || w.due || CASE WHEN w.or_more THEN ' or more' ELSE '' END
                                               || ' due, for ' || workflow_span(w.oldest)
                ELSE 'no worker that covers this type has a handler for it: its runs fail as no_handler_registered' END AS problem
    FROM workflow_waiting w
    WHERE w.due > 0
      AND NOT EXISTS (SELECT FROM workflow_live_worker l
                      WHERE EXISTS (SELECT FROM unnest(l.prefixes) AS p WHERE workflow_covers(p, w.type)) AND (l.steps OR NOT w.steps)
                        AND EXISTS (SELECT FROM unnest(l.handlers) AS h WHERE workflow_covers(h, w.type)))
    UNION ALL
    SELECT l.name, 'this worker has no handler for its prefix ' || p
    FROM workflow_live_worker l CROSS JOIN unnest(l.prefixes) AS p
    WHERE NOT EXISTS (SELECT FROM unnest(l.handlers) AS h WHERE workflow_covers(p, h) OR workflow_covers(h, p))
    UNION ALL
    SELECT string_agg(DISTINCT a.name, ', '), 'prefixes overlap: ' || p || ' and ' || q || ' of ' || string_agg(DISTINCT b.name, ', ')
    FROM workflow_live_worker a
    CROSS JOIN unnest(a.prefixes) AS p
    JOIN workflow_live_worker b ON b.prefixes <> a.prefixes
    CROSS JOIN unnest(b.prefixes) AS q
    WHERE q <> p AND workflow_covers(p, q)
    GROUP BY p, q;
COMMENT ON VIEW workflow_coverage IS 'Due runs that nobody takes, workers without work, prefixes that overlap. Empty if all is well.';

CREATE VIEW workflow_working AS
    SELECT r.id, r.type, r.leased_by, now() - r.started_at AS since, r.attempt, r.max_attempts, r.lease_until, r.deadline_at,
           r.lease_until < now() AS expired, r.token_id IS NOT NULL AS step
    FROM workflow_run r
    WHERE r.status = 'leased'
    ORDER BY r.started_at;
COMMENT ON VIEW workflow_working IS 'Runs that are leased, the longest first. Use LIMIT.';

CREATE VIEW workflow_failing AS
    SELECT f.type, f.code, count(*) AS failed, max(f.finished_at) AS latest, CASE WHEN has_table_privilege('workflow_history'::regclass, 'SELECT') -- it may quote a payload
                THEN (array_agg(f.last_error ORDER BY f.finished_at DESC))[1] ELSE '(hidden)' END AS last_error,
           (array_agg(f.id ORDER BY f.finished_at DESC))[1] AS last_run
    FROM (SELECT r.id, r.type, coalesce(r.error->>'code', 'unknown') AS code, r.finished_at, r.last_error
          FROM workflow_run r
          WHERE r.status = 'failed' AND r.finished_at IS NOT NULL AND r.token_id IS NULL AND r.deleted_at IS NULL
          ORDER BY r.finished_at DESC LIMIT 1000) f
    GROUP BY f.type, f.code;
COMMENT ON VIEW workflow_failing IS 'The last thousand runs that have failed for good, by type and code.';

-- For those who must not see what runs and processes are about: see roles/create.sql.
CREATE VIEW workflow_overview AS
    SELECT r.id, r.type, r.status, r.priority, r.attempt, r.max_attempts, r.postponed, r.suspect, r.error->>'code' AS error_code,
           r.run_at, r.started_at, r.deadline_at, r.finished_at, r.held_at, r.lease_until, r.lease_no, r.leased_by, r.settled_by, r.token_id,
           r.created_at, r.created_by, r.updated_at, r.deleted_at
    FROM workflow_run r;
COMMENT ON VIEW workflow_overview IS 'Runs without what they are about: no payload, result, key, metadata, or text of an error.';

CREATE VIEW process_overview AS
    SELECT i.id, d.name, d.version, i.status, i.priority, i.parent_process_instance_id, i.live_tokens, i.ready_tokens, i.joining_tokens, i.open_incidents,
           i.ending, i.created_at, i.updated_at, i.started_at, i.completed_at, i.paused_at, i.deleted_at
    FROM process_instance i JOIN process_definition d ON d.id = i.process_definition_id;
COMMENT ON VIEW process_overview IS 'Instances without what they are about.';

CREATE VIEW workflow_rate AS
    SELECT s.status, round(count(r.finished_at) / greatest(extract(epoch FROM now() - min(r.finished_at)), 1), 1) AS per_second,
           count(r.finished_at) AS of_runs, now() - max(r.finished_at) AS latest
    FROM unnest('{succeeded,failed,cancelled}'::text[]) AS s (status)
    LEFT JOIN LATERAL (
        SELECT r.finished_at FROM workflow_run r
        WHERE r.status = s.status COLLATE "C" AND r.finished_at IS NOT NULL AND r.token_id IS NULL AND r.finished_at > now() - interval '5 minutes'
        ORDER BY r.finished_at DESC LIMIT 1000) r ON true
    GROUP BY s.status;
COMMENT ON VIEW workflow_rate IS 'How many plain runs end in a second: by the last thousand of each kind, of the last five minutes.';

CREATE VIEW outbox_lag AS
    SELECT s.name AS sink, n.open,
           (SELECT now() - min(o.created_at)
            FROM outbox_lane l
            CROSS JOIN LATERAL (
                SELECT e.created_at FROM outbox_event e
                WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = l.lane AND e.id > l.floor
                    AND outbox_wants(s.types, e.event_type)
                    AND (s.name = ANY (e.delivered_to)) IS NOT TRUE AND (s.name = ANY (e.parked_by)) IS NOT TRUE
                ORDER BY e.lane, e.id LIMIT 1) o
            WHERE l.sink = s.name) AS oldest,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NULL LIMIT 1000) AS x) AS failing,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NOT NULL LIMIT 1000) AS x) AS parked,
           CASE WHEN s.paused_until > now() THEN s.paused_until END AS paused_until,
           CASE WHEN s.last_error IS NULL OR has_table_privilege('workflow_history'::regclass, 'SELECT') THEN s.last_error ELSE '(hidden)' END AS last_error, now() - s.seen_at AS unserved
    FROM outbox_sink s
    CROSS JOIN LATERAL (
        SELECT count(*) AS open
        FROM (SELECT
              FROM outbox_lane l
              CROSS JOIN LATERAL (
                  SELECT FROM outbox_event e
                  WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = l.lane AND e.id > l.floor
                      AND outbox_wants(s.types, e.event_type)
                      AND (s.name = ANY (e.delivered_to)) IS NOT TRUE AND (s.name = ANY (e.parked_by)) IS NOT TRUE
                  ORDER BY e.lane, e.id LIMIT 1000) o
              WHERE l.sink = s.name LIMIT 1000) AS x) n;
COMMENT ON VIEW   outbox_lag IS 'How far behind each sink is.';
COMMENT ON COLUMN outbox_lag.open IS 'Events that it has still to get; 1000 means that many or more.';
COMMENT ON COLUMN outbox_lag.unserved IS 'For how long no dispatcher has said that it serves the sink.';

-- Who keeps dead rows from being removed, or our tables locked.
CREATE VIEW workflow_blocker AS
    SELECT a.pid, a.usename AS role, a.application_name, 'holds a snapshot: nothing that has died since can be removed' AS problem,
           now() - a.xact_start AS since, a.state, 'SELECT pg_terminate_backend(' || a.pid || ')' AS way_out
    FROM pg_stat_activity a
    WHERE a.backend_xmin IS NOT NULL AND a.xact_start < now() - interval '1 minute' AND a.pid <> pg_backend_pid()
      AND (a.datname = current_database() OR a.backend_type = 'walsender') AND a.backend_type NOT IN ('autovacuum worker', 'parallel worker')
    UNION ALL
    SELECT a.pid, a.usename, a.application_name, 'holds ' || l.mode || ' on ' || l.relation::regclass, now() - a.xact_start, a.state,
           'SELECT pg_terminate_backend(' || a.pid || ')'
    FROM pg_locks l
    JOIN pg_stat_activity a ON a.pid = l.pid
    JOIN pg_class c ON c.oid = l.relation
    WHERE l.granted AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND c.oid IN (SELECT workflow_relations())
      AND a.xact_start < now() - interval '1 second'
    UNION ALL
    SELECT NULL, s.slot_type::text, s.slot_name, 'a replication slot holds a snapshot, or WAL', NULL, CASE WHEN s.active THEN 'active' ELSE 'inactive' END,
           'SELECT pg_drop_replication_slot(' || quote_literal(s.slot_name) || ')'
    FROM pg_replication_slots s
    WHERE NOT s.active OR s.xmin IS NOT NULL
    UNION ALL
    SELECT NULL, p.owner, p.gid, 'a prepared transaction holds a snapshot and its locks', now() - p.prepared, 'prepared', 'ROLLBACK PREPARED ' || quote_literal(p.gid)
    FROM pg_prepared_xacts p
    WHERE p.database = current_database() AND p.prepared < now() - interval '1 minute';
COMMENT ON VIEW workflow_blocker IS 'Sessions, slots and prepared transactions that keep dead rows from being removed, or lock our tables; and what ends each.';

CREATE VIEW workflow_bloat AS
    SELECT s.relname AS table_name, s.n_live_tup AS live, s.n_dead_tup AS dead,
           round(100.0 * s.n_dead_tup / greatest(s.n_live_tup + s.n_dead_tup, 1), 1) AS dead_percent,
           pg_size_pretty(pg_table_size(s.relid)) AS table_size, pg_size_pretty(pg_indexes_size(s.relid)) AS index_size,
           greatest(s.last_vacuum, s.last_autovacuum) AS last_vacuum, greatest(s.last_analyze, s.last_autoanalyze) AS last_analyze
    FROM pg_stat_user_tables s
    WHERE s.relid IN (SELECT workflow_relations())
    ORDER BY pg_total_relation_size(s.relid) DESC;
COMMENT ON VIEW workflow_bloat IS 'Dead rows and sizes of our tables, the largest first, by the server''s statistics.';

-- ---------------------------------------------------------------------------------
-- Why.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_why(id uuid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    r      workflow_run;
    p      workflow_pause;
    tries  text;
    error  text;
    names  text;
    able   boolean;
    busy   boolean;
    ahead  bigint;
BEGIN
    SELECT * INTO r FROM workflow_run w WHERE w.id = workflow_why.id;
    IF NOT FOUND THEN
        RETURN 'there is no such run, or retention has removed it';
    END IF;
    tries := r.attempt || ' of ' || r.max_attempts;
    error := coalesce(' after «' || left(r.last_error, 200) || '»', '');
    IF r.deleted_at IS NOT NULL THEN
        RETURN 'deleted ' || workflow_span(now() - r.deleted_at) || ' ago' || coalesce(': ' || r.delete_reason, '');
    END IF;
    CASE r.status
    WHEN 'succeeded' THEN
        RETURN 'succeeded ' || workflow_span(now() - r.finished_at) || ' ago, at attempt ' || tries || coalesce(', by ' || r.settled_by, '');
    WHEN 'cancelled' THEN
        RETURN 'cancelled ' || workflow_span(now() - r.finished_at) || ' ago: ' || coalesce(r.last_error, '');
    WHEN 'failed' THEN
        RETURN 'failed ' || workflow_span(now() - r.finished_at) || ' ago, at attempt ' || tries || error || CASE
            WHEN r.token_id IS NOT NULL THEN '; it is a step of a process, see SELECT process_why(' || coalesce(
                (SELECT quote_literal(t.instance_id) FROM process_token t WHERE t.id = r.token_id), 'instance') || ')'
            ELSE '; SELECT workflow_retry(' || quote_literal(r.id) || ') tries again' END;
    WHEN 'leased' THEN
        IF r.lease_until > clock_timestamp() THEN
            RETURN 'runs at ' || r.leased_by || ' for ' || workflow_span(now() - r.started_at) || ', attempt ' || tries
                || '; its lease goes until ' || to_char(r.lease_until, 'HH24:MI:SS') || ', and is extended while that worker lives';
        END IF;
    ELSE
    END CASE;

    SELECT string_agg(w.name, ', ' ORDER BY w.name), bool_or(EXISTS (SELECT FROM unnest(w.handlers) AS h WHERE workflow_covers(h, r.type))),
           bool_and(w.running >= w.concurrency)
    INTO names, able, busy
    FROM workflow_live_worker w
    WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, r.type)) AND (w.steps OR r.token_id IS NULL);

    IF r.status = 'leased' THEN
        RETURN 'its lease at ' || r.leased_by || ' ran out ' || workflow_span(clock_timestamp() - r.lease_until) || ' ago: '
            || CASE WHEN NOT EXISTS (SELECT FROM workflow_live_worker) THEN 'no worker lives to take it back; start one that covers ' || r.type
                    WHEN names IS NULL THEN 'it will be taken back, but no live worker covers ' || r.type
                    ELSE 'it will be taken back, for ' || names END;
    END IF;
    IF r.held_at IS NOT NULL THEN
        RETURN coalesce((SELECT 'its process is paused since ' || to_char(r.held_at, 'YYYY-MM-DD HH24:MI') || ': SELECT process_resume(' || quote_literal(process_paused_with(i.id)) || ')'
                         FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE t.id = r.token_id AND i.paused_at = r.held_at),
                        'held since ' || to_char(r.held_at, 'YYYY-MM-DD HH24:MI') || ': UPDATE workflow_run SET held_at = NULL WHERE id = ' || quote_literal(r.id));
    END IF;
    SELECT * INTO p FROM workflow_pause x WHERE x.resumed_at IS NULL AND workflow_covers(x.prefix, r.type) ORDER BY x.paused_at LIMIT 1;
    IF FOUND THEN
        RETURN 'prefix ' || p.prefix || ' is paused since ' || to_char(p.paused_at, 'YYYY-MM-DD HH24:MI') || ' by ' || p.paused_by || ': ' || p.reason
            || '; SELECT workflow_resume(' || quote_literal(p.prefix) || ')';
    END IF;
    IF r.run_at > clock_timestamp() THEN
        RETURN 'due in ' || workflow_span(r.run_at - clock_timestamp()) || CASE
            WHEN r.attempt > 0 THEN ': attempt ' || r.attempt + 1 || ' of ' || r.max_attempts || error
            WHEN r.postponed > 0 THEN ': its handler has put it off, ' || r.postponed || ' times so far'
            ELSE '' END;
    END IF;
    IF names IS NULL THEN
        RETURN 'no live worker covers ' || r.type || '; ' || coalesce(
            'those that live cover ' || (SELECT string_agg(DISTINCT x, ', ') FROM workflow_live_worker w CROSS JOIN unnest(w.prefixes) AS x), 'none lives at all');
    ELSIF NOT able THEN
        RETURN names || ' will take it and fail it: no handler for ' || r.type || ' is registered there';
    END IF;
    ahead := (SELECT sum(l.due) FROM workflow_lane l
              WHERE l.priority > r.priority AND NOT l.suspect
                AND EXISTS (SELECT FROM workflow_live_worker w
                            WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, r.type))
                              AND EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, l.type))));
    RETURN 'due for ' || workflow_span(clock_timestamp() - r.run_at) || ': ' || CASE
        WHEN r.suspect THEN 'its last lease ran out, so it is watched: such runs are started one at a time by ' || names
        WHEN ahead > 0 THEN ahead || ' runs of higher priority go first at ' || names
        WHEN busy THEN names || ' cover it, and have no slot free'
        ELSE names || ' cover it, and will take it in its turn' END;
END
$fn$;
COMMENT ON FUNCTION workflow_why(uuid) IS 'Says in one line what a run waits for, or how it ended, and what to do.';

CREATE FUNCTION process_why(id uuid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    i    process_instance;
    x    incident;
    why  text;
    join_waits text;
BEGIN
    SELECT * INTO i FROM process_instance p WHERE p.id = process_why.id;
    IF NOT FOUND THEN
        RETURN 'there is no such instance, or retention has removed it';
    ELSIF i.completed_at IS NOT NULL THEN
        RETURN i.status || ' ' || workflow_span(now() - i.completed_at) || ' ago' || coalesce(': ' || i.failure_reason, ': ' || (
            SELECT h.reason FROM process_state_history h WHERE h.instance_id = i.id AND h.to_status = i.status ORDER BY h.id DESC LIMIT 1), '');
    END IF;
    SELECT * INTO x FROM incident c WHERE c.instance_id = i.id AND c.resolved_at IS NULL ORDER BY c.created_at, c.id LIMIT 1;
    IF FOUND THEN
        RETURN 'incident ' || x.code || ' at ' || x.node || ' for ' || workflow_span(now() - x.created_at) || ': ' || left(x.message, 300)
            || '; then INSERT INTO workflow_run (type, payload) VALUES (''graph.retry.v1'', ''{"incident": "' || x.id || '"}'')';
    END IF;
    IF i.paused_at IS NOT NULL THEN
        RETURN 'paused since ' || to_char(i.paused_at, 'YYYY-MM-DD HH24:MI') || '; SELECT process_resume(' || quote_literal(process_paused_with(i.id)) || ')';
    END IF;

    -- What moves it, the most urgent first: what is undone within what it has called, a step, an instance
    -- that it has called, a person, a message, the time.
    SELECT coalesce(m.why, m.node || ': ' || workflow_why(m.run)) INTO why FROM (
        SELECT 0 AS place, c.created_at AS at, NULL::uuid AS run, NULL AS node,
               'waits until ' || c.id || ', which it has called, has undone what it did; SELECT process_why(' || quote_literal(c.id) || ')' AS why
        FROM process_instance c
        WHERE i.ending IS NOT NULL AND c.parent_process_instance_id = i.id AND c.undone_with_parent AND c.completed_at IS NULL
        UNION ALL
        SELECT 1, r.run_at, r.id, r.node, NULL
        FROM process_token k JOIN workflow_run r ON r.token_id = k.id
        WHERE k.instance_id = i.id AND k.state = 'Ready' AND r.finished_at IS NULL
        UNION ALL
        SELECT 2, c.created_at, NULL, NULL, 'waits at ' || k.node || ' for the instance it has called: ' || c.id || ', ' || c.status || '; SELECT process_why(' || quote_literal(c.id) || ')'
        FROM process_token k JOIN process_instance c ON c.parent_token_id = k.id
        WHERE k.instance_id = i.id AND k.state = 'Waiting' AND c.completed_at IS NULL
        UNION ALL
        SELECT 3, u.created_at, NULL, NULL, 'waits at ' || u.node || ' for ' || coalesce(u.assignee, 'somebody' || coalesce(' of ' || nullif(array_to_string(u.groups, ', '), ''), ''))
               || ' to complete task ' || u.id || ', for ' || workflow_span(now() - u.created_at)
        FROM user_task u WHERE u.instance_id = i.id AND u.state = 'open'
        UNION ALL
        SELECT 4, w.created_at, NULL, NULL, 'waits at ' || k.node || ' for ' || CASE WHEN w.key IS NULL THEN 'signal ' || w.name ELSE 'message ' || w.name || ' with key ' || w.key END
               || ', for ' || workflow_span(now() - w.created_at)
        FROM message_wait w JOIN process_token k ON k.id = w.token_id WHERE w.instance_id = i.id
        UNION ALL
        SELECT 5, r.run_at, r.id, r.node, NULL
        FROM process_token k JOIN workflow_run r ON r.token_id = k.id
        WHERE k.instance_id = i.id AND k.state = 'Waiting' AND r.finished_at IS NULL) m
    ORDER BY m.place, m.at
    LIMIT 1;
    SELECT 'waits for ' || (j.expected - j.joined) || ' of ' || j.expected || ' branches at join ' || j.node || ': ' INTO join_waits
    FROM parallel_join j
    WHERE j.instance_id = i.id AND NOT j.fired AND j.expected > j.joined
      AND EXISTS (SELECT FROM join_arrival a JOIN process_token k ON k.id = a.token_id WHERE a.join_id = j.id AND k.state = 'Waiting')
    ORDER BY j.id
    LIMIT 1;
    RETURN CASE WHEN i.ending IS NOT NULL THEN 'undoes what it has done, to be ' || i.ending || ' then: ' ELSE '' END
        || coalesce(join_waits, '')
        || coalesce(why, CASE WHEN EXISTS (SELECT FROM process_starting s WHERE s.instance_id = i.id)
                              THEN 'the instance that it calls is about to be started'
                              ELSE 'nothing will ever move it: that is a bug; SELECT * FROM process_event WHERE instance_id = ' || quote_literal(i.id) END);
END
$fn$;
COMMENT ON FUNCTION process_why(uuid) IS 'Says in one line what an instance waits for, or how it ended, and what to do.';

-- ---------------------------------------------------------------------------------
-- Act. Each answers what it did.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_pause(prefix text, reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF workflow_pause.prefix !~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$' THEN
        RAISE EXCEPTION 'workflow_pause: % is neither a type nor a prefix that ends with a dot', quote_literal(left(workflow_pause.prefix, 120))
            USING ERRCODE = 'check_violation', HINT = 'Use billing. for all its types, or one type such as billing.invoice_charge.v1.';
    ELSIF workflow_pause.reason IS NULL OR workflow_pause.reason !~ '\S' THEN
        RAISE EXCEPTION 'workflow_pause: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why, for those who find it paused.';
    END IF;
    INSERT INTO workflow_pause (prefix, reason) VALUES (workflow_pause.prefix, workflow_pause.reason)
    ON CONFLICT DO NOTHING;
    RETURN CASE WHEN NOT FOUND THEN 'already paused' WHEN right(workflow_pause.prefix, 1) = '.' THEN 'paused' ELSE 'paused, this one type alone' END;
END
$fn$;
COMMENT ON FUNCTION workflow_pause(text, text) IS
    'Has no run of a type, or of a prefix that ends with a dot, be leased any more; what runs goes on. Answers paused or already paused.';

CREATE FUNCTION workflow_resume(prefix text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    UPDATE workflow_pause p
    SET resumed_at = now(), resumed_by = concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))
    WHERE p.prefix = workflow_resume.prefix AND p.resumed_at IS NULL;
    RETURN CASE WHEN FOUND THEN 'resumed' ELSE 'not paused' || coalesce('; paused are ' || (SELECT string_agg(p.prefix, ', ') FROM workflow_pause p WHERE p.resumed_at IS NULL), '') END;
END
$fn$;
COMMENT ON FUNCTION workflow_resume(text) IS 'Ends a pause. Answers resumed, or not paused.';

-- First look, then a few, then the rest at a rate:
--   SELECT * FROM workflow_redrive('billing.', 'timeout');                                        -- what would be done
--   SELECT * FROM workflow_redrive('billing.', 'timeout', most => 10, dry_run => false);          -- a canary
--   SELECT count(*) FROM workflow_redrive('billing.', 'timeout', most => 100000, per_second => 50, dry_run => false);
CREATE FUNCTION workflow_redrive(
    prefix     text,
    code       text        DEFAULT NULL,
    since      timestamptz DEFAULT '-infinity',
    until      timestamptz DEFAULT 'infinity',
    most       integer     DEFAULT 100,
    per_second float8      DEFAULT NULL,
    attempts   integer     DEFAULT 1,
    dry_run    boolean     DEFAULT true
) RETURNS TABLE (id uuid, type text, code_was text, error_was text, failed_at timestamptz, run_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text := coalesce(current_setting('workflow.retry', true), '');
BEGIN
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF most IS NULL OR attempts IS NULL OR dry_run IS NULL OR most NOT BETWEEN 1 AND 100000 OR attempts NOT BETWEEN 1 AND 1000 OR per_second <= 0 THEN
        RAISE EXCEPTION 'workflow_redrive: most is 1 to 100000, attempts 1 to 1000, per_second above 0'
            USING ERRCODE = 'check_violation', HINT = 'Redrive more than 100000 runs in several calls.';
    END IF;
    IF dry_run THEN -- nothing is locked
        RETURN QUERY
        SELECT f.id, f.type, f.error->>'code', f.last_error, f.finished_at, NULL::timestamptz
        FROM workflow_run f
        WHERE f.status = 'failed' AND f.finished_at IS NOT NULL AND f.token_id IS NULL AND f.deleted_at IS NULL AND f.attempt < 1000
          AND f.finished_at >= since AND f.finished_at < until
          AND f.type BETWEEN workflow_redrive.prefix AND CASE WHEN right(workflow_redrive.prefix, 1) = '.' THEN left(workflow_redrive.prefix, -1) || '/' ELSE workflow_redrive.prefix END
          AND workflow_covers(workflow_redrive.prefix, f.type) AND (workflow_redrive.code IS NULL OR f.error->>'code' = workflow_redrive.code)
        ORDER BY f.finished_at, f.id
        LIMIT most;
        RETURN;
    END IF;
    PERFORM set_config('workflow.retry', 'on', true);
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT c.*, c.place - 1 AS before_it
        FROM workflow_redrive(workflow_redrive.prefix, workflow_redrive.code, since, until, most) WITH ORDINALITY
          AS c (id, type, code_was, error_was, failed_at, run_at, place)
    ), again AS (
        UPDATE workflow_run w
        SET status = 'pending', finished_at = NULL, updated_at = clock_timestamp(), suspect = false, postponed = 0,
            run_at = now() + coalesce(c.before_it / per_second, 0) * interval '1 second',
            max_attempts = least(1000, greatest(w.max_attempts, w.attempt + workflow_redrive.attempts))
        FROM chosen c
        WHERE w.id = c.id AND w.status = 'failed' AND w.deleted_at IS NULL AND w.attempt < 1000 -- others may have been faster
        RETURNING w.id, w.run_at
    )
    SELECT c.id, c.type, c.code_was, c.error_was, c.failed_at, a.run_at
    FROM chosen c JOIN again a ON a.id = c.id
    ORDER BY c.place;
    PERFORM set_config('workflow.retry', before, true);
END
$fn$;
COMMENT ON FUNCTION workflow_redrive(text, text, timestamptz, timestamptz, integer, float8, integer, boolean) IS
    'Gives failed runs of a type or prefix further attempts, the oldest first: nothing but shows them unless dry_run is false; at most so many; spread over time with per_second.';

CREATE FUNCTION workflow_release(worker text, reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n bigint;
BEGIN
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF reason !~ '\S' OR reason IS NULL THEN
        RAISE EXCEPTION 'workflow_release: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why the leases are taken away.';
    END IF;
    UPDATE workflow_run r
    SET status = 'pending', lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, run_at = now(), updated_at = clock_timestamp(),
        last_error = left('released by ' || session_user || ': ' || workflow_release.reason, 4096)
    WHERE r.id IN (SELECT h.id FROM workflow_run h WHERE h.status = 'leased' AND h.leased_by = workflow_release.worker ORDER BY h.id FOR NO KEY UPDATE);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$fn$;
COMMENT ON FUNCTION workflow_release(text, text) IS
    'Takes a worker''s leases away at once, so that others may have its runs; what it still reports is refused. The attempts stay charged. Returns how many.';

-- Another time or priority is no change of status, which a trigger would record: this does. It
-- answers what the run is instead, if it is not pending.
CREATE FUNCTION workflow_edit(id uuid, run_at timestamptz, priority integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    was workflow_run;
BEGIN
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF workflow_edit.run_at IS NULL AND workflow_edit.priority IS NULL THEN
        RAISE EXCEPTION 'workflow_run: neither a time nor a priority is given' USING ERRCODE = 'check_violation', HINT = 'Say when the run is to be due, or with which priority.';
    END IF;
    SELECT * INTO was FROM workflow_run r WHERE r.id = workflow_edit.id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    ELSIF was.deleted_at IS NOT NULL OR was.status <> 'pending' THEN
        RETURN 'too late: ' || CASE WHEN was.deleted_at IS NOT NULL THEN 'deleted' ELSE was.status END;
    END IF;
    UPDATE workflow_run r
    SET run_at = coalesce(workflow_edit.run_at, greatest(r.run_at, now())), priority = coalesce(workflow_edit.priority, r.priority), updated_at = clock_timestamp()
    WHERE r.id = was.id;
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    SELECT was.id, 'edited', concat_ws(' ', session_user, nullif(current_setting('application_name'), '')), was.attempt, was.lease_no,
           jsonb_build_object('run_at_was', was.run_at, 'priority_was', was.priority, 'statement', left(current_query(), 1000));
    RETURN NULL;
END
$fn$;

CREATE FUNCTION workflow_reschedule(id uuid, run_at timestamptz) RETURNS text
LANGUAGE sql SET search_path FROM CURRENT AS $fn$
    SELECT coalesce(workflow_edit(workflow_reschedule.id, workflow_reschedule.run_at, NULL),
                    'due ' || to_char(workflow_reschedule.run_at, 'YYYY-MM-DD HH24:MI:SS TZ'))
$fn$;
COMMENT ON FUNCTION workflow_reschedule(uuid, timestamptz) IS 'Has a pending run be due at another time. Answers due …, too late: <status>, or not found.';

CREATE FUNCTION workflow_prioritize(id uuid, priority integer) RETURNS text
LANGUAGE sql SET search_path FROM CURRENT AS $fn$
    SELECT coalesce(workflow_edit(workflow_prioritize.id, NULL, workflow_prioritize.priority), 'priority ' || workflow_prioritize.priority)
$fn$;
COMMENT ON FUNCTION workflow_prioritize(uuid, integer) IS 'Has a pending run go first, or last: -100 to 100. It lines up behind those of that priority which are due. Answers priority …, too late: <status>, or not found.';

-- ---------------------------------------------------------------------------------
-- Nobody but the owner may call what is here until it is granted: see roles/create.sql.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_functions() RETURNS SETOF regprocedure
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.oid::regprocedure
    FROM pg_proc p
    WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND p.prokind = 'f'
      AND p.proname = ANY ('{workflow_uuid, workflow_run_refuse_insert, workflow_run_refuse_update, workflow_run_refuse_input, workflow_run_refuse_delete,
        workflow_run_tidy_row, workflow_run_refuse_undelete, workflow_event_id, workflow_run_audit_row, workflow_enqueue_once, workflow_enqueue,
        workflow_cancel, workflow_retry, workflow_delete, workflow_run_wake, workflow_covers, workflow_span, workflow_why, workflow_pause, workflow_resume,
        workflow_redrive, workflow_release, workflow_edit, workflow_reschedule, workflow_prioritize, workflow_relations, workflow_functions,
        outbox_event_keep, outbox_wants, outbox_emit, outbox_replay, outbox_replay_parked, outbox_run_event,
        process_definition_guard, process_steps_go, process_facts_go, process_step_cut_off, process_task_assign, process_task_finish, process_scopes, process_undoes, process_correct,
        process_guard, process_instance_guard, process_instance_marked, process_lock_called, process_pause, process_paused_with, process_resume, process_why}'::text[]);
END;
COMMENT ON FUNCTION workflow_functions() IS 'The functions of simple-workflow.';

DO $do$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT workflow_functions() LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END
$do$;
