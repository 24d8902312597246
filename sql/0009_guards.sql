-- simple-workflow 0009: guards on every table, and limits of documents.
--
--   workflow_run         a bound is asked of what changes alone; what has ended stays as it is
--   all tables           INSERT, UPDATE, DELETE and TRUNCATE by hand are refused in words, but for what people do
--   documents            have the limits by SQL that results have: numbers, names and members; payloads what can be asked at no cost
--
-- No guard rests on a setting alone: it asks what the role in effect may do, too.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- workflow_run.
-- ---------------------------------------------------------------------------------

-- Every statement has to read the conditions of its triggers, which costs more than to evaluate them: so they are short, and stricter than
-- what is asked here in full; and what a lease or a settle does not write is asked of those statements that name it. What has ended comes here, too. Bounds are asked of columns that change: a row that came to lie beyond them while no trigger
-- was there can still be cancelled. Whoever must, can do otherwise, on record: see 0007.
CREATE OR REPLACE FUNCTION workflow_run_refuse_update() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
    ended   boolean := OLD.status IN ('succeeded', 'failed', 'cancelled');
BEGIN
    IF (
            NEW.id = OLD.id AND NEW.type = OLD.type AND NEW.created_at = OLD.created_at AND NEW.created_by = OLD.created_by
            AND (NEW.priority = OLD.priority OR NEW.priority BETWEEN -100 AND 100)
            AND (NEW.max_attempts = OLD.max_attempts OR NEW.max_attempts BETWEEN 1 AND 1000)
            AND (NEW.attempt = OLD.attempt OR NEW.attempt BETWEEN 0 AND greatest(OLD.attempt, 1000))
            AND (NEW.postponed = OLD.postponed OR NEW.postponed BETWEEN 0 AND 1000000000)
            AND (NEW.run_at = OLD.run_at OR isfinite(NEW.run_at) AND NEW.run_at >= '2000-01-01' AND NEW.run_at <= now() + interval '10 years 1 day')
            AND (NEW.lease_until IS NULL OR NEW.lease_until IS NOT DISTINCT FROM OLD.lease_until
                 OR isfinite(NEW.lease_until) AND NEW.lease_until <= clock_timestamp() + interval '25 hours')
            AND (NEW.lease_no = OLD.lease_no OR NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_no - OLD.lease_no = 1
                                                AND isfinite(NEW.started_at) IS TRUE)
            AND (NEW.started_at IS NOT DISTINCT FROM OLD.started_at OR NEW.lease_no > OLD.lease_no)
            AND (NEW.finished_at IS NULL OR NEW.finished_at IS NOT DISTINCT FROM OLD.finished_at OR isfinite(NEW.finished_at))
            AND CASE OLD.status
                WHEN 'pending' THEN NEW.status IN ('pending', 'cancelled')
                                 OR NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_token IS NOT NULL
                                    AND NEW.lease_until IS NOT NULL AND NEW.leased_by IS NOT NULL
                WHEN 'leased'  THEN NEW.status IN ('pending', 'succeeded', 'failed', 'cancelled')
                                 OR NEW.status = 'leased' AND (NEW.lease_token = OLD.lease_token AND NEW.lease_no = OLD.lease_no
                                     OR NEW.lease_no > OLD.lease_no AND (OLD.lease_until < clock_timestamp() OR OLD.lease_until > clock_timestamp() + interval '25 hours'))
                ELSE NEW.status = OLD.status AND (NEW.attempt, NEW.postponed, NEW.suspect, NEW.lease_no) = (OLD.attempt, OLD.postponed, OLD.suspect, OLD.lease_no)
                                    AND NEW.finished_at IS NOT DISTINCT FROM OLD.finished_at END
        ) IS NOT FALSE THEN
        RETURN NEW;
    END IF;
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN NEW;
    END IF;
    IF NEW.status NOT IN ('pending', 'leased', 'succeeded', 'failed', 'cancelled') THEN
        problem := format('status %L does not exist', left(NEW.status, 120));
        fix := 'The states are pending, leased, succeeded, failed and cancelled.';
    ELSIF NEW.id <> OLD.id OR NEW.type <> OLD.type OR NEW.created_at <> OLD.created_at OR NEW.created_by <> OLD.created_by THEN
        problem := format('run %s: id, type, created_at and created_by never change', OLD.id);
        fix := 'Cancel this run with SELECT workflow_cancel(id) and enqueue a new one.';
    ELSIF NEW.priority <> OLD.priority AND NEW.priority NOT BETWEEN -100 AND 100 THEN
        problem := format('run %s: priority %s is outside -100 to 100', OLD.id, NEW.priority);
        fix := 'Use a priority from -100 (last) to 100 (first).';
    ELSIF NEW.max_attempts <> OLD.max_attempts AND NEW.max_attempts NOT BETWEEN 1 AND 1000
       OR NEW.attempt <> OLD.attempt AND NEW.attempt NOT BETWEEN 0 AND greatest(OLD.attempt, 1000) THEN
        problem := format('run %s: attempt %s of %s is not possible', OLD.id, NEW.attempt, NEW.max_attempts);
        fix := 'attempt starts at 0, max_attempts is 1 to 1000.';
    ELSIF NEW.postponed <> OLD.postponed AND NEW.postponed NOT BETWEEN 0 AND 1000000000 THEN
        problem := format('run %s: postponed %s is not possible', OLD.id, NEW.postponed);
        fix := 'Leave postponed to the workers.';
    ELSIF NEW.run_at <> OLD.run_at AND (NOT isfinite(NEW.run_at) OR NEW.run_at < '2000-01-01' OR NEW.run_at > now() + interval '10 years 1 day') THEN
        problem := format('run %s: run_at %s is not a usable time', OLD.id, NEW.run_at);
        fix := 'Use a time from the year 2000 to ten years ahead.';
    ELSIF NEW.lease_until IS DISTINCT FROM OLD.lease_until
      AND (NOT isfinite(NEW.lease_until) OR NEW.lease_until > clock_timestamp() + interval '25 hours') THEN
        problem := format('run %s: lease_until %s would never expire', OLD.id, NEW.lease_until);
        fix := 'A lease ends within 24 hours; workers extend it by heartbeats.';
    ELSIF NEW.lease_no < OLD.lease_no THEN
        problem := format('run %s: lease_no never goes down', OLD.id);
        fix := 'Leave lease_no to the workers.';
    ELSIF OLD.status = 'failed' AND NEW.status = 'pending' THEN
        problem := format('run %s has failed and is not simply set to pending', OLD.id);
        fix := format('SELECT workflow_retry(%L) grants it another attempt and records who asked.', OLD.id);
    ELSIF ended AND NEW.status <> OLD.status THEN
        problem := format('run %s is %s, which is final; it cannot become %s', OLD.id, OLD.status, NEW.status);
        fix := CASE OLD.status WHEN 'failed' THEN format('Only SELECT workflow_retry(%L) brings a failed run back.', OLD.id)
               ELSE 'Enqueue a new run with the same payload.' END;
    ELSIF ended THEN
        problem := format('run %s has %s: attempt, postponed, suspect, lease_no, started_at and finished_at are its history', OLD.id,
                          CASE OLD.status WHEN 'cancelled' THEN 'been cancelled' ELSE OLD.status END);
        fix := 'Leave them as they are.';
    ELSIF OLD.status = 'pending' AND NEW.status IN ('succeeded', 'failed') THEN
        problem := format('run %s is pending and cannot become %s without being leased', OLD.id, NEW.status);
        fix := format('Only the worker that leased a run settles it. To stop it: SELECT workflow_cancel(%L).', OLD.id);
    ELSIF NEW.status = 'leased' AND (NEW.lease_token IS NULL OR NEW.lease_until IS NULL OR NEW.leased_by IS NULL) THEN
        problem := format('run %s cannot be leased without lease_token, lease_until and leased_by', OLD.id);
        fix := 'Leave leasing to the workers.';
    ELSIF (OLD.status = 'pending' AND NEW.status = 'leased' OR NEW.lease_no <> OLD.lease_no) AND (NEW.status <> 'leased' OR NEW.lease_no - OLD.lease_no <> 1) THEN
        problem := format('run %s: every lease takes the next lease_no, and nothing else changes it', OLD.id);
        fix := 'Leave leasing to the workers.';
    ELSIF NEW.status = 'leased' AND NEW.lease_no <> OLD.lease_no AND NOT coalesce(isfinite(NEW.started_at), false) THEN
        problem := format('run %s: a lease has a start, and started_at is %s', OLD.id, coalesce(NEW.started_at::text, 'null'));
        fix := 'Leave leasing to the workers.';
    ELSIF NEW.started_at IS DISTINCT FROM OLD.started_at AND NEW.lease_no = OLD.lease_no THEN
        problem := format('run %s: started_at is when its lease was taken, and changes with the lease alone', OLD.id);
        fix := 'Leave it as it is.';
    ELSIF NEW.finished_at IS DISTINCT FROM OLD.finished_at AND NOT isfinite(NEW.finished_at) THEN
        problem := format('run %s: finished_at %s is no time', OLD.id, NEW.finished_at);
        fix := 'Leave finished_at out.';
    ELSE
        problem := format('run %s: its lease is held by %s until %s and cannot be given to another', OLD.id, OLD.leased_by, OLD.lease_until);
        fix := 'Wait until it expires, or stop that worker: it hands its leases back.';
    END IF;
    RAISE EXCEPTION 'workflow_run: %', problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_update_guard';
