-- simple-workflow 0010: what only the engine may enqueue, and walks that end.
--
--   workflow_run_reserved_guard   refuses runs that only the engine may enqueue, in words
--   workflow_enqueue_once         the same for its callers, whatever they have set
--   process_step_cut_off          tells a process only of what is its own
--   process_lock_called, process_paused_with, process_scopes   end on any data
--   process_misundone             knows that what is lent may come late

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
    IF NEW.token_id IS NULL AND NEW.node IS NULL AND NEW.type = ANY ('{graph.start.v1, graph.message.v1, graph.signal.v1, graph.complete_task.v1, graph.cancel.v1, graph.retry.v1}')
       AND NOT (NEW.type = 'graph.start.v1' AND NEW.payload ? 'parent') THEN
        RETURN NEW;
    -- Workers from before this migration bring messages and signals without saying that they are the engine: there its
    -- role is enough, and what such a run names is checked when it is carried out.
    ELSIF NEW.type = 'graph.arrive.v1' AND NEW.token_id IS NOT NULL AND NEW.payload ?| '{message,signal}' AND has_table_privilege('process_token'::regclass, 'UPDATE') THEN
        RETURN NEW;
    ELSIF coalesce(current_setting('workflow.override', true), '') ~ '\S' THEN
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

-- Its condition is short, as each insert has to read it: a start, which is the usual command, and what the engine
-- enqueues (workflow_at_work(), written out) call no function.
CREATE TRIGGER workflow_run_reserved_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((NEW.token_id IS NOT NULL OR NEW.node IS NOT NULL OR NEW.type ^@ 'graph.' AND (NEW.type <> 'graph.start.v1' OR NEW.payload ? 'parent'))
        AND NOT (coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE')))
    EXECUTE FUNCTION workflow_run_refuse_reserved();

-- Somebody other than the engine has cancelled or deleted a step, or the start of an instance that a token
-- waits for: its process is told, by a run. Without a boundary timer a token goes on as if it had none. A start
-- is a token's own if both ends agree; others, from before parent was refused, are nobody's.
CREATE OR REPLACE FUNCTION process_step_cut_off() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
    parent jsonb := NEW.payload->'parent';
BEGIN
    IF NEW.token_id IS NULL AND parent IS NULL OR NEW.type = 'graph.timer.v1' AND NEW.node LIKE '%/on/%' THEN
        RETURN NULL;
    END IF;
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

-- The later of two is undone first, if it was there already: by its transaction's begin, and by its id, which is drawn in it.
CREATE OR REPLACE VIEW process_misundone AS
    SELECT t.instance_id, r.id AS run_id, 'has ' || count(c.id) || ' records' AS problem
    FROM process_token t
    JOIN process_instance i ON i.id = t.instance_id
    JOIN workflow_run r ON r.token_id = t.id AND r.status = 'succeeded'
    JOIN process_node n ON n.process_definition_id = i.process_definition_id AND n.node = r.node COLLATE "C" AND n.definition ? 'undo' AND n.definition ? 'do'
    LEFT JOIN compensation_record c ON c.run_id = r.id AND c.instance_id = t.instance_id AND c.retry_of IS NULL
    WHERE i.completed_at IS NULL OR i.status = 'COMPLETED' OR i.ending IS NOT NULL
    GROUP BY t.instance_id, r.id
    HAVING count(c.id) <> 1
    UNION ALL
    SELECT c.instance_id, c.run_id, 'is undone ' || count(*) || ' times'
    FROM compensation_record c
    WHERE c.status = 'Completed'
    GROUP BY c.instance_id, c.run_id
    HAVING count(*) > 1
    UNION ALL
    SELECT c.instance_id, c.run_id, 'is not undone: ' || c.status
    FROM compensation_record c JOIN process_instance i ON i.id = c.instance_id
    WHERE i.completed_at IS NOT NULL AND i.ending IS NOT NULL AND c.status <> 'Completed'
      AND NOT EXISTS (SELECT FROM compensation_record o WHERE o.retry_of = c.id)
    UNION ALL
    SELECT c.instance_id, c.run_id, 'is undone before ' || later.run_id
    FROM compensation_record c
    JOIN process_instance i ON i.id = c.instance_id
    JOIN workflow_run u ON u.id = c.undo_run_id
    JOIN compensation_record later ON later.instance_id = c.instance_id AND later."order" > c."order"
    LEFT JOIN workflow_run v ON v.id = later.undo_run_id
    WHERE c.status = 'Completed' AND later.id < u.id AND later.created_at < u.created_at AND (later.status = 'Pending' OR v.finished_at > u.started_at)
      AND (process_scopes(c.token_id) = process_scopes(later.token_id) -- what is thrown undoes its own scope alone, what ends all
           OR i.ending IS NOT NULL AND u.created_at >= (SELECT max(e.created_at) FROM process_event e
                                                        WHERE e.instance_id = i.id AND e.event_type = 'compensation.started'))
      -- What an instance that was called lends is written while the caller is not held: it was there for certain once the caller had heard of the end,
      -- or, where the caller ends, because that waits for all that it has called.
      AND ((SELECT r.token_id FROM workflow_run r WHERE r.id = later.run_id) = later.token_id
           OR i.ending IS NOT NULL AND u.created_at >= (SELECT max(e.created_at) FROM process_event e
                                                        WHERE e.instance_id = i.id AND e.event_type = 'compensation.started')
           OR EXISTS (SELECT FROM workflow_run r
                      WHERE r.token_id = later.token_id AND r.type = 'graph.arrive.v1' AND r.created_at >= later.created_at AND r.started_at < u.created_at));
