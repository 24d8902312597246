-- simple-workflow 0016: a signal reaches those who can take it, whoever cannot.
--
--   process_broadcast      who waited when a signal was taken up, and how far it has come
--   process_unreached      to whom a signal could not be given, and is owed
--   process_signal_v1      gives a signal to some more of those who waited
--   process_try_again_v1   gives what is owed, when it is time
--   process_unreachable    what is owed, for people

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- Who waited.
-- ---------------------------------------------------------------------------------

-- Those who waited are not written down: they are the waits that began before, and that the snapshot shows. They are walked in the order of
-- their beginning, by index.
CREATE TABLE process_broadcast (
    signal_id   uuid        NOT NULL PRIMARY KEY,
    name        text COLLATE "C" NOT NULL,
    taken_up_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    snapshot    pg_snapshot NOT NULL DEFAULT pg_current_snapshot(),
    next        timestamptz NOT NULL DEFAULT '-infinity',
    walked      boolean     NOT NULL DEFAULT false,
    tokens      uuid[]      NOT NULL DEFAULT '{}',
    places      text[] COLLATE "C" NOT NULL DEFAULT '{}',
    began       timestamptz[] NOT NULL DEFAULT '{}',
    reached     integer     NOT NULL DEFAULT 0,
    set_aside   integer     NOT NULL DEFAULT 0,
    failed      integer     NOT NULL DEFAULT 0,
    sqlstate    text COLLATE "C",
    message     text,
    refused_at  timestamptz,
    CONSTRAINT process_broadcast_name_check CHECK (octet_length(name) BETWEEN 1 AND 1000),
    CONSTRAINT process_broadcast_time_check CHECK (taken_up_at BETWEEN '2000-01-01' AND '3000-01-01' AND (refused_at BETWEEN '2000-01-01' AND '3000-01-01') IS NOT FALSE),
    CONSTRAINT process_broadcast_left_check CHECK (cardinality(tokens) <= 10000000 AND cardinality(places) = cardinality(tokens) AND cardinality(began) = cardinality(tokens)
                                                   AND array_ndims(tokens) IS DISTINCT FROM 2 AND array_ndims(places) IS DISTINCT FROM 2 AND array_ndims(began) IS DISTINCT FROM 2),
    CONSTRAINT process_broadcast_count_check CHECK (reached BETWEEN 0 AND 1000000000 AND set_aside BETWEEN 0 AND 1000000000 AND failed BETWEEN 0 AND 2),
    CONSTRAINT process_broadcast_refused_check CHECK (octet_length(sqlstate) <= 5 AND octet_length(message) <= 16384)
);
COMMENT ON TABLE  process_broadcast IS 'Signals that are on their way: when one was taken up, and how far it has come. A row goes when its run has succeeded.';
COMMENT ON COLUMN process_broadcast.next IS 'Waits that began before have had their turn. It may be infinite, as the beginnings of waits may be that were written without guards.';
COMMENT ON COLUMN process_broadcast.walked IS 'All have had their turn.';
COMMENT ON COLUMN process_broadcast.tokens IS 'Those who were passed over, because somebody had locked their waits: a token, its place and its beginning are at the same index.';
COMMENT ON COLUMN process_broadcast.failed IS 'How many of the last stretches were refused as a whole: after two each goes in small groups.';
COMMENT ON COLUMN process_broadcast.message IS 'Why the database refuses it to all: then nobody is set aside, and it is tried again.';

-- Without a foreign key: it would be looked up for each wait that ends. What is stale is removed when it is tried again.
CREATE TABLE process_unreached (
    token_id  uuid        NOT NULL,
    place     text COLLATE "C" NOT NULL,
    signal_id uuid        NOT NULL,
    visit     bigint      NOT NULL,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (token_id, place, signal_id),
    CONSTRAINT process_unreached_place_check CHECK (octet_length(place) <= 4096),
    CONSTRAINT process_unreached_visit_check CHECK (visit BETWEEN 1 AND 9223372036854775807),
    CONSTRAINT process_unreached_since_check CHECK (since BETWEEN '2000-01-01' AND '3000-01-01')
);
CREATE INDEX process_unreached_some_idx ON process_unreached (uuid_hash(token_id));
CREATE INDEX process_unreached_signal_idx ON process_unreached (signal_id);
CREATE INDEX workflow_set_aside_due_idx ON workflow_set_aside (kind, last_tried_at) WHERE due;
-- For looks at some, from anywhere on. Not by id: those of a year begin alike, and anywhere would be before or after all of them.
CREATE INDEX workflow_set_aside_some_idx ON workflow_set_aside (kind, uuid_hash(id));
ALTER TABLE workflow_set_aside ADD COLUMN incident uuid;
COMMENT ON COLUMN workflow_set_aside.incident IS 'That of the step or wait, see process_incidents_v1; null: none.';
COMMENT ON TABLE  process_unreached IS 'Signals that were not given to somebody who waited, because the database refuses it for that one. The oldest is given when that goes through; why it does not stands in workflow_set_aside, as kind wait.';
COMMENT ON COLUMN process_unreached.visit IS 'The version of the token: one that has moved on is owed nothing.';

COMMENT ON COLUMN workflow_set_aside.kind IS 'run; or wait, of which the id is the token''s: see process_unreachable.';
COMMENT ON COLUMN workflow_set_aside.statement IS 'What was refused: lease, settle or take back; of a wait signal. What is refused to be settled is tried again by the worker that has its lease.';

DO $do$
DECLARE
    hint text := 'Workers'' functions bring signals: see process_unreachable.';
    t    text;
BEGIN
    FOREACH t IN ARRAY '{process_broadcast, process_unreached}'::text[] LOOP
        EXECUTE format('CREATE TRIGGER %I BEFORE INSERT OR UPDATE OR DELETE ON %I FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard(%L)', t || '_guard', t, hint);
        EXECUTE format('CREATE TRIGGER %I BEFORE TRUNCATE ON %I FOR EACH STATEMENT WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard(%L)', t || '_truncate_guard', t, hint);
    END LOOP;
END
$do$;

-- ---------------------------------------------------------------------------------
-- Giving it.
-- ---------------------------------------------------------------------------------

-- What follows is called with the settings and the search_path of the two functions that programs call.

-- What comes from outside, a message or a signal, does not lock the instance that it comes to: two that send each other something would wait for each other. It takes the wait
-- away, which process_pause and process_resume lock, and only then asks whether the instance is paused. In one of the two orders they always see each other.
CREATE FUNCTION process_paused_since(instance uuid) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE AS $fn$ -- so that it sees what was committed since the statement began
BEGIN
    RETURN (SELECT i.paused_at FROM process_instance i WHERE i.id = instance);
END
$fn$;
COMMENT ON FUNCTION process_paused_since(uuid) IS 'For the engine: when an instance was paused, as it is now, and not when the statement began. Null: it is not paused.';

CREATE FUNCTION process_lock_waits(instances uuid[]) RETURNS void
LANGUAGE plpgsql AS $fn$
BEGIN
    PERFORM FROM message_wait w WHERE w.instance_id = ANY (instances) ORDER BY w.name, w.key, w.created_at, w.token_id, w.place FOR UPDATE;
END
$fn$;

-- The one statement that gives a signal: to those of some who wait still, and whose wait, token and instance agree. Each is
-- found by its key, whatever the planner thinks of the tables. It returns how many it was given to.
CREATE FUNCTION process_give(signal uuid, tokens uuid[], places text[], began timestamptz[], pause interval) RETURNS integer
LANGUAGE plpgsql AS $fn$
DECLARE
    given integer;
