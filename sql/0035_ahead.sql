-- simple-workflow 0035: leases ahead of handlers.
--
-- A worker leases more runs of quick types than it has slots, and charges the attempt with the lease, as always. If it dies, most of these have not begun, and
-- nothing may be charged for them; but a run that kills its process must be charged. So before a handler of such a run may begin, the worker commits a mark.
-- Whoever takes an expired lease back asks for the mark: without it the attempt is given back, and the run is due again as it was.
--
--   workflow_begun           the marks, by the token of the lease. Whoever stores the first row of a token decides
--   workflow_leased_ahead    whether a token is that of a lease ahead
--   workflow_lease_ahead_v1  leases, with one token for each group of runs that may begin together
--   workflow_begin_v1        stores marks
--   workflow_take_back       asks for them, by workflow_begun_or_never
--   workflow_give_back_v2    gives back what was leased with any of some tokens
--   workflow_forget_begun_v1 removes old marks
--
-- Locks are taken in the order run → mark.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE TABLE workflow_begun (
    token uuid        NOT NULL PRIMARY KEY,
    begun boolean     NOT NULL,
    at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT workflow_begun_at_check CHECK (at BETWEEN '2000-01-01' AND '2200-01-01')
);
COMMENT ON TABLE  workflow_begun IS 'Which leases ahead of handlers may have begun. For the engine alone.';
COMMENT ON COLUMN workflow_begun.token IS 'The lease_token of a group of runs that were leased ahead.';
COMMENT ON COLUMN workflow_begun.begun IS 'True: their worker may begin them, so their attempts are charged. False: a lease was taken back before that, and their worker may not begin them any more.';
COMMENT ON COLUMN workflow_begun.at IS 'When that was stored, or when such a lease was last taken back.';

CREATE TRIGGER workflow_begun_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_begun
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers write it, and remove what is old.');
CREATE TRIGGER workflow_begun_kept BEFORE TRUNCATE ON workflow_begun
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('Workers remove what is old.');

-- Its bounds, among those of 0021.
DO $do$
BEGIN
    EXECUTE 'CREATE OR REPLACE VIEW workflow_bound AS ' || rtrim(pg_get_viewdef('workflow_bound'::regclass), ';')
        || $q$ UNION ALL SELECT 'workflow_begun' COLLATE "C", 'at' COLLATE "C", 'times' COLLATE "C", NULL::bigint, NULL::bigint, 'workflow_begun_at_check' COLLATE "C", 1::bigint $q$;
END
$do$;

-- A lease ahead has a token of UUID version 8, and every other lease one of version 4. So a row says what kind of lease it is under, and no statement that
-- leases, settles or takes back has to write, or to reset, anything for that.
CREATE FUNCTION workflow_leased_ahead(token uuid) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN get_byte(uuid_send(token), 6) >> 4 = 8;

