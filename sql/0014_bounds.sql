-- simple-workflow 0014: guards of counters, of what never changes, and of what people write.
--
--   counters              version, attempt, postponed, lease_no, next and done change in the steps of the engine alone, whoever asks for it
--   what never changes    whose a token, a wait, a task or a list is: for the engine neither
--   what people write     is refused in words where it is beyond a bound
--
-- Bounds of all columns are CHECKs: see 0021.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- ---------------------------------------------------------------------------------
-- workflow_run.
-- ---------------------------------------------------------------------------------

-- As in 0009; attempt and postponed by steps. What lies beyond its bounds, since it was written while no guard was there, can be
-- brought back within them.
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
            AND (NEW.attempt = OLD.attempt OR NEW.attempt - OLD.attempt::bigint = (NEW.status = 'leased')::integer - (OLD.status = 'leased')::integer
                 OR OLD.attempt NOT BETWEEN 0 AND 1000 AND NEW.attempt BETWEEN 0 AND 1000)
            AND (NEW.postponed = OLD.postponed OR OLD.status = 'leased' AND NEW.postponed - OLD.postponed::bigint = 1 OR NEW.postponed = 0 AND OLD.status = 'failed'
                 OR OLD.postponed NOT BETWEEN 0 AND 1000000000 AND NEW.postponed BETWEEN 0 AND 1000000000)
            AND (NEW.run_at = OLD.run_at OR isfinite(NEW.run_at) AND NEW.run_at >= '2000-01-01' AND NEW.run_at <= now() + interval '10 years 1 day')
            AND (NEW.lease_until IS NULL OR NEW.lease_until IS NOT DISTINCT FROM OLD.lease_until
                 OR isfinite(NEW.lease_until) AND NEW.lease_until <= clock_timestamp() + interval '25 hours')
            AND (NEW.lease_no = OLD.lease_no OR NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_no = OLD.lease_no + 1
                                                AND isfinite(NEW.started_at) IS TRUE
                 OR OLD.lease_no NOT BETWEEN 0 AND 1000000000000000 AND NEW.lease_no BETWEEN 0 AND 1000000000000000)
            AND (NEW.started_at IS NOT DISTINCT FROM OLD.started_at OR NEW.lease_no > OLD.lease_no
                 OR OLD.started_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00' AND NEW.started_at BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00')
            AND (NEW.finished_at IS NULL OR NEW.finished_at IS NOT DISTINCT FROM OLD.finished_at OR isfinite(NEW.finished_at))
            AND CASE OLD.status
                WHEN 'pending' THEN NEW.status IN ('pending', 'cancelled')
                                 OR NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_token IS NOT NULL
                                    AND NEW.lease_until IS NOT NULL AND NEW.leased_by IS NOT NULL
                WHEN 'leased'  THEN NEW.status IN ('pending', 'succeeded', 'failed', 'cancelled')
                                 OR NEW.status = 'leased' AND (NEW.lease_token = OLD.lease_token AND NEW.lease_no = OLD.lease_no
                                     OR OLD.lease_no NOT BETWEEN 0 AND 1000000000000000 AND NEW.lease_token = OLD.lease_token
                                     OR NEW.lease_no > OLD.lease_no AND (OLD.lease_until < clock_timestamp() OR OLD.lease_until > clock_timestamp() + interval '25 hours'))
                ELSE NEW.status = OLD.status AND (
                     OLD.attempt NOT BETWEEN 0 AND 1000 OR OLD.postponed NOT BETWEEN 0 AND 1000000000 OR OLD.lease_no NOT BETWEEN 0 AND 1000000000000000
                     OR OLD.finished_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00' OR (NEW.attempt, NEW.postponed, NEW.suspect, NEW.lease_no) = (OLD.attempt, OLD.postponed, OLD.suspect, OLD.lease_no)
                                    AND NEW.finished_at IS NOT DISTINCT FROM OLD.finished_at) END
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
    ELSIF NEW.max_attempts <> OLD.max_attempts AND NEW.max_attempts NOT BETWEEN 1 AND 1000 THEN
        problem := format('run %s: max_attempts %s is outside 1 to 1000', OLD.id, NEW.max_attempts);
        fix := 'Use 1 for a single start.';
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
    ELSIF NOT ended AND NEW.attempt <> OLD.attempt AND NEW.attempt - OLD.attempt::bigint <> (NEW.status = 'leased')::integer - (OLD.status = 'leased')::integer THEN
        problem := format('run %s: attempt goes from %s to %s; a lease counts one, and a lease that is given back takes one away', OLD.id, OLD.attempt, NEW.attempt);
        fix := 'Leave attempt as it is. For more attempts raise max_attempts; a failed run gets more by SELECT workflow_retry(id).';
    ELSIF NOT ended AND NEW.postponed <> OLD.postponed THEN
        problem := format('run %s: postponed goes from %s to %s; workers alone count it', OLD.id, OLD.postponed, NEW.postponed);
        fix := 'Leave postponed as it is.';
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
    ELSIF (OLD.status = 'pending' AND NEW.status = 'leased' OR NEW.lease_no <> OLD.lease_no) AND (NEW.status <> 'leased' OR NEW.lease_no = OLD.lease_no OR NEW.lease_no <> OLD.lease_no + 1) THEN
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

