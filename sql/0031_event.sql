-- simple-workflow 0031: events of users.
--
--   INSERT INTO workflow_event (workflow_id, event_type, data)    tells something of a run, in its history
--   workflow_event                                                shows that a run was started

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- As in 0002, with started: a worker begins with a run as soon as it has the lease, so that is the time of it. It does not begin where it leases a run to fail it, and
-- where it never knew of the lease.
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
                                            WHEN 'released' THEN h.data->>'reason' = 'the answer to the lease was lost' END IS NOT TRUE)
UNION ALL
    SELECT workflow_event_id(r.started_at, 2 + e.place), r.id, e.what, r.attempt, r.lease_no, coalesce(r.leased_by, r.settled_by), NULL, r.started_at
    FROM workflow_run r CROSS JOIN (VALUES ('leased', 0), ('started', 1)) AS e (what, place)
    WHERE (r.status = 'leased' OR r.status = 'succeeded' AND r.settled_by IS NOT NULL)
      AND (e.place = 0 OR r.deadline_at IS DISTINCT FROM r.started_at)
UNION ALL
    SELECT workflow_event_id(r.finished_at, 3), r.id, 'succeeded', r.attempt, r.lease_no, r.settled_by, NULL, r.finished_at
    FROM workflow_run r
    WHERE r.status = 'succeeded' AND r.settled_by IS NOT NULL;

-- Whoever sees a run may tell something of it; a bound worker sees plain runs of its prefixes. It is told whatever workflow.audit says. The run is looked
-- at and not locked: a lease passes over what is locked in any way, so whoever tells something in a long transaction would keep it from workers.
CREATE FUNCTION workflow_event_tell() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    whose   CONSTANT text   := workflow_role();
    written CONSTANT text   := NEW.data::text;
    bound   text[];
    r       record;
    problem text;
    fix     text;
BEGIN
    IF (NEW.event_type ~ '^app(\.[a-z0-9_-]+)+$' AND octet_length(NEW.event_type) <= 200) IS NOT TRUE THEN
        problem := format('event_type %s is not a type of yours', coalesce(quote_literal(left(NEW.event_type, 120)), 'null'));
        fix := 'Use app. and lower-case words with dots between, such as app.invoice_sent.';
    ELSIF num_nonnulls(NEW.id, NEW.attempt, NEW.lease_no, NEW.actor, NEW.created_at) > 0 THEN
        problem := 'id, attempt, lease_no, actor and created_at are set by the database';
        fix := 'Give workflow_id, event_type and data.';
    ELSIF octet_length(written) > 16384 THEN
        problem := format('data has %s bytes, the limit is 16384', octet_length(written));
        fix := 'Store large data elsewhere and put a reference into data.';
    ELSIF jsonb_path_exists(NEW.data, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
        problem := 'data is nested deeper than 64 levels';
        fix := 'Flatten the document.';
    ELSE
        SELECT 'data: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(NEW.data, written) AS p;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'workflow_event: %', problem USING ERRCODE = 'check_violation', HINT = fix;
    END IF;
    IF NOT has_table_privilege(whose, 'workflow_run'::regclass, 'SELECT') THEN
        bound := coalesce(workflow_bound_prefixes(), '{}');
    END IF;
    SELECT w.attempt, nullif(w.lease_no, 0) AS lease_no INTO r FROM workflow_run w
    WHERE w.id = NEW.workflow_id AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'workflow_event: there is no run % that % may see', coalesce(NEW.workflow_id::text, 'null'), whose
            USING ERRCODE = 'foreign_key_violation', HINT = 'Give the id of a run as workflow_id; a bound worker tells of plain runs of its prefixes.';
    END IF;
    INSERT INTO workflow_history AS h (workflow_id, event_type, actor, attempt, lease_no, data)
    VALUES (NEW.workflow_id, NEW.event_type, workflow_actor(), r.attempt, r.lease_no, NEW.data)
    RETURNING workflow_event_id(h.created_at, 1), h.attempt, h.lease_no, h.actor, h.created_at INTO NEW.id, NEW.attempt, NEW.lease_no, NEW.actor, NEW.created_at;
    RETURN NEW;
END
$fn$;
CREATE TRIGGER workflow_event_insert INSTEAD OF INSERT ON workflow_event
    FOR EACH ROW EXECUTE FUNCTION workflow_event_tell();

COMMENT ON VIEW workflow_event IS 'What happened to runs, one row per event: created, leased, started, succeeded, and all that workflow_history has. INSERT workflow_id, event_type (app.…) and data to tell something of a run.';
COMMENT ON COLUMN workflow_history.event_type IS 'failed, retried, postponed, released, expired, cancelled, requeued, held, resumed, edited, deleted, undeleted, dead_letter or dead_letter_refused; succeeded if it was not a worker that said so; app.… if a user has told it.';

REVOKE ALL ON FUNCTION workflow_event_tell() FROM PUBLIC;

-- Whoever settles runs, or acts on them, may tell of them.
DO $do$
DECLARE
    r regrole;
BEGIN
    FOR r IN
        SELECT DISTINCT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        WHERE o.proname IN ('workflow_settle_v1', 'workflow_cancel') AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT INSERT (workflow_id, event_type, data) ON workflow_event TO %s', r);
    END LOOP;
END
$do$;