-- As workflow_lease_v2, for lanes that have no suspects and no limits. The first of the runs, as many as there are slots, get the first of the tokens, which is
-- an ordinary one. All further runs are leased ahead: each group of them gets a token of its own. They are left out where the payloads of all, as they are stored, exceed most_bytes.
-- A run without attempts left never begins, so it needs no mark; its deadline is its start.
CREATE FUNCTION workflow_lease_ahead_v1(
    types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], steps boolean, most integer, most_bytes bigint,
    slots integer, together integer, tokens uuid[], worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS TABLE (due integer, token uuid, follows boolean, created_at timestamptz, instance uuid, business_key text, node text, id uuid, type text, attempt integer, max_attempts integer, lease_no bigint, idempotency_key text, tenant_id text, metadata jsonb,
    started_at timestamptz, payload jsonb, priority integer, postponed integer, suspect boolean, exhausted boolean, run_at timestamptz, token_id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound   text[]  := workflow_bound_prefixes();
    own     boolean := bound IS NULL;
    plain   boolean := bound IS NOT NULL OR NOT steps;
    passing boolean := EXISTS (SELECT FROM workflow_set_aside);
    called  text    := workflow_worker_name(bound, worker);
    ids     uuid[];
    many    integer;
BEGIN
    SELECT array_agg(c.id) FILTER (WHERE c.place <= slots OR c.bytes <= most_bytes), count(*) INTO ids, many
    FROM (
        SELECT d.id, row_number() OVER () AS place, sum(d.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes
        FROM (
            SELECT r.id, r.bytes
            FROM unnest(types, priorities, from_at, from_id, graces) AS l (type, priority, from_at, from_id, grace)
            CROSS JOIN LATERAL (
                SELECT w.id, pg_column_size(w.payload) AS bytes FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL
                  AND w.suspect = false AND w.type = l.type AND w.priority = l.priority
                  AND w.run_at <= statement_timestamp() - l.grace * interval '1 second'
                  AND (w.run_at, w.id) >= (CASE WHEN l.from_at < '1901-01-01' THEN '-infinity' ELSE l.from_at END, l.from_id)
                  AND (NOT plain OR w.token_id IS NULL) AND (own OR w.type ^@ ANY (bound))
                  AND (NOT passing OR NOT EXISTS (SELECT FROM workflow_set_aside a WHERE a.kind = 'run' AND a.id = w.id AND a.row_version = w.xmin AND NOT a.due))
                ORDER BY w.run_at, w.id
                LIMIT most
                FOR UPDATE SKIP LOCKED) r
            LIMIT most) d) c;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE workflow_run w
    SET status = 'leased', lease_token = CASE WHEN i.place <= slots THEN tokens[1] ELSE tokens[2 + (i.place - slots - 1) / together] END, leased_by = called, lease_no = w.lease_no + 1,
        attempt = w.attempt + CASE WHEN w.attempt < w.max_attempts THEN 1 ELSE 0 END,
        alone = CASE WHEN w.alone THEN true END,
        started_at = statement_timestamp(), updated_at = statement_timestamp(),
        lease_until = statement_timestamp() + least(t.length, t.timeout) * interval '1 second',
        deadline_at = statement_timestamp() + CASE WHEN w.attempt < w.max_attempts THEN t.timeout ELSE 0 END * interval '1 second'
    FROM unnest(ids) WITH ORDINALITY AS i (id, place), unnest(term_types, lengths, timeouts) AS t (type, length, timeout)
    WHERE w.id = ANY (ids) AND w.id = i.id AND w.type = t.type COLLATE "C"
    RETURNING many, w.lease_token, workflow_follows(w.max_attempts, w.policy_attempts), CASE WHEN isfinite(w.created_at) AND w.policy_attempts IS DISTINCT FROM 0 THEN w.created_at END,
              -- As in workflow_lease_v2.
              CASE WHEN w.token_id IS NOT NULL AND NOT w.type ^@ 'graph.' THEN (SELECT k.instance_id FROM process_token k WHERE k.id = w.token_id) END,
              CASE WHEN w.token_id IS NOT NULL AND NOT w.type ^@ 'graph.' THEN (
                  SELECT p.business_key FROM process_instance p WHERE p.id = (SELECT k.instance_id FROM process_token k WHERE k.id = w.token_id)) END,
              CASE WHEN NOT w.type ^@ 'graph.' THEN w.node::text END,
              w.id, w.type::text, w.attempt, w.max_attempts, w.lease_no, w.idempotency_key, w.tenant_id, w.metadata, w.started_at,
              w.payload, w.priority, w.postponed, w.suspect, w.deadline_at IS NOT DISTINCT FROM w.started_at,
              CASE WHEN isfinite(w.run_at) THEN w.run_at ELSE '1900-01-01' END, w.token_id;
    IF passing THEN
        PERFORM workflow_put_back(ids);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_lease_ahead_v1(text[], integer[], timestamptz[], uuid[], float8[], boolean, integer, bigint, integer, integer, uuid[], text, text[], float8[], float8[]) IS
    'For workers: leases due runs of some lanes without suspects, in their order. The first of them, as many as slots, are leased as workflow_lease_v2 does it. The others are leased ahead: so many together have a token, and their handlers may begin once workflow_begin_v1 says so of it.';

-- DO UPDATE waits for whoever is storing a row of the token, and returns what is stored then. A snapshot would not show it. A lease that was taken back, and whose
-- row was removed since, must not be taken for one of which nothing was decided: so a run has to be leased with the token.
CREATE FUNCTION workflow_begin_v1(tokens uuid[], runs uuid[]) RETURNS TABLE (token uuid, begun boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[] := workflow_bound_prefixes();
    before text   := workflow_advance('on'); -- for the guard
BEGIN
    RETURN QUERY
    INSERT INTO workflow_begun AS b (token, begun)
    SELECT DISTINCT t.token, true
    FROM unnest(tokens, runs) AS t (token, run) JOIN workflow_run w ON w.id = t.run AND w.lease_token = t.token
    WHERE w.id = ANY (runs) AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    ORDER BY t.token
    ON CONFLICT (token) DO UPDATE SET token = excluded.token
    RETURNING b.token, b.begun;
    PERFORM workflow_advance(before);
END
$fn$;
COMMENT ON FUNCTION workflow_begin_v1(uuid[], uuid[]) IS
    'For workers: handlers of runs that were leased ahead may begin. tokens and runs are pairs: of each lease, by its token, some runs that should still be under it. A lease that is not in the answer, or of which begun is false, was taken back or has ended: its runs must not begin. It may be called again if the answer was lost.';

-- A mark is needed while a run is leased with its token. It is kept a minute longer than any statement lasts that may store it anew.
CREATE FUNCTION workflow_forget_begun_v1() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_nestloop = off SET jit = off AS $fn$
DECLARE
    most    constant integer := 50000;
    removed integer;
    before  text := workflow_advance('on'); -- for the guard
BEGIN
    WITH old AS MATERIALIZED (
        SELECT b.token FROM workflow_begun b
        WHERE b.at < clock_timestamp() - interval '1 minute'
          AND NOT EXISTS (SELECT FROM workflow_run w WHERE w.status = 'leased' AND w.lease_token = b.token)
        LIMIT most
        FOR UPDATE OF b SKIP LOCKED
    )
    DELETE FROM workflow_begun b WHERE b.token = ANY (ARRAY(SELECT o.token FROM old o));
    GET DIAGNOSTICS removed = ROW_COUNT;
    PERFORM workflow_advance(before);
    RETURN removed = most;
END
$fn$;
COMMENT ON FUNCTION workflow_forget_begun_v1() IS 'For workers: removes old rows of workflow_begun whose leases have ended, some at a time. True: there may be more.';

-- For who takes leases back: stores of each token that its runs may not begin any more, unless their worker has stored that they may; and which of the two it is.
CREATE FUNCTION workflow_begun_or_never(tokens uuid[]) RETURNS TABLE (token uuid, begun boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text := workflow_advance('on'); -- for the guard
BEGIN
    RETURN QUERY
    INSERT INTO workflow_begun AS b (token, begun) SELECT t.token, false FROM unnest(tokens) AS t (token)
    ON CONFLICT (token) DO UPDATE SET at = excluded.at
    RETURNING b.token, b.begun;
    PERFORM workflow_advance(before);
END
$fn$;

-- As in 0019. A lease ahead that was not begun is given back: its attempt is not charged, and the run is due at once, as it was before. That is
-- asked before the attempt is compared with the limit, as a run must not fail by an attempt that is not charged.
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
    WITH asked AS MATERIALIZED (
        SELECT b.token, b.begun
        FROM workflow_begun_or_never(ARRAY(SELECT DISTINCT w.lease_token FROM workflow_run w WHERE w.id = ANY (ids) AND workflow_leased_ahead(w.lease_token) ORDER BY 1)) AS b
    ), expired AS MATERIALIZED (
        SELECT e.*, e.attempt >= e.most AND NOT e.spared AND NOT e.unbegun AS over, CASE WHEN e.id = ANY (elsewhere) THEN 'not completed in time elsewhere, where it was handed on to by ' ELSE 'no sign of life from ' END || e.loser AS words
        FROM (SELECT w.id, w.started_at, left(w.leased_by, 200) AS loser, w.attempt, workflow_follows(w.max_attempts, w.policy_attempts) AS follows,
                     workflow_most(w.type, w.max_attempts, w.policy_attempts, w.attempt, w.suspect) AS most,
                     w.suspect AND w.alone IS FALSE AND w.attempt > 0 AND w.deadline_at IS DISTINCT FROM w.started_at
                     AND (w.deadline_at IS NULL OR w.updated_at <= w.deadline_at - interval '1 second') AS spared,
                     a.begun IS FALSE AND w.attempt > 0 AND w.deadline_at IS DISTINCT FROM w.started_at AS unbegun
              FROM workflow_run w LEFT JOIN asked a ON a.token = w.lease_token WHERE w.id = ANY (ids)) e
    ), taken AS (
        UPDATE workflow_run w
        SET status = CASE WHEN e.over THEN 'leased' ELSE 'pending' END,
            attempt = w.attempt - CASE WHEN e.spared OR e.unbegun THEN 1 ELSE 0 END, alone = CASE WHEN w.suspect AND (e.spared OR w.alone) THEN true END,
            max_attempts = e.most, policy_attempts = CASE WHEN e.follows THEN e.most ELSE w.policy_attempts END,
            suspect = CASE WHEN e.unbegun THEN w.suspect ELSE e.id <> ALL (elsewhere) END, updated_at = statement_timestamp(),
            error = CASE WHEN e.unbegun THEN w.error
                         ELSE jsonb_build_object('code', 'lease_expired', 'message', e.words, 'attempt', w.attempt, 'worker', left(w.leased_by, 200), 'lease_no', w.lease_no) END,
            last_error = CASE WHEN e.unbegun THEN w.last_error ELSE 'lease_expired: ' || e.words END,
            run_at = CASE WHEN e.over OR e.unbegun THEN w.run_at ELSE statement_timestamp() + interval '1 second' * (1 + random() / 2) * workflow_backoff(w.type, delays, w.attempt - 1) END,
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
        SELECT t.id, statement_timestamp(), CASE WHEN e.unbegun THEN 'released' ELSE 'expired' END, e.attempt, t.lease_no - CASE WHEN t.exhausted THEN 1 ELSE 0 END,
               CASE WHEN isfinite(e.started_at) THEN e.started_at END, called, e.loser,
               CASE WHEN e.unbegun THEN '{"reason": "its worker has shown no sign of life, and had not begun it"}'::jsonb
                    WHEN e.spared THEN '{"attempt_given_back": true, "reason": "another suspect was beside it at its last attempt"}'::jsonb END
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

-- As in 0031: nor does a worker begin with what it has leased ahead and was taken back from it.
CREATE OR REPLACE VIEW workflow_event AS
    SELECT workflow_event_id(r.created_at, 0) AS id, r.id AS workflow_id, 'created'::text COLLATE "C" AS event_type, NULL::integer AS attempt,
           NULL::bigint AS lease_no, r.created_by AS actor, NULL::jsonb AS data, r.created_at
    FROM workflow_run r
UNION ALL
    SELECT workflow_event_id(h.created_at, 1), h.workflow_id, h.event_type, h.attempt, h.lease_no, h.actor,
           CASE h.event_type WHEN 'expired' THEN jsonb_build_object('worker', h.leased_by) || coalesce(h.data, '{}') ELSE h.data END, h.created_at
    FROM workflow_history h
UNION ALL
    SELECT workflow_event_id(h.started_at, 2 + e.place), h.workflow_id, e.what, h.attempt, h.lease_no, coalesce(h.leased_by, h.actor), NULL, h.started_at
    FROM workflow_history h CROSS JOIN (VALUES ('leased', 0), ('started', 1)) AS e (what, place)
    WHERE h.started_at IS NOT NULL
      AND (e.place = 0 OR CASE h.event_type WHEN 'failed' THEN h.data->>'code' IN ('lease_expired', 'too_late', 'no_handler_registered')
                                            WHEN 'released' THEN h.data->>'reason' = ANY ('{the answer to the lease was lost,"its worker has shown no sign of life, and had not begun it"}') END IS NOT TRUE)
UNION ALL
    SELECT workflow_event_id(r.started_at, 2 + e.place), r.id, e.what, r.attempt, r.lease_no, coalesce(r.leased_by, r.settled_by), NULL, r.started_at
    FROM workflow_run r CROSS JOIN (VALUES ('leased', 0), ('started', 1)) AS e (what, place)
    WHERE (r.status = 'leased' OR r.status = 'succeeded' AND r.settled_by IS NOT NULL)
      AND (e.place = 0 OR r.deadline_at IS DISTINCT FROM r.started_at)
UNION ALL
    SELECT workflow_event_id(r.finished_at, 3), r.id, 'succeeded', r.attempt, r.lease_no, r.settled_by, NULL, r.finished_at
    FROM workflow_run r
    WHERE r.status = 'succeeded' AND r.settled_by IS NOT NULL;

-- As v1 (0014), for a request that has taken leases with several tokens.
CREATE FUNCTION workflow_give_back_v2(tokens uuid[], within float8, worker text, OUT given integer, OUT locked integer)
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
        WHERE w.status = 'leased' AND w.started_at > now() - within * interval '1 second' AND w.lease_token = ANY (tokens)
          AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    ), mine AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w
        WHERE w.id = ANY (ARRAY(SELECT h.id FROM held h)) AND w.status = 'leased' AND w.lease_token = ANY (tokens)
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
COMMENT ON FUNCTION workflow_give_back_v2(uuid[], float8, text) IS 'For workers: gives back the leases that were taken with some tokens and whose answer was lost. Returns how many, and how many somebody has locked.';

CREATE OR REPLACE FUNCTION workflow_give_back_v1(token uuid, within float8, worker text, OUT given integer, OUT locked integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    SELECT g.given, g.locked INTO given, locked FROM workflow_give_back_v2(ARRAY[token], within, worker) AS g;
END
$fn$;

-- What is new is ours, in the lists of 0020.
DO $do$
BEGIN
    EXECUTE replace(pg_get_functiondef('workflow_relations()'::regprocedure), $q$'{$q$, $q$'{workflow_begun, $q$);
    EXECUTE replace(pg_get_functiondef('workflow_functions()'::regprocedure), $q$'{$q$,
        $q$'{workflow_leased_ahead, workflow_begun_or_never, workflow_lease_ahead_v1, workflow_begin_v1, workflow_forget_begun_v1, workflow_give_back_v2, $q$);
END
$do$;

-- Whoever leases goes on to, until `workflowctl roles` is run again.
DO $do$
DECLARE
    own constant regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    f   regprocedure;
    r   regrole;
BEGIN
    REVOKE ALL ON workflow_begun FROM PUBLIC;
    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = own
             AND p.proname = ANY ('{workflow_leased_ahead, workflow_begun_or_never, workflow_lease_ahead_v1, workflow_begin_v1, workflow_forget_begun_v1, workflow_give_back_v2}'::text[]) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    FOR f, r IN
        SELECT n.oid, x.grantee
        FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        JOIN pg_proc n ON n.pronamespace = own AND n.proname = ANY ('{workflow_lease_ahead_v1, workflow_begin_v1, workflow_forget_begun_v1, workflow_give_back_v2}'::text[])
        WHERE o.proname = 'workflow_lease_v2' AND o.pronamespace = own AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
    END LOOP;
END
$do$;

-- What is new belongs to whom the rest belongs to.
DO $do$
DECLARE
    own   oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    thing text;
BEGIN
    FOR thing IN
        SELECT 'FUNCTION ' || p.oid::regprocedure FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proowner <> own
        UNION ALL
        SELECT 'TABLE ' || c.oid::regclass FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours WHERE c.relowner <> own
    LOOP
        EXECUTE format('ALTER %s OWNER TO %s', thing, own::regrole);
    END LOOP;
END
$do$;