-- Ranges are those of the CHECKs, so they are not asked here. In place of the range of attempt its steps are.
CREATE OR REPLACE TRIGGER workflow_run_update_guard BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN (( -- what is unknown is no reason: null passes
        NEW.lease_until <= clock_timestamp() + interval '25 hours'
        AND CASE WHEN NEW.lease_no = OLD.lease_no THEN NEW.started_at IS NOT DISTINCT FROM OLD.started_at
            ELSE NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_no = OLD.lease_no + 1 AND NEW.started_at IS NOT NULL END
        AND CASE OLD.status
            WHEN 'pending' THEN CASE WHEN NEW.lease_no > OLD.lease_no THEN NEW.attempt - OLD.attempt = ANY ('{0,1}') AND num_nulls(NEW.lease_token, NEW.lease_until, NEW.leased_by) = 0
                                     ELSE NEW.attempt = OLD.attempt AND NEW.status = ANY ('{pending,cancelled}') END
            WHEN 'leased'  THEN OLD.attempt - NEW.attempt = ANY ('{0,1}')
                                AND (NEW.status = ANY ('{pending,succeeded,failed,cancelled}')
                                     OR NEW.status = 'leased' AND NEW.attempt = OLD.attempt AND NEW.lease_no = OLD.lease_no AND NEW.lease_token = OLD.lease_token)
            ELSE OLD.status = 'failed' AND NEW.status = 'pending' AND coalesce(current_setting('workflow.retry', true), '') = 'on'
                 AND has_table_privilege('process_token'::regclass, 'UPDATE') END
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();
CREATE OR REPLACE TRIGGER workflow_run_update_guard_due BEFORE UPDATE OF postponed, run_at ON workflow_run
    FOR EACH ROW WHEN (((NEW.postponed = OLD.postponed OR OLD.status = 'leased' AND NEW.postponed > OLD.postponed AND NEW.postponed = OLD.postponed + 1 OR OLD.status = 'failed' AND NEW.postponed = 0)
        AND NEW.run_at BETWEEN '2000-01-01' AND now() + interval '10 years 1 day') IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();

-- As in 0009, and a result has a limit of size, which its worker has checked before.
CREATE OR REPLACE FUNCTION workflow_run_refuse_outcome() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF (NEW.token_id, NEW.node) IS NOT DISTINCT FROM (OLD.token_id, OLD.node)
       AND (OLD.finished_at IS NULL OR (NEW.settled_token, NEW.settled_by, NEW.last_error, NEW.error, NEW.result)
            IS NOT DISTINCT FROM (OLD.settled_token, OLD.settled_by, OLD.last_error, OLD.error, OLD.result))
       AND (octet_length(NEW.last_error) > 16384 AND NEW.last_error IS DISTINCT FROM OLD.last_error) IS NOT TRUE
       AND (octet_length(NEW.error::text) > 65536 AND NEW.error IS DISTINCT FROM OLD.error) IS NOT TRUE -- here it is compressed
       AND (pg_column_size(NEW.result) > 16777216 AND NEW.result IS DISTINCT FROM OLD.result) IS NOT TRUE THEN
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
    ELSIF pg_column_size(NEW.result) > 16777216 THEN
        problem := format('result has %s bytes as it is stored, the limit is 16777216', pg_column_size(NEW.result));
        fix := 'Store large data elsewhere and return a reference.';
    ELSE
        problem := format('error has %s bytes, the limit is 65536', octet_length(NEW.error::text));
        fix := 'Keep it to a code and a message.';
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = TG_NAME;
END
$fn$;

CREATE OR REPLACE TRIGGER workflow_run_outcome_guard AFTER UPDATE OF result, error, last_error, settled_token, settled_by ON workflow_run
    FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL OR octet_length(NEW.last_error) > 16384 OR pg_column_size(NEW.error) > 65536 OR pg_column_size(NEW.result) > 16777216)
    EXECUTE FUNCTION workflow_run_refuse_outcome();

-- As in 0009, and the times and the reason that only people give have bounds.
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
        fix := 'Use 1 for a single start, or leave it out: then the policy of the type says how many.';
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
    ELSIF least(NEW.created_at, NEW.held_at, NEW.deleted_at) < '1900-01-01 00:00:00+00' OR greatest(NEW.created_at, NEW.held_at, NEW.deleted_at) > '9999-01-01 00:00:00+00' THEN
        problem := format('created_at %s, held_at %s or deleted_at %s is not a time from 1900 to 9999', NEW.created_at, coalesce(NEW.held_at::text, 'null'), coalesce(NEW.deleted_at::text, 'null'));
        fix := 'Leave them out.';
    ELSIF octet_length(NEW.delete_reason) > 16384 THEN
        problem := format('delete_reason has %s bytes, the limit is 16384', octet_length(NEW.delete_reason));
        fix := 'Leave it out.';
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
CREATE OR REPLACE TRIGGER workflow_run_insert_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.type ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND length(NEW.type) <= 200
        AND NEW.status = 'pending' AND NEW.created_by = session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '')
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000
        AND NEW.attempt = 0 AND NEW.postponed = 0 AND NOT NEW.suspect AND NEW.lease_no = 0
        AND coalesce(NEW.lease_token, NEW.settled_token) IS NULL AND coalesce(NEW.leased_by, NEW.settled_by) IS NULL
        AND coalesce(NEW.lease_until, NEW.started_at, NEW.deadline_at, NEW.finished_at) IS NULL
        AND NEW.result IS NULL AND NEW.error IS NULL AND NEW.last_error IS NULL
        AND coalesce(NEW.held_at, NEW.deleted_at) IS NULL AND NEW.delete_reason IS NULL AND NEW.created_at = now()
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

-- ---------------------------------------------------------------------------------
-- What a bound worker reaches: as in 0008, but it locks no row of others, gives back no step, and tells of as many prefixes as a
-- worker can have.
-- ---------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION workflow_lease_refused_v1(suspects boolean[], types text[], priorities integer[], from_at timestamptz[], from_id uuid[], graces float8[], steps boolean, most integer, any_code boolean,
    worker text, term_types text[], lengths float8[], timeouts float8[])
RETURNS TABLE (id uuid, type text, sqlstate text, "constraint" text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    ids uuid[] := (SELECT d.ids FROM workflow_due(suspects, types, priorities, from_at, from_id, graces, array_fill(most, ARRAY[cardinality(types)]), NULL, NULL,
                                                  steps, 0, most, false, false, false) AS d);
    others uuid[];
    bound  text[] := workflow_bound_prefixes();
BEGIN
    IF ids IS NOT NULL THEN
        others := ARRAY( -- the last of each lane: those behind many that are refused
            SELECT o.id
            FROM unnest(suspects, types, priorities) AS l (suspect, type, priority)
            CROSS JOIN LATERAL (
                SELECT w.id FROM workflow_run w
                WHERE w.status = 'pending' AND w.deleted_at IS NULL AND w.held_at IS NULL AND w.suspect = l.suspect AND w.type = l.type AND w.priority = l.priority
                  AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound))
                ORDER BY w.run_at DESC, w.id DESC LIMIT 3 FOR UPDATE SKIP LOCKED) o
            LIMIT 30);
        RETURN QUERY SELECT s.id, s.type::text, s.sqlstate::text, s."constraint"::text FROM workflow_isolate(ids, others, 'lease', any_code, worker, term_types, lengths, timeouts) AS s;
    END IF;
