-- simple-workflow 0012: people act under their own names, consoles for people, and what operators
-- look at stands any time.
--
--   on_behalf_of      the last parameter of every function that acts; see workflow_behalf
--   workflow_age      how long ago a time is, infinite ones included
--   workflow_prefix   how the prefixes stand that workers are bound to
--   workflow_rate     by type, too

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- Who acts.
-- ---------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION workflow_run_audit_row() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    kinds text[] := '{}';
    kind  text;
    ended boolean := OLD.status = 'leased' AND (NEW.status <> 'leased' OR NEW.lease_no <> OLD.lease_no);
    who   text := workflow_actor();
    how   jsonb := CASE WHEN current_setting('workflow.advance', true) = 'on' AND has_table_privilege(workflow_role(), 'process_token', 'UPDATE') THEN '{}' -- the engine itself
                        ELSE jsonb_build_object('statement', left(current_query(), 1000)) END;
BEGIN
    IF current_setting('workflow.audit', true) = 'self' AND has_column_privilege(workflow_role(), 'workflow_run'::regclass, 'lease_token', 'UPDATE') THEN
        RETURN NULL; -- whoever may settle by an UPDATE, as workers of an earlier version do, writes that
    END IF;
    IF ended THEN
        kinds := kinds || CASE NEW.status WHEN 'pending' THEN 'released' WHEN 'leased' THEN 'expired' ELSE NEW.status END;
    ELSIF NEW.status NOT IN (OLD.status, 'leased') THEN
        kinds := kinds || CASE NEW.status WHEN 'pending' THEN 'requeued' ELSE NEW.status END;
    END IF;
    IF (NEW.deleted_at IS NULL) <> (OLD.deleted_at IS NULL) THEN
        kinds := kinds || CASE WHEN NEW.deleted_at IS NULL THEN 'undeleted' ELSE 'deleted' END;
    END IF;
    IF (NEW.held_at IS NULL) <> (OLD.held_at IS NULL) THEN
        kinds := kinds || CASE WHEN NEW.held_at IS NULL THEN 'resumed' ELSE 'held' END;
    END IF;
    IF NEW.attempt <> OLD.attempt AND NEW.status = OLD.status THEN
        kinds := kinds || 'edited'::text;
    END IF;
    FOREACH kind IN ARRAY kinds LOOP
        INSERT INTO workflow_history (workflow_id, event_type, actor, created_at, attempt, lease_no, started_at, leased_by, data)
        VALUES (NEW.id, kind, who,
                -- Before the lease that takes over.
                CASE WHEN ended AND NEW.started_at > OLD.started_at THEN NEW.started_at ELSE clock_timestamp() END,
                CASE WHEN ended THEN OLD.attempt ELSE NEW.attempt END,
                CASE WHEN ended THEN OLD.lease_no ELSE NEW.lease_no END,
                CASE WHEN ended THEN coalesce(OLD.started_at, OLD.updated_at) END,
                CASE WHEN ended THEN OLD.leased_by END, CASE kind
            WHEN 'deleted'   THEN jsonb_build_object('reason', NEW.delete_reason)
            WHEN 'failed'    THEN coalesce(NEW.error, jsonb_build_object('message', NEW.last_error))
            WHEN 'cancelled' THEN jsonb_build_object('reason', NEW.last_error, 'was', OLD.status)
            WHEN 'requeued'  THEN jsonb_build_object('max_attempts', NEW.max_attempts)
            WHEN 'edited'    THEN jsonb_build_object('attempt_was', OLD.attempt) ELSE '{}' END || how);
        ended := false; -- the first of them tells of the lease
    END LOOP;
    RETURN NULL;
END
$fn$;

CREATE OR REPLACE FUNCTION process_instance_marked() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := workflow_advance('on');
BEGIN
    NEW.version := OLD.version + 1;
    NEW.updated_at := now();
    INSERT INTO process_event (instance_id, event_type, version, data)
    VALUES (NEW.id, CASE WHEN NEW.deleted_at IS NULL THEN 'instance.undeleted' ELSE 'instance.deleted' END, NEW.version,
            jsonb_build_object('actor', workflow_actor()));
    PERFORM workflow_advance(before);
    RETURN NEW;
END
$fn$;

ALTER TABLE workflow_pause ALTER COLUMN paused_by SET DEFAULT workflow_actor();
CREATE TRIGGER workflow_pause_insert_guard BEFORE INSERT ON workflow_pause
    FOR EACH ROW WHEN (NEW.paused_at <> now() OR NEW.resumed_at IS NOT NULL OR NEW.resumed_by IS NOT NULL OR NEW.paused_by <> workflow_actor())
    EXECUTE FUNCTION workflow_guard('SELECT workflow_pause(prefix, reason); or give prefix and reason alone.');
CREATE TRIGGER workflow_pause_update_guard BEFORE UPDATE ON workflow_pause
    FOR EACH ROW WHEN (OLD.resumed_at IS NOT NULL OR (NEW.id, NEW.prefix, NEW.reason, NEW.paused_at, NEW.paused_by) IS DISTINCT FROM (OLD.id, OLD.prefix, OLD.reason, OLD.paused_at, OLD.paused_by)
                       OR NEW.resumed_at <> now() OR NEW.resumed_by <> workflow_actor())
    EXECUTE FUNCTION workflow_guard('SELECT workflow_resume(prefix) ends a pause; SELECT workflow_pause(prefix, reason) begins another.');
ALTER TABLE process_correction ALTER COLUMN actor SET DEFAULT workflow_actor();

-- A parameter more is another function: the old ones go, and who could call them can call these.
DO $do$
BEGIN
    PERFORM set_config('workflow.kept', coalesce((
        SELECT jsonb_agg(jsonb_build_object('name', p.proname, 'to', (
            SELECT coalesce(jsonb_agg(DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END), '[]')
            FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.privilege_type = 'EXECUTE' AND a.grantee <> p.proowner)))::text
        FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours
        WHERE p.proname IN ('workflow_enqueue_once', 'workflow_enqueue', 'workflow_cancel', 'workflow_retry', 'workflow_delete', 'workflow_pause', 'workflow_resume', 'workflow_redrive', 'workflow_release', 'workflow_edit', 'workflow_reschedule', 'workflow_prioritize', 'process_task_assign', 'process_correct', 'process_pause', 'process_resume', 'outbox_replay', 'outbox_replay_parked')), '[]'), true);
END
$do$;

