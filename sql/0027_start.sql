-- simple-workflow 0027: how instances start.
--
--   process_instance_refuse_insert, _inserted   an INSERT into process_instance starts the instance
--   process_instance_moved                      version and updated_at move with every change, by hand, too
--   workflow_retry                              says of a step what can be retried
--   process_without_mover                       knows that an instance may be about to be started by its run

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- An instance is inserted as it is before it is started. Its columns are the giver's or have these values; all others are null.
CREATE FUNCTION process_instance_refuse_insert() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    fresh   CONSTANT jsonb := '{"status": "CREATED", "version": 1, "depth": 0, "undone_with_parent": false, "corrected": false,
                                "live_tokens": 0, "ready_tokens": 0, "joining_tokens": 0, "open_incidents": 0}';
    most    CONSTANT integer := 261000; -- with what the start says besides no more than a run may be given
    name    text;
    problem text;
    fix     text;
BEGIN
    -- Workers of an earlier version do not say that they are at work; the owner can do more, on record.
    IF has_column_privilege(workflow_role(), 'workflow_run'::regclass, 'lease_token', 'UPDATE') AND workflow_earlier(TG_TABLE_NAME, jsonb_build_object('id', NEW.id))
       OR workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', NEW.id)) THEN
        RETURN NEW;
    END IF;
    SELECT c.key, CASE WHEN c.key = 'status' OR length(c.value::text) < 30 THEN format('%s is %s', c.key, left(c.value::text, 100)) ELSE c.key || ' is given' END
           || ', and is ' || coalesce(fresh->>c.key, 'null') || ' before an instance is started'
    INTO name, problem
    FROM jsonb_each(to_jsonb(NEW) - '{id, process_definition_id, business_key, tenant_id, priority, input_payload, metadata, created_at, updated_at}'::text[]) AS c
    WHERE c.value IS DISTINCT FROM coalesce(fresh->c.key, 'null')
    ORDER BY c.key <> 'status', c.key
    LIMIT 1;
    IF FOUND THEN
        fix := format('Leave %s out: the engine sets it.', name);
    ELSIF NEW.created_at <> now() OR NEW.updated_at <> now() THEN
        name := CASE WHEN NEW.created_at <> now() THEN 'created_at' ELSE 'updated_at' END;
        problem := name || ' is not the time of this transaction';
        fix := format('Leave %s out.', name);
    ELSIF NEW.business_key IS NOT NULL THEN -- the id of such an instance is made of it
        name := 'business_key';
        problem := 'business_key is given, and only a run makes an instance of a key';
        fix := 'Leave it out, or start the instance by a run: INSERT INTO workflow_run (type, payload) VALUES (''graph.start.v1'', ''{"process": "order", "key": "o-17", "input": {}}'').';
    ELSIF length(NEW.tenant_id) NOT BETWEEN 1 AND 200 THEN
        name := 'tenant_id';
        problem := format('tenant_id has %s characters, allowed are 1 to 200', length(NEW.tenant_id));
        fix := 'Use a shorter name, or null for none.';
    ELSIF NEW.priority NOT BETWEEN -100 AND 100 THEN
        name := 'priority';
        problem := format('priority %s is outside -100 to 100', NEW.priority);
        fix := 'Use a priority from -100 (last) to 100 (first).';
    ELSIF jsonb_typeof(NEW.input_payload) <> 'object' THEN
        name := 'input_payload';
        problem := format('input_payload is a JSON %s, and not an object', jsonb_typeof(NEW.input_payload));
        fix := 'Wrap it: {"value": …}.';
    ELSIF octet_length(NEW.input_payload::text) > most THEN
        name := 'input_payload';
        problem := format('input_payload has %s bytes, the limit is %s', octet_length(NEW.input_payload::text), most);
        fix := 'Keep large data elsewhere, and pass a reference to it.';
    ELSIF NEW.process_definition_id IS NOT NULL AND NOT EXISTS (SELECT FROM process_definition d WHERE d.id = NEW.process_definition_id) THEN
        name := 'process_definition_id';
        problem := format('process_definition_id is %s, and there is no such definition', NEW.process_definition_id);
        fix := 'Look it up: SELECT id FROM process_definition WHERE name = ''order'' ORDER BY version DESC LIMIT 1. Deploy one with: workflowctl define FILE.';
    ELSE
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'process_instance: %', problem
        USING ERRCODE = 'integrity_constraint_violation', HINT = fix || ' The owner can, on record: SET LOCAL workflow.override = ''why''.',
              TABLE = TG_TABLE_NAME, COLUMN = name, CONSTRAINT = TG_NAME;
END
$fn$;