END
$fn$;

CREATE OR REPLACE FUNCTION workflow_present_v1(id uuid, secret uuid, name text, prefixes text[], handlers text[], steps boolean, concurrency integer, running integer,
    version text, host text, pid integer, uptime float8) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    bound text[] := workflow_bound_prefixes();
    hash  bytea  := sha256(uuid_send(secret));
    mine  text   := CASE WHEN bound IS NOT NULL THEN workflow_role() || '/' END; -- how the names of its workers begin
BEGIN
    IF secret IS NULL THEN
        RAISE EXCEPTION 'workflow_present_v1: secret is null' USING ERRCODE = 'null_value_not_allowed', HINT = 'Draw a uuid when the worker starts, and keep it: with that alone its row is changed or taken away.';
    END IF;
    IF EXISTS (SELECT FROM workflow_worker o WHERE o.id = workflow_present_v1.id AND o.secret_hash IS DISTINCT FROM hash) THEN
        RETURN false; -- before its row is locked
    END IF;
    DELETE FROM workflow_worker w
    WHERE w.id IN (SELECT o.id FROM workflow_worker o WHERE o.seen_at < now() - interval '1 day' AND o.id <> workflow_present_v1.id LIMIT 100 FOR UPDATE SKIP LOCKED); -- those that died long ago
    IF mine IS NOT NULL AND NOT EXISTS (SELECT FROM workflow_worker o WHERE o.id = workflow_present_v1.id) THEN -- people and views read them all
        IF (SELECT count(*) FROM workflow_live_worker o WHERE o.name ^@ mine) >= 300 THEN
            RAISE WARNING 'workflow_present_v1: role % has 300 live workers, and more are not told of', workflow_role()
                USING HINT = 'They work all the same. To see all of them, bind them by several roles: workflowctl roles worker ROLE --prefixes …';
            RETURN false; -- no error: one that cannot write is not ready
        END IF;
        DELETE FROM workflow_worker w
        WHERE w.id IN (SELECT o.id FROM workflow_worker o WHERE o.name ^@ mine ORDER BY o.seen_at DESC OFFSET 299 LIMIT 100 FOR UPDATE SKIP LOCKED);
    END IF;
    INSERT INTO workflow_worker AS w (id, name, prefixes, handlers, steps, concurrency, running, version, host, pid, started_at, secret_hash)
    VALUES (workflow_present_v1.id, workflow_worker_name(bound, workflow_present_v1.name),
            ARRAY(SELECT left(p, 200) FROM unnest(workflow_present_v1.prefixes) AS p WHERE bound IS NULL OR p ^@ ANY (bound) LIMIT 100),
            ARRAY(SELECT left(h, 200) FROM unnest(workflow_present_v1.handlers) AS h WHERE bound IS NULL OR h ^@ ANY (bound) LIMIT 10000),
            workflow_present_v1.steps AND bound IS NULL, greatest(workflow_present_v1.concurrency, 0), greatest(workflow_present_v1.running, 0),
            left(workflow_present_v1.version, 200), left(workflow_present_v1.host, 200), workflow_present_v1.pid,
            now() - least(greatest(uptime, 0), 1e9) * interval '1 second', hash)
    ON CONFLICT (id) DO UPDATE SET seen_at = now(), running = excluded.running
    WHERE w.secret_hash = hash;
    RETURN FOUND;
