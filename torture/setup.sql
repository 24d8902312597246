-- What the torture needs in the database under test: the roles of its clients, a log of every change of a run that
-- does not depend on the product's own history, and storms of errors.

-- Based on workflowctl roles. In addition, the workers have a table of their own, and the client edits by hand.
CREATE ROLE torture_worker LOGIN IN ROLE workflow_engine, workflow_dispatcher;
CREATE ROLE torture_client LOGIN IN ROLE workflow_operator;
GRANT CREATE ON SCHEMA public TO torture_worker;
GRANT UPDATE (priority) ON workflow_run TO torture_client;
-- Its workers keep what is over for seconds only, which would be a mistake elsewhere.
ALTER TABLE workflow_retention DROP CONSTRAINT workflow_retention_period_check;

CREATE SCHEMA t;
GRANT USAGE ON SCHEMA t TO torture_worker, torture_client, workflow_owner;

-- One row for each change of a run. The rows of one run are in the order of their commits, because its row is locked
-- meanwhile.
CREATE TABLE t.transition (
    seq          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    begun        timestamptz NOT NULL DEFAULT now(), -- of the transaction
    app          text NOT NULL DEFAULT current_setting('application_name'),
    run          uuid NOT NULL,
    was          text, -- null: it is new
    status       text, -- null: it was removed
    lease_no     bigint, lease_no_was bigint,
    lease_until  timestamptz, lease_until_was timestamptz,
    deadline_at  timestamptz,
    leased_by    text, leased_by_was text,
    token_was    uuid, -- of the lease
    settled      boolean, -- it recorded an outcome
    by_holder    boolean, -- the process that held the lease ended it
    joined       boolean, -- it ended the lease of a suspect at its last attempt that was not alone, and is alone from now on
    run_at       timestamptz,
    attempt      integer, attempt_was integer,
    max_attempts integer,
    code         text, -- of the error
    deleted      boolean
);
CREATE INDEX ON t.transition (run, seq);

CREATE FUNCTION t.log_transition() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' AND NEW.status = 'leased' THEN -- a step that is carried on: it is new, and leased at once
        INSERT INTO t.transition (run, was, status, lease_no, lease_no_was, lease_until, run_at, deadline_at, leased_by, settled, attempt, attempt_was, max_attempts, deleted)
        VALUES (NEW.id, NULL, 'pending', 0, NULL, NULL, NEW.run_at, NULL, NULL, false, 0, NULL, NEW.max_attempts, false),
               (NEW.id, 'pending', 'leased', NEW.lease_no, 0, NEW.lease_until, NEW.run_at, NEW.deadline_at, NEW.leased_by, false, NEW.attempt, 0, NEW.max_attempts, NEW.deleted_at IS NOT NULL);
        RETURN NULL;
    END IF;
    INSERT INTO t.transition (run, was, status, lease_no, lease_no_was, lease_until, lease_until_was, deadline_at, leased_by, leased_by_was, token_was,
                              settled, by_holder, joined, run_at, attempt, attempt_was, max_attempts, code, deleted)
    VALUES (coalesce(NEW.id, OLD.id), OLD.status, NEW.status, NEW.lease_no, OLD.lease_no, NEW.lease_until, OLD.lease_until, NEW.deadline_at,
            NEW.leased_by, OLD.leased_by, OLD.lease_token,
            NEW.settled_token IS DISTINCT FROM OLD.settled_token,
            -- Each process draws its worker's name. A process that never got the answer to its lease gives the lease
            -- back without having settled anything; for an exhausted run it gives no attempt back. The run is due at that
            -- moment. A run whose lease is taken back is due later, or when it was before.
            NEW.settled_token = OLD.lease_token AND NEW.settled_by = OLD.leased_by
                OR OLD.status = 'leased' AND NEW.status = 'pending' AND current_setting('application_name') = split_part(OLD.leased_by, '-', 1)
                   AND (NEW.attempt < OLD.attempt AND NEW.run_at = now() OR OLD.deadline_at = OLD.started_at) AND (OLD.suspect AND NOT OLD.alone AND NEW.alone) IS NOT TRUE,
            OLD.suspect AND NOT OLD.alone AND NEW.alone,
            NEW.run_at, NEW.attempt, OLD.attempt, NEW.max_attempts,
            NEW.error->>'code', NEW.deleted_at IS NOT NULL);
    RETURN NULL;
END
$$;
CREATE TRIGGER t_log_insert AFTER INSERT OR DELETE ON workflow_run FOR EACH ROW EXECUTE FUNCTION t.log_transition();
CREATE TRIGGER t_log_update AFTER UPDATE ON workflow_run FOR EACH ROW
    WHEN (NEW.status <> OLD.status OR NEW.lease_no <> OLD.lease_no OR NEW.lease_until IS DISTINCT FROM OLD.lease_until
          OR NEW.attempt <> OLD.attempt OR NEW.deleted_at IS DISTINCT FROM OLD.deleted_at)
    EXECUTE FUNCTION t.log_transition();

