-- simple-workflow 0015: the dispatcher keeps its own house.
--
-- What a dispatcher goes by (lanes, claims, floors, the sequence of ids) may be wrong: restored without the rest, written
-- by hand, or by somebody who has the dispatcher's role. It harms no other event then, and is set right by the
-- dispatcher itself, at its start and from time to time, or by SELECT outbox_set_right_v1().

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- Ids.
-- ---------------------------------------------------------------------------------

-- Ids are drawn. Restores (COPY, OVERRIDING SYSTEM VALUE) and logical replication bring their own, and no trigger asks
-- about these: nothing relies on an id having been drawn, but for the order of commits within an aggregate.
ALTER TABLE outbox_event ALTER COLUMN id SET GENERATED ALWAYS;

CREATE FUNCTION outbox_last_id_v1() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    last bigint;
BEGIN
    EXECUTE 'SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM ' || pg_get_serial_sequence('outbox_event', 'id') INTO last;
    RETURN last;
END
$fn$;
COMMENT ON FUNCTION outbox_last_id_v1() IS 'The last id that was drawn for an event, whether its transaction has committed or not. No floor passes it.';

-- A plain INSERT does by this what outbox_append_v1 does, row by row: its id is drawn anew while its aggregate is held. An id
-- that was given stays; it is told by not being what this session has drawn last, and restores have sessions of their own.
CREATE OR REPLACE FUNCTION outbox_event_door() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
DECLARE
    ids   text := pg_get_serial_sequence('outbox_event', 'id');
    drawn bigint;
    here  tid;
    holds text;
BEGIN
    BEGIN
        drawn := currval(ids);
    EXCEPTION WHEN object_not_in_prerequisite_state THEN -- this session has drawn none
    END;
    IF NEW.id IS DISTINCT FROM drawn THEN
        RETURN NEW;
    END IF;
    holds := pg_current_xact_id()::text || ' ' || NEW.aggregate_id;
    IF current_setting('workflow.inserted', true) IS DISTINCT FROM holds THEN
        INSERT INTO outbox_aggregate VALUES (NEW.aggregate_id) ON CONFLICT ON CONSTRAINT outbox_aggregate_pkey DO UPDATE SET id = excluded.id RETURNING ctid INTO here;
        DELETE FROM outbox_aggregate WHERE ctid = here;
        PERFORM set_config('workflow.inserted', holds, true);
    END IF;
    NEW.id := nextval(ids);
    RETURN NEW;
END
$fn$;

-- ---------------------------------------------------------------------------------
-- Documents.
-- ---------------------------------------------------------------------------------

-- Headers have limits, too. Beyond one of them are only such as have 309 bytes or more as text, or 520 as they are stored, as 65 levels take.
CREATE FUNCTION outbox_event_refuse() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    which   text := 'payload';
    problem text;
    fix     text;
    written text;