BEGIN
    WITH served AS (
        DELETE FROM message_wait w
        USING unnest(tokens, places, began) AS a (token, place, began), process_token t, process_instance i
        WHERE w.token_id = a.token AND w.place = a.place AND w.created_at = a.began AND w.key IS NULL
          AND t.id = w.token_id AND (t.instance_id = w.instance_id) IS TRUE AND t.state IN ('Created', 'Ready', 'Waiting') AND i.id = w.instance_id
        RETURNING w.token_id, w.place, w.node, t.version, i.priority, i.tenant_id, i.metadata, i.id AS instance
    )
    INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at, run_at)
    SELECT s.token_id, 'graph.arrive.v1', s.node, jsonb_strip_nulls(jsonb_build_object('at', nullif(s.place, ''), 'signal', signal, 'visit', s.version)), 1000,
           s.priority, s.tenant_id, process_trace(s.metadata), process_paused_since(s.instance), now() + pause
    FROM served s;
    GET DIAGNOSTICS given = ROW_COUNT;
    RETURN given;
END
$fn$;

-- What arrives at this moment is waited for, and paused, or resumed, with the others.
CREATE OR REPLACE FUNCTION process_pause(id uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '5s' AS $fn$
DECLARE
    ids    uuid[];
    before text;
BEGIN
    ids := process_lock_called(process_pause.id);
    PERFORM workflow_behalf(process_pause.on_behalf_of, 'process_pause(uuid, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF NOT EXISTS (SELECT FROM process_instance i WHERE i.id = process_pause.id AND i.completed_at IS NULL AND i.paused_at IS NULL) THEN
        RETURN coalesce((SELECT CASE WHEN i.completed_at IS NULL THEN 'already paused' ELSE 'too late: ' || i.status END
                         FROM process_instance i WHERE i.id = process_pause.id), 'not found');
    END IF;
    before := workflow_advance('on');
    WITH paused AS (
        UPDATE process_instance i SET paused_at = now(), version = version + 1, updated_at = now()
        WHERE i.id = ANY (ids) AND i.completed_at IS NULL AND i.paused_at IS NULL RETURNING i.id
    )
    SELECT array_agg(p.id) INTO ids FROM paused p;
    INSERT INTO process_event (instance_id, event_type, version, data)
    SELECT i.id, 'instance.paused', i.version, jsonb_build_object('actor', workflow_actor())
    FROM process_instance i WHERE i.id = ANY (ids);
    PERFORM workflow_advance(before);
    PERFORM process_lock_waits(ids);
    UPDATE workflow_run r SET held_at = now(), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at IS NULL
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    RETURN 'paused';
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RAISE EXCEPTION 'process_pause: a part of instance % is being changed', process_pause.id USING ERRCODE = 'lock_not_available', HINT = 'Call it again. workflow_blocker shows who has rows locked for long.';
END
$fn$;

CREATE OR REPLACE FUNCTION process_resume(id uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '5s' AS $fn$
DECLARE
    ids    uuid[];
    since  timestamptz;
    before text;
BEGIN
    ids := process_lock_called(process_resume.id);
    SELECT i.paused_at INTO since FROM process_instance i WHERE i.id = process_resume.id; -- which is locked now
    PERFORM workflow_behalf(process_resume.on_behalf_of, 'process_resume(uuid, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    before := workflow_advance('on');
    WITH resumed AS (
        UPDATE process_instance i SET paused_at = NULL, version = version + 1, updated_at = now()
        WHERE i.id = ANY (ids) AND i.completed_at IS NULL AND i.paused_at = since
        RETURNING i.id
    )
    SELECT array_agg(r.id) INTO ids FROM resumed r;
    IF ids IS NULL THEN
        PERFORM workflow_advance(before);
        RETURN coalesce((SELECT CASE WHEN i.completed_at IS NULL THEN 'not paused' ELSE 'too late: ' || i.status END
                         FROM process_instance i WHERE i.id = process_resume.id), 'not found');
    END IF;
    INSERT INTO process_event (instance_id, event_type, version, data)
    SELECT i.id, 'instance.resumed', i.version, jsonb_build_object('actor', workflow_actor())
    FROM process_instance i WHERE i.id = ANY (ids);
    PERFORM workflow_advance(before);
    PERFORM process_lock_waits(ids);
    UPDATE workflow_run r SET held_at = NULL, run_at = greatest(r.run_at, now()), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at = since
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    RETURN 'resumed';
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RAISE EXCEPTION 'process_resume: a part of instance % is being changed', process_resume.id USING ERRCODE = 'lock_not_available', HINT = 'Call it again. workflow_blocker shows who has rows locked for long.';
END
$fn$;

-- Whether a wait was there when a signal was taken up. A transaction that has written it and is not over after an hour is none of the engine's: so
-- the number of a transaction, which comes again after four billion others, is asked of the latest alone.
CREATE FUNCTION process_waited(began timestamptz, writer xid, taken_up_at timestamptz, snapshot pg_snapshot) RETURNS boolean
LANGUAGE sql STABLE
RETURN began < taken_up_at - interval '1 hour'
    OR (began <= taken_up_at OR NOT isfinite(began))
       AND pg_visible_in_snapshot((CASE WHEN writer::text::bigint > (pg_snapshot_xmax(snapshot)::text::bigint & 4294967295)
                                        THEN greatest((pg_snapshot_xmax(snapshot)::text::bigint >> 32) - 1, 0) ELSE pg_snapshot_xmax(snapshot)::text::bigint >> 32 END * 4294967296
                                   + writer::text::bigint)::text::xid8, snapshot);

-- The same as process_give, to a stretch of those who waited: to all but those whose run would break a rule of ours, and those that are set aside. They are
-- tried by themselves.
CREATE FUNCTION process_give_all(b process_broadcast, last timestamptz, pause interval) RETURNS integer
LANGUAGE plpgsql AS $fn$
DECLARE
    given   integer;
    -- What was written by a transaction older than this one was there: most are told by that.
    running integer := age((pg_snapshot_xmin(b.snapshot)::text::bigint & 4294967295)::text::xid);
    passing boolean := EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'wait');
BEGIN
    WITH served AS (
        DELETE FROM message_wait w
        USING process_token t, process_instance i
        WHERE w.name = b.name AND w.key IS NULL AND w.created_at >= b.next AND w.created_at <= last
          AND (w.created_at <= b.taken_up_at AND age(w.xmin) > running OR process_waited(w.created_at, w.xmin, b.taken_up_at, b.snapshot))
          AND t.id = w.token_id AND (t.instance_id = w.instance_id) IS TRUE AND t.state IN ('Created', 'Ready', 'Waiting') AND i.id = w.instance_id
          AND i.priority BETWEEN -100 AND 100 AND (i.tenant_id IS NULL OR length(i.tenant_id) BETWEEN 1 AND 200) AND isfinite(i.paused_at) IS NOT FALSE
          AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'wait' AND a.id = w.token_id))
        RETURNING w.token_id, w.place, w.node, t.version, i.priority, i.tenant_id, i.metadata, i.id AS instance
    )
    INSERT INTO workflow_run (token_id, type, node, payload, max_attempts, priority, tenant_id, metadata, held_at, run_at)
    SELECT s.token_id, 'graph.arrive.v1', s.node, jsonb_strip_nulls(jsonb_build_object('at', nullif(s.place, ''), 'signal', b.signal_id, 'visit', s.version)), 1000,
           s.priority, s.tenant_id, process_trace(s.metadata), process_paused_since(s.instance), now() + pause
    FROM served s;
    GET DIAGNOSTICS given = ROW_COUNT;
    RETURN given;
END
$fn$;

-- Whether the statement goes through for somebody else who waits, or, if need be, for an instance that is made for this: all of it is undone.
CREATE FUNCTION process_gives(signal uuid, others uuid[], definition uuid) RETURNS boolean
LANGUAGE plpgsql AS $fn$
DECLARE
    control uuid := workflow_uuid();
    other   record;
BEGIN
    FOR other IN SELECT w.token_id, w.place, w.created_at FROM message_wait w WHERE w.token_id = ANY (others) AND w.key IS NULL LIMIT 3 LOOP
        BEGIN
            IF process_give(signal, ARRAY[other.token_id], ARRAY[other.place], ARRAY[other.created_at], '0') = 1 THEN
                SET CONSTRAINTS ALL IMMEDIATE;
                RAISE EXCEPTION 'it works' USING ERRCODE = 'WF001';
            END IF;
        EXCEPTION
            WHEN SQLSTATE 'WF001' THEN RETURN true;
            WHEN OTHERS OR assert_failure THEN NULL;
        END;
    END LOOP;
    INSERT INTO process_instance (id, process_definition_id, status, live_tokens) VALUES (control, definition, 'WAITING', 1);
    INSERT INTO process_token (id, instance_id, node, state) VALUES (control, control, 'control', 'Waiting');
    INSERT INTO message_wait (token_id, place, instance_id, node, name, created_at) VALUES (control, '', control, 'control', 'control', now());
    IF process_give(signal, ARRAY[control], ARRAY[''], ARRAY[now()], '0') = 1 THEN
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE EXCEPTION 'it works' USING ERRCODE = 'WF001';
    END IF;
    RETURN false;
EXCEPTION
    WHEN SQLSTATE 'WF001' THEN RETURN true;
    WHEN OTHERS OR assert_failure THEN RETURN false; -- what cannot even be made tells of the tables, and not of a row
END
$fn$;

-- What a wait depends on, as it is: of another version it is tried again.
CREATE FUNCTION process_wait_version(token uuid) RETURNS xid
LANGUAGE plpgsql STABLE AS $fn$
BEGIN
    RETURN (hashtext(concat_ws(' ', (SELECT string_agg(concat(w.xmin, i.xmin), ' ' ORDER BY w.place) FROM message_wait w LEFT JOIN process_instance i ON i.id = w.instance_id WHERE w.token_id = token),
                                    (SELECT concat(t.xmin, i.xmin) FROM process_token t LEFT JOIN process_instance i ON i.id = t.instance_id WHERE t.id = token)))
            & 2147483647)::text::xid;
END
$fn$;

-- Gives a signal to some, or, where tokens is null, to a stretch. It is done if it goes through, and else undone: then the answer is SQLSTATE, message and constraint. What passes by itself is raised, unless any
-- code is to be taken for an answer.
CREATE FUNCTION process_try_give(b process_broadcast, last timestamptz, signal uuid, tokens uuid[], places text[], began timestamptz[], pause interval, any_code boolean, OUT given integer, OUT answer text[])
LANGUAGE plpgsql AS $fn$
DECLARE
    state text;
    words text;
    rule  text;
BEGIN
    given := CASE WHEN tokens IS NULL THEN process_give_all(b, last, pause) ELSE process_give(signal, tokens, places, began, pause) END;
    SET CONSTRAINTS ALL IMMEDIATE; -- what is deferred is refused at the commit
EXCEPTION
    WHEN OTHERS OR assert_failure THEN
        GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, words = MESSAGE_TEXT, rule = CONSTRAINT_NAME;
        IF workflow_remedy(state) IN ('again', 'anew', 'fewer') AND NOT any_code THEN
            RAISE;
        END IF;
        given  := 0;
        answer := ARRAY[state, left(words, 4096), left(rule, 200)];
END
$fn$;

-- What is wrong with the references of a wait, in words; null: nothing.
CREATE FUNCTION process_wait_problem(token uuid, place text) RETURNS text
LANGUAGE plpgsql STABLE AS $fn$
BEGIN
    RETURN (
        SELECT CASE WHEN t.id IS NULL THEN 'message_wait.token_id names no token'
                    WHEN t.instance_id <> w.instance_id THEN 'message_wait.instance_id is not that of its token'
                    WHEN i.id IS NULL THEN 'message_wait.instance_id names no instance'
                    WHEN t.state NOT IN ('Created', 'Ready', 'Waiting') THEN 'its token does not wait, it is ' || left(t.state, 40) END
        FROM message_wait w
        LEFT JOIN process_token t ON t.id = w.token_id
        LEFT JOIN process_instance i ON i.id = w.instance_id
        WHERE w.token_id = token AND w.place = process_wait_problem.place);
END
$fn$;

-- Notes that a signal is owed to some, and why: of each a token and its place. Null: nothing was tried, what is noted of them stays.
CREATE FUNCTION process_owe(signal uuid, tokens uuid[], places text[], answer text[]) RETURNS void
LANGUAGE plpgsql AS $fn$
BEGIN
    INSERT INTO process_unreached (token_id, place, signal_id, visit)
    SELECT a.token, a.place, signal, greatest(coalesce((SELECT t.version FROM process_token t WHERE t.id = a.token), 1), 1)
    FROM unnest(tokens, places) AS a (token, place)
    ON CONFLICT DO NOTHING;
    IF answer IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO workflow_set_aside AS a (kind, id, type, statement, sqlstate, message, "constraint", row_version)
    SELECT DISTINCT 'wait', o.token, 'graph.arrive.v1', 'signal', answer[1], answer[2], answer[3], process_wait_version(o.token)
    FROM unnest(tokens) AS o (token)
    ON CONFLICT (kind, id) DO UPDATE
    SET sqlstate = excluded.sqlstate, message = excluded.message, "constraint" = excluded."constraint",
        last_tried_at = excluded.last_tried_at, due = false, row_version = excluded.row_version;
END
$fn$;

-- A signal goes to those who waited when this was called for the first time. Each call gives it to at most most of them, in a transaction of
-- its own, and notes how far it has come. So whoever calls again, after whatever has happened, gives it to nobody twice, and to no wait that has
-- begun since.
--
-- A stretch goes by one statement. If that is refused, those of it whose waits somebody has locked are left for later; the others are
-- given it in small groups, halved down to whom it is refused alone. That one is at fault if the same goes through for another one, or for an
-- instance that is made for this: then it is set aside. Else it is the statement's fault: nobody is set aside, and refused is true.
CREATE FUNCTION process_signal_v1(signal uuid, most integer, any_code boolean,
    OUT reached integer, OUT set_aside integer, OUT waiting integer, OUT finished boolean, OUT refused boolean, OUT over boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '200ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    careful  constant integer := 32; -- a statement for so many costs little more for each than one for a thousand
    until    timestamptz;
    before   text;
    called   text;
    b        process_broadcast;
    last     timestamptz;       -- of the stretch
    all_of   boolean;           -- it has as many as it may
    pause    interval;
    tokens   uuid[];
    places   text[];
    began    timestamptz[];
    known    uuid[];            -- those that are set aside, and stay so
    known_at text[];
    odd      text[];            -- what is known of some to be refused: those are last
    n        integer;           -- the others
    i        integer := 1;
    j        integer;
    hot      integer := 0;      -- among those up to here is one that is refused
    size     integer;
    streak   integer := 0;
    bad      boolean := false;  -- the last one was
    works    boolean := false;
    tried    record;
    w        record;
    passing  boolean;           -- some are set aside
    locks    boolean := false;  -- some may be locked
    looked   boolean := false;
    rest     process_broadcast;
BEGIN
    reached := 0; set_aside := 0; waiting := 0; finished := false; refused := false; over := false;
    IF NOT has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') THEN
        RAISE EXCEPTION 'process_signal: this is for the engine alone' USING ERRCODE = 'insufficient_privilege',
            HINT = 'Send a signal by a run: INSERT INTO workflow_run (type, payload) VALUES (''graph.signal.v1'', ''{"name": "…"}'').';
    END IF;
    SELECT r.payload->>'name' INTO called FROM workflow_run r WHERE r.id = signal AND r.type = 'graph.signal.v1' AND r.status = 'leased';
    IF NOT FOUND THEN
        over := true;
        RETURN;
    END IF;
    before := workflow_advance('on');
    SELECT * INTO b FROM process_broadcast x WHERE x.signal_id = signal FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO process_broadcast (signal_id, name) VALUES (signal, called) ON CONFLICT DO NOTHING;
        SELECT * INTO b FROM process_broadcast x WHERE x.signal_id = signal FOR UPDATE;
    END IF;
    BEGIN
        UPDATE process_broadcast x SET signal_id = x.signal_id WHERE x.signal_id = signal;
    EXCEPTION WHEN check_violation THEN -- somebody has changed it past all guards. It begins anew: whom it has reached does not wait any more
        UPDATE process_broadcast x
        SET name = called, taken_up_at = least(greatest(x.taken_up_at, '2000-01-01'), clock_timestamp()), next = '-infinity', walked = false, tokens = '{}', places = '{}', began = '{}',
            reached = 0, set_aside = 0, failed = 0, sqlstate = NULL, message = NULL, refused_at = NULL
        WHERE x.signal_id = signal
        RETURNING * INTO b;
    END;
    -- Workers of an earlier version take no signal whose run is not over.
    pause := CASE WHEN EXISTS (SELECT FROM workflow_worker l WHERE l.steps AND l.seen_at > now() - interval '1 minute' AND 'graph.broadcast.v1' <> ALL (l.handlers)) THEN '5 seconds' ELSE '0' END;

    IF NOT b.walked THEN
        SELECT m.created_at INTO last FROM message_wait m
        WHERE m.name = b.name AND m.key IS NULL AND m.created_at >= b.next AND m.created_at <= b.taken_up_at
        ORDER BY m.key, m.created_at -- as the index has it
        OFFSET greatest(most, 1) - 1 LIMIT 1;
        all_of := FOUND;
        last   := coalesce(last, 'infinity');
        IF b.failed < 2 THEN -- in a row
            SELECT t.given, t.answer INTO tried FROM process_try_give(b, last, signal, NULL, NULL, NULL, pause, any_code) AS t;
            reached := tried.given;
            works   := tried.answer IS NULL AND reached > 0;
            locks   := (tried.answer[1] = '55P03') IS TRUE;
            b.failed := CASE WHEN tried.answer IS NULL THEN 0 ELSE b.failed + 1 END;
        END IF;
        IF NOT works OR NOT (all_of AND reached = most) THEN -- the others of it, if there are any
            SELECT coalesce(array_agg(x.token_id), '{}'), coalesce(array_agg(x.place), '{}'), coalesce(array_agg(x.created_at), '{}') INTO tokens, places, began
            FROM (SELECT m.token_id, m.place, m.created_at FROM message_wait m
                  WHERE m.name = b.name AND m.key IS NULL AND m.created_at >= b.next AND m.created_at <= last AND process_waited(m.created_at, m.xmin, b.taken_up_at, b.snapshot)
                  ORDER BY m.key, m.created_at) x;
        END IF;
        tokens := coalesce(tokens, '{}'); places := coalesce(places, '{}'); began := coalesce(began, '{}');
        rest.tokens := b.tokens; rest.places := b.places; rest.began := b.began;
        b.walked := last = 'infinity';
        b.next   := CASE WHEN b.walked THEN last ELSE last + interval '1 microsecond' END;
    ELSE
        tokens := b.tokens[1:most]; places := b.places[1:most]; began := b.began[1:most];
        rest.tokens := b.tokens[most + 1:]; rest.places := b.places[most + 1:]; rest.began := b.began[most + 1:];
    END IF;

    IF tokens <> '{}' THEN
        -- Those that are set aside stay so, unless they are to be tried. Last come those whose run breaks a rule of ours, and those to be tried, each alone.
        SELECT array_agg(a.token), array_agg(a.at), count(*) INTO known, known_at, set_aside
        FROM unnest(tokens, places, began) AS a (token, at, began)
        JOIN workflow_set_aside s ON s.kind = 'wait' AND s.id = a.token AND NOT s.due AND s.row_version = process_wait_version(a.token)
        JOIN message_wait m ON m.token_id = a.token AND m.place = a.at AND m.created_at = a.began;
        PERFORM process_owe(signal, known, known_at, NULL);
        passing := set_aside > 0 OR EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'wait');
        SELECT coalesce(array_agg(x.token), '{}'), coalesce(array_agg(x.at), '{}'), coalesce(array_agg(x.began), '{}'), array_agg(x.odd), count(*) FILTER (WHERE x.odd IS NULL)
        INTO tokens, places, began, odd, n
        FROM (
            SELECT a.token, a.at, a.began,
                   CASE WHEN passing AND EXISTS (SELECT FROM workflow_set_aside o WHERE o.kind = 'wait' AND o.id = a.token) THEN 'set aside'
                        WHEN k.priority NOT BETWEEN -100 AND 100 THEN 'priority'
                        WHEN length(k.tenant_id) NOT BETWEEN 1 AND 200 THEN 'tenant'
                        WHEN NOT isfinite(k.paused_at) THEN 'paused' END AS odd
            FROM unnest(tokens, places, began) AS a (token, at, began)
            LEFT JOIN process_token t ON t.id = a.token
            LEFT JOIN process_instance k ON k.id = t.instance_id
            WHERE NOT (passing AND EXISTS (SELECT FROM process_unreached u WHERE u.token_id = a.token AND u.place = a.at AND u.signal_id = signal))
            ORDER BY odd NULLS FIRST) x;
        until := clock_timestamp() + interval '1 second';
        size  := CASE WHEN n < cardinality(tokens) THEN 1000 ELSE careful END;
        WHILE i <= cardinality(tokens) LOOP
            IF i > 1 AND clock_timestamp() > until THEN
                rest.tokens := rest.tokens || tokens[i:]; rest.places := rest.places || places[i:]; rest.began := rest.began || began[i:];
                EXIT;
            END IF;
            IF locks THEN -- those later
                SELECT coalesce(array_agg(x.token) FILTER (WHERE x.free), '{}'), coalesce(array_agg(x.at) FILTER (WHERE x.free), '{}'), coalesce(array_agg(x.began) FILTER (WHERE x.free), '{}'),
                       array_agg(x.odd) FILTER (WHERE x.free), count(*) FILTER (WHERE x.free AND x.odd IS NULL),
                       rest.tokens || array_agg(x.token) FILTER (WHERE NOT x.free), rest.places || array_agg(x.at) FILTER (WHERE NOT x.free), rest.began || array_agg(x.began) FILTER (WHERE NOT x.free)
                INTO tokens, places, began, odd, n, rest.tokens, rest.places, rest.began
                FROM (SELECT a.*, EXISTS (SELECT FROM message_wait m WHERE m.token_id = a.token AND m.place = a.at FOR UPDATE SKIP LOCKED) AS free
                      FROM unnest(tokens[i:], places[i:], began[i:], odd[i:]) AS a (token, at, began, odd)
                      WHERE EXISTS (SELECT FROM message_wait m WHERE m.token_id = a.token AND m.place = a.at)) x;
                i := 1; hot := 0; size := careful; locks := false;
                CONTINUE;
            END IF;
            j := CASE WHEN i > n THEN i WHEN i <= hot THEN i + (hot - i) / 2 ELSE least(i + size - 1, n) END;
            SELECT t.given, t.answer INTO tried FROM process_try_give(NULL, NULL, signal, tokens[i:j], places[i:j], began[i:j], pause, any_code) AS t;
            IF tried.answer IS NULL THEN
                works   := works OR tried.given > 0;
                reached := reached + tried.given;
                bad     := false;
                streak  := streak + 1;
                IF streak >= 8 THEN
                    size   := least(2 * size, 1000);
                    streak := 0;
                    b.failed := 0; -- the next stretch may go as a whole
                END IF;
                IF tried.given < j - i + 1 THEN -- the references of some do not agree, or they have gone
                    FOR w IN SELECT m.token_id, m.place, process_wait_problem(m.token_id, m.place) AS problem
                             FROM unnest(tokens[i:j], places[i:j], began[i:j]) AS a (token, at, began)
                             JOIN message_wait m ON m.token_id = a.token AND m.place = a.at AND m.created_at = a.began LOOP
                        PERFORM process_owe(signal, ARRAY[w.token_id], ARRAY[w.place], ARRAY['', coalesce(w.problem, 'it was passed over'), '']);
                        set_aside := set_aside + 1;
                    END LOOP;
                END IF;
                i := j + 1;
            ELSIF tried.answer[1] = '55P03' AND NOT looked THEN
                locks := true; looked := true;
            ELSIF i < j THEN
                streak := 0;
                size   := careful;
                hot    := CASE WHEN j - i >= careful THEN i - 1 ELSE j END;
            ELSIF tried.answer[1] = '55P03' THEN -- a lock that a trigger waits for: never accused
                rest.tokens := rest.tokens || tokens[i]; rest.places := rest.places || places[i]; rest.began := rest.began || began[i];
                i := i + 1;
            ELSE
                works := works OR process_gives(signal, ARRAY(SELECT o.token_id FROM message_wait o WHERE o.key IS NULL AND o.token_id <> ALL (tokens) LIMIT 3),
                                                (SELECT k.process_definition_id FROM process_token t JOIN process_instance k ON k.id = t.instance_id WHERE t.id = tokens[i]));
                IF NOT works THEN
                    refused := true;
                    UPDATE process_broadcast x SET sqlstate = tried.answer[1], message = tried.answer[2], refused_at = coalesce(x.refused_at, clock_timestamp())
                    WHERE x.signal_id = signal;
                    PERFORM workflow_advance(before);
                    RETURN;
                END IF;
                WHILE odd[i] <> 'set aside' AND odd[j + 1] = odd[i] LOOP -- what breaks the same rule of ours is refused alike
                    j := j + 1;
                END LOOP;
                PERFORM process_owe(signal, tokens[i:j], places[i:j], tried.answer);
                set_aside := set_aside + j - i + 1;
                size := CASE WHEN bad THEN 1 ELSE careful END;
                bad  := true;
                i    := j + 1;
            END IF;
        END LOOP;
    END IF;

    reached   := b.reached + reached;
    set_aside := b.set_aside + set_aside;
    waiting   := cardinality(rest.tokens);
    finished  := b.walked AND waiting = 0;
    UPDATE process_broadcast x
    SET next = b.next, walked = b.walked, tokens = rest.tokens, places = rest.places, began = rest.began,
        reached = process_signal_v1.reached, set_aside = process_signal_v1.set_aside, failed = b.failed, sqlstate = NULL, message = NULL, refused_at = NULL
    WHERE x.signal_id = signal;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION process_signal_v1(uuid, integer, boolean) IS
    'For the engine: gives a signal, whose run is leased, to at most so many of those who waited when it was called first. Call it until it is finished. It returns how many were reached so far, how many are set aside, and how many were passed over, because they are locked. refused: the database refuses it to all; over: the run is not leased any more.';

-- Where a look at some begins that are ordered by uuid_hash.
CREATE FUNCTION workflow_anywhere() RETURNS integer
LANGUAGE sql
RETURN floor(random() * 4294967296 - 2147483648)::bigint::integer;

-- Some of what is set aside, from anywhere on: however much there is, calls look at all of it in turns.
CREATE FUNCTION workflow_aside_some(kind text) RETURNS uuid[]
LANGUAGE plpgsql AS $fn$
DECLARE
    most  constant integer := 500;
    spot  integer := workflow_anywhere();
    found uuid[];
BEGIN
    found := ARRAY(SELECT s.id FROM workflow_set_aside s WHERE s.kind = workflow_aside_some.kind AND uuid_hash(s.id) >= spot ORDER BY s.kind, uuid_hash(s.id) LIMIT most);
    IF cardinality(found) < most THEN
        found := found || ARRAY(SELECT s.id FROM workflow_set_aside s WHERE s.kind = workflow_aside_some.kind AND uuid_hash(s.id) < spot ORDER BY s.kind, uuid_hash(s.id) LIMIT most - cardinality(found));
    END IF;
    RETURN found;
END
$fn$;

-- One for each reason, if none with it was tried for seven seconds: whoever calls every second tries one at most ten seconds after the last, with what comes
-- of it. By index, from reason to reason.
CREATE FUNCTION workflow_aside_turn(kind text, prefixes text[]) RETURNS uuid[]
LANGUAGE plpgsql AS $fn$
DECLARE
    found uuid[] := '{}';
    x     workflow_set_aside;
BEGIN
    SELECT s.* INTO x FROM workflow_set_aside s WHERE s.kind = workflow_aside_turn.kind
    ORDER BY s.kind, s.type, s.statement, s.sqlstate, s."constraint", s.last_tried_at LIMIT 1;
    WHILE x.kind = workflow_aside_turn.kind AND cardinality(found) < 1000 LOOP
        IF (prefixes IS NULL OR x.type ^@ ANY (prefixes))
           AND (SELECT max(s.last_tried_at) FROM workflow_set_aside s
                WHERE s.kind = x.kind AND s.type = x.type AND s.statement = x.statement AND s.sqlstate = x.sqlstate AND s."constraint" = x."constraint")
               < clock_timestamp() - interval '7 seconds' THEN
            found := found || x.id;
        END IF;
        SELECT s.* INTO x FROM workflow_set_aside s
        WHERE (s.kind, s.type, s.statement, s.sqlstate, s."constraint") > (x.kind, x.type, x.statement, x.sqlstate, x."constraint")
        ORDER BY s.kind, s.type, s.statement, s.sqlstate, s."constraint", s.last_tried_at LIMIT 1;
    END LOOP;
    RETURN found;
END
$fn$;

-- At most ten seconds apart, whoever calls it every second: those of which something has changed, one for each reason, and those that have waited for ten
-- minutes. What goes through has ten more for the same reason tried, then twice as many each time.
CREATE FUNCTION process_try_again_v1() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '200ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    until   timestamptz := clock_timestamp() + interval '2 seconds';
    before  text;
    given   integer := 0; -- to how many
    slice   uuid[];
    spot    integer := workflow_anywhere();
    of_them integer;      -- in this round
    a       workflow_set_aside;
    w       record;
    tried   record;
    state   text;
BEGIN
    IF NOT has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') THEN
        RAISE EXCEPTION 'process_try_again: this is for the engine alone' USING ERRCODE = 'insufficient_privilege', HINT = 'Workers call it every second.';
    ELSIF NOT EXISTS (SELECT FROM process_unreached) AND NOT EXISTS (SELECT FROM process_broadcast) THEN
        RETURN 0;
    END IF;
    before := workflow_advance('on');
    -- A signal that has not succeeded is asked for by those that it has reached, for as long as there is a run of it.
    DELETE FROM process_broadcast b WHERE b.ctid = ANY (ARRAY(
        SELECT x.ctid FROM process_broadcast x LEFT JOIN workflow_run r ON r.id = x.signal_id
        WHERE r.id IS NULL OR r.status = 'succeeded' LIMIT 1000 FOR UPDATE OF x SKIP LOCKED));
    slice := ARRAY(SELECT u.token_id FROM process_unreached u WHERE uuid_hash(u.token_id) >= spot ORDER BY uuid_hash(u.token_id) LIMIT 500); -- some, from anywhere on: calls look at all in turns
    IF cardinality(slice) < 500 THEN
        slice := slice || ARRAY(SELECT u.token_id FROM process_unreached u WHERE uuid_hash(u.token_id) < spot ORDER BY uuid_hash(u.token_id) LIMIT 500 - cardinality(slice));
    END IF;
    DELETE FROM process_unreached u WHERE u.ctid = ANY (ARRAY(
        SELECT x.ctid FROM process_unreached x LEFT JOIN process_token t ON t.id = x.token_id
        WHERE x.token_id = ANY (slice)
          AND (NOT EXISTS (SELECT FROM message_wait m WHERE m.token_id = x.token_id AND m.place = x.place AND m.key IS NULL) OR t.version > x.visit
               OR NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = x.signal_id))
        FOR UPDATE OF x SKIP LOCKED));
    DELETE FROM workflow_set_aside s WHERE s.kind = 'wait' AND s.id = ANY (slice) AND NOT EXISTS (SELECT FROM process_unreached u WHERE u.token_id = s.id);
    INSERT INTO workflow_set_aside (kind, id, type, statement, sqlstate, message, "constraint", due, row_version) -- somebody has removed the note
    SELECT DISTINCT 'wait', u.token_id, 'graph.arrive.v1', 'signal', '', '', '', true, '0'::xid
    FROM process_unreached u
    WHERE u.token_id = ANY (slice) AND NOT EXISTS (SELECT FROM workflow_set_aside s WHERE s.kind = 'wait' AND s.id = u.token_id)
    ON CONFLICT DO NOTHING;
    slice := workflow_aside_turn('wait', NULL) || ARRAY(
        SELECT s.id FROM workflow_set_aside s
        WHERE s.kind = 'wait' AND s.id = ANY (slice) AND (s.last_tried_at < clock_timestamp() - interval '10 minutes' OR s.row_version <> process_wait_version(s.id)));
    UPDATE workflow_set_aside s SET due = true, last_tried_at = clock_timestamp() WHERE s.kind = 'wait' AND s.id = ANY (slice) AND NOT s.due;
    LOOP
        of_them := 0;
        FOR a IN SELECT x.* FROM workflow_set_aside x WHERE x.kind = 'wait' AND x.due ORDER BY x.last_tried_at LIMIT 1000 FOR UPDATE SKIP LOCKED LOOP
            EXIT WHEN clock_timestamp() > until;
            FOR w IN SELECT DISTINCT ON (u.place) u.place, u.signal_id, m.created_at, process_wait_problem(m.token_id, m.place) AS problem -- of each place the oldest
                     FROM process_unreached u JOIN message_wait m ON m.token_id = u.token_id AND m.place = u.place AND m.key IS NULL
                     LEFT JOIN process_token k ON k.id = u.token_id
                     WHERE u.token_id = a.id AND (k.version > u.visit) IS NOT TRUE -- it waits as it did then, and not for something else
                     ORDER BY u.place, u.since, u.signal_id LOOP
                SELECT t.given, t.answer INTO tried FROM process_try_give(NULL, NULL, w.signal_id, ARRAY[a.id], ARRAY[w.place], ARRAY[w.created_at], '0', true) AS t;
                IF tried.answer IS NULL AND tried.given = 1 THEN
                    DELETE FROM process_unreached u WHERE u.token_id = a.id AND u.place = w.place;
                    of_them := of_them + 1;
                ELSIF tried.answer[1] = '55P03' THEN
                    NULL; -- somebody has it locked: the next time
                ELSE
                    state := coalesce(tried.answer[1], '');
                    UPDATE workflow_set_aside s
                    SET due = false, last_tried_at = clock_timestamp(), row_version = process_wait_version(a.id), sqlstate = state,
                        message = coalesce(tried.answer[2], w.problem, s.message), "constraint" = coalesce(tried.answer[3], '')
                    WHERE s.kind = 'wait' AND s.id = a.id;
                END IF;
            END LOOP;
            IF NOT EXISTS (SELECT FROM process_unreached u WHERE u.token_id = a.id) THEN
                DELETE FROM workflow_set_aside s WHERE s.kind = 'wait' AND s.id = a.id;
                UPDATE workflow_set_aside s SET due = true
                WHERE s.kind = 'wait' AND NOT s.due AND s.id IN (
                    SELECT x.id FROM workflow_set_aside x
                    WHERE x.kind = 'wait' AND NOT x.due AND (x.sqlstate, x."constraint") = (a.sqlstate, a."constraint")
                    ORDER BY x.last_tried_at LIMIT CASE WHEN of_them < 2 THEN 10 ELSE 2 END);
            END IF;
        END LOOP;
        given := given + of_them;
        EXIT WHEN of_them = 0 OR clock_timestamp() > until;
    END LOOP;
    PERFORM workflow_advance(before);
    RETURN given;
