-- simple-workflow 0019: a suspect at its last attempt.
--
-- Such a run is watched alone for two seconds. If it takes longer, other suspects are leased beside it, and
-- one of them may kill the process. So each run that was not alone is noted, in its row, before its company
-- begins; and who takes back a lease that ends like that gives the attempt back, once. From then on it is kept alone
-- until it ends, so that what it fails by is its own doing. No run is failed for another suspect, and a guilty one has one start more at most. (One that kills its process at its very first start is no suspect yet.)

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Nullable and without a default: no row is written. Only suspects at their last attempt have a value.
ALTER TABLE workflow_run ADD COLUMN alone boolean;
COMMENT ON COLUMN workflow_run.alone IS 'Of a suspect: false, another suspect is or was beside it under its lease at its last attempt; true, it has been given that attempt back, once, and is kept alone while it runs. Null: neither. Of a run that is no suspect it says nothing.';

-- due pulls row by row: the limit outside stops it in the middle of a lane, and no row too many is
-- locked, except where lanes share their room, or some suspects are passed over: then what is chosen drops
-- these. statement_timestamp is now(), but right in an old transaction.
--
-- A suspect at its last attempt is leased alone, when it is the first of all and none is watched;
-- the others pass it over. They wait, too, once it is late, but only until one has had its turn:
-- then they go first, so that neither kind waits for long.
--
-- One that is kept alone (solo) is leased when the caller holds no suspect at all (not accompanied) and no other is due. Once it has been due
-- for a minute the others wait until it has had its turn; not so for a caller that has just had one (patient).
--
-- suspected are the suspects among ids, and lasts those of them that are at their last attempt and not solo: the lease notes of these whether they join others (joined).
DROP FUNCTION workflow_due(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean);
CREATE FUNCTION workflow_due(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean,
    accompanied boolean DEFAULT false, patient boolean DEFAULT false, OUT ids uuid[], OUT many integer, OUT passing boolean, OUT suspected uuid[], OUT lasts uuid[])
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
        SELECT r.id, r.run_at, r.last, l.suspect AND r.last AND r.given_back AS solo, l.place, l.suspect, l.room, l.team
        FROM unnest(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts)
          WITH ORDINALITY AS l (suspect, type, priority, from_at, from_id, grace, room, team, most, place)
        CROSS JOIN LATERAL (
            SELECT w.id, w.run_at, w.attempt::bigint + 1 = least(w.max_attempts, l.most) AS last, w.alone IS TRUE AS given_back FROM workflow_run w
            WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
              AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
              AND w.run_at <= statement_timestamp() - l.grace * interval '1 second'
              AND (w.run_at, w.id) >= (CASE WHEN l.from_at < '1901-01-01' THEN '-infinity' ELSE l.from_at END, l.from_id)
              AND (NOT plain OR w.token_id IS NULL) AND (own OR w.type ^@ ANY (bound))
              AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
              AND (NOT accompanied OR NOT l.suspect OR w.alone IS NOT TRUE OR NOT patient AND w.run_at < statement_timestamp() - interval '1 minute'
                   OR w.attempt::bigint + 1 <> least(w.max_attempts, l.most))
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
               count(*) FILTER (WHERE d.last AND NOT d.solo AND d.run_at < statement_timestamp() - interval '5 seconds') OVER kind AS late,
               count(*) FILTER (WHERE NOT d.solo) OVER (PARTITION BY d.suspect) AS others,
               count(*) FILTER (WHERE d.solo AND NOT patient AND d.run_at < statement_timestamp() - interval '1 minute') OVER (PARTITION BY d.suspect) > 0 AS urgent
        FROM due d
        WINDOW kind AS (PARTITION BY d.suspect ORDER BY d.solo, d.place, d.run_at, d.id)
    ), chosen AS (
        SELECT p.id, p.suspect, p.last AND NOT p.solo AS last, p.in_team <= p.room AND (NOT p.suspect OR CASE
                   WHEN p.solo            THEN NOT accompanied AND (p.in_kind = 1 OR p.urgent AND p.in_kind = p.others + 1)
                   WHEN p.urgent          THEN false
                   WHEN watched AND alone THEN NOT p.last AND p.in_group <= most_suspects
                   WHEN watched           THEN NOT p.last AND p.in_group <= most_suspects AND p.late = 0
                   WHEN alone             THEN CASE WHEN p.groups = 0 THEN p.in_kind = 1 ELSE NOT p.last AND p.in_group <= most_suspects END
                   ELSE CASE WHEN p.first THEN p.in_kind = 1 ELSE NOT p.last AND p.in_group <= most_suspects AND p.late = 0 END END) AS taken
        FROM placed p
    )
    SELECT array_agg(c.id) FILTER (WHERE c.taken), count(*), array_agg(c.id) FILTER (WHERE c.taken AND c.suspect), array_agg(c.id) FILTER (WHERE c.taken AND c.suspect AND c.last)
    INTO ids, many, suspected, lasts
    FROM chosen c;