BEGIN
    IF NEW.bytes >= 80000 OR NEW.bytes >= 309 AND NEW.payload::text ~ '[0-9]{155}[0-9]{154}|[^"]{129}":|\\"' THEN
        SELECT x.problem, x.fix INTO problem, fix FROM workflow_document_problem(NEW.payload, NEW.payload::text) AS x;
    END IF;
    IF problem IS NULL AND NEW.headers IS NOT NULL THEN
        which := 'headers';
        written := NEW.headers;
        IF octet_length(written) > 65536 THEN
            problem := format('they have %s bytes, the limit is 65536', octet_length(written));
            fix := 'Headers are attributes of the event, such as traceparent. Put data into the payload.';
        ELSIF jsonb_path_exists(NEW.headers, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
            problem := 'they are nested deeper than 64 levels';
            fix := 'Headers are texts: {"name": "value"}.';
        ELSIF octet_length(written) >= 309 THEN
            SELECT x.problem, x.fix INTO problem, fix FROM workflow_document_problem(NEW.headers, written) AS x;
        END IF;
    END IF;
    IF problem IS NOT NULL AND NOT workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', NEW.id)) THEN
        RAISE EXCEPTION '%: %: %', TG_TABLE_NAME, which, problem
            USING ERRCODE = 'check_violation', HINT = fix, TABLE = TG_TABLE_NAME, COLUMN = which, CONSTRAINT = TG_NAME;
    END IF;
    RETURN NULL;
END
$fn$;
CREATE OR REPLACE TRIGGER outbox_event_document AFTER INSERT ON outbox_event
    FOR EACH ROW WHEN (NEW.bytes >= 309 OR octet_length(NEW.headers::text) >= 309 OR pg_column_size(NEW.headers) >= 512)
    EXECUTE FUNCTION outbox_event_refuse();
COMMENT ON COLUMN outbox_event.headers IS 'Attributes that travel with the event, such as traceparent: an object of texts, of 64 kB at most.';

-- ---------------------------------------------------------------------------------
-- Lanes, floors and the sequence.
-- ---------------------------------------------------------------------------------

-- Makes the lanes of a sink anew that are missing (null: of all sinks), and sets back what no lane can have: a claim
-- longer than any may be, which is over; a time that is still to come; a floor that has passed what was drawn. A lane that somebody has
-- locked is left for the next time. It returns how many lanes it was.
CREATE FUNCTION outbox_mend_lanes(only_sink text) RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '200ms' AS $fn$
DECLARE
    made   integer;
    mended integer;
BEGIN
    INSERT INTO outbox_lane (sink, lane)
    SELECT s.name, n FROM outbox_sink s CROSS JOIN generate_series(0, 63) AS n
    WHERE (only_sink IS NULL OR s.name = only_sink) AND NOT EXISTS (SELECT FROM outbox_lane l WHERE l.sink = s.name AND l.lane = n)
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS made = ROW_COUNT;
    WITH wrong AS MATERIALIZED (
        SELECT l.sink, l.lane, w.*
        FROM outbox_lane l CROSS JOIN LATERAL (
            SELECT l.floor > outbox_last_id_v1() AS floor,
                   l.next_floor > outbox_last_id_v1() OR (l.next_floor IS NULL) <> (l.next_xid IS NULL) AS next,
                   NOT coalesce(l.claim_until BETWEEN '2000-01-01' AND clock_timestamp() + interval '61 minutes', l.claim_token IS NULL) OR octet_length(l.claimed_by) > 400 AS claim,
                   l.served_at NOT BETWEEN '2000-01-01' AND clock_timestamp() + interval '1 minute' AND l.served_at <> '1970-01-01 00:00:00+00' AS served,
                   l.replays NOT BETWEEN 0 AND 1000000000000000 AS replays) AS w
        WHERE (only_sink IS NULL OR l.sink = only_sink) AND l.lane BETWEEN 0 AND 63 AND (w.floor OR w.next OR w.claim OR w.served OR w.replays)
        FOR NO KEY UPDATE OF l SKIP LOCKED
    )
    UPDATE outbox_lane l
    SET floor = CASE WHEN w.floor THEN 0 ELSE l.floor END, next_floor = CASE WHEN (w.floor OR w.next) IS NOT TRUE THEN l.next_floor END, next_xid = CASE WHEN (w.floor OR w.next) IS NOT TRUE THEN l.next_xid END,
        claim_token = CASE WHEN w.claim IS NOT TRUE THEN l.claim_token END, claimed_by = CASE WHEN w.claim IS NOT TRUE THEN l.claimed_by END, claim_until = CASE WHEN w.claim IS NOT TRUE THEN l.claim_until END,
        served_at = CASE WHEN w.served THEN '1970-01-01 00:00:00+00' ELSE l.served_at END, replays = CASE WHEN w.replays THEN 0 ELSE l.replays END
    FROM wrong w
    WHERE w.sink = l.sink AND w.lane = l.lane;
    GET DIAGNOSTICS mended = ROW_COUNT;
    RETURN made + mended;
END
$fn$;

-- The sequence may be behind the ids: after a restore of the data alone, in a copy by logical replication, or because
-- somebody has given ids. It follows them, but no further than 2^40 at a time, and never goes back. Floors that were ahead of it are lowered before, in the
-- same transaction: what is drawn meanwhile is below them.
CREATE FUNCTION outbox_set_right_v1(only_sink text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET lock_timeout = '200ms' AS $fn$
DECLARE
    ids   text := pg_get_serial_sequence('outbox_event', 'id');
    said  text[] := '{}';
    n     bigint;
    last  bigint;
    found bigint;
BEGIN
    n := outbox_mend_lanes(only_sink);
    IF n > 0 THEN
        said := said || format('lanes made anew or mended: %s', n);
    END IF;

    -- An event below the floor is not read: somebody has given its id, or was slow to commit what he had not begun to write. An
    -- event with the least id there is cannot be above a floor: workflowctl doctor names it.
    WITH low AS MATERIALIZED (
        SELECT l.sink, l.lane, e.id AS first
        FROM outbox_lane l JOIN outbox_sink s ON s.name = l.sink CROSS JOIN LATERAL (
            SELECT e.id FROM outbox_event e
            WHERE e.lane = l.lane AND e.id <= l.floor AND e.id > -9223372036854775808 AND e.published_at IS NULL AND e.parked_at IS NULL AND outbox_wants(s.types, e.event_type)
              AND (s.name = ANY (e.delivered_to)) IS NOT TRUE AND (s.name = ANY (e.parked_by)) IS NOT TRUE
              AND (SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE
            ORDER BY e.lane, e.id
            LIMIT 1) AS e
        WHERE (only_sink IS NULL OR l.sink = only_sink) AND l.lane BETWEEN 0 AND 63
    ), free AS MATERIALIZED (
        SELECT l.sink, l.lane FROM outbox_lane l WHERE (l.sink, l.lane) IN (SELECT low.sink, low.lane FROM low) FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE outbox_lane l
    SET floor = low.first - 1, next_floor = NULL, next_xid = NULL
    FROM low JOIN free USING (sink, lane)
    WHERE l.sink = low.sink AND l.lane = low.lane;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n > 0 THEN
        said := said || format('floors lowered: %s', n);
    END IF;

    last := outbox_last_id_v1();
    found := (SELECT e.id FROM outbox_event e WHERE e.id <= least(last, 9223372036854775807 - 1099511627776) + 1099511627776 ORDER BY e.id DESC LIMIT 1);
    last := outbox_last_id_v1(); -- what had committed by then was drawn by now
    IF found > last THEN
        BEGIN
            LOCK TABLE workflow_schema IN SHARE UPDATE EXCLUSIVE MODE; -- one session at a time; nobody but the owner can lock it so
            IF only_sink IS NOT NULL THEN
                PERFORM outbox_mend_lanes(NULL);
            END IF;
            last := outbox_last_id_v1(); -- which may have been set right meanwhile
        EXCEPTION WHEN lock_not_available THEN
            said  := said || 'ids are left for the next time: another session is at it'::text;
            found := NULL;
        END;
    END IF;
    -- Where a floor could not be lowered, because somebody has locked its lane, it is known by this alone that it hides events.
    IF found > last AND NOT EXISTS (SELECT FROM outbox_lane l WHERE l.lane BETWEEN 0 AND 63 AND l.floor > last) THEN
        last := outbox_last_id_v1();
        IF found - last <= 100000 THEN -- as everybody draws: it cannot go back, whoever draws meanwhile
            PERFORM nextval(ids) FROM generate_series(1, found - last);
        ELSE -- by now nobody draws as many
            PERFORM setval(ids, found);
        END IF;
        said := said || format('ids go on after %s, not %s', found, last);
    END IF;
    RETURN coalesce(nullif(array_to_string(said, '; '), ''), 'nothing was wrong');
END
$fn$;
COMMENT ON FUNCTION outbox_set_right_v1(text) IS
    'Sets right what dispatchers go by: lanes that are missing or damaged, floors that hide events, of one sink or (null) of all, and the sequence of ids where it is behind them. Answers what it did. To be called after data was restored alone, before programs append events.';

-- A lane's count of replays may be at its end, and marks may be arrays of any form: of no harm to a replay.
CREATE OR REPLACE FUNCTION outbox_replay(since timestamptz, until timestamptz DEFAULT 'infinity', types text[] DEFAULT '{}', sink text DEFAULT NULL, on_behalf_of text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n      bigint;
    before text;
BEGIN
    PERFORM workflow_behalf(outbox_replay.on_behalf_of, 'outbox_replay(timestamptz, timestamptz, text[], text, text)'::regprocedure);
    IF sink IS NOT NULL AND NOT EXISTS (SELECT FROM outbox_sink s WHERE s.name = outbox_replay.sink) THEN
        RAISE EXCEPTION 'outbox_replay: there is no sink %', quote_literal(sink) USING HINT = 'See SELECT name FROM outbox_sink.';
    END IF;
    -- The lock order: lane, event.
    PERFORM FROM outbox_lane l WHERE outbox_replay.sink IS NULL OR l.sink = outbox_replay.sink ORDER BY l.sink, l.lane FOR NO KEY UPDATE;
    PERFORM outbox_mend_lanes(outbox_replay.sink);
    WITH again AS MATERIALIZED (
        SELECT e.id, e.lane FROM outbox_event e
        WHERE e.created_at >= since AND e.created_at < until AND outbox_wants(outbox_replay.types, e.event_type)
    ), opened AS (
        UPDATE outbox_event e
        SET published_at = NULL, parked_at = NULL,
            delivered_to = CASE WHEN outbox_replay.sink IS NOT NULL THEN nullif(ARRAY(SELECT d FROM unnest(e.delivered_to) AS d WHERE d <> outbox_replay.sink), '{}') END,
            parked_by    = CASE WHEN outbox_replay.sink IS NOT NULL THEN nullif(ARRAY(SELECT p FROM unnest(e.parked_by) AS p WHERE p <> outbox_replay.sink), '{}') END
        FROM again a
        WHERE e.id = a.id
          AND (e.published_at IS NOT NULL OR e.parked_at IS NOT NULL OR e.delivered_to IS NOT NULL OR e.parked_by IS NOT NULL)
    ), forgotten AS (
        DELETE FROM outbox_delivery d USING again a WHERE d.event_id = a.id AND (outbox_replay.sink IS NULL OR d.sink = outbox_replay.sink)
    ), lowered AS (
        UPDATE outbox_lane l
        SET floor = least(l.floor, greatest(a.first, -9223372036854775807) - 1), next_floor = NULL, next_xid = NULL, replays = l.replays + 1,
            claim_token = CASE WHEN l.claim_token IS NOT NULL THEN gen_random_uuid() END -- what is on its way counts no more
        FROM (SELECT lane, min(id) AS first FROM again GROUP BY lane) a
        WHERE l.lane = a.lane AND (outbox_replay.sink IS NULL OR l.sink = outbox_replay.sink)
    )
    SELECT count(*) INTO n FROM again;
    before := workflow_advance('on');
    INSERT INTO outbox_replayed (sink, since, until, types, events) VALUES (outbox_replay.sink, outbox_replay.since, outbox_replay.until, outbox_replay.types, n);
    PERFORM workflow_advance(before);
    RETURN n;
END
$fn$;

CREATE OR REPLACE FUNCTION outbox_replay_parked(sink text DEFAULT NULL, types text[] DEFAULT '{}', on_behalf_of text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n      bigint;
    before text;
BEGIN
    PERFORM workflow_behalf(outbox_replay_parked.on_behalf_of, 'outbox_replay_parked(text, text[], text)'::regprocedure);
    PERFORM FROM outbox_lane l WHERE outbox_replay_parked.sink IS NULL OR l.sink = outbox_replay_parked.sink ORDER BY l.sink, l.lane FOR NO KEY UPDATE;
    PERFORM outbox_mend_lanes(outbox_replay_parked.sink);
    WITH forgotten AS (
        DELETE FROM outbox_delivery d USING outbox_event e
        WHERE d.parked_at IS NOT NULL AND e.id = d.event_id
          AND (outbox_replay_parked.sink IS NULL OR d.sink = outbox_replay_parked.sink) AND outbox_wants(outbox_replay_parked.types, e.event_type)
        RETURNING d.event_id, d.sink, e.lane
    ), again AS (
        UPDATE outbox_event e
        SET parked_at = NULL, parked_by = nullif(ARRAY(SELECT unnest(e.parked_by) EXCEPT SELECT unnest(f.sinks)), '{}')
        FROM (SELECT event_id, array_agg(forgotten.sink) AS sinks FROM forgotten GROUP BY event_id) f
        WHERE e.id = f.event_id AND (e.parked_at IS NOT NULL OR e.parked_by IS NOT NULL)
    ), lowered AS (
        UPDATE outbox_lane l SET floor = least(l.floor, greatest(f.first, -9223372036854775807) - 1), next_floor = NULL, next_xid = NULL, replays = l.replays + 1
        FROM (SELECT forgotten.sink, lane, min(event_id) AS first FROM forgotten GROUP BY 1, 2) f
        WHERE l.sink = f.sink AND l.lane = f.lane
    )
    SELECT count(DISTINCT event_id) INTO n FROM forgotten;
    before := workflow_advance('on');
    INSERT INTO outbox_replayed (sink, types, events) VALUES (outbox_replay_parked.sink, outbox_replay_parked.types, n);
    PERFORM workflow_advance(before);
    RETURN n;
END
$fn$;

-- Of each lane, whether it has a row or not, up to 500 open events are looked at from the floor on, and 500 from the beginning: what
-- is below the floor is not read by the dispatcher until it has set that right. Once a thousand are found, 10 each: for the oldest. It is a
-- function, since whatever the statistics say it must walk the index.
CREATE FUNCTION outbox_behind(sink text, OUT open bigint, OUT oldest timestamptz, OUT at_least boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $fn$
#variable_conflict use_variable
DECLARE
    its  text[] := (SELECT s.types[1:1000] FROM outbox_sink s WHERE s.name = sink); -- no dispatcher registers more
    here bigint;
    most integer := 500;
    x    record;
BEGIN
    open := 0;
    at_least := false;
    FOR lane IN 0..63 LOOP
        here := coalesce((SELECT l.floor FROM outbox_lane l WHERE l.sink = outbox_behind.sink AND l.lane = lane), -9223372036854775808);
        SELECT count(*) FILTER (WHERE o.wanted) AS n, min(o.created_at) FILTER (WHERE o.wanted) AS first, count(*) FILTER (WHERE o.above) = most OR count(*) FILTER (WHERE NOT o.above) = most AS more INTO x
        FROM (SELECT e.above, e.created_at, outbox_wants(its, e.event_type) AND (sink = ANY (e.delivered_to)) IS NOT TRUE AND (sink = ANY (e.parked_by)) IS NOT TRUE
                  AND (SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = outbox_behind.sink) IS NOT TRUE AS wanted
              FROM ((SELECT e.id, e.created_at, e.event_type, e.delivered_to, e.parked_by, true AS above FROM outbox_event e
                     WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = lane AND e.id > here ORDER BY e.lane, e.id LIMIT most)
                    UNION ALL
                    (SELECT e.id, e.created_at, e.event_type, e.delivered_to, e.parked_by, false FROM outbox_event e
                     WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = lane AND e.id <= here ORDER BY e.lane, e.id LIMIT most)) e) o;
        open := open + x.n;
        oldest := least(oldest, x.first);
        at_least := at_least OR x.more;
        IF open >= 1000 THEN
            at_least := true;
            most := 10;
        END IF;
    END LOOP;
    open := least(open, 1000);
END
$fn$;
COMMENT ON FUNCTION outbox_behind(text) IS 'How many events a sink has still to get, counted up to 1,000, when the oldest was appended, and whether there may be more: at most 1,000 events of a lane are looked at. Read it as outbox_lag.';

CREATE OR REPLACE VIEW outbox_lag AS
    SELECT s.name AS sink, n.open, workflow_age(n.oldest) AS oldest,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NULL LIMIT 1000) AS x) AS failing,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NOT NULL LIMIT 1000) AS x) AS parked,
           CASE WHEN s.paused_until > now() THEN s.paused_until END AS paused_until,
           CASE WHEN s.last_error IS NULL OR has_table_privilege('workflow_history'::regclass, 'SELECT') THEN s.last_error ELSE '(hidden)' END AS last_error, workflow_age(s.seen_at) AS unserved,
           n.at_least
    FROM outbox_sink s CROSS JOIN LATERAL outbox_behind(s.name) AS n;
COMMENT ON COLUMN outbox_lag.open IS 'Events that it has still to get, of those that were looked at: 1,000 of a lane at most. Counted up to 1,000.';
COMMENT ON COLUMN outbox_lag.at_least IS 'Whether there may be more than open.';

REVOKE ALL ON FUNCTION outbox_behind(text), outbox_last_id_v1(), outbox_event_refuse(), outbox_mend_lanes(text), outbox_set_right_v1(text) FROM PUBLIC;

-- Who could mark events, look at outbox_lag or have events replayed can go on, before roles are made anew.
DO $do$
DECLARE
    may record;
BEGIN
    FOR may IN
        SELECT 'outbox_last_id_v1(), outbox_set_right_v1(text)' AS functions, a.grantee::regrole AS name FROM pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) a
        WHERE t.attrelid = 'outbox_event'::regclass AND t.attname = 'delivered_to' AND a.privilege_type = 'UPDATE' AND a.grantee <> 0
        UNION
        SELECT 'outbox_behind(text)', a.grantee::regrole FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = 'outbox_lag'::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner)
        UNION
        SELECT 'outbox_last_id_v1(), outbox_set_right_v1(text)', a.grantee::regrole FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a
        WHERE p.oid = 'outbox_replay_parked(text, text[], text)'::regprocedure AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', may.functions, may.name);
    END LOOP;
END
$do$;