END
$fn$;
COMMENT ON FUNCTION workflow_present_v1(uuid, uuid, text, text[], text[], boolean, integer, integer, text, text, integer, float8) IS
    'For workers: says that one is alive, under an id and a secret that it drew when it started. Of its prefixes those are told that its role may lease. False: the id is another worker''s, or its role is bound and has 300 live workers, which are all that are told of.';

CREATE OR REPLACE FUNCTION workflow_give_back_v1(token uuid, within float8, worker text, OUT given integer, OUT locked integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    bound  text[]  := workflow_bound_prefixes();
    own    boolean := bound IS NULL;
    before text    := coalesce(current_setting('workflow.audit', true), '');
    silent boolean := before = 'off' AND workflow_unrecorded();
    done   text;
BEGIN
    done := workflow_as_worker(bound, silent);
    WITH held AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w
        WHERE w.status = 'leased' AND w.started_at > now() - within * interval '1 second' AND w.lease_token = workflow_give_back_v1.token
          AND (own OR w.token_id IS NULL AND w.type ^@ ANY (bound))
    ), mine AS MATERIALIZED (
        SELECT w.id
        FROM workflow_run w
        WHERE w.id = ANY (ARRAY(SELECT h.id FROM held h)) AND w.status = 'leased' AND w.lease_token = workflow_give_back_v1.token
        FOR UPDATE SKIP LOCKED
    ), ended AS ( -- not leased again here: the caller may have no handler for them
        UPDATE workflow_run w SET lease_until = clock_timestamp(), updated_at = now()
        WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.deadline_at = w.started_at
        RETURNING w.id
    ), returned AS (
        UPDATE workflow_run w
        SET status = 'pending', run_at = now(), updated_at = now(), attempt = w.attempt - 1,
            lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL
        WHERE w.id = ANY (ARRAY(SELECT m.id FROM mine m)) AND w.deadline_at IS DISTINCT FROM w.started_at
        RETURNING w.id, least(w.attempt + 1, w.max_attempts) AS attempt, w.lease_no, w.started_at
    ), history AS (
        INSERT INTO workflow_history (workflow_id, event_type, attempt, lease_no, started_at, actor, data)
        SELECT r.id, 'released', r.attempt, r.lease_no, r.started_at, workflow_worker_name(bound, worker), '{"reason": "the answer to the lease was lost"}'
        FROM returned r
        WHERE NOT silent
    )
    SELECT count(*), (SELECT count(*) FROM held) - count(*) INTO given, locked FROM (SELECT FROM returned UNION ALL SELECT FROM ended) AS done;
    done := set_config('workflow.audit', before, true);
