-- simple-workflow 0032: dead letters.
--
--   workflow_dead_letter    enqueues a run of the type that the policy names, for a run that has failed for good

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Who fails asks this once: nothing is here where no policy names a type.
CREATE INDEX workflow_policy_letter_idx ON workflow_policy (pattern) WHERE dead_letter IS NOT NULL;

-- It is called by the change of the row that failed, so there is one letter for each time that a run fails for good, by a settle that is fenced; no key
-- that somebody could have taken before, or could wait for. A type that is named as a dead letter makes none, whatever policy it has: so letters
-- cannot go round. What refuses a letter keeps no run from failing; what may pass by itself fails the settle, which is tried again.
CREATE FUNCTION workflow_dead_letter(dead workflow_run) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    kind   text := (SELECT p.dead_letter FROM workflow_policy p WHERE p.dead_letter IS NOT NULL AND (p.pattern = '*' OR workflow_covers(p.pattern, dead.type))
                    ORDER BY length(p.pattern) DESC LIMIT 1);
    letter uuid := workflow_uuid();
    whole  boolean;
    state  text;
    words  text;
    rule   text;
    place  text;
BEGIN
    IF kind IS NULL OR kind = 'none' OR EXISTS (SELECT FROM workflow_policy p WHERE p.dead_letter = dead.type) THEN
        RETURN;
    END IF;
    -- A payload may be too large, or too deep, to be a part of another one.
    FOREACH whole IN ARRAY '{true,false}'::boolean[] LOOP
        BEGIN
            INSERT INTO workflow_run (id, type, priority, tenant_id, metadata, payload)
            VALUES (letter, kind, dead.priority, dead.tenant_id, CASE WHEN dead.metadata ? 'traceparent' THEN jsonb_build_object('traceparent', dead.metadata->>'traceparent') END,
                    jsonb_build_object('run', dead.id, 'type', dead.type, 'code', dead.error->>'code', 'message', left(dead.last_error, 4096), 'attempts', dead.attempt,
                                       'lease_no', dead.lease_no, 'failed_at', dead.finished_at)
                    || CASE WHEN whole THEN jsonb_build_object('payload', dead.payload) ELSE '{}' END);
            IF NOT FOUND THEN
                RAISE EXCEPTION 'a trigger has left it out' USING ERRCODE = 'triggered_action_exception';
            END IF;
            state := NULL;
            EXIT;
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, words = MESSAGE_TEXT, rule = CONSTRAINT_NAME, place = PG_EXCEPTION_CONTEXT;
            IF workflow_remedy(state) <> 'halve' THEN
                RAISE;
            END IF;
        END;
    END LOOP;
    IF state IS NULL AND workflow_unrecorded() THEN
        RETURN;
    END IF;
    INSERT INTO workflow_history (workflow_id, event_type, actor, attempt, lease_no, data)
    VALUES (dead.id, CASE WHEN state IS NULL THEN 'dead_letter' ELSE 'dead_letter_refused' END, coalesce(CASE WHEN current_setting('workflow.audit', true) IN ('self', 'off') THEN dead.settled_by END, workflow_actor()), dead.attempt, dead.lease_no,
            jsonb_build_object('type', kind) || CASE WHEN state IS NULL THEN jsonb_build_object('run', letter)
                                                     ELSE jsonb_build_object('sqlstate', state, 'message', left(words, 4096), 'constraint', left(rule, 4096)) END);
END
$fn$;

-- As in 0011, and a run that has failed for good has its dead letter. In this trigger, since each statement reads the conditions of all of them.
CREATE OR REPLACE FUNCTION outbox_run_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    types text[];
    code  text   := NEW.error->>'code';
    fact  jsonb  := jsonb_build_object('run', NEW.id, 'type', NEW.type, 'status', NEW.status, 'attempt', NEW.attempt)
                    || CASE WHEN NEW.status = 'failed' AND code IS NOT NULL THEN jsonb_build_object('code', code) ELSE '{}' END;
    heads jsonb  := CASE WHEN NEW.metadata ? 'traceparent' THEN jsonb_build_object('traceparent', NEW.metadata->>'traceparent') END;
BEGIN
    IF NEW.status = 'failed' AND NEW.token_id IS NULL AND NEW.deleted_at IS NULL AND NOT NEW.type ^@ 'graph.'
       AND EXISTS (SELECT FROM workflow_policy p WHERE p.dead_letter IS NOT NULL) THEN
        PERFORM workflow_dead_letter(NEW);
    END IF;
    IF NOT EXISTS (SELECT FROM outbox_sink)
       OR NOT (CASE outbox_setting('workflow.run_events') WHEN 'all' THEN true WHEN 'none' THEN false ELSE NEW.status = 'failed' END) THEN
        RETURN NULL;
    END IF;
    types := string_to_array(replace(coalesce(outbox_setting('workflow.run_event_types'), ''), ' ', ''), ',');
    IF NOT outbox_wants(types, NEW.type) THEN
        RETURN NULL;
    END IF;
    INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) VALUES (NEW.id, 'run.' || NEW.status, fact, heads); -- by outbox_event_door
    IF NEW.status = 'failed' AND code = 'no_handler_registered' THEN
        INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) VALUES (NEW.id, code, fact, heads);
    END IF;
    RETURN NULL;
END
$fn$;

REVOKE ALL ON FUNCTION workflow_dead_letter(workflow_run) FROM PUBLIC;
