-- simple-workflow 0008: guards on every table, and limits of documents.
--
--   workflow_run         a bound is asked of what changes alone; what has ended stays as it is
--   all tables           INSERT, UPDATE, DELETE and TRUNCATE by hand are refused in words, but for what people do
--   documents            have the limits by SQL that results have: numbers, names and members
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

-- Bounds are asked of columns that change: a row that came to lie beyond them while no trigger
-- was there can still be cancelled. Whoever must, can do otherwise, on record: see 0007.
CREATE OR REPLACE FUNCTION workflow_run_refuse_update() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
    ended   boolean := OLD.status IN ('succeeded', 'failed', 'cancelled');
BEGIN
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
    FOR EACH ROW WHEN ((
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
                                 OR OLD.lease_until < clock_timestamp() AND NEW.lease_no > OLD.lease_no)
            ELSE NEW.status = OLD.status AND (NEW.attempt, NEW.postponed, NEW.suspect, NEW.lease_no) = (OLD.attempt, OLD.postponed, OLD.suspect, OLD.lease_no)
                                AND NEW.finished_at IS NOT DISTINCT FROM OLD.finished_at
              OR OLD.status = 'failed' AND NEW.status = 'pending' AND coalesce(current_setting('workflow.retry', true), '') = 'on'
                 AND has_table_privilege('process_token'::regclass, 'UPDATE') END
    ) IS FALSE)
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
            ELSE 'by ' || concat_ws(' ', session_user, nullif(current_setting('application_name'), '')) END, 4096);
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
        OR NEW.status = 'leased' AND NEW.deleted_at IS NOT NULL
        OR NEW.status <> 'leased' AND NEW.lease_token IS NOT NULL
        OR NEW.status IN ('succeeded', 'failed', 'cancelled') AND NEW.finished_at IS NULL
        OR NEW.status = 'succeeded' AND OLD.status = 'leased' AND NEW.settled_token IS DISTINCT FROM OLD.lease_token
        OR NEW.status = 'cancelled' AND OLD.status <> 'cancelled' AND NEW.last_error IS NOT DISTINCT FROM OLD.last_error)
    EXECUTE FUNCTION workflow_run_tidy_row();

-- What a run has come to, whose step it is, and how much may be said of a failure: looked at only
-- when a statement names it.
CREATE FUNCTION workflow_run_refuse_outcome() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, jsonb_build_object('id', OLD.id)) THEN
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
        problem := format('error has %s bytes, the limit is 65536', pg_column_size(NEW.error));
        fix := 'Keep it to a code and a message.';
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = TG_NAME;
END
$fn$;

CREATE TRIGGER workflow_run_outcome_guard AFTER UPDATE OF result, error, last_error, settled_token, settled_by ON workflow_run
    FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL AND (NEW.settled_token, NEW.settled_by, NEW.last_error, NEW.error, NEW.result)
            IS DISTINCT FROM (OLD.settled_token, OLD.settled_by, OLD.last_error, OLD.error, OLD.result)
        OR octet_length(NEW.last_error) > 16384 AND NEW.last_error IS DISTINCT FROM OLD.last_error
        OR pg_column_size(NEW.error) > 65536 AND NEW.error IS DISTINCT FROM OLD.error)
    EXECUTE FUNCTION workflow_run_refuse_outcome();
CREATE TRIGGER workflow_run_step_guard AFTER UPDATE OF token_id, node ON workflow_run
    FOR EACH ROW WHEN ((NEW.token_id, NEW.node) IS DISTINCT FROM (OLD.token_id, OLD.node))
    EXECUTE FUNCTION workflow_run_refuse_outcome();