DROP FUNCTION outbox_replay_parked(text, text[]);
DROP FUNCTION outbox_replay(timestamptz, timestamptz, text[], text);
DROP FUNCTION process_resume(uuid);
DROP FUNCTION process_pause(uuid);
DROP FUNCTION process_correct(uuid, text, jsonb, text);
DROP FUNCTION process_task_assign(uuid, text, bigint, text);
DROP FUNCTION workflow_prioritize(uuid, integer);
DROP FUNCTION workflow_reschedule(uuid, timestamptz);
DROP FUNCTION workflow_edit(uuid, timestamptz, integer);
DROP FUNCTION workflow_release(text, text);
DROP FUNCTION workflow_redrive(text, text, timestamptz, timestamptz, integer, float8, integer, boolean);
DROP FUNCTION workflow_resume(text);
DROP FUNCTION workflow_pause(text, text);
DROP FUNCTION workflow_delete(uuid, text);
DROP FUNCTION workflow_retry(uuid, integer);
DROP FUNCTION workflow_cancel(uuid, text);
DROP FUNCTION workflow_enqueue(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text);
DROP FUNCTION workflow_enqueue_once(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text);

CREATE FUNCTION workflow_enqueue_once(
    type            text,
    payload         jsonb       DEFAULT '{}',
    run_at          timestamptz DEFAULT NULL,
    delay           interval    DEFAULT NULL,
    priority        integer     DEFAULT 0,
    max_attempts    integer     DEFAULT 3,
    idempotency_key text        DEFAULT NULL,
    metadata        jsonb       DEFAULT NULL,
    id              uuid        DEFAULT NULL,
    tenant          text        DEFAULT NULL,
    on_behalf_of    text        DEFAULT NULL,
    OUT run         uuid,
    OUT existing    boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    given uuid := coalesce(workflow_enqueue_once.id, workflow_uuid());
    whose text := coalesce(workflow_enqueue_once.on_behalf_of, workflow_role());
    other workflow_run;
BEGIN
    -- As everywhere, but called only where it has something to do: for somebody, after somebody, or for a console. The current user
    -- here is the owner. Most work comes in this way.
    IF workflow_enqueue_once.on_behalf_of IS NOT NULL OR current_setting('workflow.on_behalf_of', true) <> ''
       OR workflow_role() <> current_user AND workflow_console(workflow_role()) THEN
        PERFORM workflow_behalf(workflow_enqueue_once.on_behalf_of, 'workflow_enqueue_once(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text, text)'::regprocedure);
    END IF;
    -- It runs with the owner's rights. What acts on processes is for those who may hold runs; what only the
    -- engine may say, nobody says by this function.
    IF workflow_enqueue_once.type ^@ 'graph.' THEN
        IF workflow_enqueue_once.type <> ALL ('{graph.start.v1, graph.message.v1, graph.signal.v1, graph.complete_task.v1, graph.cancel.v1, graph.retry.v1}'::text[]) THEN
            RAISE EXCEPTION 'workflow_enqueue: % is enqueued by the engine alone', quote_literal(left(workflow_enqueue_once.type, 120))
                USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are graph.start.v1, message, signal, complete_task, cancel and retry: see docs/processes.md.';
        ELSIF workflow_enqueue_once.type = 'graph.start.v1' AND workflow_enqueue_once.payload ? 'parent' THEN
            RAISE EXCEPTION 'workflow_enqueue: parent is set by the engine alone'
                USING ERRCODE = 'insufficient_privilege', HINT = 'Leave parent out: only a call node of a process starts an instance that it waits for.';
        ELSIF workflow_enqueue_once.type IN ('graph.cancel.v1', 'graph.retry.v1')
           AND NOT has_column_privilege(whose, 'workflow_run'::regclass, 'held_at', 'UPDATE') THEN
            RAISE EXCEPTION 'workflow_enqueue: % may not enqueue %', whose, quote_literal(workflow_enqueue_once.type)
                USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are for operators: see docs/roles.md.';
        END IF;
    END IF;
    FOR round IN 1..10 LOOP
        INSERT INTO workflow_run (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata, tenant_id, created_by)
        VALUES (given, workflow_enqueue_once.type, workflow_enqueue_once.payload,
                coalesce(workflow_enqueue_once.run_at, now()) + coalesce(workflow_enqueue_once.delay, '0'),
                workflow_enqueue_once.priority, workflow_enqueue_once.max_attempts,
                workflow_enqueue_once.idempotency_key, workflow_enqueue_once.metadata, workflow_enqueue_once.tenant,
                session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '') || coalesce(' for ' || workflow_enqueue_once.on_behalf_of, ''))
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            run := given;
            existing := false;
            RETURN;
        END IF;
        SELECT * INTO other FROM workflow_run r
        WHERE r.id = given
           OR r.idempotency_key = workflow_enqueue_once.idempotency_key AND r.deleted_at IS NULL
        ORDER BY r.id = given DESC
        LIMIT 1;
        IF FOUND AND other.type = workflow_enqueue_once.type AND other.payload = workflow_enqueue_once.payload
           AND other.idempotency_key IS NOT DISTINCT FROM workflow_enqueue_once.idempotency_key
           AND other.tenant_id IS NOT DISTINCT FROM workflow_enqueue_once.tenant THEN
            run := other.id;
            existing := true;
            RETURN;
        ELSIF FOUND THEN
            -- Both ids come first, so that programs can tell them from what users wrote.
            RAISE EXCEPTION 'workflow_enqueue: new run % is refused: run % has the same %',
                given, other.id, CASE WHEN other.id = given THEN 'id, with another type, payload, key or tenant'
                    ELSE format('idempotency key %L, with another type, payload or tenant', workflow_enqueue_once.idempotency_key) END
                USING ERRCODE = 'unique_violation', TABLE = 'workflow_run',
                      CONSTRAINT = CASE WHEN other.id = given THEN 'workflow_run_pkey' ELSE 'workflow_run_idempotency_idx' END,
                      HINT = CASE WHEN other.id = given THEN 'Use another id for other work, or leave it out.'
                             ELSE format('Use another key for other work, or free it with SELECT workflow_delete(%L, ''reason'').', other.id) END;
        END IF;
        -- The row that was in the way has gone since: try again.
    END LOOP;
    RAISE EXCEPTION 'workflow_enqueue: idempotency key % keeps changing hands', quote_literal(workflow_enqueue_once.idempotency_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$fn$;
COMMENT ON FUNCTION workflow_enqueue_once(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text, text) IS
    'workflow_enqueue for programs: returns the run and whether it existed already.';

CREATE FUNCTION workflow_enqueue(
    type            text,
    payload         jsonb       DEFAULT '{}',
    run_at          timestamptz DEFAULT NULL,
    delay           interval    DEFAULT NULL,
    priority        integer     DEFAULT 0,
    max_attempts    integer     DEFAULT 3,
    idempotency_key text        DEFAULT NULL,
    metadata        jsonb       DEFAULT NULL,
    id              uuid        DEFAULT NULL,
    tenant          text        DEFAULT NULL,
    on_behalf_of    text        DEFAULT NULL
) RETURNS uuid
LANGUAGE sql
RETURN (workflow_enqueue_once(type, payload, run_at, delay, priority, max_attempts, idempotency_key, metadata, id, tenant, on_behalf_of)).run;
COMMENT ON FUNCTION workflow_enqueue(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text, text) IS
    'Enqueues a run and returns its id. The same idempotency key with the same type, payload and tenant returns the run that exists; with others it is an error that names both.';

CREATE FUNCTION workflow_cancel(id uuid, reason text DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    seen text;
BEGIN
    PERFORM workflow_behalf(workflow_cancel.on_behalf_of, 'workflow_cancel(uuid, text, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    LOOP
        UPDATE workflow_run r
        SET status = 'cancelled', finished_at = now(), updated_at = clock_timestamp(), suspect = false,
            lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL,
            last_error = left(concat_ws(': ', 'cancelled', workflow_cancel.reason), 4096)
        WHERE r.id = workflow_cancel.id AND r.status IN ('pending', 'leased');
        IF FOUND THEN
            RETURN 'cancelled';
        END IF;
        SELECT r.status INTO seen FROM workflow_run r WHERE r.id = workflow_cancel.id;
        IF NOT FOUND THEN
            RETURN 'not found';
        ELSIF seen NOT IN ('pending', 'leased') THEN
            RETURN 'too late: ' || seen;
        END IF;
        -- It was finished a moment ago and has been retried since: cancel it now.
    END LOOP;
END
$fn$;
COMMENT ON FUNCTION workflow_cancel(uuid, text, text) IS
    'Cancels a pending or leased run for good. Answers cancelled, too late: <status>, or not found.';

CREATE FUNCTION workflow_retry(id uuid, attempts integer DEFAULT 1, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before  text := coalesce(current_setting('workflow.retry', true), '');
    retried boolean;
    seen    text;
BEGIN
    PERFORM workflow_behalf(workflow_retry.on_behalf_of, 'workflow_retry(uuid, integer, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF workflow_retry.attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'workflow_retry: attempts % is outside 1 to 1000', workflow_retry.attempts
            USING ERRCODE = 'check_violation', HINT = 'Say how many further starts the run may have.';
    END IF;
    LOOP
        -- Not a SET clause of the function: that would take a superuser to create it.
        PERFORM set_config('workflow.retry', 'on', true);
        UPDATE workflow_run r
        SET status = 'pending', run_at = now(), finished_at = NULL, updated_at = clock_timestamp(), suspect = false,
            postponed = 0, max_attempts = least(1000, greatest(r.max_attempts, r.attempt + workflow_retry.attempts))
        WHERE r.id = workflow_retry.id AND r.status = 'failed' AND r.deleted_at IS NULL AND r.attempt < 1000 AND r.token_id IS NULL;
        retried := FOUND;
        PERFORM set_config('workflow.retry', before, true);
        IF retried THEN
            RETURN 'pending';
        END IF;
        SELECT CASE WHEN r.deleted_at IS NOT NULL THEN 'deleted'
                    WHEN r.token_id IS NOT NULL THEN r.status || ', a step of a process that has moved on: retry its incident'
                    WHEN r.status = 'failed' AND r.attempt >= 1000 THEN 'failed, 1000 attempts used'
                    ELSE r.status END
        INTO seen FROM workflow_run r WHERE r.id = workflow_retry.id;
        IF seen IS DISTINCT FROM 'failed' THEN
            RETURN coalesce('not failed: ' || seen, 'not found');
        END IF;
        -- It has failed just now, or was undeleted: retry it.
    END LOOP;
END
$fn$;
COMMENT ON FUNCTION workflow_retry(uuid, integer, text) IS
    'Gives a failed run further attempts, now. Answers pending, not failed: <status>, or not found.';

CREATE FUNCTION workflow_delete(id uuid, reason text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
BEGIN
    PERFORM workflow_behalf(workflow_delete.on_behalf_of, 'workflow_delete(uuid, text, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    -- A leased run is cancelled by the same statement, or its worker could still settle it.
    UPDATE workflow_run r
    SET deleted_at = now(), delete_reason = left(workflow_delete.reason, 4096), updated_at = clock_timestamp(),
        status = CASE r.status WHEN 'leased' THEN 'cancelled' ELSE r.status END,
        finished_at = CASE r.status WHEN 'leased' THEN now() ELSE r.finished_at END,
        lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
    WHERE r.id = workflow_delete.id AND r.deleted_at IS NULL;
    IF FOUND THEN
        RETURN 'deleted';
    END IF;
    PERFORM FROM workflow_run r WHERE r.id = workflow_delete.id;
    RETURN CASE WHEN FOUND THEN 'already deleted' ELSE 'not found' END;
END
$fn$;
COMMENT ON FUNCTION workflow_delete(uuid, text, text) IS
    'Soft-deletes a run: never leased again, key free. A leased run is cancelled with it. Answers deleted, already deleted, or not found.';

CREATE FUNCTION workflow_pause(prefix text, reason text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    PERFORM workflow_behalf(workflow_pause.on_behalf_of, 'workflow_pause(text, text, text)'::regprocedure);
    IF workflow_pause.prefix !~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$' THEN
        RAISE EXCEPTION 'workflow_pause: % is neither a type nor a prefix that ends with a dot', quote_literal(left(workflow_pause.prefix, 120))
            USING ERRCODE = 'check_violation', HINT = 'Use billing. for all its types, or one type such as billing.invoice_charge.v1.';
    ELSIF workflow_pause.reason IS NULL OR workflow_pause.reason !~ '\S' THEN
        RAISE EXCEPTION 'workflow_pause: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why, for those who find it paused.';
    END IF;
    INSERT INTO workflow_pause (prefix, reason, paused_by) VALUES (workflow_pause.prefix, workflow_pause.reason, workflow_actor())
    ON CONFLICT DO NOTHING;
    RETURN CASE WHEN NOT FOUND THEN 'already paused' WHEN right(workflow_pause.prefix, 1) = '.' THEN 'paused' ELSE 'paused, this one type alone' END;
END
$fn$;
COMMENT ON FUNCTION workflow_pause(text, text, text) IS
    'Has no run of a type, or of a prefix that ends with a dot, be leased any more; what runs goes on. Answers paused or already paused.';

CREATE FUNCTION workflow_resume(prefix text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    PERFORM workflow_behalf(workflow_resume.on_behalf_of, 'workflow_resume(text, text)'::regprocedure);
    UPDATE workflow_pause p
    SET resumed_at = now(), resumed_by = workflow_actor()
    WHERE p.prefix = workflow_resume.prefix AND p.resumed_at IS NULL;
    RETURN CASE WHEN FOUND THEN 'resumed' ELSE 'not paused' || coalesce('; paused are ' || (SELECT string_agg(p.prefix, ', ') FROM workflow_pause p WHERE p.resumed_at IS NULL), '') END;
END
$fn$;
COMMENT ON FUNCTION workflow_resume(text, text) IS 'Ends a pause. Answers resumed, or not paused.';

CREATE FUNCTION workflow_redrive(
    prefix     text,
    code       text        DEFAULT NULL,
    since      timestamptz DEFAULT '-infinity',
    until      timestamptz DEFAULT 'infinity',
    most       integer     DEFAULT 100,
    per_second float8      DEFAULT NULL,
    attempts   integer     DEFAULT 1,
    dry_run    boolean     DEFAULT true,
    on_behalf_of text      DEFAULT NULL
) RETURNS TABLE (id uuid, type text, code_was text, error_was text, failed_at timestamptz, run_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before text := coalesce(current_setting('workflow.retry', true), '');
BEGIN
    PERFORM workflow_behalf(workflow_redrive.on_behalf_of, 'workflow_redrive(text, text, timestamptz, timestamptz, integer, float8, integer, boolean, text)'::regprocedure);
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
        FROM workflow_redrive(workflow_redrive.prefix, workflow_redrive.code, since, until, most, on_behalf_of => workflow_redrive.on_behalf_of) WITH ORDINALITY
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
COMMENT ON FUNCTION workflow_redrive(text, text, timestamptz, timestamptz, integer, float8, integer, boolean, text) IS
    'Gives failed runs of a type or prefix further attempts, the oldest first: nothing but shows them unless dry_run is false; at most so many; spread over time with per_second.';

CREATE FUNCTION workflow_release(worker text, reason text, on_behalf_of text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n bigint;
BEGIN
    PERFORM workflow_behalf(workflow_release.on_behalf_of, 'workflow_release(text, text, text)'::regprocedure);
    PERFORM set_config('workflow.audit', 'on', true), set_config('workflow.advance', '', true); -- recorded and guarded whatever the caller has set
    IF reason !~ '\S' OR reason IS NULL THEN
        RAISE EXCEPTION 'workflow_release: reason is missing' USING ERRCODE = 'check_violation', HINT = 'Say why the leases are taken away.';
    END IF;
    UPDATE workflow_run r
    SET status = 'pending', lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, run_at = now(), updated_at = clock_timestamp(),
        last_error = left('released by ' || workflow_actor() || ': ' || workflow_release.reason, 4096)
    WHERE r.id IN (SELECT h.id FROM workflow_run h WHERE h.status = 'leased' AND h.leased_by = workflow_release.worker ORDER BY h.id FOR NO KEY UPDATE);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$fn$;
COMMENT ON FUNCTION workflow_release(text, text, text) IS
    'Takes a worker''s leases away at once, so that others may have its runs; what it still reports is refused. The attempts stay charged. Returns how many.';

CREATE FUNCTION workflow_edit(id uuid, run_at timestamptz, priority integer, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    was    workflow_run;
    before text;
BEGIN
    PERFORM workflow_behalf(workflow_edit.on_behalf_of, 'workflow_edit(uuid, timestamptz, integer, text)'::regprocedure);
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
    before := workflow_advance('on');
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    SELECT was.id, 'edited', workflow_actor(), was.attempt, was.lease_no,
           jsonb_build_object('run_at_was', was.run_at, 'priority_was', was.priority, 'statement', left(current_query(), 1000));
    PERFORM workflow_advance(before);
    RETURN NULL;
END
$fn$;

CREATE FUNCTION workflow_reschedule(id uuid, run_at timestamptz, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE sql SET search_path FROM CURRENT AS $fn$
    SELECT coalesce(workflow_edit(workflow_reschedule.id, workflow_reschedule.run_at, NULL, on_behalf_of),
                    'due ' || coalesce(to_char(workflow_reschedule.run_at, 'YYYY-MM-DD HH24:MI:SS TZ'), workflow_reschedule.run_at::text))
$fn$;
COMMENT ON FUNCTION workflow_reschedule(uuid, timestamptz, text) IS 'Has a pending run be due at another time. Answers due …, too late: <status>, or not found.';

CREATE FUNCTION workflow_prioritize(id uuid, priority integer, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE sql SET search_path FROM CURRENT AS $fn$
    SELECT coalesce(workflow_edit(workflow_prioritize.id, NULL, workflow_prioritize.priority, on_behalf_of), 'priority ' || workflow_prioritize.priority)
$fn$;
COMMENT ON FUNCTION workflow_prioritize(uuid, integer, text) IS 'Has a pending run go first, or last: -100 to 100. It lines up behind those of that priority which are due. Answers priority …, too late: <status>, or not found.';

CREATE FUNCTION process_task_assign(task uuid, assignee text, version bigint DEFAULT NULL, by text DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    was  user_task;
    t    user_task;
    last bigint;
    before text;
BEGIN
    PERFORM workflow_behalf(process_task_assign.on_behalf_of, 'process_task_assign(uuid, text, bigint, text, text)'::regprocedure);
    IF process_task_assign.assignee !~ '\S' OR process_task_assign.by !~ '\S' THEN
        RAISE EXCEPTION 'process_task_assign: a name is empty'
            USING ERRCODE = 'check_violation', HINT = 'Name a person; NULL as assignee releases the task.';
    END IF;
    PERFORM FROM process_instance i WHERE i.id = (SELECT u.instance_id FROM user_task u WHERE u.id = task) FOR NO KEY UPDATE; -- before the task, as all do
    SELECT * INTO was FROM user_task u WHERE u.id = task FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    ELSIF was.state <> 'open' THEN
        RETURN 'too late: ' || was.state;
    ELSIF process_task_assign.version <> was.version
       OR process_task_assign.version IS NULL AND was.assignee NOT IN (coalesce(process_task_assign.assignee, ''), coalesce(process_task_assign.by, '')) THEN
        RETURN format('conflict: assigned to %s, version %s', coalesce(was.assignee, 'nobody'), was.version);
    ELSIF was.assignee IS NOT DISTINCT FROM process_task_assign.assignee THEN
        RETURN coalesce('assigned to ' || was.assignee, 'released'); -- as it was
    END IF;
    before := workflow_advance('on');
    UPDATE user_task u SET assignee = process_task_assign.assignee, version = u.version + 1 WHERE u.id = task RETURNING u.* INTO t;
    UPDATE process_instance i SET version = i.version + 1, updated_at = now() WHERE i.id = t.instance_id RETURNING i.version INTO last;
    INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
    VALUES (t.instance_id, t.token_id, CASE WHEN t.assignee IS NULL THEN 'task.released' WHEN was.assignee IS NULL THEN 'task.claimed' ELSE 'task.assigned' END, t.node, last,
            jsonb_build_object('by', coalesce(process_task_assign.by, workflow_actor()), 'actor', workflow_actor(), 'assignee', t.assignee, 'version', t.version));
    PERFORM workflow_advance(before);
    RETURN coalesce('assigned to ' || t.assignee, 'released');
END
$fn$;
COMMENT ON FUNCTION process_task_assign(uuid, text, bigint, text, text) IS
    'Claims a task, or releases it; with the version that was seen, also takes it from somebody. by says who does that, in the caller''s words; without, it is the role and application, which is recorded in any case. Answers assigned to …, released, conflict: …, too late: …, or not found.';

CREATE FUNCTION process_correct(instance uuid, node text, value jsonb, reason text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    i      process_instance;
    before text;
BEGIN
    PERFORM workflow_behalf(process_correct.on_behalf_of, 'process_correct(uuid, text, jsonb, text, text)'::regprocedure);
    SELECT * INTO i FROM process_instance p WHERE p.id = process_correct.instance FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    ELSIF i.completed_at IS NOT NULL THEN
        RETURN 'too late: ' || i.status;
    END IF;
    IF NOT EXISTS (SELECT FROM process_node n WHERE n.process_definition_id = i.process_definition_id
                   AND n.node = process_correct.node AND n.definition ?| ARRAY['do', 'human', 'call', 'each', 'await', 'wait']) THEN
        RAISE EXCEPTION 'process_correct: node % has no result in this process', quote_literal(process_correct.node)
            USING ERRCODE = 'check_violation', HINT = 'Name a step, task, call, list or message of it: SELECT node FROM process_node.';
    END IF;
    IF jsonb_path_exists(process_correct.value, 'strict $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))') THEN
        RAISE EXCEPTION 'process_correct: a number of the value is beyond ±1e308'
            USING ERRCODE = 'check_violation', HINT = 'Round it, or give it as a text.';
    END IF;
    before := workflow_advance('on');
    INSERT INTO process_correction (instance_id, node, value, reason)
    VALUES (process_correct.instance, process_correct.node, coalesce(process_correct.value, 'null'), coalesce(process_correct.reason, ''));
    UPDATE process_instance p SET corrected = true, version = p.version + 1, updated_at = now() WHERE p.id = i.id;
    INSERT INTO process_event (instance_id, event_type, node, version, data)
    VALUES (i.id, 'fact.corrected', process_correct.node, i.version + 1, jsonb_build_object('reason', process_correct.reason,
        'actor', workflow_actor()));
    PERFORM workflow_advance(before);
    RETURN 'corrected';
END
$fn$;
COMMENT ON FUNCTION process_correct(uuid, text, jsonb, text, text) IS
    'Says what the result of a node is from now on, and why; the incident that it has caused is retried afterwards. Answers corrected, too late: …, or not found.';

CREATE FUNCTION process_pause(id uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    ids    uuid[] := process_lock_called(process_pause.id);
    before text;
BEGIN
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
    UPDATE workflow_run r SET held_at = now(), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at IS NULL
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    RETURN 'paused';
END
$fn$;
COMMENT ON FUNCTION process_pause(uuid, text) IS 'Pauses an instance, and what it has called. Answers paused, already paused, too late: …, or not found.';

CREATE FUNCTION process_resume(id uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    ids   uuid[] := process_lock_called(process_resume.id);
    since timestamptz := (SELECT i.paused_at FROM process_instance i WHERE i.id = process_resume.id);
    before text;
BEGIN
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
    UPDATE workflow_run r SET held_at = NULL, run_at = greatest(r.run_at, now()), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at = since
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    RETURN 'resumed';
END
$fn$;
COMMENT ON FUNCTION process_resume(uuid, text) IS 'Resumes a paused instance, and what was paused with it. Answers resumed, not paused, too late: …, or not found.';

-- What goes out once more does so because somebody wanted it.
CREATE TABLE outbox_replayed (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text        NOT NULL DEFAULT workflow_actor(),
    sink       text,
    since      timestamptz,
    until      timestamptz,
    types      text[],
    events     bigint      NOT NULL
);
COMMENT ON TABLE  outbox_replayed IS 'The calls of outbox_replay and outbox_replay_parked, one row each: who had which events published again.';
COMMENT ON COLUMN outbox_replayed.sink IS 'To which sink; null: to all.';
COMMENT ON COLUMN outbox_replayed.since IS 'The span of time in which the events were appended, to until; null: it was what was parked.';
COMMENT ON COLUMN outbox_replayed.types IS 'As the caller gave them: types, or prefixes; none: all.';
COMMENT ON COLUMN outbox_replayed.events IS 'How many events it was.';
CREATE TRIGGER outbox_replayed_insert_guard BEFORE INSERT ON outbox_replayed
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT outbox_replay(…) or outbox_replay_parked(…) notes itself.');
CREATE TRIGGER outbox_replayed_guard BEFORE UPDATE OR DELETE ON outbox_replayed
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('What has happened stays as it was told.', 'recorded');
CREATE TRIGGER outbox_replayed_kept BEFORE TRUNCATE ON outbox_replayed
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('What has happened stays as it was told.', 'recorded');

CREATE FUNCTION outbox_replay(since timestamptz, until timestamptz DEFAULT 'infinity', types text[] DEFAULT '{}', sink text DEFAULT NULL, on_behalf_of text DEFAULT NULL)
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
    before := workflow_advance('on');
    INSERT INTO outbox_replayed (sink, since, until, types, events) VALUES (outbox_replay.sink, outbox_replay.since, outbox_replay.until, outbox_replay.types, n);
    PERFORM workflow_advance(before);
    RETURN n;
END
$fn$;
COMMENT ON FUNCTION outbox_replay(timestamptz, timestamptz, text[], text, text) IS
    'Has events published again that were appended in a span of time: to all sinks, or to one. Returns how many.';

CREATE FUNCTION outbox_replay_parked(sink text DEFAULT NULL, types text[] DEFAULT '{}', on_behalf_of text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    n      bigint;
    before text;
BEGIN
    PERFORM workflow_behalf(outbox_replay_parked.on_behalf_of, 'outbox_replay_parked(text, text[], text)'::regprocedure);
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
    before := workflow_advance('on');
    INSERT INTO outbox_replayed (sink, types, events) VALUES (outbox_replay_parked.sink, outbox_replay_parked.types, n);
    PERFORM workflow_advance(before);
    RETURN n;
END
$fn$;
COMMENT ON FUNCTION outbox_replay_parked(text, text[], text) IS
    'Has parked events tried again: of all sinks or of one, of all types or of some. Returns how many.';


DO $do$
DECLARE
    f record;
    g text;
BEGIN
    FOR f IN
        SELECT p.oid::regprocedure AS name, k."to"
        FROM jsonb_to_recordset(current_setting('workflow.kept')::jsonb) AS k (name text, "to" jsonb)
        JOIN pg_proc p ON p.proname = k.name AND p.oid IN (SELECT workflow_functions())
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f.name);
        FOR g IN SELECT jsonb_array_elements_text(f."to") LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f.name, g);
        END LOOP;
    END LOOP;
END
$do$;

-- ---------------------------------------------------------------------------------
-- What operators look at. A time may be infinite, written while triggers were off: Postgres 15 to
-- 16 refuse to subtract it, and nothing could be seen any more.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_age(at timestamptz, until timestamptz DEFAULT now()) RETURNS interval
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN at IS NOT NULL THEN until - greatest(least(at, until + interval '1000000 days'), until - interval '1000000 days') END;
COMMENT ON FUNCTION workflow_age(timestamptz, timestamptz) IS
    'How long before until, which is finite, a time is; negative: after it. What is infinite, or further away, is a million days away.';

CREATE OR REPLACE VIEW workflow_live_worker AS
    SELECT w.id, w.name, w.prefixes, w.handlers, w.steps, w.concurrency, w.running, w.version, w.host, w.pid, w.started_at, w.seen_at, workflow_age(w.seen_at) AS unseen
    FROM workflow_worker w
    WHERE w.seen_at > now() - interval '45 seconds';

CREATE OR REPLACE VIEW workflow_waiting AS
    SELECT l.type, sum(l.due)::bigint AS due, bool_or(l.due >= 1000) AS or_more,
           workflow_age(min(l.first_run_at) FILTER (WHERE l.due > 0)) AS oldest,
           min(l.first_run_at) FILTER (WHERE l.due = 0) AS next_run_at,
           count(*) AS lanes, bool_or(l.steps) AS steps,
           (SELECT string_agg(w.name, ', ' ORDER BY w.name)
            FROM workflow_live_worker w
            WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS p WHERE workflow_covers(p, l.type)) AND (w.steps OR NOT bool_or(l.steps))) AS covered_by,
           (SELECT p.prefix FROM workflow_pause p WHERE p.resumed_at IS NULL AND workflow_covers(p.prefix, l.type) LIMIT 1) AS paused_by
    FROM workflow_lane l
    GROUP BY l.type;

CREATE OR REPLACE VIEW workflow_working AS
    SELECT r.id, r.type, r.leased_by, workflow_age(r.started_at) AS since, r.attempt, r.max_attempts, r.lease_until, r.deadline_at,
           r.lease_until < now() AS expired, r.token_id IS NOT NULL AS step
    FROM workflow_run r
    WHERE r.status = 'leased'
    ORDER BY r.started_at;

-- Without what was parked in outbox_delivery alone, too. (IS NOT TRUE, not IS NULL: of that the planner
-- believes that hardly any row is so, and sorts all there are to get the first.)
CREATE OR REPLACE VIEW outbox_lag AS
    SELECT s.name AS sink, n.open,
           (SELECT workflow_age(min(o.created_at))
            FROM outbox_lane l
            CROSS JOIN LATERAL (
                SELECT e.created_at FROM outbox_event e
                WHERE e.published_at IS NULL AND e.parked_at IS NULL AND e.lane = l.lane AND e.id > l.floor
                    AND outbox_wants(s.types, e.event_type)
                    AND (s.name = ANY (e.delivered_to)) IS NOT TRUE AND (s.name = ANY (e.parked_by)) IS NOT TRUE
                    AND (SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE
                ORDER BY e.lane, e.id LIMIT 1) o
            WHERE l.sink = s.name) AS oldest,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NULL LIMIT 1000) AS x) AS failing,
           (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.sink = s.name AND d.parked_at IS NOT NULL LIMIT 1000) AS x) AS parked,
           CASE WHEN s.paused_until > now() THEN s.paused_until END AS paused_until,
           CASE WHEN s.last_error IS NULL OR has_table_privilege('workflow_history'::regclass, 'SELECT') THEN s.last_error ELSE '(hidden)' END AS last_error, workflow_age(s.seen_at) AS unserved
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
                      AND (SELECT p.parked_at IS NOT NULL FROM outbox_delivery p WHERE p.event_id = e.id AND p.sink = s.name) IS NOT TRUE
                  ORDER BY e.lane, e.id LIMIT 1000) o
              WHERE l.sink = s.name LIMIT 1000) AS x) n;

CREATE OR REPLACE VIEW process_duration AS
    SELECT d.name, d.version, count(*) AS completed, avg(i.completed_at - i.started_at) FILTER (WHERE isfinite(i.completed_at) AND isfinite(i.started_at)) AS average
    FROM (SELECT * FROM process_instance WHERE completed_at IS NOT NULL ORDER BY completed_at DESC LIMIT 1000) i
    JOIN process_definition d ON d.id = i.process_definition_id
    WHERE i.status = 'COMPLETED'
    GROUP BY d.name, d.version;

CREATE OR REPLACE VIEW workflow_rate AS
    SELECT s.status, round(count(r.finished_at) / greatest(extract(epoch FROM workflow_age(min(min(r.finished_at)) OVER (PARTITION BY s.status))), 1), 1) AS per_second,
           count(r.finished_at) AS of_runs, workflow_age(max(r.finished_at)) AS latest, r.type
    FROM unnest('{succeeded,failed,cancelled}'::text[]) AS s (status)
    LEFT JOIN LATERAL (
        SELECT r.finished_at, r.type FROM workflow_run r
        WHERE r.status = s.status COLLATE "C" AND r.finished_at IS NOT NULL AND r.token_id IS NULL
          AND r.finished_at > now() - interval '5 minutes' AND r.finished_at < 'infinity'
        ORDER BY r.finished_at DESC LIMIT 1000) r ON true
    GROUP BY s.status, r.type;
COMMENT ON VIEW   workflow_rate IS 'How many plain runs end in a second, by type: by the last thousand of each kind, of the last five minutes. The sum over the types is the rate of all.';
COMMENT ON COLUMN workflow_rate.type IS 'Null: no run of this kind has ended.';

-- One row for each prefix that live workers are bound to, or that is paused.
CREATE VIEW workflow_prefix AS
    WITH prefix AS (
        SELECT p AS prefix FROM workflow_live_worker w CROSS JOIN unnest(w.prefixes) AS p
        UNION
        SELECT p.prefix FROM workflow_pause p WHERE p.resumed_at IS NULL
    ), waiting AS MATERIALIZED (
        SELECT * FROM workflow_waiting
    ), running AS MATERIALIZED (
        SELECT r.type, count(*) AS n FROM (SELECT r.type FROM workflow_run r WHERE r.status = 'leased' LIMIT 10000) r GROUP BY r.type
    ), failing AS MATERIALIZED (
        SELECT f.type, sum(f.failed)::bigint AS n FROM workflow_failing f GROUP BY f.type
    ), rate AS MATERIALIZED (
        SELECT r.type, r.per_second FROM workflow_rate r WHERE r.status = 'succeeded' AND r.type IS NOT NULL
    )
    SELECT x.prefix, w.types, w.due, w.or_more, w.oldest,
           (SELECT coalesce(sum(r.n), 0)::bigint FROM running r WHERE workflow_covers(x.prefix, r.type)) AS running,
           (SELECT coalesce(sum(f.n), 0)::bigint FROM failing f WHERE workflow_covers(x.prefix, f.type)) AS failed,
           (SELECT coalesce(sum(r.per_second), 0) FROM rate r WHERE workflow_covers(x.prefix, r.type)) AS succeeded_per_second,
           l.workers, l.slots, l.covered_by,
           (SELECT p.prefix FROM workflow_pause p WHERE p.resumed_at IS NULL AND workflow_covers(p.prefix, x.prefix) LIMIT 1) AS paused_by,
           (SELECT string_agg(p.prefix, ', ' ORDER BY p.prefix) FROM workflow_pause p
            WHERE p.resumed_at IS NULL AND p.prefix <> x.prefix AND workflow_covers(x.prefix, p.prefix)) AS paused_within
    FROM prefix x
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE w.due > 0) AS types, coalesce(sum(w.due), 0)::bigint AS due, coalesce(bool_or(w.or_more), false) AS or_more, max(w.oldest) AS oldest
        FROM waiting w WHERE workflow_covers(x.prefix, w.type)) w
    CROSS JOIN LATERAL (
        SELECT count(*) AS workers, sum(l.concurrency) AS slots, string_agg(l.name, ', ' ORDER BY l.name) AS covered_by
        FROM workflow_live_worker l WHERE EXISTS (SELECT FROM unnest(l.prefixes) AS p WHERE workflow_covers(p, x.prefix))) l;
COMMENT ON VIEW   workflow_prefix IS 'How each prefix stands that live workers are bound to, or that is paused.';
COMMENT ON COLUMN workflow_prefix.types IS 'Types of it that have something due.';
COMMENT ON COLUMN workflow_prefix.or_more IS 'A thousand or more are due of a type and priority; they are not counted further.';
COMMENT ON COLUMN workflow_prefix.oldest IS 'For how long the first of them has been due.';
COMMENT ON COLUMN workflow_prefix.running IS 'Runs that are leased, of the first ten thousand.';
COMMENT ON COLUMN workflow_prefix.failed IS 'How many of the last thousand failures are of it.';
COMMENT ON COLUMN workflow_prefix.slots IS 'How many runs these workers execute at once, of all their prefixes.';
COMMENT ON COLUMN workflow_prefix.covered_by IS 'Live workers that cover it; null: nobody will take it.';
COMMENT ON COLUMN workflow_prefix.paused_by IS 'The prefix in workflow_pause that keeps all of it from being leased.';
COMMENT ON COLUMN workflow_prefix.paused_within IS 'What is paused of it.';

CREATE OR REPLACE FUNCTION workflow_why(id uuid) RETURNS text
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
    aside  text;
BEGIN
    SELECT * INTO r FROM workflow_run w WHERE w.id = workflow_why.id;
    IF NOT FOUND THEN
        RETURN 'there is no such run, or retention has removed it';
    END IF;
    tries := r.attempt || ' of ' || r.max_attempts;
    error := coalesce(' after «' || left(r.last_error, 200) || '»', '');
    IF r.deleted_at IS NOT NULL THEN
        RETURN 'deleted ' || workflow_span(workflow_age(r.deleted_at)) || ' ago' || coalesce(': ' || r.delete_reason, '');
    END IF;
    CASE r.status
    WHEN 'succeeded' THEN
        RETURN 'succeeded ' || workflow_span(workflow_age(r.finished_at)) || ' ago, at attempt ' || tries || coalesce(', by ' || r.settled_by, '');
    WHEN 'cancelled' THEN
        RETURN 'cancelled ' || workflow_span(workflow_age(r.finished_at)) || ' ago: ' || coalesce(r.last_error, '');
    WHEN 'failed' THEN
        RETURN 'failed ' || workflow_span(workflow_age(r.finished_at)) || ' ago, at attempt ' || tries || error || CASE
            WHEN r.token_id IS NOT NULL THEN '; it is a step of a process, see SELECT process_why(' || coalesce(
                (SELECT quote_literal(t.instance_id) FROM process_token t WHERE t.id = r.token_id), 'instance') || ')'
            ELSE '; SELECT workflow_retry(' || quote_literal(r.id) || ') tries again' END;
    WHEN 'leased' THEN
        IF r.lease_until IS NULL THEN
            RETURN 'leased by ' || coalesce(r.leased_by, 'nobody') || ' without an end, so it is never taken back: lease_until is null; set lease_until = now(), past the guards if need be';
        ELSIF r.lease_until > clock_timestamp() THEN
            SELECT u.problem || ' for ' || workflow_span(workflow_age(u.since)) || ' (' || coalesce('SQLSTATE ' || nullif(u.sqlstate, '') || ', ', '') || '«' || left(u.message, 200) || '»); '
                || r.leased_by || ' keeps it, and tries again every half a minute: mend what refuses it, or cancel the run'
            INTO aside FROM workflow_unleasable u WHERE u.id = r.id AND u.statement = 'settle';
            IF FOUND THEN
                RETURN aside;
            END IF;
            RETURN 'runs at ' || coalesce(r.leased_by, 'nobody') || ' for ' || workflow_span(workflow_age(r.started_at)) || ', attempt ' || tries
                || '; its lease goes until ' || coalesce(to_char(r.lease_until, 'HH24:MI:SS'), r.lease_until::text) || ', and is extended while that worker lives';
        END IF;
    WHEN 'pending' THEN
    ELSE
        RETURN 'status ' || quote_literal(left(r.status, 40)) || ' does not exist, so nobody takes it: set status = ''pending'', past the guards if need be';
    END CASE;
    SELECT 'set aside for ' || workflow_span(workflow_age(u.since)) || ': ' || u.problem || ' (SQLSTATE ' || u.sqlstate || ', «' || left(u.message, 200) || '»); '
        || coalesce('set ' || u.fix || ', then it is tried again at once', 'it is tried again when its row changes, and every ten minutes')
    INTO aside FROM workflow_unleasable u WHERE u.id = r.id;
    IF FOUND THEN
        RETURN aside;
    END IF;

    SELECT string_agg(w.name, ', ' ORDER BY w.name), bool_or(EXISTS (SELECT FROM unnest(w.handlers) AS h WHERE workflow_covers(h, r.type))),
           bool_and(w.running >= w.concurrency)
    INTO names, able, busy
    FROM workflow_live_worker w
    WHERE EXISTS (SELECT FROM unnest(w.prefixes) AS x WHERE workflow_covers(x, r.type)) AND (w.steps OR r.token_id IS NULL);

    IF r.status = 'leased' THEN
        RETURN 'its lease at ' || coalesce(r.leased_by, 'nobody') || ' ran out ' || workflow_span(workflow_age(r.lease_until, clock_timestamp())) || ' ago: '
            || CASE WHEN NOT EXISTS (SELECT FROM workflow_live_worker) THEN 'no worker lives to take it back; start one that covers ' || r.type
                    WHEN names IS NULL THEN 'it will be taken back, but no live worker covers ' || r.type
                    ELSE 'it will be taken back, for ' || names END;
    END IF;
    IF r.held_at IS NOT NULL THEN
        RETURN coalesce((SELECT 'its process is paused since ' || coalesce(to_char(r.held_at, 'YYYY-MM-DD HH24:MI'), r.held_at::text) || ': SELECT process_resume(' || quote_literal(process_paused_with(i.id)) || ')'
                         FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE t.id = r.token_id AND i.paused_at = r.held_at),
                        'held since ' || coalesce(to_char(r.held_at, 'YYYY-MM-DD HH24:MI'), r.held_at::text) || ': UPDATE workflow_run SET held_at = NULL WHERE id = ' || quote_literal(r.id));
    END IF;
    SELECT * INTO p FROM workflow_pause x WHERE x.resumed_at IS NULL AND workflow_covers(x.prefix, r.type) ORDER BY x.paused_at LIMIT 1;
    IF FOUND THEN
        RETURN 'prefix ' || p.prefix || ' is paused since ' || coalesce(to_char(p.paused_at, 'YYYY-MM-DD HH24:MI'), p.paused_at::text) || ' by ' || p.paused_by || ': ' || p.reason
            || '; SELECT workflow_resume(' || quote_literal(p.prefix) || ')';
    END IF;
    IF r.run_at > clock_timestamp() THEN
        RETURN 'due in ' || workflow_span(-workflow_age(r.run_at, clock_timestamp())) || CASE
            WHEN r.attempt > 0 THEN ': attempt ' || r.attempt::bigint + 1 || ' of ' || r.max_attempts || error
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
    RETURN 'due for ' || workflow_span(workflow_age(r.run_at, clock_timestamp())) || ': ' || CASE
        WHEN r.suspect THEN 'its last lease ran out, so it is watched: such runs are started one at a time by ' || names
        WHEN ahead > 0 THEN ahead || ' runs of higher priority go first at ' || names
        WHEN busy THEN names || ' cover it, and have no slot free'
        ELSE names || ' cover it, and will take it in its turn' END;
END
$fn$;

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
            SELECT h.reason FROM process_state_history h WHERE h.instance_id = i.id AND h.to_status = i.status ORDER BY h.id DESC LIMIT 1), '');
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

-- What is ours, as in 0006.
CREATE OR REPLACE FUNCTION workflow_relations() RETURNS SETOF regclass
LANGUAGE sql STABLE SET search_path FROM CURRENT
BEGIN ATOMIC
    SELECT to_regclass(n) FROM unnest('{workflow_schema, workflow_run, workflow_history, workflow_worker, workflow_pause, workflow_override, workflow_open,
    workflow_event, workflow_live_worker, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
    workflow_overview, workflow_rate, workflow_prefix, workflow_blocker, workflow_bloat, outbox_event, outbox_sink,
    outbox_lane, outbox_delivery, outbox_lag, process_definition, process_instance, process_token, process_state_history,
    process_event, process_correction, parallel_group, parallel_join, join_arrival, each_progress, message,
    message_wait, user_task, incident, compensation_record, token, activity_instance, timer,
    process_node, process_starting, process_without_mover, process_miscounted, process_undead, process_untimed, process_misjoined,
    process_misundone, process_unearned, process_mismatched, process_misrecorded, process_stuck, process_duration, process_rate,
    process_overview, workflow_binding, workflow_console_role, workflow_set_aside, workflow_stalled, workflow_unleasable, outbox_aggregate, outbox_replayed, message_key}'::text[]) AS n
    WHERE to_regclass(n) IS NOT NULL;
END;

CREATE OR REPLACE FUNCTION workflow_functions() RETURNS SETOF regprocedure
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.oid::regprocedure
    FROM pg_proc p
    WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND p.prokind = 'f'
      AND p.proname = ANY ('{workflow_uuid, workflow_run_refuse_insert, workflow_run_refuse_update, workflow_run_refuse_input, workflow_run_refuse_delete, workflow_run_tidy_row, workflow_run_refuse_undelete,
        workflow_event_id, workflow_run_audit_row, workflow_enqueue_once, workflow_enqueue, workflow_cancel, workflow_retry, workflow_delete,
        workflow_run_wake, workflow_covers, workflow_span, workflow_why, workflow_pause, workflow_resume, workflow_redrive,
        workflow_release, workflow_edit, workflow_reschedule, workflow_prioritize, workflow_relations, workflow_functions, outbox_event_keep,
        outbox_wants, outbox_emit, outbox_replay, outbox_replay_parked, outbox_run_event, process_definition_guard, process_steps_go,
        process_facts_go, process_step_cut_off, process_task_assign, process_task_finish, process_scopes, process_undoes, process_correct,
        process_instance_guard, process_instance_marked, process_lock_called, process_pause, process_paused_with, process_resume, process_why,
        workflow_role, workflow_behalf, workflow_actor, workflow_at_work, workflow_overrides, workflow_guard, workflow_console, workflow_for_others,
        workflow_age, workflow_bound_prefixes, workflow_binding_of, workflow_passing, workflow_try, workflow_take_back, workflow_works, workflow_isolate, workflow_put_back,
        workflow_try_again_v1, workflow_lanes_v1, workflow_narrow, workflow_lanes, workflow_stalled_types, workflow_due, workflow_lease_v1,
        workflow_lease_refused_v1, workflow_extend_v1, workflow_held_v1, workflow_locked_v1, workflow_unrecorded, workflow_as_worker, workflow_worker_name, workflow_settle_v1,
        workflow_unsettled_v1, workflow_recorded_v1, workflow_expired, workflow_take_back_v1, workflow_take_back_refused_v1, workflow_stalled_v1, workflow_give_back_v1, workflow_present_v1,
        workflow_absent_v1, workflow_run_refuse_outcome, workflow_document_problem, workflow_refuse_document, workflow_earlier, workflow_advance, workflow_run_refuse_reserved,
        outbox_event_door, outbox_append_v1, outbox_setting, process_hold_v1}'::text[]);
END;

REVOKE ALL ON FUNCTION workflow_age(timestamptz, timestamptz) FROM PUBLIC;

-- Whoever owns what was there owns what is new: functions with the owner's rights need it.
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

-- What the guards, defaults and views above ask now, whoever makes the statement: until `workflowctl roles` runs
-- again, those who had anything of ours go on to have what they had.
DO $do$
DECLARE
    holder text;
BEGIN
    FOR holder IN
        SELECT DISTINCT a.grantee::regrole::text
        FROM (SELECT c.relacl AS acl, c.relowner AS owner FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours
              UNION ALL
              SELECT t.attacl, c.relowner FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours JOIN pg_attribute t ON t.attrelid = c.oid
              UNION ALL
              SELECT p.proacl, p.proowner FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours) o
        CROSS JOIN LATERAL aclexplode(o.acl) a
        WHERE a.grantee NOT IN (0, o.owner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_role(), workflow_actor(), workflow_at_work(), workflow_age(timestamptz, timestamptz) TO %s', holder);
    END LOOP;
END
$do$;