END
$fn$;
COMMENT ON FUNCTION process_try_again_v1() IS 'For the engine: gives signals to those for whom they were set aside, when it is time. Workers call it every second. Returns to how many.';

-- ---------------------------------------------------------------------------------
-- What people see of it.
-- ---------------------------------------------------------------------------------

CREATE VIEW process_unreachable AS
    SELECT coalesce(t.instance_id, m.instance_id) AS instance_id, u.token_id, coalesce(m.node, t.node) AS node, u.place, u.signal_id, m.name AS signal, u.since, a.last_tried_at, a.sqlstate,
           CASE WHEN has_table_privilege('workflow_history'::regclass, 'SELECT') THEN a.message ELSE '(hidden)' END AS message, -- it may quote what was refused
           x.problem, x.fix
    FROM process_unreached u
    JOIN message_wait m ON m.token_id = u.token_id AND m.place = u.place AND m.key IS NULL
    LEFT JOIN workflow_set_aside a ON a.kind = 'wait' AND a.id = u.token_id
    LEFT JOIN process_token t ON t.id = u.token_id
    LEFT JOIN process_instance i ON i.id = m.instance_id
    CROSS JOIN LATERAL (
        SELECT p.problem, p.fix FROM (VALUES
            (1, i.priority NOT BETWEEN -100 AND 100, 'process_instance.priority is ' || i.priority, format('UPDATE process_instance SET priority = 0 WHERE id = %L', i.id)),
            (2, length(i.tenant_id) NOT BETWEEN 1 AND 200, 'process_instance.tenant_id has ' || length(i.tenant_id) || ' characters', format('UPDATE process_instance SET tenant_id = NULL WHERE id = %L', i.id)),
            (3, NOT isfinite(i.paused_at), 'process_instance.paused_at is ' || i.paused_at, format('UPDATE process_instance SET paused_at = now() WHERE id = %L', i.id)),
            (4, t.id IS NULL, 'message_wait.token_id names no token', format('DELETE FROM message_wait WHERE token_id = %L AND place = %L', m.token_id, m.place)),
            (5, t.instance_id <> m.instance_id, 'message_wait.instance_id is not that of its token', format('UPDATE message_wait SET instance_id = %L WHERE token_id = %L AND place = %L', t.instance_id, m.token_id, m.place)),
            (6, i.id IS NULL, 'message_wait.instance_id names no instance', format('DELETE FROM message_wait WHERE token_id = %L AND place = %L', m.token_id, m.place)),
            (7, t.state NOT IN ('Created', 'Ready', 'Waiting'), 'its token does not wait, it is ' || left(t.state, 40), format('DELETE FROM message_wait WHERE token_id = %L AND place = %L', m.token_id, m.place)),
            (8, true, 'the database refuses the run that would bring it' || coalesce(', by ' || nullif(a."constraint", ''), ''), NULL)
        ) AS p (place, holds, problem, fix)
        WHERE p.holds
        ORDER BY p.place LIMIT 1) AS x;
