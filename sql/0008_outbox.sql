-- simple-workflow 0008: what nobody can do to the outbox.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

ALTER TABLE outbox_lane ADD COLUMN replays bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN outbox_lane.replays IS 'Grows with each replay of its events: what a sink had acknowledged before, and could not be marked, is published again.';

-- As in 0003, but an event that needs no change is not changed: its row may refuse that. And what
-- was acknowledged, and is not marked yet, counts no more.
CREATE OR REPLACE FUNCTION outbox_replay(since timestamptz, until timestamptz DEFAULT 'infinity', types text[] DEFAULT '{}', sink text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n bigint;
BEGIN
    IF sink IS NOT NULL AND NOT EXISTS (SELECT FROM outbox_sink s WHERE s.name = outbox_replay.sink) THEN
        RAISE EXCEPTION 'outbox_replay: there is no sink %', quote_literal(sink) USING HINT = 'See SELECT name FROM outbox_sink.';
    END IF;
    WITH lanes AS MATERIALIZED ( -- the lock order: lane, event
        SELECT l.sink, l.lane FROM outbox_lane l WHERE outbox_replay.sink IS NULL OR l.sink = outbox_replay.sink ORDER BY l.sink, l.lane FOR NO KEY UPDATE
    ), again AS MATERIALIZED (
        SELECT e.id, e.lane FROM outbox_event e
        WHERE (SELECT count(*) FROM lanes) >= 0
          AND e.created_at >= since AND e.created_at < until AND outbox_wants(outbox_replay.types, e.event_type)
    ), opened AS (
        UPDATE outbox_event e
        SET published_at = NULL, parked_at = NULL,
            delivered_to = CASE WHEN outbox_replay.sink IS NOT NULL THEN nullif(array_remove(e.delivered_to, outbox_replay.sink), '{}') END,
            parked_by    = CASE WHEN outbox_replay.sink IS NOT NULL THEN nullif(array_remove(e.parked_by, outbox_replay.sink), '{}') END
        FROM again a
        WHERE e.id = a.id
          AND (e.published_at IS NOT NULL OR e.parked_at IS NOT NULL OR e.delivered_to IS NOT NULL OR e.parked_by IS NOT NULL)
    ), forgotten AS (
        DELETE FROM outbox_delivery d USING again a WHERE d.event_id = a.id AND (outbox_replay.sink IS NULL OR d.sink = outbox_replay.sink)
    ), lowered AS (
        UPDATE outbox_lane l
        SET floor = least(l.floor, a.first - 1), next_floor = NULL, replays = l.replays + 1,
            claim_token = CASE WHEN l.claim_token IS NOT NULL THEN gen_random_uuid() END -- what is on its way counts no more
        FROM (SELECT lane, min(id) AS first FROM again GROUP BY lane) a
        WHERE l.lane = a.lane AND (outbox_replay.sink IS NULL OR l.sink = outbox_replay.sink)
    )
    SELECT count(*) INTO n FROM again;
    RETURN n;
END
$fn$;

-- As in 0003, likewise. What was parked because its row refuses every change says so only in
-- outbox_delivery.
CREATE OR REPLACE FUNCTION outbox_replay_parked(sink text DEFAULT NULL, types text[] DEFAULT '{}') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n bigint;
BEGIN
    WITH lanes AS MATERIALIZED (
        SELECT l.sink, l.lane FROM outbox_lane l WHERE outbox_replay_parked.sink IS NULL OR l.sink = outbox_replay_parked.sink ORDER BY l.sink, l.lane FOR NO KEY UPDATE
    ), forgotten AS (
        DELETE FROM outbox_delivery d USING outbox_event e
        WHERE (SELECT count(*) FROM lanes) >= 0 AND d.parked_at IS NOT NULL AND e.id = d.event_id
          AND (outbox_replay_parked.sink IS NULL OR d.sink = outbox_replay_parked.sink) AND outbox_wants(outbox_replay_parked.types, e.event_type)
        RETURNING d.event_id, d.sink, e.lane
    ), again AS (
        UPDATE outbox_event e
        SET parked_at = NULL, parked_by = nullif(ARRAY(SELECT unnest(e.parked_by) EXCEPT SELECT unnest(f.sinks)), '{}')
        FROM (SELECT event_id, array_agg(forgotten.sink) AS sinks FROM forgotten GROUP BY event_id) f
        WHERE e.id = f.event_id AND (e.parked_at IS NOT NULL OR e.parked_by IS NOT NULL)
    ), lowered AS (
        UPDATE outbox_lane l SET floor = least(l.floor, f.first - 1), next_floor = NULL, replays = l.replays + 1
        FROM (SELECT forgotten.sink, lane, min(event_id) AS first FROM forgotten GROUP BY 1, 2) f
        WHERE l.sink = f.sink AND l.lane = f.lane
    )
    SELECT count(DISTINCT event_id) INTO n FROM forgotten;
    RETURN n;
END
$fn$;