END
$fn$;

CREATE OR REPLACE TRIGGER workflow_run_update_guard BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN (( -- what is unknown is no reason: null passes
        NEW.attempt BETWEEN 0 AND 1000
        AND isfinite(NEW.lease_until) AND NEW.lease_until <= clock_timestamp() + interval '25 hours'
        AND CASE WHEN NEW.lease_no = OLD.lease_no THEN NEW.started_at IS NOT DISTINCT FROM OLD.started_at
            ELSE NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_no - OLD.lease_no = 1 AND isfinite(NEW.started_at) IS TRUE END
        AND CASE OLD.status
            WHEN 'pending' THEN NEW.status = ANY ('{pending,cancelled}') OR NEW.lease_no > OLD.lease_no AND num_nulls(NEW.lease_token, NEW.lease_until, NEW.leased_by) = 0
            WHEN 'leased'  THEN NEW.status = ANY ('{pending,succeeded,failed,cancelled}') OR NEW.status = 'leased' AND NEW.lease_no = OLD.lease_no AND NEW.lease_token = OLD.lease_token
            ELSE OLD.status = 'failed' AND NEW.status = 'pending' AND coalesce(current_setting('workflow.retry', true), '') = 'on'
                 AND has_table_privilege('process_token'::regclass, 'UPDATE') END
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();
CREATE TRIGGER workflow_run_update_guard_due BEFORE UPDATE OF postponed, run_at, finished_at ON workflow_run
    FOR EACH ROW WHEN ((NEW.postponed BETWEEN 0 AND 1000000000 AND NEW.run_at BETWEEN '2000-01-01' AND now() + interval '10 years 1 day' AND isfinite(NEW.finished_at)) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();
CREATE TRIGGER workflow_run_update_guard_fixed BEFORE UPDATE OF id, type, created_at, created_by, priority, max_attempts ON workflow_run
    FOR EACH ROW WHEN ((NEW.id = OLD.id AND NEW.type = OLD.type AND NEW.created_at = OLD.created_at AND NEW.created_by = OLD.created_by
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();

-- What people leave undone, as in 0001; and a lease that is taken by hand has a start, and a cancel
-- that says nothing has words of its own: those of an attempt before would be taken for its reason.
CREATE OR REPLACE FUNCTION workflow_run_tidy_row() RETURNS trigger
LANGUAGE plpgsql AS $fn$
BEGIN
    IF NEW.updated_at = OLD.updated_at THEN
        NEW.updated_at := now();
    END IF;
    -- What comes back, or goes to another lane, lines up behind what is there: workers go on
    -- from where they are.
    IF NEW.status = 'pending' AND (NEW.held_at IS NULL AND OLD.held_at IS NOT NULL
       OR NEW.deleted_at IS NULL AND OLD.deleted_at IS NOT NULL OR NEW.priority <> OLD.priority) THEN
        NEW.run_at := greatest(NEW.run_at, now());
    END IF;
    IF NEW.deleted_at IS NOT NULL AND NEW.status = 'leased' THEN
        NEW.status := 'cancelled';
    END IF;
    IF OLD.status = 'pending' AND NEW.status = 'leased' AND NEW.started_at IS NOT DISTINCT FROM OLD.started_at THEN
        NEW.started_at := now();
    END IF;
    IF NEW.status = 'cancelled' AND OLD.status IN ('pending', 'leased') AND NEW.last_error IS NOT DISTINCT FROM OLD.last_error THEN
        NEW.last_error := left('cancelled: ' || CASE
            WHEN NEW.deleted_at IS NOT NULL AND OLD.deleted_at IS NULL THEN concat_ws(': ', 'deleted', NEW.delete_reason)
            ELSE 'by ' || session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '') END, 4096);
    END IF;
    IF OLD.status = 'leased' AND NEW.status = 'succeeded' AND NEW.settled_token IS DISTINCT FROM OLD.lease_token THEN
        NEW.settled_token := NULL; -- it was no worker that said so
        NEW.settled_by    := NULL;
    END IF;
    IF NEW.status <> 'leased' THEN
        NEW.lease_token := NULL;
        NEW.lease_until := NULL;
        NEW.leased_by   := NULL;
        NEW.deadline_at := NULL;
    END IF;
    IF NEW.status IN ('succeeded', 'failed', 'cancelled') THEN
        NEW.finished_at := coalesce(NEW.finished_at, now());
    ELSIF NEW.status IN ('pending', 'leased') THEN
        NEW.finished_at := NULL;
    END IF;
    RETURN NEW;
END
$fn$;

CREATE OR REPLACE TRIGGER workflow_run_tidy BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN (NEW.updated_at = OLD.updated_at
        OR NEW.deleted_at IS NOT NULL
        OR NEW.status <> 'leased' AND NEW.lease_token IS NOT NULL
        OR NEW.finished_at IS NULL AND NEW.status = ANY ('{succeeded,failed,cancelled}')
        OR NEW.status = 'succeeded' AND OLD.status = 'leased' AND NEW.settled_token IS DISTINCT FROM OLD.lease_token
        OR NEW.status = 'cancelled')
    EXECUTE FUNCTION workflow_run_tidy_row();

-- What a run has come to, whose step it is, and how much may be said of a failure: looked at only
-- when a statement names it. What workers say of a run that they hold is let pass by a short condition, which each
-- statement has to read; whether anything has changed is asked of the rest.
CREATE FUNCTION workflow_run_refuse_outcome() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF (NEW.token_id, NEW.node) IS NOT DISTINCT FROM (OLD.token_id, OLD.node)
       AND (OLD.finished_at IS NULL OR (NEW.settled_token, NEW.settled_by, NEW.last_error, NEW.error, NEW.result)
            IS NOT DISTINCT FROM (OLD.settled_token, OLD.settled_by, OLD.last_error, OLD.error, OLD.result))
       AND (octet_length(NEW.last_error) > 16384 AND NEW.last_error IS DISTINCT FROM OLD.last_error) IS NOT TRUE
       AND (octet_length(NEW.error::text) > 65536 AND NEW.error IS DISTINCT FROM OLD.error) IS NOT TRUE THEN -- here it is compressed
        RETURN NULL;
    ELSIF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN NULL;
    ELSIF (NEW.token_id, NEW.node) IS DISTINCT FROM (OLD.token_id, OLD.node) THEN
        problem := 'token_id and node never change: they say whose step it is';
        fix := 'Cancel it with SELECT workflow_cancel(id); its process goes on by its rules.';
    ELSIF OLD.finished_at IS NOT NULL THEN
        problem := format('it has %s: result, error, last_error, settled_token and settled_by are its history',
                          CASE OLD.status WHEN 'cancelled' THEN 'been cancelled' ELSE OLD.status END);
        fix := 'Leave them as they are; metadata may be changed.';
    ELSIF octet_length(NEW.last_error) > 16384 THEN
        problem := format('last_error has %s bytes, the limit is 16384', octet_length(NEW.last_error));
        fix := 'Keep it to a line.';
    ELSE
        problem := format('error has %s bytes, the limit is 65536', octet_length(NEW.error::text));
        fix := 'Keep it to a code and a message.';
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = TG_NAME;
END
$fn$;

CREATE TRIGGER workflow_run_outcome_guard AFTER UPDATE OF result, error, last_error, settled_token, settled_by ON workflow_run
    FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL OR octet_length(NEW.last_error) > 16384 OR pg_column_size(NEW.error) > 65536)
    EXECUTE FUNCTION workflow_run_refuse_outcome();
CREATE TRIGGER workflow_run_step_guard AFTER UPDATE OF token_id, node ON workflow_run
    FOR EACH ROW WHEN ((NEW.token_id, NEW.node) IS DISTINCT FROM (OLD.token_id, OLD.node))
    EXECUTE FUNCTION workflow_run_refuse_outcome();

-- A setting says who writes the history, and whether the engine is at work; it is believed of roles that may do
-- as the engine does. That is asked last: few rows come so far.
CREATE OR REPLACE TRIGGER workflow_run_audit AFTER UPDATE ON workflow_run
    FOR EACH ROW WHEN ((NEW.status NOT IN (OLD.status, 'leased')
        OR OLD.status = 'leased' AND NEW.lease_no <> OLD.lease_no
        OR (NEW.deleted_at IS NULL) <> (OLD.deleted_at IS NULL)
        OR (NEW.held_at IS NULL) <> (OLD.held_at IS NULL)
        OR NEW.attempt <> OLD.attempt AND NEW.status = OLD.status)
        AND (coalesce(current_setting('workflow.audit', true), '') <> ALL ('{self,off}') OR NOT has_table_privilege('process_token'::regclass, 'UPDATE')))
    EXECUTE FUNCTION workflow_run_audit_row();

CREATE OR REPLACE TRIGGER process_step_cut_off AFTER UPDATE ON workflow_run
    FOR EACH ROW WHEN (NEW.status = 'cancelled' AND NEW.status <> OLD.status AND (NEW.token_id IS NOT NULL OR NEW.type = 'graph.start.v1')
        AND NOT (coalesce(current_setting('workflow.advance', true), '') = 'on' AND has_table_privilege('process_token'::regclass, 'UPDATE')))
    EXECUTE FUNCTION process_step_cut_off();
CREATE TRIGGER process_step_cut_off_deleted AFTER UPDATE OF deleted_at ON workflow_run
    FOR EACH ROW WHEN (OLD.deleted_at IS NULL AND NEW.deleted_at IS NOT NULL AND NEW.status IN ('pending', 'leased') AND (NEW.token_id IS NOT NULL OR NEW.type = 'graph.start.v1'))
    EXECUTE FUNCTION process_step_cut_off();

CREATE OR REPLACE FUNCTION workflow_run_refuse_input() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF NEW.payload <> OLD.payload THEN
        problem := 'payload never changes';
        fix := 'Cancel this run with SELECT workflow_cancel(id) and enqueue a new one.';
    ELSIF NEW.tenant_id IS DISTINCT FROM OLD.tenant_id THEN
        problem := 'tenant_id never changes';
        fix := 'Cancel this run with SELECT workflow_cancel(id) and enqueue a new one.';
    ELSIF length(NEW.idempotency_key) NOT BETWEEN 1 AND 200 AND NEW.idempotency_key IS DISTINCT FROM OLD.idempotency_key THEN
        problem := format('idempotency_key has %s characters, allowed are 1 to 200', length(NEW.idempotency_key));
        fix := 'Use a shorter key, a hash for example, or null for none.';
    ELSIF NEW.metadata IS NOT DISTINCT FROM OLD.metadata THEN
        RETURN NULL;
    ELSIF jsonb_typeof(NEW.metadata) <> 'object' OR octet_length(NEW.metadata::text) > 16384
       OR jsonb_path_exists(NEW.metadata, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
        problem := 'metadata is not an object of at most 16384 bytes and 64 levels';
        fix := 'Keep metadata to tags and trace context.';
    ELSE
        SELECT 'metadata: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(NEW.metadata, NEW.metadata::text) AS p;
        IF problem IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_input_guard';
END
$fn$;

CREATE OR REPLACE TRIGGER workflow_run_input_guard AFTER UPDATE OF payload, idempotency_key, metadata, tenant_id ON workflow_run
    FOR EACH ROW WHEN (NEW.payload <> OLD.payload OR NEW.tenant_id IS DISTINCT FROM OLD.tenant_id
        OR length(NEW.idempotency_key) NOT BETWEEN 1 AND 200
        OR NEW.metadata IS DISTINCT FROM OLD.metadata AND NEW.metadata IS NOT NULL)
    EXECUTE FUNCTION workflow_run_refuse_input();

-- ---------------------------------------------------------------------------------
-- Documents.
-- ---------------------------------------------------------------------------------

-- What results are refused for (run.CheckResult) beside size and depth: numbers beyond 1e308, names of more than 512
-- bytes, objects of more than 10,000 members. Each takes a longer text than most documents have: the conditions of the
-- triggers below let pass what cannot have any, and this looks closely. A number or a name is seen
-- in the text: by as many digits, or a long text before a colon. A quote within a text hides that, so such
-- documents are looked at, too.
CREATE FUNCTION workflow_document_problem(document jsonb, written text, OUT problem text, OUT fix text)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $fn$
DECLARE
    name   text;
    odd    boolean := written ~ '[0-9]{155}[0-9]{154}|[^"]{129}":|\\"';
BEGIN
    IF odd AND jsonb_path_exists(document, 'strict $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))') THEN
        problem := 'a number is beyond ±1e308';
        fix := 'Round it, or give it as a text.';
        RETURN;
    END IF;
    IF odd THEN
        SELECT k INTO name FROM jsonb_path_query(document, 'strict $.** ? (@.type() == "object")') AS o CROSS JOIN LATERAL jsonb_object_keys(o) AS k
        WHERE octet_length(k) > 512 LIMIT 1;
        IF FOUND THEN
            problem := format('key %s has %s bytes, the limit is 512', quote_literal(left(name, 40) || '…'), octet_length(name));
            fix := 'Shorten it, or make it a value.';
            RETURN;
        END IF;
    END IF;
    IF octet_length(written) >= 80000 AND length(written) - length(replace(written, '":', '"')) > 10000
       AND EXISTS (SELECT FROM jsonb_path_query(document, 'strict $.** ? (@.type() == "object")') AS o
                   WHERE (SELECT count(*) FROM jsonb_object_keys(o)) > 10000) THEN
        problem := 'more than 10000 members are in one object';
        fix := 'Use an array, or several objects.';
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_document_problem(jsonb, text) IS 'What keeps a document from being stored, beside size and depth: numbers beyond 1e308, names above 512 bytes, objects of more than 10,000 members; null: nothing. written is its text.';

-- It is called for what may be wrong, and for large documents, which it looks through.
CREATE OR REPLACE FUNCTION workflow_run_refuse_insert() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
    written text := NEW.payload; -- once: it may be large
    me      text := session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '');
BEGIN
    IF NEW.type IS NULL OR NEW.payload IS NULL THEN
        RETURN NEW; -- the column's own NOT NULL names it
    END IF;
    IF NEW.type !~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' THEN
        problem := format('type %L is not a dotted lower-case name', left(NEW.type, 120));
        fix := 'Use segments of a-z, 0-9, _ and - joined by dots, such as billing.invoice_charge.v1.';
    ELSIF length(NEW.type) > 200 THEN
        problem := format('type has %s characters, the limit is 200', length(NEW.type));
        fix := 'Shorten the type.';
    ELSIF NEW.created_by <> me AND NOT (workflow_for_others(workflow_role()) AND NEW.created_by = me || ' for ' || coalesce(nullif(current_setting('workflow.on_behalf_of', true), ''), '-')) THEN
        problem := format('created_by %L is not you, %s', left(NEW.created_by, 120), me);
        fix := 'Leave created_by out.';
    ELSIF NEW.status <> 'pending' THEN
        problem := format('status %L cannot be inserted: a new run is pending', left(NEW.status, 120));
        fix := 'Leave status out. The states are pending, leased, succeeded, failed and cancelled.';
    ELSIF NEW.priority NOT BETWEEN -100 AND 100 THEN
        problem := format('priority %s is outside -100 to 100', NEW.priority);
        fix := 'Use a priority from -100 (last) to 100 (first).';
    ELSIF NEW.max_attempts NOT BETWEEN 1 AND 1000 THEN
        problem := format('max_attempts %s is outside 1 to 1000', NEW.max_attempts);
        fix := 'Use 1 for a single start, or leave it out for 3.';
    ELSIF NEW.attempt <> 0 OR NEW.postponed <> 0 OR NEW.suspect OR NEW.lease_no <> 0
       OR NEW.lease_token IS NOT NULL OR NEW.lease_until IS NOT NULL OR NEW.leased_by IS NOT NULL
       OR NEW.settled_token IS NOT NULL OR NEW.settled_by IS NOT NULL OR NEW.started_at IS NOT NULL OR NEW.deadline_at IS NOT NULL
       OR NEW.finished_at IS NOT NULL OR NEW.result IS NOT NULL OR NEW.error IS NOT NULL
       OR NEW.last_error IS NOT NULL THEN
        problem := 'a new run carries no attempts, lease, result or error';
        fix := 'Leave out attempt, postponed, suspect, lease_*, leased_by, settled_*, started_at, deadline_at, finished_at, result, error and last_error.';
    ELSIF NOT isfinite(NEW.run_at) OR NEW.run_at < '2000-01-01' OR NEW.run_at > now() + interval '10 years' THEN
        problem := format('run_at %s is not a usable time', NEW.run_at);
        fix := 'Use a time from the year 2000 to ten years ahead, or leave it out for now.';
    ELSIF NEW.idempotency_key IS NOT NULL AND length(NEW.idempotency_key) NOT BETWEEN 1 AND 200 THEN
        problem := format('idempotency_key has %s characters, allowed are 1 to 200', length(NEW.idempotency_key));
        fix := 'Use a shorter key, a hash for example, or leave it out.';
    ELSIF NEW.tenant_id IS NOT NULL AND length(NEW.tenant_id) NOT BETWEEN 1 AND 200 THEN
        problem := format('tenant_id has %s characters, allowed are 1 to 200', length(NEW.tenant_id));
        fix := 'Use a shorter id, or leave it out.';
    ELSIF jsonb_typeof(NEW.payload) <> 'object' THEN
        problem := format('payload is a JSON %s, an object is required', jsonb_typeof(NEW.payload));
        fix := 'Wrap the value: {"value": …}.';
    ELSIF octet_length(written) > 262144 THEN
        problem := format('payload has %s bytes, the limit is 262144', octet_length(written));
        fix := 'Store large data elsewhere and put a reference into the payload.';
    ELSIF NEW.metadata IS NOT NULL AND jsonb_typeof(NEW.metadata) <> 'object' THEN
        problem := format('metadata is a JSON %s, an object is required', jsonb_typeof(NEW.metadata));
        fix := 'Use an object such as {"tag": "nightly"}.';
    ELSIF octet_length(NEW.metadata::text) > 16384 THEN
        problem := format('metadata has %s bytes, the limit is 16384', octet_length(NEW.metadata::text));
        fix := 'Keep metadata to tags and trace context.';
    ELSIF jsonb_path_exists(NEW.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")')
       OR jsonb_path_exists(NEW.metadata, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
        problem := 'payload or metadata is nested deeper than 64 levels';
        fix := 'Flatten the document.';
    ELSE
        -- Enqueueing has to be cheap. Numbers by exponent are found, and what the payload's own members show; long names and members further
        -- inside, and numbers of 309 digits spelled out, are run.Enqueue's to refuse.
        IF strpos(written, '00000000000000000000000000000000') > 0 THEN
            SELECT 'payload: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(NEW.payload, written) AS p;
        ELSIF octet_length(written) >= 80000 AND (SELECT count(*) FROM jsonb_object_keys(NEW.payload)) > 10000 THEN
            problem := 'payload: more than 10000 members are in one object';
            fix := 'Use an array, or several objects.';
        END IF;
        IF problem IS NULL AND NEW.metadata IS NOT NULL THEN
            SELECT 'metadata: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(NEW.metadata, NEW.metadata::text) AS p;
        END IF;
        IF problem IS NULL THEN
            RETURN NEW;
        END IF;
    END IF;
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', NEW.id)) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'workflow_run: %', problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_insert_guard';
END
$fn$;

-- An application names itself: brackets tell it from the roles, and it can have none in its name. What the guard
-- asks for is what stands here.
ALTER TABLE workflow_run ALTER COLUMN created_by SET DEFAULT session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '');
COMMENT ON COLUMN workflow_run.created_by IS 'The database role that logged in and enqueued it, [its application_name], and for whom a console did.';
CREATE OR REPLACE TRIGGER workflow_run_insert_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.type ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND length(NEW.type) <= 200
        AND NEW.status = 'pending' AND NEW.created_by = session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000
        AND NEW.attempt = 0 AND NEW.postponed = 0 AND NOT NEW.suspect AND NEW.lease_no = 0
        AND coalesce(NEW.lease_token, NEW.settled_token) IS NULL AND coalesce(NEW.leased_by, NEW.settled_by) IS NULL
        AND coalesce(NEW.lease_until, NEW.started_at, NEW.deadline_at, NEW.finished_at) IS NULL
        AND NEW.result IS NULL AND NEW.error IS NULL AND NEW.last_error IS NULL
        AND NEW.run_at BETWEEN '2000-01-01' AND now() + interval '10 years'
        AND length(NEW.idempotency_key) BETWEEN 1 AND 200 -- null passes
        AND length(NEW.tenant_id) BETWEEN 1 AND 200
        AND jsonb_typeof(NEW.payload) = 'object'
        -- The text is the dear part: it is made once. Without 32 zeros in a row it has at most six times the bytes that are stored, so that
        -- it is within its limit; and an exponent above 308 spells out more of them. What has them, is large or comes compressed is looked at there.
        AND pg_column_size(NEW.payload) < 40000 AND pg_column_compression(NEW.payload) IS NULL
        AND strpos(NEW.payload::text, '00000000000000000000000000000000') = 0
        -- 64 levels and one more are stored in 520 bytes, or written in 130. Nothing that could hold more lies 64 levels below the top.
        AND (pg_column_size(NEW.payload) < 512
             OR NOT jsonb_path_exists(NEW.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
        AND jsonb_typeof(NEW.metadata) = 'object' AND octet_length(NEW.metadata::text) < 130
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_insert();

-- Other documents have the same limits; they have those of size by themselves.
CREATE FUNCTION workflow_refuse_document() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    p record;
BEGIN
    IF TG_TABLE_NAME = 'outbox_event' THEN -- here, because a longer condition of the trigger costs more than the rest of an insert
        IF NEW.bytes < 80000 AND NEW.payload::text !~ '[0-9]{155}[0-9]{154}|[^"]{129}":|\\"' THEN
            RETURN NULL;
        END IF;
    END IF;
    SELECT * INTO p FROM workflow_document_problem(to_jsonb(NEW)->(TG_ARGV[0]), (to_jsonb(NEW)->(TG_ARGV[0]))::text) AS x;
    IF p.problem IS NOT NULL AND NOT workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', NEW.id)) THEN
        RAISE EXCEPTION '%: %: %', TG_TABLE_NAME, TG_ARGV[0], p.problem
            USING ERRCODE = 'check_violation', HINT = p.fix, TABLE = TG_TABLE_NAME, CONSTRAINT = TG_NAME;
    END IF;
    RETURN NULL;
END
$fn$;
CREATE TRIGGER outbox_event_document AFTER INSERT ON outbox_event
    FOR EACH ROW WHEN (NEW.bytes >= 309)
    EXECUTE FUNCTION workflow_refuse_document('payload');
CREATE TRIGGER process_correction_document AFTER INSERT ON process_correction
    FOR EACH ROW WHEN (octet_length(NEW.value::text) >= 309)
    EXECUTE FUNCTION workflow_refuse_document('value');

-- ---------------------------------------------------------------------------------
-- All tables.
-- ---------------------------------------------------------------------------------

-- What people may do by hand has no guard here, and is listed in docs/operations.md. A row that goes with another one is
-- deleted by the trigger of a foreign key, at a depth above 0: what it goes with has a guard of its own.
DO $do$
DECLARE
    act   text := 'To act on an instance: process_pause, process_resume, process_correct, or a run of graph.cancel.v1, graph.retry.v1, graph.message.v1, graph.complete_task.v1.';
    told  text := 'What has happened stays as it was told.';
    start text := 'Start an instance by a run: INSERT INTO workflow_run (type, payload) VALUES (''graph.start.v1'', ''{"process": "order", "input": {}}'').';
    goes  text := 'It goes with its instance, by retention (WORKER_KEEP_PROCESSES).';
    ended text := 'Retention deletes what is over (WORKER_KEEP_…).';
    -- workflow_at_work() in two: what the engine says is asked for each row, and whether it is believed once for a statement.
    idle  text := 'current_setting(''workflow.advance'', true) IS DISTINCT FROM ''on''';
    lies  text := 'NOT has_table_privilege(''process_token''::regclass, ''UPDATE'')';
    hint  text;
    t     text;
    what  text;
BEGIN
    FOREACH t IN ARRAY '{process_instance, process_token, parallel_group, parallel_join, join_arrival, each_progress, message, message_wait, user_task,
                         compensation_record, incident, process_state_history, process_event, process_correction, process_definition,
                         workflow_run, workflow_history, workflow_worker, workflow_pause, outbox_event, outbox_sink, outbox_lane, outbox_delivery}'::text[] LOOP
        EXECUTE format('CREATE TRIGGER %I BEFORE TRUNCATE ON %I FOR EACH STATEMENT WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard(%L)', t || '_truncate_guard', t,
                       CASE WHEN t ^@ 'workflow_worker' THEN 'Workers that are gone are taken out by those that live.' ELSE ended END);
        CONTINUE WHEN t ^@ 'workflow_' OR t ^@ 'outbox_' OR t = 'process_definition';

        hint := CASE WHEN t = 'process_instance' THEN start WHEN t IN ('process_state_history', 'process_event') THEN 'The engine writes what happens.' ELSE act END;
        EXECUTE format('CREATE TRIGGER %I BEFORE INSERT ON %I FOR EACH ROW WHEN (%s) EXECUTE FUNCTION workflow_guard(%L)', t || '_insert_guard', t, idle, hint);
        EXECUTE format('CREATE TRIGGER %I BEFORE DELETE ON %I FOR EACH ROW WHEN (%s pg_trigger_depth() = 0 AND NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard(%L)', t || '_delete_guard', t,
                       CASE WHEN t = 'process_instance' THEN 'OLD.completed_at IS NOT NULL AND' ELSE '' END, -- the others: process_instance_removed
                       CASE WHEN t IN ('process_instance', 'message') THEN ended ELSE goes END);
        what := CASE t
            WHEN 'process_instance' THEN 'OF status, output_payload, failure_reason, live_tokens, ready_tokens, joining_tokens, open_incidents, ending, ending_reason,
                                             started_at, completed_at, depth, version, paused_at, corrected, updated_at' -- the rest: process_instance_kept
            ELSE '' END;
        EXECUTE format('CREATE OR REPLACE TRIGGER process_guard AFTER UPDATE %s ON %I FOR EACH ROW WHEN (%s) EXECUTE FUNCTION workflow_guard(%L)', what, t, idle,
                       CASE WHEN t IN ('process_state_history', 'process_event', 'process_correction') THEN told ELSE act END);
        EXECUTE format('CREATE TRIGGER %I BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT WHEN (%s) EXECUTE FUNCTION workflow_guard(%L)', t || '_engine_guard', what, t, lies, hint);
    END LOOP;
END
$do$;

DROP FUNCTION process_guard();

CREATE OR REPLACE FUNCTION process_instance_guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN NULL;
    ELSIF TG_OP = 'DELETE' OR NEW.deleted_at IS NOT NULL AND OLD.deleted_at IS NULL AND OLD.completed_at IS NULL THEN
        RAISE EXCEPTION 'process_instance %: it is not over, and cannot be deleted', OLD.id
            USING ERRCODE = 'integrity_constraint_violation', HINT = 'Cancel it first: INSERT INTO workflow_run (type, payload) VALUES (''graph.cancel.v1'', ''{"instance": "…"}'').';
    ELSIF OLD.completed_at IS NOT NULL AND NEW.status <> OLD.status THEN
        RAISE EXCEPTION 'process_instance %: % is final', OLD.id, OLD.status
            USING ERRCODE = 'integrity_constraint_violation', HINT = 'Start another instance.';
    END IF;
    RAISE EXCEPTION 'process_instance %: id, definition, tenant, input, parent and the time of its creation never change', OLD.id
        USING ERRCODE = 'integrity_constraint_violation', HINT = 'Cancel it, and start another instance.';
END
$fn$;
CREATE OR REPLACE TRIGGER process_instance_kept AFTER UPDATE OF id, process_definition_id, tenant_id, input_payload, parent_process_instance_id, parent_token_id, parent_visit,
        undone_with_parent, created_at ON process_instance
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION process_instance_guard();

ALTER TABLE process_definition ALTER COLUMN created_by SET DEFAULT session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', ''); -- as of runs
CREATE OR REPLACE FUNCTION process_definition_guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    used bigint;
BEGIN
    IF TG_OP = 'DELETE' THEN
        used := (SELECT count(*) FROM (SELECT FROM process_instance i WHERE i.process_definition_id = OLD.id LIMIT 1000) AS x);
        IF used > 0 THEN
            RAISE EXCEPTION 'process_definition: % version % cannot be deleted: % instances are of it', OLD.name, OLD.version, used || CASE WHEN used = 1000 THEN ' or more' ELSE '' END
                USING ERRCODE = 'foreign_key_violation', TABLE = 'process_definition',
                      HINT = format('Retention removes those that are over. Look at them: SELECT id, status FROM process_instance WHERE process_definition_id = %L.', OLD.id);
        END IF;
        RETURN OLD;
    ELSIF TG_OP = 'UPDATE' THEN
        IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id, 'name', OLD.name, 'version', OLD.version)) THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'process_definition: % version % cannot be changed', OLD.name, OLD.version
            USING ERRCODE = 'check_violation', HINT = 'Deploy the edited process with a higher version.';
    END IF;
    IF jsonb_typeof(NEW.definition) <> 'object' OR jsonb_typeof(NEW.definition->'nodes') IS DISTINCT FROM 'object'
       OR jsonb_typeof(NEW.definition->'process') IS DISTINCT FROM 'string' OR jsonb_typeof(NEW.definition->'version') IS DISTINCT FROM 'number' THEN
        RAISE EXCEPTION 'process_definition: definition is not an object with process, version and nodes'
            USING ERRCODE = 'check_violation', HINT = 'Check it with: workflowctl define --check FILE.';
    END IF;
    IF NEW.created_by <> session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')
       AND NOT workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', NEW.id)) THEN
        RAISE EXCEPTION 'process_definition: created_by % is not you', quote_literal(left(NEW.created_by, 120))
            USING ERRCODE = 'check_violation', HINT = 'Leave created_by out.';
    END IF;
    NEW.hash := encode(sha256(convert_to(NEW.definition::text, 'UTF8')), 'hex');
    RETURN NEW;
END
$fn$;

-- Runs go by retention, and steps with their process. What is leased does not go at all.
CREATE OR REPLACE FUNCTION workflow_run_refuse_delete() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'workflow_run: run % %', OLD.id, CASE OLD.status WHEN 'leased' THEN 'is leased by ' || OLD.leased_by || ' and cannot be deleted' ELSE 'is deleted by retention alone' END
        USING ERRCODE = 'check_violation', TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_delete_guard',
              HINT = CASE WHEN OLD.token_id IS NULL THEN format('SELECT workflow_delete(%L, ''reason'') cancels and hides it; retention removes the row later.', OLD.id)
                          ELSE 'It is a step: it goes with its process.' END || ' The owner can, on record: SET LOCAL workflow.override = ''why''.';
END
$fn$;
CREATE OR REPLACE TRIGGER workflow_run_delete_guard BEFORE DELETE ON workflow_run
    FOR EACH ROW WHEN (OLD.status = 'leased' OR NOT workflow_at_work())
    EXECUTE FUNCTION workflow_run_refuse_delete();

-- Who deletes a token takes its steps along: that is the engine's work.
CREATE OR REPLACE FUNCTION process_steps_go() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    PERFORM set_config('workflow.advance', 'on', true);
    WITH steps AS (
        DELETE FROM workflow_run WHERE token_id = ANY (ARRAY(SELECT id FROM gone)) RETURNING id
    )
    DELETE FROM workflow_history WHERE workflow_id = ANY (ARRAY(SELECT id FROM steps));
    DELETE FROM join_arrival WHERE token_id = ANY (ARRAY(SELECT id FROM gone));
    PERFORM set_config('workflow.advance', before, true);
    RETURN NULL;
END
$fn$;

-- History is written by the statements that make it, which say so, or by triggers.
CREATE TRIGGER workflow_history_insert_guard BEFORE INSERT ON workflow_history
    FOR EACH ROW WHEN (NOT (coalesce(current_setting('workflow.audit', true), '') = 'self' AND has_column_privilege('workflow_run'::regclass, 'lease_token', 'UPDATE'))
                       AND pg_trigger_depth() = 0 AND NOT workflow_at_work())
    EXECUTE FUNCTION workflow_guard('What changes a run writes its history.');
CREATE TRIGGER workflow_history_update_guard BEFORE UPDATE ON workflow_history
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('What has happened stays as it was told.');
CREATE TRIGGER workflow_history_delete_guard BEFORE DELETE ON workflow_history
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('It goes with its run, by retention (WORKER_KEEP_…).');

-- Whoever could write here could hide runs. Workers' functions say that it is they.
CREATE TRIGGER workflow_set_aside_guard BEFORE INSERT OR UPDATE ON workflow_set_aside
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Workers'' functions set aside what the database refuses. DELETE forgets a row: it is found again if it is still refused.');

-- A pause begins now, and ends once; the rest is its history.
CREATE TRIGGER workflow_pause_delete_guard BEFORE DELETE ON workflow_pause
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('SELECT workflow_resume(prefix) ends a pause; that it was there stays on record.');

-- The outbox: a dispatcher's role works on these tables directly, and what it may is granted by column. What tells of events,
-- and of which of them are gone, is not its own.
CREATE OR REPLACE FUNCTION outbox_event_keep() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'outbox_event %: an event cannot be changed, others may have it already', OLD.id
        USING ERRCODE = 'integrity_constraint_violation', HINT = 'Append another event that corrects it.';
END
$fn$;
CREATE TRIGGER outbox_event_delete_guard BEFORE DELETE ON outbox_event
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('Retention deletes what is published (WORKER_KEEP_PUBLISHED).');
CREATE TRIGGER outbox_lane_delete_guard BEFORE DELETE ON outbox_lane
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION workflow_guard('Lanes go with their sink: dispatcher --abandon NAME.');

-- ---------------------------------------------------------------------------------
-- Functions that act on what is guarded say that they do, around the statements that do.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_advance(setting text) RETURNS text
LANGUAGE plpgsql AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
BEGIN
    PERFORM set_config('workflow.advance', workflow_advance.setting, true);
    RETURN before;
END
$fn$;
COMMENT ON FUNCTION workflow_advance(text) IS 'Says for the rest of the transaction whether the engine is at work, on or nothing, and returns what was said before. It is believed of roles that may do as the engine does: see workflow_at_work().';

CREATE OR REPLACE FUNCTION process_task_finish(task uuid, who text, output jsonb, version bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    t      user_task;
    before text := workflow_advance('on');
BEGIN
    UPDATE user_task u
    SET state = 'completed', completed_at = clock_timestamp(), completed_by = who, output = process_task_finish.output, version = u.version + 1
    WHERE u.id = task AND u.state = 'open' AND coalesce(u.assignee, who) = who AND u.version = coalesce(process_task_finish.version, u.version)
    RETURNING u.* INTO t;
    IF NOT FOUND THEN
        SELECT * INTO t FROM user_task u WHERE u.id = task;
        RAISE EXCEPTION 'task % cannot be completed by %: it is %, assigned to %, version %', task, who, t.state, coalesce(t.assignee, 'nobody'), t.version
            USING ERRCODE = 'check_violation', HINT = 'Look at the task again.';
    END IF;
    INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
    VALUES (t.instance_id, t.token_id, 'task.completed', t.node, (SELECT i.version + 1 FROM process_instance i WHERE i.id = t.instance_id),
            jsonb_build_object('by', who, 'assignee', t.assignee, 'version', t.version));
    PERFORM workflow_advance(before);
END
$fn$;

DO $do$
BEGIN
    IF to_regclass('workflow_schema') IS NOT NULL THEN -- it is not where the files were run by hand
        CREATE TRIGGER workflow_schema_update_guard BEFORE UPDATE OR DELETE ON workflow_schema
            FOR EACH ROW EXECUTE FUNCTION workflow_guard('What was applied stays on record: workflowctl migrate up adds to it.');
        CREATE TRIGGER workflow_schema_truncate_guard BEFORE TRUNCATE ON workflow_schema
            FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('What was applied stays on record: workflowctl migrate up adds to it.');
    END IF;
END
$do$;

REVOKE ALL ON FUNCTION workflow_run_refuse_outcome(), workflow_document_problem(jsonb, text), workflow_refuse_document(), workflow_advance(text) FROM PUBLIC;