COMMENT ON VIEW   process_unreachable IS 'Signals that are owed to somebody who waits: the database refuses to bring them.';
COMMENT ON COLUMN process_unreachable.problem IS 'What is wrong with the rows of the instance, if that can be told, or else what refuses it.';
COMMENT ON COLUMN process_unreachable.fix IS 'The statement that mends it, past the guards if need be; null: see message. Within ten seconds afterwards the signal is given.';

-- ---------------------------------------------------------------------------------
-- Rows that keep their instance from going on, or that nothing of its refers to rightly.
-- ---------------------------------------------------------------------------------

CREATE VIEW process_fault AS
    SELECT u.instance_id, 'signal ' || u.signal || ' cannot be brought to ' || u.node || ' for ' || workflow_span(workflow_age(u.since)) || ': ' || u.problem
               || coalesce(' (SQLSTATE ' || nullif(u.sqlstate, '') || ')', '') AS problem, u.fix
    FROM process_unreachable u
    UNION ALL -- both ends of a wait: the token is wrong where one of the instance waits there without
    SELECT x.instance_id, 'message_wait.' || CASE WHEN o.id IS NULL THEN 'instance_id of token ' || w.token_id || ' is not that of its token' ELSE 'token_id ' || w.token_id || ' is not a token of instance ' || w.instance_id END,
           format(CASE WHEN o.id IS NULL THEN 'UPDATE message_wait SET instance_id = %L' ELSE 'UPDATE message_wait SET token_id = %L' END || ' WHERE token_id = %L AND place = %L', coalesce(o.id, t.instance_id), w.token_id, w.place)
    FROM message_wait w JOIN process_token t ON t.id = w.token_id AND t.instance_id <> w.instance_id
    LEFT JOIN LATERAL (SELECT o.id FROM process_token o WHERE o.instance_id = w.instance_id AND o.node = w.node AND o.state IN ('Created', 'Ready', 'Waiting')
                         AND NOT EXISTS (SELECT FROM message_wait m WHERE m.token_id = o.id) LIMIT 1) o ON true
    CROSS JOIN LATERAL (VALUES (w.instance_id), (t.instance_id)) AS x (instance_id)
    UNION ALL
    SELECT i.id, 'process_instance.' || x.problem, format('UPDATE process_instance SET %s WHERE id = %L', x.fix, i.id)
    FROM process_instance i
    CROSS JOIN LATERAL (VALUES
        (i.priority NOT BETWEEN -100 AND 100, 'priority is ' || i.priority, 'priority = 0'),
        (length(i.tenant_id) NOT BETWEEN 1 AND 200, 'tenant_id has ' || length(i.tenant_id) || ' characters', 'tenant_id = NULL'),
        (i.version >= 1000000000000000, 'version is ' || i.version, 'version = ' || coalesce((SELECT max(e.version) FROM process_event e WHERE e.instance_id = i.id AND e.version < 1000000000000000), 1) + 1000)
    ) AS x (holds, problem, fix)
    WHERE i.completed_at IS NULL AND x.holds
      AND (i.priority NOT BETWEEN -100 AND 100 OR length(i.tenant_id) NOT BETWEEN 1 AND 200 OR i.version >= 1000000000000000)
      AND NOT EXISTS (SELECT FROM process_unreachable u WHERE u.instance_id = i.id)
    UNION ALL
    SELECT i.id, 'process_token.version of ' || t.id || ' is ' || t.version, format('UPDATE process_token SET version = 1000000 WHERE id = %L', t.id)
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id
    WHERE i.completed_at IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND t.version >= 1000000000000000
    UNION ALL -- the definition is another one if it does not have the node that was entered last
    (WITH known AS MATERIALIZED (SELECT n.process_definition_id, n.node COLLATE "C" AS node FROM process_node n)
    SELECT i.id, CASE WHEN k.known THEN 'process_token.node of ' || t.id || ' is ' || left(t.node, 100) || ', which the process does not have'
                      ELSE 'process_instance.process_definition_id is that of another process, which does not have node ' || left(t.node, 100) END,
           CASE WHEN k.known THEN format('UPDATE process_token SET node = %L WHERE id = %L', k.last, t.id)
                ELSE format('UPDATE process_instance SET process_definition_id = %L WHERE id = %L',
                            (SELECT d.id FROM process_definition d WHERE d.definition->'nodes' ? t.node ORDER BY d.version DESC, d.id LIMIT 1), i.id) END
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id
    LEFT JOIN known n ON n.process_definition_id = i.process_definition_id AND n.node = t.node
    CROSS JOIN LATERAL (
        SELECT e.node AS last, EXISTS (SELECT FROM known o WHERE o.process_definition_id = i.process_definition_id AND o.node = e.node) AS known
        FROM (SELECT (SELECT v.node FROM process_event v WHERE v.instance_id = i.id AND v.token_id = t.id AND v.event_type = 'node.entered' ORDER BY v.id DESC LIMIT 1) AS node OFFSET 0) e) k
    WHERE i.completed_at IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND n.node IS NULL)
    UNION ALL
    SELECT g.instance_id, 'each_progress.' || x.problem || ', group ' || e.group_id, format('UPDATE each_progress SET %s WHERE group_id = %L', x.fix, e.group_id)
    FROM each_progress e JOIN parallel_group g ON g.id = e.group_id JOIN process_instance i ON i.id = g.instance_id
    CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(e.items) WHEN 'array' THEN jsonb_array_length(e.items) END AS length) l
    CROSS JOIN LATERAL (VALUES
        (e.instance_id <> g.instance_id, 'instance_id is not that of its group', format('instance_id = %L', g.instance_id)),
        (jsonb_typeof(e.items) <> 'array', 'items is no list, but a JSON ' || jsonb_typeof(e.items) || ', and what it was is written nowhere else: cancel the instance', NULL),
        (e.total <> l.length, 'total is ' || e.total || ' of ' || l.length, 'total = jsonb_array_length(items)'),
        (e.next <> (SELECT coalesce(max(t.item), -1) + 1 FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item <= 10000000), 'next is ' || e.next,
         'next = ' || (SELECT coalesce(max(t.item), -1) + 1 FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item <= 10000000)),
        (e.done <> (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item IS NOT NULL AND t.state = 'Completed'), 'done is ' || e.done,
         'done = ' || (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = e.group_id AND t.item IS NOT NULL AND t.state = 'Completed'))
    ) AS x (holds, problem, fix)
    WHERE i.completed_at IS NULL AND e.over_at IS NULL AND x.holds
    UNION ALL -- both ends of a task
    SELECT x.instance_id, 'user_task.' || CASE WHEN o.id IS NULL THEN 'instance_id of ' || k.id || ' is not that of its token' ELSE 'token_id of ' || k.id || ' is not a token of its instance at ' || k.node END,
           format(CASE WHEN o.id IS NULL THEN 'UPDATE user_task SET instance_id = %L' ELSE 'UPDATE user_task SET token_id = %L' END || ' WHERE id = %L', coalesce(o.id, t.instance_id), k.id)
    FROM user_task k JOIN process_token t ON t.id = k.token_id AND (t.instance_id <> k.instance_id OR t.node <> k.node)
    LEFT JOIN LATERAL (SELECT o.id FROM process_token o WHERE o.instance_id = k.instance_id AND o.node = k.node AND o.state = 'Waiting'
                         AND NOT EXISTS (SELECT FROM user_task m WHERE m.token_id = o.id AND m.state = 'open') LIMIT 1) o ON true
    CROSS JOIN LATERAL (SELECT k.instance_id UNION SELECT t.instance_id) AS x (instance_id)
    WHERE k.state = 'open'
    UNION ALL -- both ends of a call
    SELECT c.parent_process_instance_id, 'process_instance.parent_token_id of ' || c.id || ' is not a token of its caller',
           format('UPDATE process_instance SET parent_token_id = %L WHERE id = %L', o.id, c.id)
               || CASE WHEN c.completed_at IS NOT NULL THEN format('; INSERT INTO workflow_run (token_id, type, node, payload, max_attempts) VALUES (%L, ''graph.arrive.v1'', %L, %L, 1000)', o.id, o.node,
                                                                   jsonb_build_object('visit', o.version, 'child', c.id)) ELSE '' END
    FROM process_instance c JOIN process_instance p ON p.id = c.parent_process_instance_id
    JOIN process_token o ON o.instance_id = p.id AND o.state = 'Waiting' AND o.version = c.parent_visit
    WHERE p.completed_at IS NULL AND NOT EXISTS (SELECT FROM process_token t WHERE t.id = c.parent_token_id AND t.instance_id = p.id)
      AND NOT EXISTS (SELECT FROM process_instance b WHERE b.parent_token_id = o.id)
    UNION ALL
    SELECT t.instance_id, 'workflow_run.payload of timer ' || r.id || ' is ' || left(r.payload::text, 40),
           CASE WHEN r.finished_at IS NULL THEN format('UPDATE workflow_run SET payload = %L WHERE id = %L', x.payload, r.id)
                ELSE format('INSERT INTO workflow_run (token_id, type, node, payload, max_attempts) VALUES (%L, %L, %L, %L, 1000)', r.token_id, r.type, r.node, x.payload) END
    FROM process_token t JOIN process_instance i ON i.id = t.instance_id JOIN workflow_run r ON r.token_id = t.id
    CROSS JOIN LATERAL (SELECT CASE WHEN r.node ~ '/(on|race)/\d+$' THEN jsonb_build_object('at', substring(r.node FROM '(?:on|race)/\d+$')) ELSE '{}' END AS payload) x
    WHERE i.completed_at IS NULL AND t.state = 'Waiting' AND r.type = 'graph.timer.v1' AND jsonb_typeof(r.payload) <> 'object' AND r.status <> 'cancelled'
      AND NOT EXISTS (SELECT FROM incident d WHERE d.token_id = t.id AND d.resolved_at IS NULL) -- to retry that sets the timer anew
      AND NOT EXISTS (SELECT FROM workflow_run o WHERE o.token_id = t.id AND o.id > r.id AND o.type = r.type AND o.node = r.node);