END
$fn$;

-- Before suspects are leased: notes that those which the caller holds (held, by their tokens) are not alone because of it. False: somebody has one
-- locked, or the database refuses it. Then none of the suspects may be leased. It waits for nobody. What is held ends, so that is not for ever; of
-- those that are to be leased the lease itself notes it, so that who refuses that is set aside as any other. One that is kept alone stays so: its attempt was given back.
CREATE FUNCTION workflow_beside(held uuid[], held_tokens uuid[]) RETURNS boolean
LANGUAGE plpgsql AS $fn$
DECLARE
    missed boolean;
BEGIN
    WITH theirs AS MATERIALIZED (
        SELECT h.id, h.token FROM unnest(held, held_tokens) AS h (id, token) JOIN workflow_run w ON w.id = h.id AND w.lease_token = h.token
        WHERE w.id = ANY (held) AND w.alone IS NULL
    ), mine AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w JOIN theirs t ON w.id = t.id AND w.lease_token = t.token
        WHERE w.id = ANY (held)
        ORDER BY w.id
        FOR UPDATE OF w SKIP LOCKED
    ), noted AS (
        UPDATE workflow_run w SET alone = false, updated_at = clock_timestamp() WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) RETURNING w.id
    )
    SELECT count(*) < (SELECT count(*) FROM theirs) INTO missed FROM noted;
    RETURN NOT missed;
EXCEPTION WHEN OTHERS OR assert_failure THEN
    RETURN false;
END
$fn$;

