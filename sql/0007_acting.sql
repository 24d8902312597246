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

-- A role is made a console by its name here, and not by a grant: whoever has been granted everything is none.
CREATE TABLE workflow_console_role (
    role regrole NOT NULL PRIMARY KEY
);
COMMENT ON TABLE workflow_console_role IS 'The roles of consoles, which act for people: see workflow_behalf. workflowctl roles writes it.';

-- In PL/pgSQL, which keeps the plan: every function that acts asks this.
CREATE FUNCTION workflow_console(role text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN EXISTS (SELECT FROM workflow_console_role c WHERE pg_has_role(workflow_console.role, c.role, 'USAGE'))
       AND NOT pg_has_role(workflow_console.role, (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass), 'USAGE');
END
$fn$;
COMMENT ON FUNCTION workflow_console(text) IS 'Whether a role is a console''s: it acts for others, and never for itself.';

CREATE FUNCTION workflow_for_others(role text) RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $fn$
    SELECT workflow_console(workflow_for_others.role) OR pg_has_role(workflow_for_others.role, (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass), 'USAGE')
$fn$;
COMMENT ON FUNCTION workflow_for_others(text) IS 'Whether a role is believed when it says for whom it acts: a console''s, or the owner''s.';

-- An application names itself: brackets tell it from the roles, and it can have none in its name.
CREATE FUNCTION workflow_actor() RETURNS text
LANGUAGE sql STABLE
RETURN CASE WHEN current_setting('workflow.on_behalf_of', true) <> '' AND workflow_for_others(workflow_role())
         THEN current_setting('workflow.on_behalf_of') || ' by ' || session_user
         WHEN workflow_role() <> session_user THEN workflow_role() || ' by ' || session_user
         ELSE session_user::text END || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '');
COMMENT ON FUNCTION workflow_actor() IS
    'Who acts, as histories tell it: the role and [the application_name]; where the rights are those of another role than the one that logged in, that role, by the login.';

-- What an earlier call in the transaction has set is not believed: each call says anew for whom it is.
CREATE FUNCTION workflow_behalf(person text, act regprocedure) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    IF person IS NULL THEN
        IF workflow_console(workflow_role()) THEN
            RAISE EXCEPTION 'on_behalf_of: role % acts for people, and names nobody', workflow_role()
                USING ERRCODE = 'insufficient_privilege', HINT = 'Say for whom: on_behalf_of => ''anna'', the database role of that person.';
        ELSIF current_setting('workflow.on_behalf_of', true) <> '' THEN
            PERFORM set_config('workflow.on_behalf_of', '', true);
        END IF;
        RETURN;
    END IF;
    IF NOT workflow_for_others(workflow_role()) THEN
        RAISE EXCEPTION 'on_behalf_of: role % may not act for others', workflow_role()
            USING ERRCODE = 'insufficient_privilege', HINT = 'Leave on_behalf_of out, or grant the console''s role: see docs/roles.md.';
    ELSIF to_regrole(quote_ident(person)) IS NULL THEN
        RAISE EXCEPTION 'on_behalf_of: there is no role %', quote_literal(left(person, 120))
            USING ERRCODE = 'undefined_object', HINT = 'Name the database role of the person who acts.';
    ELSIF workflow_console(person) THEN -- it may execute all this, and must not act for itself by naming itself
        RAISE EXCEPTION 'on_behalf_of: role % is a console, and no person', person
            USING ERRCODE = 'insufficient_privilege', HINT = 'Name the database role of the person who acts.';
    ELSIF NOT has_function_privilege(person, act, 'EXECUTE') THEN
        RAISE EXCEPTION 'on_behalf_of: role % may not execute %', person, act
            USING ERRCODE = 'insufficient_privilege', HINT = format('GRANT workflow_operator TO %I, if that person is an operator.', person);
    END IF;
    PERFORM set_config('workflow.on_behalf_of', person, true);
END
$fn$;
COMMENT ON FUNCTION workflow_behalf(text, regprocedure) IS
    'Has what follows in a function that acts be done for a person: with the rights of that person''s role, under its name. For roles of consoles alone.';

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

