-- simple-workflow 0004: what people and programs call by SQL.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- What workflow_enqueue does, also telling whether the run was there before.
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
    OUT run         uuid,
    OUT existing    boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    given uuid := coalesce(workflow_enqueue_once.id, workflow_uuid());
    other workflow_run;
BEGIN
    -- It runs with the owner's rights. What acts on processes is for those who may hold runs.
    IF workflow_enqueue_once.type ^@ 'graph.' AND workflow_enqueue_once.type NOT IN ('graph.start.v1', 'graph.message.v1', 'graph.signal.v1', 'graph.complete_task.v1')
       AND NOT has_column_privilege(session_user, 'workflow_run'::regclass, 'held_at', 'UPDATE') THEN
        RAISE EXCEPTION 'workflow_enqueue: % may not enqueue %', session_user, quote_literal(left(workflow_enqueue_once.type, 120))
            USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are for operators: see docs/roles.md.';
    END IF;
    FOR round IN 1..10 LOOP
        INSERT INTO workflow_run (id, type, payload, run_at, priority, max_attempts, idempotency_key, metadata, tenant_id)
        VALUES (given, workflow_enqueue_once.type, workflow_enqueue_once.payload,
                coalesce(workflow_enqueue_once.run_at, now()) + coalesce(workflow_enqueue_once.delay, '0'),
                workflow_enqueue_once.priority, workflow_enqueue_once.max_attempts,
                workflow_enqueue_once.idempotency_key, workflow_enqueue_once.metadata, workflow_enqueue_once.tenant)
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
COMMENT ON FUNCTION workflow_enqueue_once(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text) IS
    'workflow_enqueue for programs: returns the run and whether it existed already.';

-- SELECT workflow_enqueue('billing.invoice_charge.v1', '{"invoice": 7}', delay => '5 minutes');
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
    tenant          text        DEFAULT NULL
) RETURNS uuid
LANGUAGE sql
RETURN (workflow_enqueue_once(type, payload, run_at, delay, priority, max_attempts, idempotency_key, metadata, id, tenant)).run;
COMMENT ON FUNCTION workflow_enqueue(text, jsonb, timestamptz, interval, integer, integer, text, jsonb, uuid, text) IS
    'Enqueues a run and returns its id. The same idempotency key with the same type, payload and tenant returns the run that exists; with others it is an error that names both.';

-- Final: the lease token goes with the same statement, so nothing a worker reports
-- afterwards is recorded.
CREATE FUNCTION workflow_cancel(id uuid, reason text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    seen text;
BEGIN
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
COMMENT ON FUNCTION workflow_cancel(uuid, text) IS
    'Cancels a pending or leased run for good. Answers cancelled, too late: <status>, or not found.';

-- Raises max_attempts where needed and never lowers attempt: history stays true.
CREATE FUNCTION workflow_retry(id uuid, attempts integer DEFAULT 1) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before  text := coalesce(current_setting('workflow.retry', true), '');
    retried boolean;
    seen    text;
BEGIN
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
COMMENT ON FUNCTION workflow_retry(uuid, integer) IS
    'Gives a failed run further attempts, now. Answers pending, not failed: <status>, or not found.';

CREATE FUNCTION workflow_delete(id uuid, reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
BEGIN
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
COMMENT ON FUNCTION workflow_delete(uuid, text) IS
    'Soft-deletes a run: never leased again, key free. A leased run is cancelled with it. Answers deleted, already deleted, or not found.';

-- Wake-up: a hint to idle workers, on top of polling. While one transaction is on its way
-- to notify, others that come within the same hundredth of a second skip it, because NOTIFY
-- makes commits queue up; one that stays open for long keeps nobody else from notifying. A
-- hint that is lost costs one poll interval. ALTER DATABASE app SET workflow.wakeup = off ends it.
CREATE FUNCTION workflow_run_wake() RETURNS trigger
LANGUAGE plpgsql AS $fn$
BEGIN
    -- Once in a transaction: each lock stays until its end.
    IF pg_try_advisory_xact_lock(1685003, (extract(epoch FROM clock_timestamp()) * 100)::bigint::bit(32)::integer) THEN
        PERFORM pg_notify('workflow_run', ''), set_config('workflow.woken', 'on', true);
    END IF;
    RETURN NULL;
END
$fn$;

CREATE TRIGGER workflow_run_wakeup AFTER INSERT ON workflow_run
    FOR EACH STATEMENT WHEN (coalesce(current_setting('workflow.wakeup', true), '') <> 'off'
        AND coalesce(current_setting('workflow.woken', true), '') <> 'on')
    EXECUTE FUNCTION workflow_run_wake();
