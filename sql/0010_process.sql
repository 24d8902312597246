-- simple-workflow 0010: what only the engine may enqueue, and walks that end.
--
--   workflow_run_reserved_guard   refuses runs that only the engine may enqueue, in words
--   workflow_enqueue_once         the same for its callers, whatever they have set
--   process_step_cut_off          tells a process only of what is its own
--   process_lock_called, process_paused_with, process_scopes   end on any data

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- Commands. Whoever may enqueue may use graph.start.v1, message, signal and complete_task; operators
-- cancel and retry, too. All else that begins with graph. is the engine's, and so are token_id, node,
-- and parent in the payload of a start: that a token waits for the instance.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_run_refuse_reserved() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    IF coalesce(current_setting('workflow.override', true), '') ~ '\S' THEN
        IF workflow_overrides('workflow_run', 'INSERT', jsonb_build_object('id', NEW.id)) THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'workflow_run: %', CASE
            WHEN NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL THEN 'a run of a process, with token_id or node, is inserted by the engine alone'
            WHEN NEW.type = 'graph.start.v1' THEN 'parent in the payload of graph.start.v1 is set by the engine alone'
            ELSE format('%L is enqueued by the engine alone', left(NEW.type, 120)) END
        USING ERRCODE = 'insufficient_privilege', TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_reserved_guard',
              HINT = CASE WHEN NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL THEN 'Leave them out: a process enqueues its steps itself.'
                          WHEN NEW.type = 'graph.start.v1' THEN 'Leave parent out: only a call node of a process starts an instance that it waits for.'
                          ELSE 'Commands to processes are graph.start.v1, message, signal, complete_task, cancel and retry: see docs/processes.md.' END
                     || ' The owner can, on record: SET LOCAL workflow.override = ''why''.';
END
$fn$;
REVOKE ALL ON FUNCTION workflow_run_refuse_reserved() FROM PUBLIC;

-- Its condition is workflow_at_work(), written out: so that a row which is fine calls no function, and
-- who inserts one needs no right to execute any. Workers from before this migration bring messages and
-- signals without saying that they are the engine: there its role is enough, and what such a run names
-- is checked when it is carried out.
CREATE TRIGGER workflow_run_reserved_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL
        OR NEW.type ^@ 'graph.' AND (NEW.type <> ALL ('{graph.start.v1, graph.message.v1, graph.signal.v1, graph.complete_task.v1, graph.cancel.v1, graph.retry.v1}'::text[])
                                     OR NEW.type = 'graph.start.v1' AND NEW.payload ? 'parent'))
        AND NOT (has_table_privilege('process_token'::regclass, 'UPDATE')
                 AND (coalesce(current_setting('workflow.advance', true), '') = 'on'
                      OR NEW.type = 'graph.arrive.v1' AND NEW.token_id IS NOT NULL AND NEW.payload ?| '{message,signal}')))
    EXECUTE FUNCTION workflow_run_refuse_reserved();

