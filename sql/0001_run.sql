-- simple-workflow 0001: runs, their history, and the outbox.
--
-- Apply with `workflowctl migrate up` or from Go with sql.Up: these also note in the table
-- workflow_schema what was applied, which workers check. To just look around in a scratch
-- database, psql -v ON_ERROR_STOP=1 -1 -f 0001_run.sql (and so on) does.
-- Nothing here names a schema: everything lands in the first one of search_path.
--
-- How to read it. workflow_run is the whole system: each row is one piece of work.
-- The engine's own statements are right by themselves; the triggers below are a net
-- for people and other programs, and say in words what went wrong. Each trigger has a
-- WHEN made of plain expressions, so that rows which are fine never call a function.
--
-- Functions stay in the schema they were made in, whatever their caller's search_path is:
-- SET search_path FROM CURRENT takes what is set here for the rest of the transaction.
DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
END
$do$;


-- Time-ordered ids (RFC 9562, version 7): neighbours in time are neighbours in the
-- index, which keeps inserts on few pages. Servers that bring uuidv7() use theirs.
DO $do$
BEGIN
    IF to_regprocedure('pg_catalog.uuidv7()') IS NOT NULL THEN
        CREATE FUNCTION workflow_uuid() RETURNS uuid
        LANGUAGE sql VOLATILE PARALLEL SAFE AS 'SELECT pg_catalog.uuidv7()';
    ELSE
        -- 48 bits of milliseconds over a random (version 4) uuid; setting bits 52 and 53
        -- turns the version nibble 0100 into 0111.
        CREATE FUNCTION workflow_uuid() RETURNS uuid
        LANGUAGE sql VOLATILE PARALLEL SAFE AS $fn$
            SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
        $fn$;
    END IF;
END
$do$;
COMMENT ON FUNCTION workflow_uuid() IS 'A new time-ordered uuid (version 7): the default of workflow_run.id.';


-- ---------------------------------------------------------------------------------
-- workflow_run: one row is one durable piece of work.
-- ---------------------------------------------------------------------------------