-- The tokens of leases ahead whose handlers may begin, as the workers have stored them. The product removes its rows.
CREATE TABLE t.may_begin (token uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE FUNCTION t.log_may_begin() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO t.may_begin (token) VALUES (NEW.token);
    RETURN NULL;
END
$$;
CREATE TRIGGER t_log AFTER INSERT ON workflow_begun FOR EACH ROW WHEN (NEW.begun) EXECUTE FUNCTION t.log_may_begin();

-- A storm makes statements fail at random with a SQLSTATE. No row means that there is no storm. The arguments of the
-- trigger are the only classes of errors that its statements fail with.
CREATE TABLE t.storm (state text NOT NULL, chance float8 NOT NULL);
GRANT SELECT ON t.storm TO torture_worker, torture_client, workflow_owner;

CREATE FUNCTION t.blow() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    s t.storm;
BEGIN
    SELECT * INTO s FROM t.storm LIMIT 1;
    IF FOUND AND random() < s.chance AND (TG_NARGS = 0 OR left(s.state, 2) = ANY (TG_ARGV)) THEN
        RAISE EXCEPTION 'torture: a storm' USING ERRCODE = s.state;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON workflow_run FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT ON workflow_history FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT ON outbox_event FOR EACH STATEMENT EXECUTE FUNCTION t.blow();

-- The same for process instances, and for data about them whose earlier values could not be seen at the end.
CREATE TABLE t.turn (
    seq     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    begun   timestamptz NOT NULL DEFAULT now(), -- of the transaction
    instance uuid NOT NULL,
    was     text, -- null: it is new
    status  text NOT NULL,
    paused  boolean NOT NULL,
    ending  text
);
CREATE TABLE t.movement (
    seq      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    instance uuid NOT NULL,
    token    uuid NOT NULL,
    node     text NOT NULL,
    state    text NOT NULL,
    mode     text NOT NULL
);
CREATE INDEX ON t.movement (token, node);
CREATE TABLE t.firing (at timestamptz NOT NULL DEFAULT clock_timestamp(), join_id uuid NOT NULL, instance uuid NOT NULL);
CREATE TABLE t.amends (at timestamptz NOT NULL DEFAULT clock_timestamp(), record uuid NOT NULL, instance uuid NOT NULL, status text NOT NULL);

CREATE FUNCTION t.log_process() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    CASE TG_TABLE_NAME
    WHEN 'process_instance' THEN
        INSERT INTO t.turn (instance, was, status, paused, ending)
        VALUES (NEW.id, CASE TG_OP WHEN 'UPDATE' THEN OLD.status END, NEW.status, NEW.paused_at IS NOT NULL, NEW.ending);
    WHEN 'process_token' THEN
        INSERT INTO t.movement (instance, token, node, state, mode) VALUES (NEW.instance_id, NEW.id, NEW.node, NEW.state, NEW.mode);
    WHEN 'parallel_join' THEN
        INSERT INTO t.firing (join_id, instance) VALUES (NEW.id, NEW.instance_id);
    WHEN 'compensation_record' THEN
        INSERT INTO t.amends (record, instance, status) VALUES (NEW.id, NEW.instance_id, NEW.status);
    END CASE;
    RETURN NULL;
END
$$;
CREATE TRIGGER t_log_insert AFTER INSERT ON process_instance FOR EACH ROW EXECUTE FUNCTION t.log_process();
CREATE TRIGGER t_log_update AFTER UPDATE ON process_instance FOR EACH ROW
    WHEN (NEW.status <> OLD.status OR NEW.paused_at IS DISTINCT FROM OLD.paused_at OR NEW.ending IS DISTINCT FROM OLD.ending
          OR OLD.status IN ('COMPLETED', 'FAILED', 'CANCELLED'))
    EXECUTE FUNCTION t.log_process();
CREATE TRIGGER t_log AFTER INSERT OR UPDATE ON process_token FOR EACH ROW EXECUTE FUNCTION t.log_process();
CREATE TRIGGER t_log_insert AFTER INSERT ON parallel_join FOR EACH ROW WHEN (NEW.fired) EXECUTE FUNCTION t.log_process();
CREATE TRIGGER t_log_update AFTER UPDATE ON parallel_join FOR EACH ROW WHEN (NEW.fired AND NOT OLD.fired) EXECUTE FUNCTION t.log_process();
CREATE TRIGGER t_log AFTER UPDATE ON compensation_record FOR EACH ROW WHEN (NEW.status = 'Completed') EXECUTE FUNCTION t.log_process();

CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON process_instance FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON process_token FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON parallel_join FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON compensation_record FOR EACH STATEMENT EXECUTE FUNCTION t.blow();
CREATE TRIGGER t_storm BEFORE INSERT OR UPDATE ON message FOR EACH STATEMENT EXECUTE FUNCTION t.blow();

-- Things that users may have, and that refuse some of their rows: a CHECK that old rows violate, and a trigger that
-- refuses a row. Tenants with these names have such rows. A session that violates the CHECK on purpose says so.
ALTER TABLE workflow_run ADD CONSTRAINT t_sound
    CHECK (tenant_id IS DISTINCT FROM 'unsound' OR coalesce(current_setting('t.unsound', true), '') = 'on') NOT VALID;
CREATE FUNCTION t.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'torture: this row is not for you';
END
$$;
CREATE TRIGGER t_refuse BEFORE UPDATE ON workflow_run FOR EACH ROW WHEN (OLD.tenant_id = 'refused') EXECUTE FUNCTION t.refuse();
CREATE TRIGGER t_refuse BEFORE UPDATE ON outbox_event FOR EACH ROW WHEN (OLD.event_type = 'torture.unmarkable') EXECUTE FUNCTION t.refuse();

-- Rows that retention removes are copied, and put back before the verdict, which is about all rows there were.
CREATE FUNCTION t.keep_aside() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('INSERT INTO t.%I SELECT ($1).*', 'removed_' || TG_TABLE_NAME) USING OLD; -- the time is set by its default
    RETURN NULL;
END
$$;
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['workflow_run', 'workflow_history', 'outbox_event', 'process_instance', 'process_token', 'parallel_group', 'parallel_join',
                                'join_arrival', 'each_progress', 'message', 'user_task', 'compensation_record', 'incident', 'process_state_history',
                                'process_event', 'process_correction'] LOOP
        EXECUTE format('CREATE TABLE t.%I (LIKE public.%I)', 'removed_' || name, name);
        EXECUTE format('ALTER TABLE t.%I ADD COLUMN t_at timestamptz DEFAULT clock_timestamp()', 'removed_' || name);
        EXECUTE format('CREATE TRIGGER t_keep_aside AFTER DELETE ON %I FOR EACH ROW EXECUTE FUNCTION t.keep_aside()', name);
    END LOOP;
END
$$;

-- Only rows that may be removed: those that are over, and the rest together with what they belong to. Rows that were
-- removed otherwise are lost.
CREATE FUNCTION t.put_back() RETURNS void LANGUAGE plpgsql SET session_replication_role = replica AS $$
DECLARE
    kept record;
BEGIN
    FOR kept IN
        SELECT substr(c.relname, 9) AS name, string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) AS columns,
               CASE WHEN c.relname = 'removed_workflow_run' THEN 'token_id IN (SELECT id FROM t.removed_process_token) OR token_id IS NULL AND (finished_at < t_at OR deleted_at < t_at)'
                    WHEN c.relname = 'removed_process_instance' THEN 'completed_at < t_at'
                    WHEN c.relname = 'removed_outbox_event' THEN 'published_at < t_at'
                    WHEN c.relname = 'removed_message' THEN 'expires_at < t_at'
                    WHEN bool_or(a.attname = 'instance_id') THEN 'instance_id IN (SELECT id FROM t.removed_process_instance)'
                    WHEN bool_or(a.attname = 'workflow_id') THEN 'workflow_id IN (SELECT id FROM t.removed_workflow_run)'
                    WHEN bool_or(a.attname = 'token_id') THEN 'token_id IN (SELECT id FROM t.removed_process_token)' END AS rightly
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = format('public.%I', substr(c.relname, 9))::regclass
        WHERE c.relnamespace = 't'::regnamespace AND c.relkind = 'r' AND c.relname LIKE 'removed\_%' AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
        GROUP BY c.relname
    LOOP
        EXECUTE format('INSERT INTO public.%1$I (%2$s) OVERRIDING SYSTEM VALUE SELECT %2$s FROM t.%3$I WHERE %4$s %5$s', kept.name, kept.columns, 'removed_' || kept.name, kept.rightly,
            CASE kept.name WHEN 'process_instance' THEN 'ON CONFLICT DO NOTHING' END); -- see I30d
    END LOOP;
END
$$;

-- A key is free once its run or instance is removed; what is enqueued under it then is new work. So these rows stay:
-- a trigger of a user may keep any row.
CREATE FUNCTION t.stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER t_stay BEFORE DELETE ON workflow_run FOR EACH ROW WHEN (OLD.token_id IS NULL AND OLD.idempotency_key IS NOT NULL) EXECUTE FUNCTION t.stay();
CREATE TRIGGER t_stay BEFORE DELETE ON process_instance FOR EACH ROW WHEN (OLD.business_key IS NOT NULL) EXECUTE FUNCTION t.stay();

-- An id, too, is free once its run is removed. A client without an answer may enqueue under the id again, however
-- late, and that would be new work. Here it is told that the run has existed.
CREATE INDEX ON t.removed_workflow_run (id);
CREATE FUNCTION t.refuse_known() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM t.removed_workflow_run r WHERE r.id = NEW.id) THEN
        RAISE unique_violation USING MESSAGE = 'torture: a run of this id was there, and was removed';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER t_refuse_known AFTER INSERT ON workflow_run FOR EACH ROW WHEN (NEW.token_id IS NULL) EXECUTE FUNCTION t.refuse_known();