END
$fn$;

-- ---------------------------------------------------------------------------------
-- What people write. The columns are named by no statement of the engine, so these cost it nothing.
-- ---------------------------------------------------------------------------------

-- Its arguments are the column, what is allowed in it, and what to do.
CREATE FUNCTION workflow_refuse_bound() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    row_is jsonb := to_jsonb(NEW);
    given  text  := row_is->>(TG_ARGV[0]);
BEGIN
    IF TG_OP = 'UPDATE' AND row_is->(TG_ARGV[0]) IS NOT DISTINCT FROM to_jsonb(OLD)->(TG_ARGV[0]) THEN
        RETURN NULL; -- it was there before
    END IF;
    RAISE EXCEPTION '%: % is %, allowed is %', TG_TABLE_NAME, TG_ARGV[0],
            CASE WHEN length(given) > 100 THEN octet_length(given) || ' bytes long' ELSE quote_literal(given) END, TG_ARGV[1]
        USING ERRCODE = 'check_violation', HINT = TG_ARGV[2], TABLE = TG_TABLE_NAME, COLUMN = TG_ARGV[0], CONSTRAINT = TG_NAME;
END
$fn$;
REVOKE ALL ON FUNCTION workflow_refuse_bound() FROM PUBLIC;

-- Metadata of instances has the limits of that of runs.
CREATE FUNCTION process_instance_refuse_words() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF NEW.priority <> OLD.priority AND NEW.priority NOT BETWEEN -100 AND 100 THEN
        problem := format('priority %s is outside -100 to 100', NEW.priority);
        fix := 'Use a priority from -100 (last) to 100 (first).';
    ELSIF NEW.business_key IS DISTINCT FROM OLD.business_key AND length(NEW.business_key) NOT BETWEEN 1 AND 200 THEN
        problem := format('business_key has %s characters, allowed are 1 to 200', length(NEW.business_key));
        fix := 'Use a shorter key, a hash for example, or null for none.';
    ELSIF NEW.deleted_at IS DISTINCT FROM OLD.deleted_at AND NEW.deleted_at NOT BETWEEN '1900-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00' THEN
        problem := format('deleted_at %s is not a time from 1900 to 9999', NEW.deleted_at);
        fix := 'Use now().';
    ELSIF NEW.metadata IS DISTINCT FROM OLD.metadata AND (jsonb_typeof(NEW.metadata) <> 'object' OR octet_length(NEW.metadata::text) > 16384
          OR jsonb_path_exists(NEW.metadata, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")')) THEN
        problem := 'metadata is not an object of at most 16384 bytes and 64 levels';
        fix := 'Keep metadata to tags and trace context.';
    ELSIF NEW.metadata IS DISTINCT FROM OLD.metadata THEN
        SELECT 'metadata: ' || p.problem, p.fix INTO problem, fix FROM workflow_document_problem(NEW.metadata, NEW.metadata::text) AS p;
    END IF;
    IF problem IS NULL THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'process_instance %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'process_instance', CONSTRAINT = TG_NAME;
END
$fn$;
REVOKE ALL ON FUNCTION process_instance_refuse_words() FROM PUBLIC;
CREATE TRIGGER process_instance_words_guard AFTER UPDATE OF priority, business_key, metadata, deleted_at ON process_instance
    FOR EACH ROW WHEN (NEW.priority <> OLD.priority OR (NEW.business_key, NEW.deleted_at, NEW.metadata) IS DISTINCT FROM (OLD.business_key, OLD.deleted_at, OLD.metadata))
    EXECUTE FUNCTION process_instance_refuse_words();

-- One trigger for several columns: each row that is updated asks every trigger whether it is meant.
CREATE FUNCTION workflow_run_refuse_mark() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    low     CONSTANT timestamptz := '1900-01-01 00:00:00+00';
    high    CONSTANT timestamptz := '9999-01-01 00:00:00+00';
    problem text;
    fix     text;
BEGIN
    IF NEW.held_at NOT BETWEEN low AND high AND NEW.held_at IS DISTINCT FROM OLD.held_at THEN
        problem := format('held_at %s is not a time from 1900 to 9999', NEW.held_at);
        fix := 'Use now(), or null to resume it.';
    ELSIF NEW.deleted_at NOT BETWEEN low AND high AND NEW.deleted_at IS DISTINCT FROM OLD.deleted_at THEN
        problem := format('deleted_at %s is not a time from 1900 to 9999', NEW.deleted_at);
        fix := 'SELECT workflow_delete(id, reason) sets it.';
    ELSIF octet_length(NEW.delete_reason) > 16384 AND NEW.delete_reason IS DISTINCT FROM OLD.delete_reason THEN
        problem := format('delete_reason has %s bytes, the limit is 16384', octet_length(NEW.delete_reason));
        fix := 'Keep it to a sentence.';
    ELSE
        RETURN NULL; -- it was there before
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = TG_NAME;
END
$fn$;
REVOKE ALL ON FUNCTION workflow_run_refuse_mark() FROM PUBLIC;
CREATE TRIGGER workflow_run_mark_guard AFTER UPDATE OF held_at, deleted_at, delete_reason ON workflow_run
    FOR EACH ROW WHEN ((least(NEW.held_at, NEW.deleted_at) >= '1900-01-01 00:00:00+00' AND greatest(NEW.held_at, NEW.deleted_at) <= '9999-01-01 00:00:00+00'
        AND octet_length(NEW.delete_reason) <= 16384) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_mark();
CREATE TRIGGER workflow_pause_reason_bound AFTER INSERT OR UPDATE OF reason ON workflow_pause
    FOR EACH ROW WHEN (octet_length(NEW.reason) > 4096) EXECUTE FUNCTION workflow_refuse_bound('reason', 'a text of at most 4096 bytes', 'Keep it to a sentence.');
CREATE TRIGGER process_correction_reason_bound AFTER INSERT OR UPDATE OF reason ON process_correction
    FOR EACH ROW WHEN (octet_length(NEW.reason) > 4096) EXECUTE FUNCTION workflow_refuse_bound('reason', 'a text of at most 4096 bytes', 'Keep it to a sentence.');
CREATE TRIGGER process_definition_definition_bound AFTER INSERT ON process_definition
    FOR EACH ROW WHEN (octet_length(NEW.definition::text) > 1048576) EXECUTE FUNCTION workflow_refuse_bound('definition', 'a document of at most 1048576 bytes', 'Split the process: a call node starts another one.');

-- ---------------------------------------------------------------------------------
-- Processes: counters change by steps, and what never changes changes for nobody.
-- ---------------------------------------------------------------------------------

-- Its arguments are how the columns change, and the columns. Who is at work does not matter: the engine's role cannot do otherwise either.
CREATE FUNCTION workflow_refuse_step() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    was   jsonb := to_jsonb(OLD);
    given jsonb := to_jsonb(NEW);
    name  text  := (SELECT c FROM unnest(TG_ARGV[1:]) AS c WHERE was->c IS DISTINCT FROM given->c LIMIT 1);
    names jsonb := (SELECT jsonb_object_agg(k, was->k) FROM unnest('{id, instance_id, token_id, place, group_id, join_id, edge, event_id, sink, lane}'::text[]) AS k WHERE was ? k);
BEGIN
    IF workflow_overrides(TG_TABLE_NAME, TG_OP, names) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% %: % goes from % to %; it %', TG_TABLE_NAME, coalesce(was->>'id', was->>'group_id', was->>'join_id', was->>'token_id'), name,
            coalesce(left(was->>name, 100), 'null'), coalesce(left(given->>name, 100), 'null'), TG_ARGV[0]
        USING ERRCODE = 'check_violation', TABLE = TG_TABLE_NAME, COLUMN = name, CONSTRAINT = TG_NAME,
              HINT = 'Leave it to the engine. The owner can, on record: SET LOCAL workflow.override = ''why''.';
END
$fn$;
REVOKE ALL ON FUNCTION workflow_refuse_step() FROM PUBLIC;

-- No difference is taken: it overflows where a row is from before the CHECKs.
CREATE TRIGGER process_instance_version_step AFTER UPDATE OF version ON process_instance
    FOR EACH ROW WHEN (NEW.version NOT IN (OLD.version, least(OLD.version, 1000000000000000) + 1)) EXECUTE FUNCTION workflow_refuse_step('grows by one with each change', 'version');
CREATE TRIGGER process_token_version_step AFTER UPDATE OF version ON process_token
    FOR EACH ROW WHEN (NEW.version NOT IN (OLD.version, least(OLD.version, 1000000000000000) + 1)) EXECUTE FUNCTION workflow_refuse_step('grows by one with each change', 'version');
CREATE TRIGGER user_task_version_step AFTER UPDATE OF version ON user_task
    FOR EACH ROW WHEN (NEW.version NOT IN (OLD.version, least(OLD.version, 1000000000000000) + 1)) EXECUTE FUNCTION workflow_refuse_step('grows by one with each change', 'version');
CREATE TRIGGER each_progress_next_step AFTER UPDATE OF next ON each_progress
    FOR EACH ROW WHEN (NEW.next NOT BETWEEN OLD.next AND NEW.total) EXECUTE FUNCTION workflow_refuse_step('grows up to total', 'next');
CREATE TRIGGER each_progress_done_step AFTER UPDATE OF done ON each_progress
    FOR EACH ROW WHEN (NEW.done NOT BETWEEN OLD.done AND NEW.next) EXECUTE FUNCTION workflow_refuse_step('grows up to next', 'done');

DO $do$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT x.t, x.columns,
                    (SELECT string_agg(format('%I', c), ', ') FROM unnest(x.columns) AS c) AS named,
                    (SELECT string_agg(format('NEW.%I', c), ', ') FROM unnest(x.columns) AS c) AS new,
                    (SELECT string_agg(format('OLD.%I', c), ', ') FROM unnest(x.columns) AS c) AS old,
                    (SELECT string_agg(format('%L', c), ', ') FROM unnest(x.columns) AS c) AS args
             FROM (VALUES
        ('process_instance', '{id, process_definition_id, tenant_id, input_payload, parent_process_instance_id, parent_token_id, parent_visit, depth, undone_with_parent, created_at}'::text[]),
        ('process_token', '{id, instance_id, item, created_at}'),
        ('parallel_group', '{id, instance_id, parent_group_id, node, host_token_id}'),
        ('parallel_join', '{id, instance_id, node, parallel_group_id, round}'),
        ('join_arrival', '{join_id, token_id, edge, surplus}'),
        ('each_progress', '{group_id, instance_id, node, items, total}'),
        ('message', '{message_id, name, key}'), -- one that came too early is replaced when it comes again
        ('message_wait', '{token_id, place, instance_id, node, name, key, created_at}'),
        ('user_task', '{id, instance_id, token_id, node, groups, payload, due_at, created_at}'),
        ('compensation_record', '{id, instance_id, order, token_id, run_id, node_id, handler_ref, certain, not_before, retry_of, created_at}'),
        ('incident', '{id, instance_id, token_id, node, code, message, created_at}')) AS x (t, columns) LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER UPDATE OF %s ON %I FOR EACH ROW WHEN ((%s) IS DISTINCT FROM (%s)) EXECUTE FUNCTION workflow_refuse_step(%L, %s)',
                       f.t || '_fixed', f.named, f.t, f.new, f.old, 'never changes', f.args);
    END LOOP;
END
$do$;
DROP TRIGGER process_instance_kept ON process_instance; -- what it kept from others never changes now

-- How long a list is, its elements tell.
CREATE FUNCTION process_refuse_list() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RAISE EXCEPTION 'each_progress %: total is %, and the list has % elements', NEW.group_id, NEW.total, jsonb_array_length(NEW.items)
        USING ERRCODE = 'check_violation', TABLE = TG_TABLE_NAME, COLUMN = 'total', CONSTRAINT = TG_NAME, HINT = 'Leave lists to the engine.';
END
$fn$;
REVOKE ALL ON FUNCTION process_refuse_list() FROM PUBLIC;
CREATE TRIGGER each_progress_total_bound AFTER INSERT ON each_progress
    FOR EACH ROW WHEN (CASE jsonb_typeof(NEW.items) WHEN 'array' THEN NEW.total <> jsonb_array_length(NEW.items) ELSE true END) EXECUTE FUNCTION process_refuse_list();