COMMENT ON VIEW   process_fault IS 'Rows of open instances that keep these from going on, or whose references do not agree: which, and which column. Empty, or somebody has written what only the engine may. Ask by instance_id, or with a limit.';
COMMENT ON COLUMN process_fault.fix IS 'The statement that mends it, past the guards if need be (SET LOCAL workflow.override); null: what refuses it is no row of the instance.';

CREATE OR REPLACE FUNCTION process_why(id uuid) RETURNS text
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
        RETURN i.status || ' ' || workflow_span(workflow_age(i.completed_at)) || ' ago' || coalesce(': ' || i.failure_reason, ': ' || (
            SELECT h.reason FROM process_state_history h WHERE h.instance_id = i.id AND h.to_status = i.status ORDER BY h.id DESC LIMIT 1), '')
            || CASE WHEN i.status <> 'FAILED' THEN ''
                    WHEN i.parent_token_id IS NOT NULL THEN '; it was called by ' || i.parent_process_instance_id || '; SELECT process_why(' || quote_literal(i.parent_process_instance_id) || ')'
                    ELSE coalesce((SELECT '; started again as ' || (e.data->>'as') FROM process_event e WHERE e.instance_id = i.id AND e.event_type = 'instance.restarted'),
                                  '; to start it again from where it failed, INSERT INTO workflow_run (type, payload) VALUES (''graph.restart.v1'', ''{"instance": "' || i.id || '"}'')') END;
    ELSIF i.status = 'CREATED' THEN -- it was inserted, and the run that starts it has its id
        SELECT CASE WHEN r.finished_at IS NULL AND r.deleted_at IS NULL THEN 'about to be started: ' || workflow_why(r.id)
                    WHEN r.status = 'failed' THEN 'not started: ' || workflow_why(r.id) || '; SELECT workflow_retry(' || quote_literal(r.id) || ')' END
        INTO why FROM workflow_run r WHERE r.id = i.id AND r.type = 'graph.start.v1';
        RETURN coalesce(why, 'not started, and the run that was to start it is cancelled or gone; INSERT INTO workflow_run (type, payload) VALUES (''graph.cancel.v1'', ''{"instance": "' || i.id || '"}''), and insert another');
    END IF;
    SELECT f.problem || coalesce('; ' || f.fix, '; it goes on by itself once that is gone') INTO why FROM process_fault f WHERE f.instance_id = i.id LIMIT 1;
    IF FOUND THEN
        RETURN why || CASE WHEN EXISTS (SELECT FROM incident c WHERE c.instance_id = i.id AND c.resolved_at IS NULL AND c.code NOT IN ('not_leased', 'not_reached'))
                           THEN '; then, for each of its incidents, INSERT INTO workflow_run (type, payload) VALUES (''graph.retry.v1'', ''{"instance": "' || i.id || '"}'')' ELSE '' END;
    END IF;
    SELECT * INTO x FROM incident c WHERE c.instance_id = i.id AND c.resolved_at IS NULL ORDER BY c.created_at, c.id LIMIT 1;
    IF FOUND THEN
        RETURN 'incident ' || x.code || ' at ' || x.node || ' for ' || workflow_span(workflow_age(x.created_at)) || ': ' || left(x.message, 300)
            || '; then INSERT INTO workflow_run (type, payload) VALUES (''graph.retry.v1'', ''{"incident": "' || x.id || '"}'')';
    END IF;
    IF i.paused_at IS NOT NULL THEN
        RETURN 'paused since ' || coalesce(to_char(i.paused_at, 'YYYY-MM-DD HH24:MI'), i.paused_at::text) || '; SELECT process_resume(' || quote_literal(process_paused_with(i.id)) || ')';
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
               || ' to complete task ' || u.id || ', for ' || workflow_span(workflow_age(u.created_at))
        FROM user_task u WHERE u.instance_id = i.id AND u.state = 'open'
        UNION ALL
        SELECT 4, w.created_at, NULL, NULL, 'waits at ' || k.node || ' for ' || CASE WHEN w.key IS NULL THEN 'signal ' || w.name ELSE 'message ' || w.name || ' with key ' || w.key END
               || ', for ' || workflow_span(workflow_age(w.created_at))
        FROM message_wait w JOIN process_token k ON k.id = w.token_id WHERE w.instance_id = i.id
        UNION ALL
        SELECT 5, r.run_at, r.id, r.node, NULL
        FROM process_token k JOIN workflow_run r ON r.token_id = k.id
        WHERE k.instance_id = i.id AND k.state = 'Waiting' AND r.finished_at IS NULL) m
    ORDER BY m.place, m.at
    LIMIT 1;
    SELECT 'waits for ' || (j.expected::bigint - j.joined) || ' of ' || j.expected || ' branches at join ' || j.node || ': ' INTO join_waits
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