CREATE TABLE workflow_run (
    id              uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    -- Collation C: prefixes are byte ranges, whatever the database's language is.
    type            text COLLATE "C" NOT NULL,
    status          text COLLATE "C" NOT NULL DEFAULT 'pending',
    priority        integer     NOT NULL DEFAULT 0,
    idempotency_key text,
    tenant_id       text,

    payload         jsonb       NOT NULL DEFAULT '{}',
    result          jsonb,
    error           jsonb,
    last_error      text,
    metadata        jsonb,

    attempt         integer     NOT NULL DEFAULT 0,
    max_attempts    integer     NOT NULL DEFAULT 3,
    postponed       integer     NOT NULL DEFAULT 0,
    suspect         boolean     NOT NULL DEFAULT false,

    run_at          timestamptz NOT NULL DEFAULT now(),
    started_at      timestamptz,
    deadline_at     timestamptz,
    finished_at     timestamptz,
    held_at         timestamptz,

    lease_until     timestamptz,
    lease_token     uuid,
    lease_no        bigint      NOT NULL DEFAULT 0,
    leased_by       text,
    settled_token   uuid,
    settled_by      text,

    token_id        uuid,

    created_at      timestamptz NOT NULL DEFAULT now(),
    created_by      text        NOT NULL DEFAULT concat_ws(' ', session_user, nullif(current_setting('application_name'), '')),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    deleted_at      timestamptz,
    delete_reason   text,

    -- The guards further down refuse the same things in words; these hold without triggers.
    CONSTRAINT workflow_run_status_check
        CHECK (status IN ('pending', 'leased', 'succeeded', 'failed', 'cancelled')),
    CONSTRAINT workflow_run_lease_check
        CHECK ((status = 'leased') = (lease_token IS NOT NULL)
           AND (lease_token IS NULL) = (lease_until IS NULL)
           AND (lease_token IS NULL) = (leased_by IS NULL)),
    CONSTRAINT workflow_run_finished_check
        CHECK ((status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT workflow_run_range_check
        CHECK (priority BETWEEN -100 AND 100 AND attempt >= 0 AND max_attempts BETWEEN 1 AND 1000
           AND lease_no >= 0 AND postponed >= 0 AND isfinite(run_at))
) WITH (
    -- Room on each page, so that a heartbeat is an in-page (HOT) update.
    fillfactor = 70,
    -- Each run is updated at least twice: vacuum by the number of changes, not by a
    -- fifth of the table, and do not throttle it.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0
);

COMMENT ON TABLE  workflow_run IS 'One row is one durable piece of work. INSERT INTO workflow_run (type, payload) VALUES (…) is a complete enqueue.';
COMMENT ON COLUMN workflow_run.type IS 'Dotted lower-case name; workers lease by prefix of it, e.g. billing.invoice_charge.v1.';
COMMENT ON COLUMN workflow_run.status IS 'pending, leased, succeeded, failed or cancelled.';
COMMENT ON COLUMN workflow_run.priority IS '-100 to 100; higher is leased first.';
COMMENT ON COLUMN workflow_run.idempotency_key IS 'At most one row that is not soft-deleted has a given key.';
COMMENT ON COLUMN workflow_run.tenant_id IS 'Whose it is, for those who serve many: 1 to 200 characters; handlers may read it. Steps have that of their process; never changes.';
COMMENT ON COLUMN workflow_run.payload IS 'The input: a JSON object of at most 256 kB and 64 levels; never changes.';
COMMENT ON COLUMN workflow_run.result IS 'What the handler returned, once succeeded.';
COMMENT ON COLUMN workflow_run.error IS 'The last failure as an object: code, message and more.';
COMMENT ON COLUMN workflow_run.last_error IS 'The last failure in one line of at most 4 kB.';
COMMENT ON COLUMN workflow_run.metadata IS 'An object that travels with the run: traceparent, tags. Handlers may read it.';
COMMENT ON COLUMN workflow_run.attempt IS 'Charged starts so far: counted when the lease is taken, given back by a release.';
COMMENT ON COLUMN workflow_run.max_attempts IS 'The most starts that may be charged, 1 to 1000.';
COMMENT ON COLUMN workflow_run.postponed IS 'How often the handler asked to be tried again later without spending an attempt.';
COMMENT ON COLUMN workflow_run.suspect IS 'Its last lease expired: workers watch such runs, few at a time, so that one which kills its process takes few others along.';
COMMENT ON COLUMN workflow_run.run_at IS 'Not leased before this time.';
COMMENT ON COLUMN workflow_run.started_at IS 'When the current or latest lease was taken.';
COMMENT ON COLUMN workflow_run.deadline_at IS 'The type''s time limit for the current lease: heartbeats never reach beyond it.';
COMMENT ON COLUMN workflow_run.finished_at IS 'When the run reached succeeded, failed or cancelled.';
COMMENT ON COLUMN workflow_run.held_at IS 'Set: paused, never leased. Clear it to resume.';
COMMENT ON COLUMN workflow_run.lease_until IS 'When the lease expires unless a heartbeat extends it.';
COMMENT ON COLUMN workflow_run.lease_token IS 'The fence: random, new with every lease, null when not leased. Every settle and heartbeat must present it.';
COMMENT ON COLUMN workflow_run.lease_no IS 'Grows by one with every lease: a fencing number for systems outside.';
COMMENT ON COLUMN workflow_run.leased_by IS 'The worker that holds the lease; for people, nothing is decided by it.';
COMMENT ON COLUMN workflow_run.settled_token IS 'The lease token of the last outcome that was recorded.';
COMMENT ON COLUMN workflow_run.settled_by IS 'The worker that recorded it.';
COMMENT ON COLUMN workflow_run.token_id IS 'The token of a process graph that this run moves; null for plain runs.';
COMMENT ON COLUMN workflow_run.created_by IS 'The database role that enqueued it, and its application_name.';
COMMENT ON COLUMN workflow_run.deleted_at IS 'Set: soft-deleted, never leased, and its idempotency key is free again.';

-- One live row per key.
CREATE UNIQUE INDEX workflow_run_idempotency_idx ON workflow_run (idempotency_key)
    WHERE idempotency_key IS NOT NULL AND deleted_at IS NULL;

-- What can be leased, as lanes: all rows of one (suspect, type, priority), in due order.
-- Workers walk lanes from the highest priority down, so rows of other types, of other
-- priorities, scheduled for later, held, deleted or finished are never touched. No column
-- here changes while a run is leased. The second line keeps out rows that a CHECK would
-- refuse to have updated (written while it was missing): one would fail every lease.
CREATE INDEX workflow_run_lane_idx ON workflow_run (suspect, type, priority DESC, run_at, id)
    WHERE status = 'pending' AND deleted_at IS NULL AND held_at IS NULL
      AND finished_at IS NULL AND priority BETWEEN -100 AND 100 AND attempt >= 0 AND max_attempts BETWEEN 1 AND 1000;

-- What that index holds, for whoever asks for it by (suspect, type, ...).
CREATE VIEW workflow_open AS
    SELECT id, suspect, type, priority, run_at, token_id, payload
    FROM workflow_run
    WHERE status = 'pending' AND deleted_at IS NULL AND held_at IS NULL
      AND finished_at IS NULL AND priority BETWEEN -100 AND 100 AND attempt >= 0 AND max_attempts BETWEEN 1 AND 1000;
COMMENT ON VIEW workflow_open IS 'Runs that are leased when they are due.';

-- What is leased, by the time of the lease. It holds started_at and not lease_until, so
-- that heartbeats change no index.
CREATE INDEX workflow_run_leased_idx ON workflow_run (started_at)
    WHERE status = 'leased';

-- What retention may remove, oldest first of each kind. Steps of process graphs go with
-- their process.
CREATE INDEX workflow_run_finished_idx ON workflow_run (status, finished_at)
    WHERE finished_at IS NOT NULL AND token_id IS NULL;
-- What has failed, by type: for those who have it tried again.
CREATE INDEX workflow_run_failed_idx ON workflow_run (type, finished_at)
    WHERE status = 'failed' AND finished_at IS NOT NULL AND token_id IS NULL AND deleted_at IS NULL;
CREATE INDEX workflow_run_deleted_idx ON workflow_run (deleted_at)
    WHERE deleted_at IS NOT NULL;


-- ---------------------------------------------------------------------------------
-- Guards: wrong rows and illegal moves are errors in words.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_run_refuse_insert() RETURNS trigger
LANGUAGE plpgsql AS $fn$
DECLARE
    problem text;
    fix     text;
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
    ELSIF NOT starts_with(NEW.created_by, session_user) THEN
        problem := format('created_by %L is not you, %s', left(NEW.created_by, 120), session_user);
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
    ELSIF octet_length(NEW.payload::text) > 262144 THEN
        problem := format('payload has %s bytes, the limit is 262144', octet_length(NEW.payload::text));
        fix := 'Store large data elsewhere and put a reference into the payload.';
    ELSIF NEW.metadata IS NOT NULL AND jsonb_typeof(NEW.metadata) <> 'object' THEN
        problem := format('metadata is a JSON %s, an object is required', jsonb_typeof(NEW.metadata));
        fix := 'Use an object such as {"tag": "nightly"}.';
    ELSIF octet_length(NEW.metadata::text) > 16384 THEN
        problem := format('metadata has %s bytes, the limit is 16384', octet_length(NEW.metadata::text));
        fix := 'Keep metadata to tags and trace context.';
    ELSE
        problem := 'payload or metadata is nested deeper than 64 levels';
        fix := 'Flatten the document.';
    END IF;
    RAISE EXCEPTION 'workflow_run: %', problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_insert_guard';
END
$fn$;

CREATE TRIGGER workflow_run_insert_guard BEFORE INSERT ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.type ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND length(NEW.type) <= 200
        AND NEW.status = 'pending' AND starts_with(NEW.created_by, session_user)
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000
        AND NEW.attempt = 0 AND NEW.postponed = 0 AND NOT NEW.suspect AND NEW.lease_no = 0
        AND coalesce(NEW.lease_token, NEW.settled_token) IS NULL AND coalesce(NEW.leased_by, NEW.settled_by) IS NULL
        AND coalesce(NEW.lease_until, NEW.started_at, NEW.deadline_at, NEW.finished_at) IS NULL
        AND NEW.result IS NULL AND NEW.error IS NULL AND NEW.last_error IS NULL
        AND isfinite(NEW.run_at) AND NEW.run_at >= '2000-01-01' AND NEW.run_at <= now() + interval '10 years'
        AND (NEW.idempotency_key IS NULL OR length(NEW.idempotency_key) BETWEEN 1 AND 200)
        AND (NEW.tenant_id IS NULL OR length(NEW.tenant_id) BETWEEN 1 AND 200)
        AND jsonb_typeof(NEW.payload) = 'object' AND octet_length(NEW.payload::text) <= 262144
        -- Nothing that could hold more lies 64 levels below the top.
        AND NOT jsonb_path_exists(NEW.payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")')
        AND (NEW.metadata IS NULL
             OR jsonb_typeof(NEW.metadata) = 'object' AND octet_length(NEW.metadata::text) <= 16384
                AND NOT jsonb_path_exists(NEW.metadata, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_insert();

-- The state machine:
--
--   pending ──lease──▶ leased ──▶ succeeded
--      ▲                 │ ├────▶ failed ──workflow_retry──▶ pending
--      │                 │ └────▶ cancelled
--      └──retry, release─┘          ▲
--   pending ──────cancel────────────┘
CREATE FUNCTION workflow_run_refuse_update() RETURNS trigger
LANGUAGE plpgsql AS $fn$
DECLARE
    problem text;
    fix     text;
BEGIN
    IF NEW.status NOT IN ('pending', 'leased', 'succeeded', 'failed', 'cancelled') THEN
        problem := format('status %L does not exist', left(NEW.status, 120));
        fix := 'The states are pending, leased, succeeded, failed and cancelled.';
    ELSIF NEW.id <> OLD.id OR NEW.type <> OLD.type OR NEW.created_at <> OLD.created_at OR NEW.created_by <> OLD.created_by THEN
        problem := format('run %s: id, type, created_at and created_by never change', OLD.id);
        fix := 'Cancel this run with SELECT workflow_cancel(id) and enqueue a new one.';
    ELSIF NEW.priority NOT BETWEEN -100 AND 100 THEN
        problem := format('run %s: priority %s is outside -100 to 100', OLD.id, NEW.priority);
        fix := 'Use a priority from -100 (last) to 100 (first).';
    ELSIF NEW.max_attempts NOT BETWEEN 1 AND 1000 OR NEW.attempt < 0 THEN
        problem := format('run %s: attempt %s of %s is not possible', OLD.id, NEW.attempt, NEW.max_attempts);
        fix := 'attempt starts at 0, max_attempts is 1 to 1000.';
    ELSIF NOT isfinite(NEW.run_at) OR NEW.run_at < '2000-01-01' OR NEW.run_at > now() + interval '10 years 1 day' THEN
        problem := format('run %s: run_at %s is not a usable time', OLD.id, NEW.run_at);
        fix := 'Use a time from the year 2000 to ten years ahead.';
    ELSIF NEW.lease_until IS NOT NULL
      AND (NOT isfinite(NEW.lease_until) OR NEW.lease_until > clock_timestamp() + interval '25 hours') THEN
        problem := format('run %s: lease_until %s would never expire', OLD.id, NEW.lease_until);
        fix := 'A lease ends within 24 hours; workers extend it by heartbeats.';
    ELSIF NEW.lease_no < OLD.lease_no THEN
        problem := format('run %s: lease_no never goes down', OLD.id);
        fix := 'Leave lease_no to the workers.';
    ELSIF OLD.status = 'failed' AND NEW.status = 'pending' THEN
        problem := format('run %s has failed and is not simply set to pending', OLD.id);
        fix := format('SELECT workflow_retry(%L) grants it another attempt and records who asked.', OLD.id);
    ELSIF OLD.status IN ('succeeded', 'failed', 'cancelled') AND NEW.status <> OLD.status THEN
        problem := format('run %s is %s, which is final; it cannot become %s', OLD.id, OLD.status, NEW.status);
        fix := CASE OLD.status WHEN 'failed' THEN format('Only SELECT workflow_retry(%L) brings a failed run back.', OLD.id)
               ELSE 'Enqueue a new run with the same payload.' END;
    ELSIF OLD.status = 'succeeded' THEN
        problem := format('run %s has succeeded: attempt, lease_no, started_at, finished_at and settled_by are its history', OLD.id);
        fix := 'Leave them as they are.';
    ELSIF OLD.status = 'pending' AND NEW.status IN ('succeeded', 'failed') THEN
        problem := format('run %s is pending and cannot become %s without being leased', OLD.id, NEW.status);
        fix := format('Only the worker that leased a run settles it. To stop it: SELECT workflow_cancel(%L).', OLD.id);
    ELSIF NEW.status = 'leased' AND (NEW.lease_token IS NULL OR NEW.lease_until IS NULL OR NEW.leased_by IS NULL) THEN
        problem := format('run %s cannot be leased without lease_token, lease_until and leased_by', OLD.id);
        fix := 'Leave leasing to the workers.';
    ELSIF NEW.status = 'leased' AND OLD.status = 'pending' AND NEW.lease_no = OLD.lease_no THEN
        problem := format('run %s: every lease takes the next lease_no', OLD.id);
        fix := 'Leave leasing to the workers.';
    ELSE
        problem := format('run %s: its lease is held by %s until %s and cannot be given to another', OLD.id, OLD.leased_by, OLD.lease_until);
        fix := 'Wait until it expires, or stop that worker: it hands its leases back.';
    END IF;
    RAISE EXCEPTION 'workflow_run: %', problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_update_guard';
END
$fn$;

CREATE TRIGGER workflow_run_update_guard BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN ((
        NEW.id = OLD.id AND NEW.type = OLD.type AND NEW.created_at = OLD.created_at AND NEW.created_by = OLD.created_by
        AND NEW.priority BETWEEN -100 AND 100 AND NEW.max_attempts BETWEEN 1 AND 1000 AND NEW.attempt >= 0
        AND isfinite(NEW.run_at) AND NEW.run_at >= '2000-01-01' AND NEW.run_at <= now() + interval '10 years 1 day'
        AND (NEW.lease_until IS NULL
             OR isfinite(NEW.lease_until) AND NEW.lease_until <= clock_timestamp() + interval '25 hours')
        AND NEW.lease_no >= OLD.lease_no
        AND CASE OLD.status
            WHEN 'pending' THEN NEW.status IN ('pending', 'cancelled')
                             OR NEW.status = 'leased' AND NEW.lease_no > OLD.lease_no AND NEW.lease_token IS NOT NULL
                                AND NEW.lease_until IS NOT NULL AND NEW.leased_by IS NOT NULL
            WHEN 'leased'  THEN NEW.status IN ('pending', 'succeeded', 'failed', 'cancelled')
                             OR NEW.status = 'leased' AND (NEW.lease_token = OLD.lease_token
                                 OR OLD.lease_until < clock_timestamp() AND NEW.lease_no > OLD.lease_no)
            WHEN 'failed'  THEN NEW.status = 'failed'
                             OR NEW.status = 'pending' AND coalesce(current_setting('workflow.retry', true), '') = 'on'
            WHEN 'succeeded' THEN NEW.status = 'succeeded' AND (NEW.attempt, NEW.lease_no) = (OLD.attempt, OLD.lease_no)
                             AND (NEW.started_at, NEW.finished_at, NEW.settled_by) IS NOT DISTINCT FROM (OLD.started_at, OLD.finished_at, OLD.settled_by)
            ELSE NEW.status = OLD.status END
    ) IS FALSE)
    EXECUTE FUNCTION workflow_run_refuse_update();

-- What was given at the start is looked at only when a statement names it: no other update
-- has to fetch a large payload.
CREATE FUNCTION workflow_run_refuse_input() RETURNS trigger
LANGUAGE plpgsql AS $fn$
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
    ELSIF length(NEW.idempotency_key) NOT BETWEEN 1 AND 200 THEN
        problem := format('idempotency_key has %s characters, allowed are 1 to 200', length(NEW.idempotency_key));
        fix := 'Use a shorter key, a hash for example, or null for none.';
    ELSE
        problem := 'metadata is not an object of at most 16384 bytes and 64 levels';
        fix := 'Keep metadata to tags and trace context.';
    END IF;
    RAISE EXCEPTION 'workflow_run: run %: %', OLD.id, problem
        USING ERRCODE = 'check_violation', HINT = fix, TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_input_guard';
END
$fn$;

CREATE TRIGGER workflow_run_input_guard AFTER UPDATE OF payload, idempotency_key, metadata, tenant_id ON workflow_run
    FOR EACH ROW WHEN (NEW.payload <> OLD.payload OR NEW.tenant_id IS DISTINCT FROM OLD.tenant_id
        OR length(NEW.idempotency_key) NOT BETWEEN 1 AND 200
        OR jsonb_typeof(NEW.metadata) <> 'object' OR octet_length(NEW.metadata::text) > 16384
        OR jsonb_path_exists(NEW.metadata, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
    EXECUTE FUNCTION workflow_run_refuse_input();

CREATE FUNCTION workflow_run_refuse_delete() RETURNS trigger
LANGUAGE plpgsql AS $fn$
BEGIN
    RAISE EXCEPTION 'workflow_run: run % is leased by % and cannot be deleted', OLD.id, OLD.leased_by
        USING ERRCODE = 'check_violation', TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_delete_guard',
              HINT = format('SELECT workflow_delete(%L, ''reason'') cancels and hides it; retention removes the row later.', OLD.id);
END
$fn$;

CREATE TRIGGER workflow_run_delete_guard BEFORE DELETE ON workflow_run
    FOR EACH ROW WHEN (OLD.status = 'leased')
    EXECUTE FUNCTION workflow_run_refuse_delete();

-- What a person's UPDATE leaves undone: updated_at, the fields that go with a state, run_at
-- of what is resumed, and the cancel that a soft delete of a leased run implies. The engine's statements set all
-- of this themselves and never come here.
CREATE FUNCTION workflow_run_tidy_row() RETURNS trigger
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

CREATE TRIGGER workflow_run_tidy BEFORE UPDATE ON workflow_run
    FOR EACH ROW WHEN (NEW.updated_at = OLD.updated_at
        OR NEW.status = 'leased' AND NEW.deleted_at IS NOT NULL
        OR NEW.status <> 'leased' AND NEW.lease_token IS NOT NULL
        OR NEW.status IN ('succeeded', 'failed', 'cancelled') AND NEW.finished_at IS NULL
        OR NEW.status = 'succeeded' AND OLD.status = 'leased' AND NEW.settled_token IS DISTINCT FROM OLD.lease_token)
    EXECUTE FUNCTION workflow_run_tidy_row();

-- A soft-deleted run frees its key; bringing it back when the key is taken says so.
CREATE FUNCTION workflow_run_refuse_undelete() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    other uuid;
BEGIN
    SELECT r.id INTO other FROM workflow_run r
    WHERE r.idempotency_key = NEW.idempotency_key AND r.deleted_at IS NULL AND r.id <> NEW.id;
    IF other IS NULL THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'workflow_run: run % cannot be undeleted: run % has its idempotency_key %', OLD.id, other, quote_literal(NEW.idempotency_key)
        USING ERRCODE = 'unique_violation', TABLE = 'workflow_run', CONSTRAINT = 'workflow_run_idempotency_idx',
              HINT = 'Delete the other run first, or clear the key of this one in the same UPDATE.';
END
$fn$;

CREATE TRIGGER workflow_run_undelete_guard BEFORE UPDATE OF deleted_at ON workflow_run
    FOR EACH ROW WHEN (OLD.deleted_at IS NOT NULL AND NEW.deleted_at IS NULL AND NEW.idempotency_key IS NOT NULL)
    EXECUTE FUNCTION workflow_run_refuse_undelete();