-- Workers of an earlier version do not always say that they are at work. What they write then belongs to a command that
-- the same transaction has settled, or to a run that it has changed. Guards ask this last, before they refuse.
CREATE FUNCTION workflow_earlier(table_name text, row_key jsonb) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
    SELECT CASE
        WHEN workflow_earlier.table_name = 'workflow_history' THEN has_column_privilege(workflow_role(), 'workflow_run'::regclass, 'lease_token', 'UPDATE')
            AND EXISTS (SELECT FROM workflow_run r WHERE r.id = (row_key->>'workflow_id')::uuid AND r.xmin = pg_current_xact_id()::xid)
        WHEN workflow_earlier.table_name IN ('process_instance', 'message', 'message_wait') THEN has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE')
            AND EXISTS (SELECT FROM workflow_run r
                        WHERE r.status = 'succeeded' AND r.token_id IS NULL AND r.finished_at >= now() AND r.type ^@ 'graph.' AND r.settled_by IS NOT NULL
                          AND r.xmin = pg_current_xact_id()::xid)
        ELSE false END;
END;
COMMENT ON FUNCTION workflow_earlier(text, jsonb) IS 'For guards: whether a worker of an earlier version, which does not always say that it is at work, writes what belongs to what it has just settled.';

-- For triggers, before or after, of rows or statements, with WHEN (NOT workflow_at_work()). Its first argument is what to do
-- instead. A second one, always, leaves no way around it but to disable triggers; recorded, only the owner's, which is on record.
CREATE FUNCTION workflow_guard() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    thing   jsonb := CASE WHEN TG_LEVEL = 'ROW' THEN CASE TG_OP WHEN 'INSERT' THEN to_jsonb(NEW) ELSE to_jsonb(OLD) END END;
    names   jsonb := (SELECT jsonb_object_agg(k, thing->k)
                      FROM unnest('{id, version, workflow_id, instance_id, token_id, place, group_id, join_id, edge, sink, lane, name, event_id, prefix, role}'::text[]) AS k
                      WHERE thing ? k);
    allowed boolean := false;
BEGIN
    IF TG_NARGS < 2 THEN -- one after the other: what is not called need not be granted
        IF current_setting('workflow.advance', true) = 'on' THEN
            allowed := workflow_at_work();
        END IF;
        IF NOT allowed AND has_column_privilege('workflow_run'::regclass, 'lease_token', 'UPDATE') THEN
            allowed := workflow_earlier(TG_TABLE_NAME, names);
        END IF;
    END IF;
    IF NOT allowed AND TG_ARGV[1] IS DISTINCT FROM 'always' AND current_setting('workflow.override', true) <> '' THEN
        allowed := workflow_overrides(TG_TABLE_NAME, TG_OP, names);
    END IF;
    IF NOT allowed THEN
        RAISE EXCEPTION '%: %', TG_TABLE_NAME, CASE TG_OP
                WHEN 'INSERT'   THEN 'a row is inserted by the engine alone'
                WHEN 'UPDATE'   THEN 'this is changed by the engine alone'
                WHEN 'DELETE'   THEN 'a row is deleted by the engine alone'
                ELSE 'it is never emptied' END
            USING ERRCODE = 'integrity_constraint_violation', TABLE = TG_TABLE_NAME, CONSTRAINT = TG_NAME,
                  HINT = concat_ws(' ', TG_ARGV[0], CASE WHEN TG_ARGV[1] IS DISTINCT FROM 'always' THEN 'The owner can, on record: SET LOCAL workflow.override = ''why''.' END);
    END IF;
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    RETURN NEW;
END
$fn$;

-- What was done past a guard stays on record, whoever is at work.
CREATE TRIGGER workflow_override_guard BEFORE UPDATE OR DELETE ON workflow_override
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('What was done past a guard stays on record.', 'always');
CREATE TRIGGER workflow_override_insert_guard BEFORE INSERT ON workflow_override
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION workflow_guard('Guards append to it: SET LOCAL workflow.override = ''why'' and make the change.', 'always');
CREATE TRIGGER workflow_override_kept BEFORE TRUNCATE ON workflow_override
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('What was done past a guard stays on record.', 'always');

CREATE TRIGGER workflow_console_role_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_console_role
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('workflowctl roles makes a console.', 'recorded');
CREATE TRIGGER workflow_console_role_kept BEFORE TRUNCATE ON workflow_console_role
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('DELETE takes a role out.', 'recorded');

REVOKE ALL ON FUNCTION workflow_role(), workflow_behalf(text, regprocedure), workflow_actor(), workflow_console(text), workflow_for_others(text), workflow_at_work(),
    workflow_overrides(text, text, jsonb), workflow_earlier(text, jsonb), workflow_guard() FROM PUBLIC;