-- The run that starts it has its id, so that everybody finds it. The engine looks after it as after any other start: it is due at once, has the
-- instance's tenant and priority, and finds the row.
CREATE FUNCTION process_instance_inserted() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF coalesce(current_setting('workflow.override', true), '') ~ '\S'
       OR has_column_privilege(workflow_role(), 'workflow_run'::regclass, 'lease_token', 'UPDATE') AND workflow_earlier(TG_TABLE_NAME, jsonb_build_object('id', NEW.id)) THEN
        RETURN NULL; -- it was let in as it is
    END IF;
    INSERT INTO workflow_run (id, type, payload, priority, tenant_id, metadata)
    SELECT NEW.id, 'graph.start.v1', jsonb_build_object('process', d.name, 'version', d.version, 'id', NEW.id, 'input', NEW.input_payload, 'priority', NEW.priority),
           NEW.priority, NEW.tenant_id, NEW.metadata
    FROM process_definition d WHERE d.id = NEW.process_definition_id
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'process_instance: id is %, and there is a run with that id already', NEW.id
            USING ERRCODE = 'unique_violation', HINT = 'Use another id, or leave it out.', TABLE = TG_TABLE_NAME, COLUMN = 'id', CONSTRAINT = TG_NAME;
    END IF;
    RETURN NULL;
END
$fn$;

DROP TRIGGER process_instance_insert_guard ON process_instance;
CREATE TRIGGER process_instance_insert_guard BEFORE INSERT ON process_instance
    FOR EACH ROW WHEN (current_setting('workflow.advance', true) IS DISTINCT FROM 'on' OR NOT has_table_privilege('process_token'::regclass, 'UPDATE')) EXECUTE FUNCTION process_instance_refuse_insert();
CREATE TRIGGER process_instance_inserted AFTER INSERT ON process_instance
    FOR EACH ROW WHEN (current_setting('workflow.advance', true) IS DISTINCT FROM 'on' OR NOT has_table_privilege('process_token'::regclass, 'UPDATE')) EXECUTE FUNCTION process_instance_inserted();

-- Who says that the engine is at work, and may not do as it does, is refused as a whole, as in 0009. Others may insert. One that says so within the statement comes
-- too late to be refused here: hence both triggers above ask who it is, too.
DROP TRIGGER process_instance_engine_guard ON process_instance;
CREATE TRIGGER process_instance_engine_guard BEFORE UPDATE OF status, output_payload, failure_reason, live_tokens, ready_tokens, joining_tokens, open_incidents, ending, ending_reason,
        started_at, completed_at, depth, version, paused_at, corrected, updated_at ON process_instance
    FOR EACH STATEMENT WHEN (NOT has_table_privilege('process_token'::regclass, 'UPDATE'))
    EXECUTE FUNCTION workflow_guard('To act on an instance: process_pause, process_resume, process_correct, or a run of graph.cancel.v1, graph.retry.v1, graph.message.v1, graph.complete_task.v1.');
CREATE TRIGGER process_instance_engine_insert_guard BEFORE INSERT ON process_instance
    FOR EACH STATEMENT WHEN (current_setting('workflow.advance', true) = 'on' AND NOT has_table_privilege('process_token'::regclass, 'UPDATE'))
    EXECUTE FUNCTION workflow_guard('Leave workflow.advance as it is: an instance that is inserted is started.');

-- The engine moves both itself, in each statement that changes an instance: of it this asks for no more than two numbers.
CREATE FUNCTION process_instance_moved() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    NEW.version := CASE WHEN OLD.version < 1000000000000000 THEN OLD.version + 1 ELSE OLD.version END;
    IF NEW.updated_at = OLD.updated_at THEN -- the owner may have set another one, on record
        NEW.updated_at := now();
    END IF;
    RETURN NEW;
END
$fn$;
CREATE TRIGGER process_instance_moved BEFORE UPDATE ON process_instance
    FOR EACH ROW WHEN (NEW.version = OLD.version AND NOT workflow_at_work() AND NEW.* IS DISTINCT FROM OLD.*) EXECUTE FUNCTION process_instance_moved();

REVOKE ALL ON FUNCTION process_instance_refuse_insert(), process_instance_inserted(), process_instance_moved() FROM PUBLIC;

-- The newest instance of a key is found at once, however many others have the same.
CREATE INDEX process_instance_newest_idx ON process_instance (business_key, coalesce(tenant_id, ''), created_at) WHERE business_key IS NOT NULL;
DROP INDEX process_instance_key_idx;

