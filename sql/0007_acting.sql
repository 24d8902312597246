-- simple-workflow 0007: who acts, and what only the engine may do.
--
--   workflow_role()      the role whose rights count: SET ROLE's, or else the login's
--   workflow_actor()     who is told of in histories
--   workflow_behalf()    a console acts for a person, with that person's rights
--   workflow_at_work()   whether a statement is the engine's own
--   workflow_guard()     refuses what is not, in words; the owner's way around it is recorded

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Inside a function that runs with its owner's rights current_user is the owner. The setting
-- role still says what the session has chosen.
CREATE FUNCTION workflow_role() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(nullif(current_setting('role'), 'none'), session_user);
COMMENT ON FUNCTION workflow_role() IS 'The role in effect: the one of SET ROLE, or else the one that logged in. It is the same inside of functions that run with their owner''s rights.';

-- Functions that act call this first, with their parameter on_behalf_of and themselves. Whoever may
-- execute it is a console: nobody else is believed.
CREATE FUNCTION workflow_behalf(person text, act regprocedure) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    IF person IS NULL THEN
        PERFORM set_config('workflow.on_behalf_of', '', true);
        RETURN;
    END IF;
    IF NOT has_function_privilege(workflow_role(), 'workflow_behalf(text, regprocedure)', 'EXECUTE') THEN
        RAISE EXCEPTION 'on_behalf_of: role % may not act for others', workflow_role()
            USING ERRCODE = 'insufficient_privilege', HINT = 'Leave on_behalf_of out, or grant the console''s role: see docs/roles.md.';
    ELSIF to_regrole(quote_ident(person)) IS NULL THEN
        RAISE EXCEPTION 'on_behalf_of: there is no role %', quote_literal(left(person, 120))
            USING ERRCODE = 'undefined_object', HINT = 'Name the database role of the person who acts.';
    ELSIF NOT has_function_privilege(person, act, 'EXECUTE') THEN
        RAISE EXCEPTION 'on_behalf_of: role % may not execute %', person, act
            USING ERRCODE = 'insufficient_privilege', HINT = format('GRANT workflow_operator TO %I, if that person is an operator.', person);
    END IF;
    PERFORM set_config('workflow.on_behalf_of', person, true);
END
$fn$;
COMMENT ON FUNCTION workflow_behalf(text, regprocedure) IS
    'Has what follows in a function that acts be done for a person: with the rights of that person''s role, under its name. For roles of consoles alone.';

CREATE FUNCTION workflow_actor() RETURNS text
LANGUAGE sql STABLE
RETURN concat_ws(' ',
    CASE WHEN current_setting('workflow.on_behalf_of', true) <> '' AND has_function_privilege(workflow_role(), 'workflow_behalf(text, regprocedure)'::regprocedure, 'EXECUTE')
         THEN current_setting('workflow.on_behalf_of') || ' by ' || session_user
         WHEN workflow_role() <> session_user THEN workflow_role() || ' by ' || session_user
         ELSE session_user END,
    nullif(current_setting('application_name'), ''));
COMMENT ON FUNCTION workflow_actor() IS
    'Who acts, as histories tell it: the role and the application_name; where the rights are those of another role than the one that logged in, that role, by the login.';

-- The engine sets workflow.advance for its transactions. Anybody can set it; but only who may
-- update tokens is believed: the owner, functions with the owner's rights, and the engine's role.
-- With one role for everything this is a net for people, and no lock.
CREATE FUNCTION workflow_at_work() RETURNS boolean
LANGUAGE sql STABLE
RETURN coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE');
COMMENT ON FUNCTION workflow_at_work() IS 'Whether the current statement is the engine''s own.';

-- What the owner did although a guard stood in the way. SET LOCAL workflow.override = 'why' opens it.
CREATE TABLE workflow_override (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text        NOT NULL,
    reason     text        NOT NULL,
    table_name text        NOT NULL,
    operation  text        NOT NULL,
    row_key    jsonb,
    statement  text        NOT NULL
);
COMMENT ON TABLE  workflow_override IS 'What the owner has changed by hand past a guard, one row each, and why. It is appended by the guards alone.';
COMMENT ON COLUMN workflow_override.reason IS 'What the setting workflow.override said.';
COMMENT ON COLUMN workflow_override.row_key IS 'The columns that name the row; null: the whole table.';
COMMENT ON COLUMN workflow_override.statement IS 'The first 1,000 characters of the statement.';