-- As in 0008, word for word where it leases: what is tried after a refusal is the same. Workers of the version before call it.
CREATE OR REPLACE FUNCTION workflow_lease_v1(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean,
    token uuid, worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS TABLE (due integer, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    called  text;
    running boolean := false;
    kept    boolean := false;
    ripe    record;
    joined  uuid[];
BEGIN
    IF true = ANY (suspects) THEN -- by a worker of the version before, which does not say what it holds
        called := workflow_worker_name(workflow_bound_prefixes(), worker);
        SELECT count(*) > 0, coalesce(bool_or(w.alone), false) INTO running, kept
        FROM workflow_run w WHERE w.status = 'leased' AND w.suspect AND w.leased_by = called AND w.deadline_at IS DISTINCT FROM w.started_at;
    END IF;
    ripe := workflow_due(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts, steps, most_suspects, most, shared, watched, alone, running);
    IF kept AND ripe.suspected IS NOT NULL THEN
        ripe.ids := ARRAY(SELECT i FROM unnest(ripe.ids) AS i WHERE i <> ALL (ripe.suspected));
    END IF;
    joined := ripe.lasts;
    IF ripe.ids IS NULL OR ripe.ids = '{}' THEN
        RETURN;
    END IF;
    called := workflow_worker_name(workflow_bound_prefixes(), worker);
    RETURN QUERY
    UPDATE workflow_run w
    SET status = 'leased', lease_token = token, leased_by = called, lease_no = w.lease_no + 1,
        attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
        alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END,
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

-- As v1; it tells what a worker holds, and whether a run follows its policy.
CREATE FUNCTION workflow_lease_v2(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean,
    token uuid, worker text, term_types text[], lengths float8[], timeouts float8[],
    held uuid[], held_tokens uuid[], accompanied boolean, strays boolean, patient boolean)
RETURNS TABLE (due integer, given_back boolean, follows boolean, created_at timestamptz, instance uuid, business_key text, node text, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    called text;
    joined uuid[];
    ripe   record := workflow_due(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts, steps, most_suspects, most, shared, watched, alone, accompanied, patient);
BEGIN
    IF ripe.suspected IS NOT NULL AND cardinality(held) > 0 AND NOT workflow_beside(held, held_tokens) THEN
        ripe.ids := ARRAY(SELECT i FROM unnest(ripe.ids) AS i WHERE i <> ALL (ripe.suspected));
    END IF;
    joined := CASE WHEN accompanied OR strays THEN ripe.lasts END;
    IF ripe.ids IS NULL OR ripe.ids = '{}' THEN
        RETURN;
    END IF;
    called := workflow_worker_name(workflow_bound_prefixes(), worker);
    RETURN QUERY
    UPDATE workflow_run w
    SET status = 'leased', lease_token = token, leased_by = called, lease_no = w.lease_no + 1,
        attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
        alone = CASE WHEN w.id = ANY (joined) THEN coalesce(w.alone, false) WHEN w.alone THEN true END,
        started_at = statement_timestamp(), updated_at = statement_timestamp(),
        lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
        deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
    FROM unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
    WHERE w.id = ANY (ripe.ids) AND w.type = t.type COLLATE "C"
    RETURNING ripe.many, w.suspect AND w.alone IS TRUE, workflow_follows(w.max_attempts, w.policy_attempts), CASE WHEN isfinite(w.created_at) AND w.policy_attempts IS DISTINCT FROM 0 THEN w.created_at END,
              -- The instance, its key and the node are found by their keys, for handlers of steps alone.
              CASE WHEN w.token_id IS NOT NULL AND NOT w.type ^@ 'graph.' THEN (SELECT k.instance_id FROM process_token k WHERE k.id = w.token_id) END,
              CASE WHEN w.token_id IS NOT NULL AND NOT w.type ^@ 'graph.' THEN (
                  SELECT i.business_key FROM process_instance i WHERE i.id = (SELECT k.instance_id FROM process_token k WHERE k.id = w.token_id)) END,
              CASE WHEN NOT w.type ^@ 'graph.' THEN w.node::text END,
              w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at,
              CASE WHEN isfinite(w.run_at) THEN w.run_at ELSE '1900-01-01' END, w.token_id;
    IF ripe.passing THEN
        PERFORM workflow_put_back(ripe.ids);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_lease_v2(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean, uuid, text, text[], float8[], float8[], uuid[], uuid[], boolean, boolean, boolean) IS
    'For workers: leases due runs of some lanes, in their order. follows: the run''s attempts are those of its policy. created_at: from when its deadline counts; null: it has none, since a person has had it tried again. held: its leases on suspects at their last attempt, which are not alone any more once another is leased. accompanied: it holds suspects. strays: handlers of some go on there although their leases are over. patient: one that is kept alone ran here within the last minute. given_back: it has been given its last attempt back, and at that no other suspect may be leased until it has ended.';

-- One statement, so that what workflow_isolate tries is what is done. A suspect that was not alone at its last attempt is due again, as if that had
-- not been; unless its worker said after its time limit, which ends a second before the deadline, that it goes on: then it is its own doing.
CREATE OR REPLACE FUNCTION workflow_take_back(ids uuid[], delays float8[], token uuid, worker text, length float8)
RETURNS TABLE (id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text    := coalesce(current_setting('workflow.audit', true), '');
    silent boolean := before = 'off' AND workflow_unrecorded();
    called text    := workflow_worker_name(workflow_bound_prefixes(), worker);
    done   text    := workflow_as_worker(workflow_bound_prefixes(), silent);
    -- Handed on (0026): their time is over, which says nothing of any worker.
    elsewhere uuid[] := CASE WHEN EXISTS (SELECT FROM workflow_accepted) THEN ARRAY(
        SELECT w.id FROM workflow_run w JOIN workflow_accepted a ON a.run = w.id AND a.token = w.lease_token WHERE w.id = ANY (ids) AND a.run = ANY (ids)) ELSE '{}' END;
    guards text;
BEGIN
    RETURN QUERY
    WITH expired AS MATERIALIZED (
        SELECT e.*, e.attempt >= e.most AND NOT e.spared AS over, CASE WHEN e.id = ANY (elsewhere) THEN 'not completed in time elsewhere, where it was handed on to by ' ELSE 'no sign of life from ' END || e.loser AS words
        FROM (SELECT w.id, w.started_at, left(w.leased_by, 200) AS loser, w.attempt, workflow_follows(w.max_attempts, w.policy_attempts) AS follows,
                     workflow_most(w.type, w.max_attempts, w.policy_attempts, w.attempt, w.suspect) AS most,
                     w.suspect AND w.alone IS FALSE AND w.attempt > 0 AND w.deadline_at IS DISTINCT FROM w.started_at
                     AND (w.deadline_at IS NULL OR w.updated_at <= w.deadline_at - interval '1 second') AS spared
              FROM workflow_run w WHERE w.id = ANY (ids)) e
    ), taken AS (
        UPDATE workflow_run w
        SET status = CASE WHEN e.over THEN 'leased' ELSE 'pending' END,
            attempt = w.attempt - CASE WHEN e.spared THEN 1 ELSE 0 END, alone = CASE WHEN w.suspect AND (e.spared OR w.alone) THEN true END,
            max_attempts = e.most, policy_attempts = CASE WHEN e.follows THEN e.most ELSE w.policy_attempts END,
            suspect = e.id <> ALL (elsewhere), updated_at = statement_timestamp(),
            error = jsonb_build_object('code', 'lease_expired', 'message', e.words,
                                       'attempt', w.attempt, 'worker', left(w.leased_by, 200), 'lease_no', w.lease_no),
            last_error = 'lease_expired: ' || e.words,
            run_at = CASE WHEN e.over THEN w.run_at ELSE statement_timestamp() + interval '1 second' * (1 + random() / 2) * workflow_backoff(w.type, delays, w.attempt - 1) END,
            lease_token = CASE WHEN e.over THEN workflow_take_back.token END,
            lease_no = w.lease_no + CASE WHEN e.over THEN 1 ELSE 0 END,
            leased_by = CASE WHEN e.over THEN called END,
            lease_until = CASE WHEN e.over THEN clock_timestamp() + workflow_take_back.length * interval '1 second' END,
            started_at = CASE WHEN e.over THEN statement_timestamp() ELSE w.started_at END,
            deadline_at = CASE WHEN e.over THEN statement_timestamp() END
        FROM expired e
        WHERE w.id = ANY (ids) AND w.id = e.id
        RETURNING w.id, w.type, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
                  w.payload, w.priority, w.postponed, w.suspect, w.status = 'leased' AS exhausted, w.run_at, w.token_id
    ), history AS (
        INSERT INTO workflow_history (workflow_id, created_at, event_type, attempt, lease_no, started_at, actor, leased_by, data)
        SELECT t.id, statement_timestamp(), 'expired', e.attempt, t.lease_no - CASE WHEN t.exhausted THEN 1 ELSE 0 END,
               CASE WHEN isfinite(e.started_at) THEN e.started_at END, called, e.loser,
               CASE WHEN e.spared THEN '{"attempt_given_back": true, "reason": "another suspect was beside it at its last attempt"}'::jsonb END
        FROM taken t JOIN expired e ON e.id = t.id
        WHERE NOT silent
    )
    SELECT t.id, t.type::text, t.attempt, t.max_attempts, t.lease_no, t.idempotency_key,
           t.tenant_id, t.metadata, CASE WHEN isfinite(t.started_at) THEN t.started_at ELSE statement_timestamp() END, t.payload, t.priority, t.postponed, t.suspect, t.exhausted,
           CASE WHEN isfinite(t.run_at) THEN t.run_at ELSE statement_timestamp() END, t.token_id
    FROM taken t;
    IF elsewhere <> '{}' THEN
        guards := workflow_advance('on');
        DELETE FROM workflow_accepted a WHERE a.run = ANY (elsewhere);
        PERFORM workflow_advance(guards);
    END IF;
    done := set_config('workflow.audit', before, true);
END
$fn$;

-- As in 0008; and whoever let a lease run out, and was not seen since, does not count as a worker that lives until it is seen again. Not so where the lease ended with
-- its run's time limit, which no worker can extend, or was the caller's own. People alone read this: a row that is locked is left out, no row of one that lives is locked, and
-- whatever goes wrong is no reason to take nothing back. It comes last, after all other locks.
CREATE OR REPLACE FUNCTION workflow_take_back_v1(from_at timestamptz, steps boolean, most integer, delays float8[], token uuid, worker text, length float8)
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
    losers text[];
    ends   timestamptz[];
BEGIN
    IF coalesce(cardinality(ids), 0) = 0 THEN
        oldest := coalesce(since, statement_timestamp());
        held   := alive;
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT array_agg(l.leased_by), array_agg(l.until) INTO losers, ends
    FROM (SELECT w.leased_by, max(w.lease_until) AS until FROM workflow_run w
          WHERE w.id = ANY (ids) AND w.lease_until < least(w.deadline_at, clock_timestamp()) AND w.leased_by <> workflow_worker_name(workflow_bound_prefixes(), worker)
          GROUP BY w.leased_by) AS l;
    RETURN QUERY
    SELECT coalesce(since, statement_timestamp()), alive, t.*
    FROM workflow_take_back(ids, delays, workflow_take_back_v1.token, workflow_take_back_v1.worker, workflow_take_back_v1.length) AS t;
    IF over.passing THEN
        PERFORM workflow_put_back(ids);
    END IF;
    IF losers IS NOT NULL THEN
        BEGIN
            WITH dead AS MATERIALIZED (
                SELECT o.id, l.until
                FROM workflow_worker o JOIN unnest(losers, ends) AS l (name, until) ON o.name = l.name
                WHERE o.seen_at <= l.until AND l.until > coalesce(o.lost_at, '-infinity')
                FOR UPDATE OF o SKIP LOCKED
            )
            UPDATE workflow_worker w SET lost_at = d.until FROM dead d WHERE w.id = d.id;
        EXCEPTION WHEN OTHERS OR assert_failure THEN -- they count as dead a few seconds later
        END;
    END IF;
END
$fn$;

REVOKE ALL ON FUNCTION workflow_due(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean, boolean, boolean) FROM PUBLIC;
REVOKE ALL ON FUNCTION workflow_beside(uuid[], uuid[]) FROM PUBLIC;
REVOKE ALL ON FUNCTION workflow_lease_v2(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean, uuid, text, text[], float8[], float8[], uuid[], uuid[], boolean, boolean, boolean) FROM PUBLIC;

-- Whoever may lease goes on to.
DO $do$
DECLARE
    f regprocedure;
    r regrole;
BEGIN
    FOR f, r IN
        SELECT n.oid, x.grantee
        FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x JOIN pg_proc n ON n.pronamespace = o.pronamespace AND n.proname = 'workflow_lease_v2'
        WHERE o.proname = 'workflow_lease_v1' AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass)
          AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
    END LOOP;
END
$do$;