CREATE OR REPLACE FUNCTION workflow_enqueue_once(
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
           AND NOT has_column_privilege(workflow_role(), 'workflow_run'::regclass, 'held_at', 'UPDATE') THEN
            RAISE EXCEPTION 'workflow_enqueue: % may not enqueue %', workflow_role(), quote_literal(workflow_enqueue_once.type)
                USING ERRCODE = 'insufficient_privilege', HINT = 'Commands to processes are for operators: see docs/roles.md.';
        END IF;
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

-- Somebody other than the engine has cancelled or deleted a step, or the start of an instance that a token
-- waits for: its process is told, by a run. Without a boundary timer a token goes on as if it had none. A start
-- is a token's own if both ends agree; others, from before parent was refused, are nobody's.
CREATE OR REPLACE FUNCTION process_step_cut_off() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
    parent jsonb := NEW.payload->'parent';
BEGIN
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard of what is inserted here
    INSERT INTO workflow_run (type, payload, priority, tenant_id)
    SELECT 'graph.cut_off.v1', jsonb_build_object('token', t.id, 'visit', t.version, 'reason', coalesce(nullif(NEW.delete_reason, ''), NEW.last_error, 'cancelled'))
               || CASE WHEN NEW.token_id IS NULL THEN '{"code": "child_not_started"}' ELSE '{}' END::jsonb,
           NEW.priority, NEW.tenant_id
    FROM process_token t
    JOIN process_instance i ON i.id = t.instance_id
    WHERE t.id = coalesce(NEW.token_id, CASE WHEN parent->>'token' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN (parent->>'token')::uuid END)
      AND t.state IN ('Created', 'Ready', 'Waiting')
      AND (NEW.token_id IS NOT NULL
           OR t.state = 'Waiting' AND t.version::text = parent->>'visit' AND t.instance_id::text = parent->>'instance' AND (i.depth + 1)::text = parent->>'depth'
              AND NEW.tenant_id IS NOT DISTINCT FROM i.tenant_id AND NOT NEW.payload ?| '{id,key,tenant}'
              AND EXISTS (SELECT FROM process_node n
                          WHERE n.process_definition_id = i.process_definition_id AND n.node = t.node COLLATE "C" AND n.definition->'call'->>'process' = NEW.payload->>'process')
              AND NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = t.id AND c.parent_visit = t.version));
    PERFORM set_config('workflow.advance', before, true);
    RETURN NULL;
END
$fn$;

CREATE OR REPLACE VIEW process_starting AS -- by index: those that wait, and those that run; whatever somebody has once written there
    SELECT s.run_id, CASE WHEN s.token ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN s.token::uuid END AS token_id,
           CASE WHEN s.instance ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN s.instance::uuid END AS instance_id
    FROM (SELECT r.id AS run_id, r.payload->'parent'->>'token' AS token, r.payload->'parent'->>'instance' AS instance
          FROM workflow_open r
          WHERE r.suspect IN (false, true) AND r.type = 'graph.start.v1' AND r.payload ? 'parent'
          UNION ALL
          SELECT r.id, r.payload->'parent'->>'token', r.payload->'parent'->>'instance'
          FROM workflow_run r
          WHERE r.status = 'leased' AND r.type = 'graph.start.v1' AND r.payload ? 'parent') s;