CREATE FUNCTION workflow_overrides(table_name text, operation text, row_key jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    why text := coalesce(current_setting('workflow.override', true), '');
BEGIN
    IF why !~ '\S' THEN
        RETURN false;
    ELSIF NOT pg_has_role(workflow_role(), (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass), 'USAGE') THEN
        RAISE EXCEPTION 'workflow.override: role % does not own these tables', workflow_role()
            USING ERRCODE = 'insufficient_privilege', HINT = 'Only the owner can change them past a guard: see docs/roles.md.';
    END IF;
    INSERT INTO workflow_override (actor, reason, table_name, operation, row_key, statement)
    VALUES (workflow_actor(), left(why, 4096), workflow_overrides.table_name, workflow_overrides.operation, workflow_overrides.row_key, left(current_query(), 1000));
    RETURN true;
END
$fn$;
COMMENT ON FUNCTION workflow_overrides(text, text, jsonb) IS 'For guards: whether the owner wants a change all the same, by the setting workflow.override, which is recorded.';

-- For triggers, before or after, of rows or statements. Its argument is what to do instead.
CREATE FUNCTION workflow_guard() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    thing jsonb := CASE WHEN TG_LEVEL = 'ROW' THEN CASE TG_OP WHEN 'INSERT' THEN to_jsonb(NEW) ELSE to_jsonb(OLD) END END;
    names jsonb := (SELECT jsonb_object_agg(k, thing->k)
                    FROM unnest('{id, version, workflow_id, instance_id, token_id, place, group_id, join_id, edge, sink, lane, name, event_id, prefix, role}'::text[]) AS k
                    WHERE thing ? k);
BEGIN
    IF NOT workflow_at_work() AND NOT workflow_overrides(TG_TABLE_NAME, TG_OP, names) THEN
        RAISE EXCEPTION '%: %', TG_TABLE_NAME, CASE TG_OP
                WHEN 'INSERT'   THEN 'a row is inserted by the engine alone'
                WHEN 'UPDATE'   THEN 'this is changed by the engine alone'
                WHEN 'DELETE'   THEN 'a row is deleted by the engine alone'
                ELSE 'it is never emptied' END
            USING ERRCODE = 'integrity_constraint_violation', TABLE = TG_TABLE_NAME, CONSTRAINT = TG_NAME,
                  HINT = concat_ws(' ', TG_ARGV[0], 'The owner can, on record: SET LOCAL workflow.override = ''why''.');
    END IF;
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    RETURN NEW;
END
$fn$;

CREATE TRIGGER workflow_override_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_override
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION workflow_guard('What was done past a guard stays on record.');
CREATE TRIGGER workflow_override_kept BEFORE TRUNCATE ON workflow_override
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('What was done past a guard stays on record.');

REVOKE ALL ON FUNCTION workflow_role(), workflow_behalf(text, regprocedure), workflow_actor(), workflow_at_work(),
    workflow_overrides(text, text, jsonb), workflow_guard() FROM PUBLIC;

-- What is ours, as in 0006.
CREATE OR REPLACE FUNCTION workflow_relations() RETURNS SETOF regclass
LANGUAGE sql STABLE SET search_path FROM CURRENT
BEGIN ATOMIC
    SELECT to_regclass(n) FROM unnest('{workflow_schema, workflow_run, workflow_history, workflow_worker, workflow_pause, workflow_override,
    workflow_open, workflow_event, workflow_live_worker, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
    workflow_overview, workflow_rate, workflow_blocker, workflow_bloat,
    outbox_event, outbox_sink, outbox_lane, outbox_delivery, outbox_lag,
    process_definition, process_instance, process_token, process_state_history, process_event, process_correction,
    parallel_group, parallel_join, join_arrival, each_progress, message, message_wait, user_task, incident, compensation_record,
    token, activity_instance, timer, process_node, process_starting, process_without_mover, process_miscounted, process_undead, process_untimed, process_misjoined,
    process_misundone, process_unearned, process_mismatched, process_misrecorded, process_stuck, process_duration, process_rate, process_overview}'::text[]) AS n
    WHERE to_regclass(n) IS NOT NULL;
END;

CREATE OR REPLACE FUNCTION workflow_functions() RETURNS SETOF regprocedure
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.oid::regprocedure
    FROM pg_proc p
    WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND p.prokind = 'f'
      AND p.proname = ANY ('{workflow_uuid, workflow_run_refuse_insert, workflow_run_refuse_update, workflow_run_refuse_input, workflow_run_refuse_delete,
        workflow_run_tidy_row, workflow_run_refuse_undelete, workflow_event_id, workflow_run_audit_row, workflow_enqueue_once, workflow_enqueue,
        workflow_cancel, workflow_retry, workflow_delete, workflow_run_wake, workflow_covers, workflow_span, workflow_why, workflow_pause, workflow_resume,
        workflow_redrive, workflow_release, workflow_edit, workflow_reschedule, workflow_prioritize, workflow_relations, workflow_functions,
        outbox_event_keep, outbox_wants, outbox_emit, outbox_replay, outbox_replay_parked, outbox_run_event,
        process_definition_guard, process_steps_go, process_facts_go, process_step_cut_off, process_task_assign, process_task_finish, process_scopes, process_undoes, process_correct,
        process_guard, process_instance_guard, process_instance_marked, process_lock_called, process_pause, process_paused_with, process_resume, process_why,
        workflow_role, workflow_behalf, workflow_actor, workflow_at_work, workflow_overrides, workflow_guard}'::text[]);
END;
