-- simple-workflow 0025: what becomes of a type whose runs meet an outage.
--
--   workflow_outage          outages that runs of a type have met in a row; from five of three runs on its breaker is open
--   workflow_breaker         the breakers that are open, for people
--   workflow_lanes_v2        as workflow_lanes_v1, with the outages, as it has the pauses
--   workflow_outage_v1       workers tell of outages, and that one is over
--   workflow_probe_v1        leases one run of a type whose breaker is open
--   workflow_close_breaker   for operators
--
-- Nothing of it is part of a settle, and no run depends on a row here: what is lost or wrong costs pauses, or attempts.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Roles that are bound to prefixes have breakers of their own (bound): none of them can slow down steps of processes, or the engine's workers.
CREATE TABLE workflow_outage (
    type       text COLLATE "C" NOT NULL,
    bound      boolean     NOT NULL,
    in_a_row   integer     NOT NULL,
    runs       integer     NOT NULL,
    first      uuid,
    second     uuid,
    code       text COLLATE "C" NOT NULL,
    said_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    opened_at  timestamptz,
    probes     integer     NOT NULL DEFAULT 0,
    next_probe timestamptz NOT NULL DEFAULT clock_timestamp(),
    probe      uuid,
    PRIMARY KEY (bound, type),
    CONSTRAINT workflow_outage_text_check   CHECK (octet_length(type) <= 200 AND octet_length(code) <= 100),
    CONSTRAINT workflow_outage_number_check CHECK (in_a_row BETWEEN 0 AND 1000 AND runs BETWEEN 0 AND 3 AND probes BETWEEN 0 AND 1000000),
    CONSTRAINT workflow_outage_time_check   CHECK (said_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z' AND opened_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'
        AND next_probe BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z')
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0.1);
COMMENT ON TABLE  workflow_outage IS 'Types of which runs have met an outage since the last success. A row of which nothing was heard for five minutes counts for nothing.';
COMMENT ON COLUMN workflow_outage.bound IS 'Told by a role that is bound to prefixes, and read by such roles alone. False: by roles that may lease steps of processes, too.';
COMMENT ON COLUMN workflow_outage.in_a_row IS 'Outages without a success between them, 1000 at most.';
COMMENT ON COLUMN workflow_outage.runs IS 'How many different runs have met them: 3 means three or more. The first two are in first and second.';
COMMENT ON COLUMN workflow_outage.code IS 'Of the last error that told of the outage.';
COMMENT ON COLUMN workflow_outage.said_at IS 'When a run last met it.';
COMMENT ON COLUMN workflow_outage.opened_at IS 'Since when nothing but probes is leased of the type. Null: the breaker is not open.';
COMMENT ON COLUMN workflow_outage.next_probe IS 'Before that no run is leased as a probe, nor while the last probe is leased.';
COMMENT ON COLUMN workflow_outage.probe IS 'The run that was leased as a probe last.';

-- The functions below say that it is they.
CREATE TRIGGER workflow_outage_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_outage
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_close_breaker(type) closes a breaker; workflow_set_policy(type, breaker => false) has it open no more.');
CREATE TRIGGER workflow_outage_kept BEFORE TRUNCATE ON workflow_outage
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('SELECT workflow_close_breaker(type) closes a breaker.');

CREATE VIEW workflow_breaker AS
    SELECT o.type, o.opened_at AS since, o.probes, o.next_probe, o.said_at AS last_met, o.code, o.bound
    FROM workflow_outage o
    WHERE o.opened_at IS NOT NULL AND o.said_at BETWEEN now() - interval '5 minutes' AND now() + interval '1 minute'
      AND (workflow_policy_of(o.type)).breaker IS NOT false;
COMMENT ON VIEW   workflow_breaker IS 'Types whose breaker is open: what their runs need is out of reach, so one run at a time is leased, as a probe. One success closes it.';
COMMENT ON COLUMN workflow_breaker.probes IS 'How many have been leased since it opened.';
COMMENT ON COLUMN workflow_breaker.last_met IS 'When a run last met the outage. Five minutes after that the breaker counts for nothing.';
COMMENT ON COLUMN workflow_breaker.code IS 'Of the last error that told of the outage.';
COMMENT ON COLUMN workflow_breaker.bound IS 'It counts for roles that are bound to prefixes. False: for all others.';

-- As v1. Of outages, those with a breaker that is open have the seconds until the next probe, others -1.
CREATE FUNCTION workflow_lanes_v2(prefixes text[])
RETURNS TABLE (outages text[], probes_in float8[], paused text[], suspect boolean, type text, priority integer, run_at timestamptz, id uuid, due_in float8)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    narrowed text[]  := workflow_narrow(prefixes);
    mine     boolean := workflow_bound_prefixes() IS NOT NULL;
    met      text[];
    probes   float8[];
BEGIN
    SELECT array_agg(o.type), array_agg(CASE WHEN o.opened_at IS NULL THEN -1 ELSE CASE WHEN isfinite(o.next_probe) THEN greatest(extract(epoch FROM o.next_probe - clock_timestamp()), 0)::float8 ELSE 0 END END) INTO met, probes
    FROM workflow_outage o
    WHERE o.bound = mine AND o.type ^@ ANY (narrowed) AND o.said_at BETWEEN clock_timestamp() - interval '5 minutes' AND clock_timestamp() + interval '1 minute';
    RETURN QUERY SELECT met, probes, l.* FROM workflow_lanes(narrowed) AS l;
END
$fn$;
COMMENT ON FUNCTION workflow_lanes_v2(text[]) IS
    'For workers: the first open run of each lane (suspect, type, priority) under some prefixes; what is paused, and types whose runs meet an outage, the same in all rows. One row at least.';

-- The answer is whether the breaker is open. Of types that are not the caller's nothing is noted; of a role's types, three hundred at most.
CREATE FUNCTION workflow_outage_v1(type text, over boolean, met integer, runs uuid[], code text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '1s' AS $fn$
#variable_conflict use_column
DECLARE
    prefixes text[]           := workflow_bound_prefixes();
    mine     CONSTANT boolean := prefixes IS NOT NULL;
    of       CONSTANT text    := workflow_outage_v1.type;
    before   text;
    was      workflow_outage;
    known    uuid[];
    opened   boolean := false;
BEGIN
    IF (octet_length(of) <= 200 AND of ~ '^([a-z0-9_-]+\.)+[a-z0-9_-]+$' AND NOT of ^@ 'graph.' AND (prefixes IS NULL OR of ^@ ANY (prefixes))) IS NOT TRUE THEN
        RETURN false;
    END IF;
    before := workflow_advance('on'); -- for the guard
    DELETE FROM workflow_outage o -- also what counts for nothing any more
    WHERE o.ctid = ANY (ARRAY(SELECT x.ctid FROM workflow_outage x WHERE x.bound = mine AND (prefixes IS NULL OR x.type ^@ ANY (prefixes))
                                AND x.said_at NOT BETWEEN clock_timestamp() - interval '5 minutes' AND clock_timestamp() + interval '1 minute' FOR UPDATE SKIP LOCKED))
       OR workflow_outage_v1.over AND o.type = of AND o.bound = mine;
    IF workflow_outage_v1.met > 0 THEN
        SELECT * INTO was FROM workflow_outage o WHERE o.type = of AND o.bound = mine FOR UPDATE;
        IF NOT FOUND AND (SELECT count(*) FROM workflow_outage o WHERE o.bound = mine AND (prefixes IS NULL OR o.type ^@ ANY (prefixes))) < 300 THEN
            INSERT INTO workflow_outage (type, bound, in_a_row, runs, code) VALUES (of, mine, 0, 0, '') ON CONFLICT DO NOTHING;
            SELECT * INTO was FROM workflow_outage o WHERE o.type = of AND o.bound = mine FOR UPDATE;
        END IF;
        known := ARRAY(SELECT DISTINCT r FROM unnest(ARRAY[was.first, was.second] || workflow_outage_v1.runs) AS r WHERE r IS NOT NULL);
        UPDATE workflow_outage o
        SET in_a_row = least(o.in_a_row::bigint + workflow_outage_v1.met, 1000), runs = greatest(o.runs, least(cardinality(known), 3)), first = known[1], second = known[2],
            code = left(regexp_replace(coalesce(workflow_outage_v1.code, ''), '[^!-~]', '', 'g'), 100), said_at = clock_timestamp()
        WHERE o.type = of AND o.bound = mine;
        UPDATE workflow_outage o
        SET opened_at = clock_timestamp(), probes = 0, probe = NULL, next_probe = clock_timestamp() + interval '1 second'
        WHERE o.type = of AND o.bound = mine AND o.opened_at IS NULL AND o.in_a_row >= 5 AND o.runs >= 3;
        opened := EXISTS (SELECT FROM workflow_outage o WHERE o.type = of AND o.bound = mine AND o.opened_at IS NOT NULL);
    END IF;
    PERFORM workflow_advance(before);
    RETURN opened;
END
$fn$;
COMMENT ON FUNCTION workflow_outage_v1(text, boolean, integer, uuid[], text) IS
    'For workers: runs of a type have met an outage, met times since the last success; over: there was one. True: the breaker is open.';

-- One probe at a time, whoever asks: the next is due after a pause that grows to half a minute, and not while the last is leased. That is seen in the row of
-- the run, so no worker that dies with a probe stops the next one. Who is not allowed to lease the type locks nothing.
CREATE FUNCTION workflow_probe_v1(
    suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], rooms integer[], teams text[], mosts integer[],
    steps boolean, most_suspects integer, most integer, shared boolean, watched boolean, alone boolean,
    token uuid, worker text, term_types text[], lengths float8[], timeouts float8[],
    held uuid[], held_tokens uuid[], accompanied boolean, strays boolean, patient boolean)
RETURNS TABLE (due integer, given_back boolean, follows boolean, created_at timestamptz, instance uuid, business_key text, node text, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[]           := workflow_bound_prefixes();
    mine   CONSTANT boolean := bound IS NOT NULL;
    of     CONSTANT text    := types[1];
    before text;
    taken  uuid;
    late   boolean;
BEGIN
    IF bound IS NOT NULL AND NOT coalesce(of ^@ ANY (bound), false) THEN
        RETURN;
    END IF;
    PERFORM FROM workflow_outage o
    WHERE o.type = of AND o.bound = mine AND o.opened_at IS NOT NULL AND o.next_probe <= clock_timestamp()
      AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = o.probe AND r.status = 'leased')
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR due, given_back, follows, created_at, instance, business_key, node, id, type, attempt, max_attempts, lease_no, idempotency_key, tenant_id, metadata, started_at, payload, priority, postponed, suspect, exhausted, run_at, token_id IN
        SELECT * FROM workflow_lease_v2(suspects, types, priorities, from_at, from_id, graces, rooms, teams, mosts, steps, most_suspects, 1, shared, watched, alone,
            workflow_probe_v1.token, worker, term_types, lengths, timeouts, held, held_tokens, accompanied, strays, patient) LOOP
        taken := id;
        late := started_at - created_at >= (workflow_policy_of(of)).deadline * interval '1 second';
        RETURN NEXT;
    END LOOP;
    IF taken IS NOT NULL AND late IS NOT true THEN -- what is late fails without a start, and tells nothing: the next one is due at once
        before := workflow_advance('on'); -- for the guard
        UPDATE workflow_outage o
        SET probe = taken, probes = least(o.probes + 1, 1000000), next_probe = clock_timestamp() + least(2.0 ^ least(o.probes + 1, 10), 30) * interval '1 second'
        WHERE o.type = of AND o.bound = mine;
        PERFORM workflow_advance(before);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_probe_v1(boolean[], text[], integer[], timestamptz[], uuid[], float8[], integer[], text[], integer[], boolean, integer, integer, boolean, boolean, boolean, uuid, text, text[], float8[], float8[], uuid[], uuid[], boolean, boolean, boolean) IS
    'For workers: as workflow_lease_v2, of lanes of one type whose breaker is open; one run, if a probe is due.';

CREATE FUNCTION workflow_close_breaker(type text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text;
    was    CONSTANT boolean := EXISTS (SELECT FROM workflow_breaker b WHERE b.type = workflow_close_breaker.type);
BEGIN
    PERFORM workflow_behalf(workflow_close_breaker.on_behalf_of, 'workflow_close_breaker(text, text)'::regprocedure);
    before := workflow_advance('on');
    DELETE FROM workflow_outage o WHERE o.type = workflow_close_breaker.type;
    PERFORM workflow_advance(before);
    RETURN CASE WHEN was THEN 'closed; five outages in a row open it again' ELSE 'none is open for it' END;
END
$fn$;
COMMENT ON FUNCTION workflow_close_breaker(text, text) IS 'Closes the breaker of a type: its runs are leased again at once. Five outages in a row open it again; so that none does, workflow_set_policy(type, breaker => false). Answers closed, or that none is open.';

-- Who leases, settles and pauses goes on to, and who looks at workers or asks why sees breakers.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f   regprocedure;
    r   regrole;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = own AND p.proname = ANY ('{workflow_lanes_v2, workflow_outage_v1, workflow_probe_v1, workflow_close_breaker}'::text[]) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    FOR f, r IN
        SELECT n.oid, x.grantee
        FROM (VALUES ('workflow_lanes_v1', 'workflow_lanes_v2'), ('workflow_settle_v1', 'workflow_outage_v1'), ('workflow_lease_v1', 'workflow_probe_v1'), ('workflow_pause', 'workflow_close_breaker')) AS as_with (known, fresh)
        JOIN pg_proc o ON o.proname = known AND o.pronamespace = own
        CROSS JOIN LATERAL aclexplode(o.proacl) AS x JOIN pg_proc n ON n.pronamespace = own AND n.proname = fresh
        WHERE x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
    END LOOP;
    FOR r IN
        SELECT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x WHERE c.oid = 'workflow_live_worker'::regclass AND x.privilege_type = 'SELECT' AND x.grantee NOT IN (0, c.relowner)
        UNION
        SELECT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x WHERE o.proname = 'workflow_why' AND o.pronamespace = own AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT SELECT ON workflow_breaker TO %s', r);
    END LOOP;
END
$do$;