-- ---------------------------------------------------------------------------------
-- Walks over parents and groups. The engine makes no rings; these end if there is one all the same.
-- ---------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION process_lock_called(id uuid) RETURNS uuid[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    held uuid[] := '{}';
    tree uuid[];
BEGIN
    LOOP
        WITH RECURSIVE called AS (
            SELECT i.id, i.completed_at FROM process_instance i WHERE i.id = process_lock_called.id
            UNION -- and not ALL: a ring would have no end
            SELECT c.id, c.completed_at FROM called p JOIN process_instance c ON c.parent_process_instance_id = p.id
        )
        SELECT coalesce(array_agg(c.id), '{}') INTO tree FROM called c WHERE c.completed_at IS NULL OR c.id = process_lock_called.id;
        EXIT WHEN tree <@ held;
        PERFORM i.id FROM process_instance i WHERE i.id = ANY (tree) ORDER BY i.id FOR NO KEY UPDATE;
        held := tree;
    END LOOP;
    RETURN held;
END
$fn$;

-- A hundred is as deep as processes may call each other.
CREATE OR REPLACE FUNCTION process_paused_with(id uuid) RETURNS uuid
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $fn$
    WITH RECURSIVE up AS (
        SELECT process_paused_with.id, 0 AS place
        UNION ALL
        SELECT elder.id, up.place + 1
        FROM up
        JOIN process_instance own ON own.id = up.id
        JOIN process_instance elder ON elder.id = own.parent_process_instance_id AND elder.paused_at = own.paused_at
        WHERE up.place < 100
    )
    SELECT up.id FROM up ORDER BY up.place DESC LIMIT 1
$fn$;

-- Groups nest without a limit. A walk that comes back to a place where it has been would go on for ever: it
-- leaves a mark after 1, 2, 4, 8 … steps, and ends where it finds it.
CREATE OR REPLACE FUNCTION process_scopes(token uuid) RETURNS uuid[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    scopes uuid[] := '{}';
    at     uuid := (SELECT t.parallel_group_id FROM process_token t WHERE t.id = token);
    host   uuid;
    outer_group uuid;
    mark   uuid;
    steps  bigint := 0;
    next_mark bigint := 1;
BEGIN
    WHILE at IS NOT NULL AND at IS DISTINCT FROM mark LOOP
        steps := steps + 1;
        IF steps = next_mark THEN
            mark := at;
            next_mark := 2 * next_mark;
        END IF;
        SELECT g.parent_group_id, g.host_token_id INTO outer_group, host FROM parallel_group g WHERE g.id = at;
        IF host IS NOT NULL THEN
            scopes := scopes || at;
        END IF;
        at := outer_group;
    END LOOP;
    RETURN scopes;
END
$fn$;

-- A message and those who wait for it meet where their name and key are held: whoever brings either has inserted
-- the key here, and deleted it again. Whoever inserts the same key meanwhile waits for the end of that
-- transaction, as unique indexes have it. So this table is always empty to everybody else, and nobody can hold a key
-- but the engine. (Anybody who can log in can take an advisory lock.)
CREATE UNLOGGED TABLE message_key (hash bigint PRIMARY KEY)
    WITH (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_threshold = 1000000000);
COMMENT ON TABLE message_key IS 'The names and keys, hashed, at which a transaction that is under way brings a message or a wait. To all others it is empty.';

-- A key that somebody has left here by hand stops nobody: it is taken over, and goes.
--
-- Its name has a number because programs of several versions call it: what it takes and does stays as it is.
CREATE FUNCTION process_hold_v1(names text[], keys text[]) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
DECLARE
    mine tid[];
BEGIN
    WITH held AS ( -- in one order, that of all who do this
        INSERT INTO message_key
        SELECT DISTINCT hashtextextended(s.name || chr(1) || s.key, 5) AS hash FROM unnest(names, keys) AS s (name, key) ORDER BY hash
        ON CONFLICT ON CONSTRAINT message_key_pkey DO UPDATE SET hash = excluded.hash
        RETURNING message_key.ctid
    )
    SELECT array_agg(held.ctid) INTO mine FROM held;
    DELETE FROM message_key WHERE ctid = ANY (mine);
END
$fn$;
COMMENT ON FUNCTION process_hold_v1(text[], text[]) IS
    'For the engine: until the transaction ends, nobody else brings messages of these names and keys, or waits for them.';
REVOKE ALL ON FUNCTION process_hold_v1(text[], text[]) FROM PUBLIC;
DO $do$
DECLARE
    caller record;
BEGIN
    -- Who brings messages until now can go on, before roles are made anew.
    FOR caller IN
        SELECT a.grantee::regrole AS name FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = 'message'::regclass AND a.privilege_type = 'INSERT' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON message_key TO %s; GRANT EXECUTE ON FUNCTION process_hold_v1(text[], text[]) TO %1$s', caller.name);
    END LOOP;
END
$do$;

-- What is ours, as in 0006.
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
        workflow_role, workflow_behalf, workflow_actor, workflow_at_work, workflow_overrides, workflow_guard, workflow_run_refuse_outcome,
        workflow_document_problem, workflow_refuse_document, workflow_earlier, workflow_advance, workflow_bound_prefixes, workflow_passing, workflow_try,
        workflow_works, workflow_isolate, workflow_put_back, workflow_try_again_v1, workflow_lanes_v1, workflow_narrow, workflow_lanes, workflow_stalled_types, workflow_due, workflow_lease_v1,
        workflow_lease_refused_v1, workflow_extend_v1, workflow_held_v1, workflow_locked_v1, workflow_unrecorded, workflow_as_worker, workflow_settle_v1,
        workflow_recorded_v1, workflow_expired, workflow_take_back_v1, workflow_take_back_refused_v1, workflow_stalled_v1, workflow_give_back_v1, workflow_present_v1,
        workflow_absent_v1, workflow_run_refuse_reserved}'::text[]);
END;