REVOKE ALL ON FUNCTION process_paused_since(uuid), process_lock_waits(uuid[]), process_give(uuid, uuid[], text[], timestamptz[], interval), process_gives(uuid, uuid[], uuid), process_wait_version(uuid), process_wait_problem(uuid, text),
    process_waited(timestamptz, xid, timestamptz, pg_snapshot), process_give_all(process_broadcast, timestamptz, interval),
    process_try_give(process_broadcast, timestamptz, uuid, uuid[], text[], timestamptz[], interval, boolean), process_owe(uuid, uuid[], text[], text[]), process_signal_v1(uuid, integer, boolean), process_try_again_v1(),
    workflow_anywhere(), workflow_aside_some(text), workflow_aside_turn(text, text[]) FROM PUBLIC;
DO $do$
DECLARE
    caller record;
BEGIN
    -- Who takes signals and messages until now can go on, before roles are made anew.
    FOR caller IN
        SELECT a.grantee::regrole AS name FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = 'process_token'::regclass AND a.privilege_type = 'UPDATE' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION process_paused_since(uuid), process_signal_v1(uuid, integer, boolean), process_try_again_v1() TO %s; GRANT SELECT, INSERT, UPDATE, DELETE ON process_broadcast, process_unreached TO %1$s; GRANT SELECT ON process_unreachable TO %1$s', caller.name);
    END LOOP;
END
$do$;