-- As in 0005, and the run of an instance that was inserted has its id.
CREATE OR REPLACE VIEW process_without_mover AS
    SELECT i.id AS instance_id, i.status, i.updated_at
    FROM process_instance i
    WHERE i.completed_at IS NULL AND i.deleted_at IS NULL
      AND NOT EXISTS (SELECT FROM process_token t JOIN workflow_run r ON r.token_id = t.id
                      WHERE t.instance_id = i.id AND t.state IN ('Ready', 'Waiting') AND r.finished_at IS NULL AND r.deleted_at IS NULL)
      AND NOT EXISTS (SELECT FROM message_wait w WHERE w.instance_id = i.id)
      AND NOT EXISTS (SELECT FROM user_task k WHERE k.instance_id = i.id AND k.state = 'open')
      AND NOT EXISTS (SELECT FROM process_token t JOIN process_instance c ON c.parent_token_id = t.id
                      WHERE t.instance_id = i.id AND t.state = 'Waiting' AND c.completed_at IS NULL)
      AND NOT EXISTS (SELECT FROM process_token t JOIN process_starting s ON s.token_id = t.id
                      WHERE t.instance_id = i.id AND t.state = 'Waiting')
      AND NOT EXISTS (SELECT FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL)
      -- No EXISTS: for that a plan may read all runs once, and hash them.
      AND CASE WHEN i.status = 'CREATED' THEN (SELECT r.finished_at IS NULL AND r.deleted_at IS NULL FROM workflow_run r WHERE r.id = i.id AND r.type = 'graph.start.v1') IS NOT TRUE ELSE true END
    UNION
    SELECT i.id, i.status, i.updated_at
    FROM process_instance i
    JOIN process_token t ON t.instance_id = i.id AND t.state IN ('Created', 'Ready', 'Waiting')
    WHERE i.completed_at IS NULL AND i.deleted_at IS NULL
      AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.token_id = t.id AND r.finished_at IS NULL AND r.deleted_at IS NULL)
      AND (t.state = 'Ready'
           OR NOT EXISTS (SELECT FROM message_wait w WHERE w.token_id = t.id)
          AND NOT EXISTS (SELECT FROM user_task k WHERE k.token_id = t.id AND k.state = 'open')
          AND NOT EXISTS (SELECT FROM join_arrival a WHERE a.token_id = t.id)
          AND NOT EXISTS (SELECT FROM parallel_group g WHERE g.instance_id = i.id AND g.host_token_id = t.id AND g.live > 0)
          AND NOT EXISTS (SELECT FROM incident x WHERE x.token_id = t.id AND x.resolved_at IS NULL)
          AND NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = t.id AND c.completed_at IS NULL)
          AND NOT EXISTS (SELECT FROM process_starting s WHERE s.token_id = t.id));

-- As in 0012, and of a step it says what can be retried instead: that is not always its incident.
CREATE OR REPLACE FUNCTION workflow_retry(id uuid, attempts integer DEFAULT 1, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    before  text := coalesce(current_setting('workflow.retry', true), '');
    retried boolean;
    seen    text;
    rounds  integer := 0;
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
        SELECT CASE WHEN r.deleted_at IS NOT NULL THEN 'not failed: deleted'
                    WHEN r.status <> 'failed' THEN 'not failed: ' || r.status
                    WHEN r.token_id IS NOT NULL THEN 'not retried: ' || coalesce(
                        (SELECT format('incident %s, %s, holds this step; retry that: workflowctl retry-incident %1$s', x.id, x.code)
                         FROM incident x WHERE x.token_id = r.token_id AND x.resolved_at IS NULL AND r.node IN (x.node, x.node || '/item', x.node || '/undo') LIMIT 1),
                        (SELECT format('a step of instance %s, which is %s', i.id, i.status)
                                || CASE WHEN i.status = 'FAILED' AND i.parent_token_id IS NULL THEN format('; start that again: workflowctl restart %s', i.id) ELSE '' END
                         FROM process_token t JOIN process_instance i ON i.id = t.instance_id WHERE t.id = r.token_id AND i.completed_at IS NOT NULL),
                        'a step of a process, which has gone on')
                    WHEN r.attempt >= 1000 THEN 'not failed: failed, 1000 attempts used'
                    ELSE 'failed' END
        INTO seen FROM workflow_run r WHERE r.id = workflow_retry.id;
        IF seen IS DISTINCT FROM 'failed' THEN
            RETURN coalesce(seen, 'not found');
        END IF;
        -- It has failed just now, or was undeleted: retry it.
        rounds := rounds + 1;
        IF rounds > 10 THEN
            RAISE EXCEPTION 'workflow_retry: run % stays failed', workflow_retry.id USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'A trigger of yours on workflow_run leaves its update out.';
        END IF;
    END LOOP;
END
$fn$;
COMMENT ON FUNCTION workflow_retry(uuid, integer, text) IS
    'Gives a failed run further attempts, now. Answers pending, not failed: <status>, not retried: <why a step is not>, or not found.';
