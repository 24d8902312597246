-- simple-workflow 0005: process graphs.
--
-- A process is no second engine: each step of it is a row of workflow_run with token_id and
-- node set. Settling that row moves the token, in the same transaction.
--
--   process_definition   what its author wrote; never changes
--   process_instance     one execution of it
--   process_token        where an instance is: one row per path, moved from node to node
--   parallel_group       what one fork opened; groups nest
--   parallel_join        what one join waits for, and its arrivals in join_arrival
--   incident             where an instance cannot go on by itself, and why
--   process_state_history, process_event   what happened, written with it

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE TABLE process_definition (
    id         uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    -- jsonb has one text for equal documents, keys in one order. One process may still be written in several ways
    -- ("90m", "PT1H30M"): graph.Deploy compares what they mean.
    definition jsonb       NOT NULL,
    name       text COLLATE "C" NOT NULL GENERATED ALWAYS AS (definition->>'process') STORED,
    version    integer     NOT NULL GENERATED ALWAYS AS ((definition->>'version')::integer) STORED,
    hash       text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text        NOT NULL DEFAULT concat_ws(' ', session_user, nullif(current_setting('application_name'), '')),
    CONSTRAINT process_definition_version_key UNIQUE (name, version),
    CONSTRAINT process_definition_version_check CHECK (version > 0)
);
COMMENT ON TABLE  process_definition IS 'Processes as their authors wrote them. A row never changes; an edited process is another version.';
COMMENT ON COLUMN process_definition.hash IS 'SHA-256 of the definition''s text as it stands here, in hex: set when it is inserted. One process written in another way has another one.';

CREATE FUNCTION process_definition_guard() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
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
        RAISE EXCEPTION 'process_definition: % version % cannot be changed', OLD.name, OLD.version
            USING ERRCODE = 'check_violation', HINT = 'Deploy the edited process with a higher version.';
    END IF;
    IF jsonb_typeof(NEW.definition) <> 'object' OR jsonb_typeof(NEW.definition->'nodes') IS DISTINCT FROM 'object'
       OR jsonb_typeof(NEW.definition->'process') IS DISTINCT FROM 'string' OR jsonb_typeof(NEW.definition->'version') IS DISTINCT FROM 'number' THEN
        RAISE EXCEPTION 'process_definition: definition is not an object with process, version and nodes'
            USING ERRCODE = 'check_violation', HINT = 'Check it with: workflowctl define --check FILE.';
    END IF;
    NEW.hash := encode(sha256(convert_to(NEW.definition::text, 'UTF8')), 'hex');
    RETURN NEW;
END
$fn$;
CREATE TRIGGER process_definition_guard BEFORE INSERT OR UPDATE OR DELETE ON process_definition
    FOR EACH ROW EXECUTE FUNCTION process_definition_guard();

CREATE TABLE process_instance (
    id                    uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    process_definition_id uuid        NOT NULL REFERENCES process_definition ON DELETE RESTRICT,
    status                text COLLATE "C" NOT NULL DEFAULT 'CREATED',
    business_key          text,
    tenant_id             text,
    priority              integer     NOT NULL DEFAULT 0,
    parent_process_instance_id uuid   REFERENCES process_instance,
    parent_token_id       uuid,
    parent_visit          bigint,
    depth                 integer     NOT NULL DEFAULT 0,
    undone_with_parent    boolean     NOT NULL DEFAULT false,
    input_payload         jsonb       NOT NULL DEFAULT '{}',
    output_payload        jsonb,
    metadata              jsonb       NOT NULL DEFAULT '{}',
    failure_reason        text,
    version               bigint      NOT NULL DEFAULT 1,

    -- Counted in every transaction that moves tokens: two that end together cannot each
    -- take the other for alive.
    live_tokens           integer     NOT NULL DEFAULT 0,
    ready_tokens          integer     NOT NULL DEFAULT 0,
    joining_tokens        integer     NOT NULL DEFAULT 0,
    open_incidents        integer     NOT NULL DEFAULT 0,

    -- What it becomes once everything is undone.
    ending                text COLLATE "C",
    ending_reason         text,

    created_at            timestamptz NOT NULL DEFAULT now(),
    updated_at            timestamptz NOT NULL DEFAULT now(),
    started_at            timestamptz,
    completed_at          timestamptz,
    paused_at             timestamptz,
    deleted_at            timestamptz,
    corrected             boolean     NOT NULL DEFAULT false,
    CONSTRAINT process_instance_status_check
        CHECK (status IN ('CREATED', 'IN_PROGRESS', 'WAITING', 'COMPLETED', 'FAILED', 'CANCELLED')),
    CONSTRAINT process_instance_version_check CHECK (version > 0),
    CONSTRAINT process_instance_tenant_check CHECK (length(tenant_id) BETWEEN 1 AND 200),
    CONSTRAINT process_instance_count_check
        CHECK (live_tokens >= 0 AND ready_tokens >= 0 AND joining_tokens >= 0 AND ready_tokens + joining_tokens <= live_tokens),
    CONSTRAINT process_instance_completed_check
        CHECK ((status IN ('COMPLETED', 'FAILED', 'CANCELLED')) = (completed_at IS NOT NULL)),
    CONSTRAINT process_instance_final_check
        CHECK (completed_at IS NULL OR live_tokens = 0),
    CONSTRAINT process_instance_failure_check CHECK (failure_reason IS NULL OR status = 'FAILED'),
    CONSTRAINT process_instance_output_check CHECK (output_payload IS NULL OR status = 'COMPLETED')
) WITH (fillfactor = 70);
CREATE INDEX process_instance_definition_idx ON process_instance (process_definition_id);
-- Those that are not over, and retention's: nothing here changes while an instance moves.
CREATE INDEX process_instance_open_idx ON process_instance (created_at) WHERE completed_at IS NULL;
CREATE INDEX process_instance_completed_idx ON process_instance (completed_at) WHERE completed_at IS NOT NULL;
CREATE INDEX process_instance_child_idx ON process_instance (parent_process_instance_id) WHERE parent_process_instance_id IS NOT NULL;
CREATE INDEX process_instance_parent_idx ON process_instance (parent_token_id) WHERE parent_token_id IS NOT NULL;
CREATE INDEX process_instance_key_idx ON process_instance (business_key) WHERE business_key IS NOT NULL;

COMMENT ON TABLE  process_instance IS 'One execution of a process.';
COMMENT ON COLUMN process_instance.status IS 'CREATED, IN_PROGRESS, WAITING, COMPLETED, FAILED or CANCELLED.';
COMMENT ON COLUMN process_instance.tenant_id IS 'Whose it is: its steps, timers and undo steps have it, and the instances that it calls; never changes.';
COMMENT ON COLUMN process_instance.input_payload IS 'What it was started with; never changes.';
COMMENT ON COLUMN process_instance.version IS 'Grows by one with each transaction that changes the instance.';
COMMENT ON COLUMN process_instance.live_tokens IS 'Tokens that are not Completed, Failed or Terminated; at zero the instance is over.';
COMMENT ON COLUMN process_instance.ready_tokens IS 'Those of them whose step is due or runs.';
COMMENT ON COLUMN process_instance.joining_tokens IS 'Those of them that wait at a join for others.';
COMMENT ON COLUMN process_instance.open_incidents IS 'Incidents that are not resolved.';

CREATE TABLE parallel_group (
    id              uuid    NOT NULL PRIMARY KEY,
    instance_id     uuid    NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    parent_group_id uuid    REFERENCES parallel_group,
    node            text COLLATE "C" NOT NULL,
    host_token_id   uuid, -- of a scope or each: the token that stands for it outside
    live            integer NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX parallel_group_parent_idx ON parallel_group (parent_group_id) WHERE parent_group_id IS NOT NULL;
CREATE INDEX parallel_group_instance_idx ON parallel_group (instance_id);
COMMENT ON TABLE  parallel_group IS 'What one execution of a fork opened.';
COMMENT ON COLUMN parallel_group.live IS 'Its live tokens, and groups within it that have any.';

CREATE TABLE process_token (
    id                uuid        NOT NULL PRIMARY KEY,
    instance_id       uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    node              text COLLATE "C" NOT NULL,
    edge              text COLLATE "C",
    state             text COLLATE "C" NOT NULL,
    mode              text COLLATE "C" NOT NULL DEFAULT 'Forward',
    parallel_group_id uuid        REFERENCES parallel_group,
    item              integer, -- the index of the element it is for
    version           bigint      NOT NULL DEFAULT 1,
    created_at        timestamptz NOT NULL DEFAULT now(),
    updated_at        timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT process_token_state_check CHECK (state IN ('Created', 'Ready', 'Waiting', 'Completed', 'Failed', 'Terminated')),
    CONSTRAINT process_token_mode_check CHECK (mode IN ('Forward', 'Compensation'))
) WITH (fillfactor = 70);
CREATE INDEX process_token_instance_idx ON process_token (instance_id);
CREATE INDEX process_token_live_idx ON process_token (instance_id) WHERE state IN ('Created', 'Ready', 'Waiting');
CREATE INDEX process_token_group_idx ON process_token (parallel_group_id) WHERE parallel_group_id IS NOT NULL;
COMMENT ON TABLE process_token IS 'The paths of an instance. Read it as token, which also tells what is executing.';

ALTER TABLE workflow_run ADD COLUMN node text COLLATE "C";
COMMENT ON COLUMN workflow_run.node IS 'The node of a process whose visit this run is; null for plain runs.';
CREATE INDEX workflow_run_token_idx ON workflow_run (token_id) WHERE token_id IS NOT NULL;

-- The runs of a token, their history, and its arrivals at joins go with it; it goes with its instance alone. By the instance's own
-- deletion, so that a trigger of yours before that still finds all of it.
CREATE FUNCTION process_steps_go() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    WITH steps AS (
        DELETE FROM workflow_run WHERE token_id = ANY (ARRAY(SELECT id FROM gone)) RETURNING id
    )
    DELETE FROM workflow_history WHERE workflow_id = ANY (ARRAY(SELECT id FROM steps));
    DELETE FROM join_arrival WHERE token_id = ANY (ARRAY(SELECT id FROM gone));
    RETURN NULL;
END
$fn$;
CREATE TRIGGER process_steps_go AFTER DELETE ON process_token
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION process_steps_go();

CREATE VIEW token AS
    SELECT t.id, t.instance_id, t.node AS node_id,
           CASE WHEN t.state = 'Ready' AND r.status = 'leased' THEN 'Executing' ELSE t.state END AS state,
           t.mode, coalesce(r.attempt, 0) AS attempt, t.version, t.parallel_group_id, r.id AS run_id, t.created_at, t.updated_at
    FROM process_token t
    LEFT JOIN LATERAL (
        SELECT id, status, attempt FROM workflow_run
        WHERE token_id = t.id AND finished_at IS NULL AND t.state IN ('Ready', 'Waiting') LIMIT 1) r ON true;
COMMENT ON VIEW token IS 'Where instances are. A token whose run is leased is Executing.';

CREATE VIEW timer AS
    SELECT r.id, r.token_id, r.run_at AS due_at,
           CASE r.status WHEN 'succeeded' THEN 'Fired' WHEN 'cancelled' THEN 'Cancelled' ELSE 'Scheduled' END AS status, r.created_at
    FROM workflow_run r
    WHERE r.token_id IS NOT NULL AND r.type = 'graph.timer.v1';
COMMENT ON VIEW timer IS 'Timers of processes. Each is a run that is due at its time.';

CREATE TABLE parallel_join (
    id                uuid    NOT NULL PRIMARY KEY,
    instance_id       uuid    NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    node              text COLLATE "C" NOT NULL,
    parallel_group_id uuid    REFERENCES parallel_group,
    round             integer NOT NULL DEFAULT 1,
    expected          integer NOT NULL,
    joined            integer NOT NULL,
    fired             boolean NOT NULL DEFAULT false,
    -- One activation at a time for each join and group.
    CONSTRAINT parallel_join_round_key UNIQUE NULLS NOT DISTINCT (instance_id, node, parallel_group_id, round)
) WITH (fillfactor = 70);
COMMENT ON TABLE  parallel_join IS 'What one activation of a join waits for.';
COMMENT ON COLUMN parallel_join.joined IS 'How many arrivals counted so far; it fires when they are as many as expected.';

CREATE TABLE join_arrival (
    join_id  uuid NOT NULL, -- no foreign keys: they would be looked up for each row
    token_id uuid NOT NULL,
    edge     text COLLATE "C" NOT NULL,
    surplus  boolean NOT NULL DEFAULT false,
    PRIMARY KEY (join_id, edge, token_id)
);
CREATE INDEX join_arrival_token_idx ON join_arrival (token_id);
COMMENT ON COLUMN join_arrival.surplus IS 'Over this edge one had come before: this one is for the next activation.';

-- Somebody other than the engine has cancelled or deleted a step, or the start of an instance that a token
-- waits for: its process is told, by a run. Without a boundary timer a token goes on as if it had none.
CREATE FUNCTION process_step_cut_off() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    INSERT INTO workflow_run (type, payload, priority, tenant_id)
    SELECT 'graph.cut_off.v1', jsonb_build_object('token', t.id, 'visit', t.version, 'reason', coalesce(nullif(NEW.delete_reason, ''), NEW.last_error, 'cancelled'))
               || CASE WHEN NEW.token_id IS NULL THEN '{"code": "child_not_started"}' ELSE '{}' END::jsonb,
           NEW.priority, NEW.tenant_id
    FROM process_token t
    WHERE t.id = coalesce(NEW.token_id, CASE WHEN NEW.payload->'parent'->>'token' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                                             THEN (NEW.payload->'parent'->>'token')::uuid END)
      AND (NEW.token_id IS NOT NULL OR t.version::text = NEW.payload->'parent'->>'visit')
      AND t.state IN ('Created', 'Ready', 'Waiting');
    RETURN NULL;
END
$fn$;
CREATE TRIGGER process_step_cut_off AFTER UPDATE ON workflow_run
    FOR EACH ROW WHEN ((NEW.token_id IS NOT NULL AND NOT (NEW.type = 'graph.timer.v1' AND NEW.node LIKE '%/on/%') OR NEW.type = 'graph.start.v1' AND NEW.payload ? 'parent')
        AND (OLD.status IN ('pending', 'leased') AND NEW.status = 'cancelled' AND coalesce(current_setting('workflow.advance', true), '') <> 'on'
             OR OLD.status IN ('pending', 'leased') AND OLD.deleted_at IS NULL AND NEW.deleted_at IS NOT NULL AND NEW.status <> 'cancelled'))
    EXECUTE FUNCTION process_step_cut_off();

CREATE TABLE each_progress (
    group_id    uuid    NOT NULL PRIMARY KEY REFERENCES parallel_group ON DELETE CASCADE,
    instance_id uuid    NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    node        text COLLATE "C" NOT NULL,
    items       jsonb   NOT NULL,
    next        integer NOT NULL,
    done        integer NOT NULL,
    total       integer NOT NULL,
    over_at     timestamptz -- when its host went on: what comes later is in nobody's results
) WITH (fillfactor = 70);
CREATE INDEX each_progress_instance_idx ON each_progress (instance_id, node);
COMMENT ON TABLE each_progress IS 'How far the execution of an each has come: the list as it was taken down, and the first element not started.';

CREATE TABLE message (
    id          uuid        NOT NULL PRIMARY KEY, -- of the run that brought it
    message_id  text        NOT NULL,             -- the sender's; the same again is dropped
    name        text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    payload     jsonb       NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz NOT NULL,
    token_id    uuid, -- whom it is on the way to
    consumed_at timestamptz,
    CONSTRAINT message_id_key UNIQUE (name, key, message_id)
);
CREATE INDEX message_buffered_idx ON message (name, key, received_at) WHERE token_id IS NULL;
CREATE INDEX message_expires_idx ON message (expires_at);
CREATE INDEX message_token_idx ON message (token_id) WHERE token_id IS NOT NULL AND consumed_at IS NULL;
COMMENT ON TABLE message IS 'Messages to processes, kept until their time is over; ids are remembered for as long.';

CREATE TABLE message_wait (
    token_id    uuid        NOT NULL REFERENCES process_token ON DELETE CASCADE,
    place       text COLLATE "C" NOT NULL,
    instance_id uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    node        text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    key         text COLLATE "C", -- null: a signal
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (token_id, place)
);
CREATE INDEX message_wait_instance_idx ON message_wait (instance_id);
CREATE INDEX message_wait_name_idx ON message_wait (name, key, created_at);
COMMENT ON TABLE message_wait IS 'Tokens that wait for a message or a signal.';

CREATE TABLE user_task (
    id           uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    instance_id  uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    token_id     uuid        NOT NULL REFERENCES process_token ON DELETE CASCADE,
    node         text COLLATE "C" NOT NULL,
    state        text COLLATE "C" NOT NULL DEFAULT 'open',
    assignee     text,
    groups       text[]      NOT NULL DEFAULT '{}',
    payload      jsonb       NOT NULL,
    output       jsonb,
    version      bigint      NOT NULL DEFAULT 1,
    due_at       timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    completed_by text,
    CONSTRAINT user_task_state_check CHECK (state IN ('open', 'completed', 'cancelled'))
);
CREATE INDEX user_task_open_idx ON user_task (created_at) WHERE state = 'open';
CREATE INDEX user_task_instance_idx ON user_task (instance_id, node);
CREATE INDEX user_task_token_idx ON user_task (token_id);
COMMENT ON TABLE user_task IS 'Tasks for people.';
COMMENT ON COLUMN user_task.version IS 'Grows with each change; say which one you saw, and nobody''s change is overwritten.';

-- SELECT process_task_assign('…', 'anna');  NULL releases it.
-- Without a version nobody loses a task to somebody else: it is only taken or given away by whom it is assigned to.
CREATE FUNCTION process_task_assign(task uuid, assignee text, version bigint DEFAULT NULL, by text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    who  text := coalesce(process_task_assign.by, concat_ws(' ', session_user, nullif(current_setting('application_name'), '')));
    was  user_task;
    t    user_task;
    last bigint;
BEGIN
    IF process_task_assign.assignee !~ '\S' OR process_task_assign.by !~ '\S' THEN
        RAISE EXCEPTION 'process_task_assign: a name is empty'
            USING ERRCODE = 'check_violation', HINT = 'Name a person; NULL as assignee releases the task.';
    END IF;
    PERFORM FROM process_instance i WHERE i.id = (SELECT u.instance_id FROM user_task u WHERE u.id = task) FOR NO KEY UPDATE; -- before the task, as all do
    SELECT * INTO was FROM user_task u WHERE u.id = task FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    ELSIF was.state <> 'open' THEN
        RETURN 'too late: ' || was.state;
    ELSIF process_task_assign.version <> was.version
       OR process_task_assign.version IS NULL AND was.assignee NOT IN (coalesce(process_task_assign.assignee, ''), coalesce(process_task_assign.by, '')) THEN
        RETURN format('conflict: assigned to %s, version %s', coalesce(was.assignee, 'nobody'), was.version);
    ELSIF was.assignee IS NOT DISTINCT FROM process_task_assign.assignee THEN
        RETURN coalesce('assigned to ' || was.assignee, 'released'); -- as it was
    END IF;
    UPDATE user_task u SET assignee = process_task_assign.assignee, version = u.version + 1 WHERE u.id = task RETURNING u.* INTO t;
    UPDATE process_instance i SET version = i.version + 1, updated_at = now() WHERE i.id = t.instance_id RETURNING i.version INTO last;
    INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
    VALUES (t.instance_id, t.token_id, CASE WHEN t.assignee IS NULL THEN 'task.released' WHEN was.assignee IS NULL THEN 'task.claimed' ELSE 'task.assigned' END, t.node, last,
            jsonb_build_object('by', who, 'assignee', t.assignee, 'version', t.version));
    RETURN coalesce('assigned to ' || t.assignee, 'released');
END
$fn$;
COMMENT ON FUNCTION process_task_assign(uuid, text, bigint, text) IS
    'Claims a task, or releases it; with the version that was seen, also takes it from somebody. by says who does that; without, it is the role and application. Answers assigned to …, released, conflict: …, too late: …, or not found.';

-- Used by the engine: the one place where a task is completed.
CREATE FUNCTION process_task_finish(task uuid, who text, output jsonb, version bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    t user_task;
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
END
$fn$;

CREATE TABLE compensation_record (
    id          uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    instance_id uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    "order"     bigint      GENERATED ALWAYS AS IDENTITY,
    token_id    uuid        NOT NULL, -- that was there
    run_id      uuid        NOT NULL, -- the run that is to be undone
    node_id     text COLLATE "C" NOT NULL,
    handler_ref text COLLATE "C" NOT NULL,
    certain     boolean     NOT NULL DEFAULT true,
    not_before  timestamptz,
    status      text COLLATE "C" NOT NULL DEFAULT 'Pending',
    undo_run_id uuid,
    retry_of    uuid        REFERENCES compensation_record,
    created_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT compensation_record_status_check CHECK (status IN ('Pending', 'Completed', 'Failed'))
);
CREATE INDEX compensation_record_instance_idx ON compensation_record (instance_id, "order");
CREATE INDEX compensation_record_run_idx ON compensation_record (undo_run_id) WHERE undo_run_id IS NOT NULL;
COMMENT ON TABLE  compensation_record IS 'Steps that may have to be undone, in the order of their completion. Only status and undo_run_id ever change.';
COMMENT ON COLUMN compensation_record.run_id IS 'The run that is to be undone: a step of the instance, or of one that it has called.';
COMMENT ON COLUMN compensation_record.certain IS 'False: an attempt may have taken effect, nobody knows.';
COMMENT ON COLUMN compensation_record.not_before IS 'When the lease of the run that was cut off ends: somebody may be at it until then.';

-- The executions of scopes that a token lies in, the innermost first.
CREATE FUNCTION process_scopes(token uuid) RETURNS uuid[]
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $fn$
    WITH RECURSIVE up AS (
        SELECT g.id, g.parent_group_id, g.host_token_id, 1 AS depth
        FROM process_token t JOIN parallel_group g ON g.id = t.parallel_group_id
        WHERE t.id = token
        UNION ALL
        SELECT g.id, g.parent_group_id, g.host_token_id, up.depth + 1
        FROM parallel_group g JOIN up ON g.id = up.parent_group_id
    )
    SELECT coalesce(array_agg(id ORDER BY depth), '{}') FROM up WHERE host_token_id IS NOT NULL
$fn$;
COMMENT ON FUNCTION process_scopes(uuid) IS 'The executions of scopes and lists that a token lies in, the innermost first.';

-- Whether what is thrown by one token undoes what another has done: in its own scope, as far as
-- the scopes within that are over.
CREATE FUNCTION process_undoes(thrower uuid, doer uuid) RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $fn$
    SELECT (process_scopes(thrower) = '{}' OR (process_scopes(thrower))[1] = ANY (process_scopes(doer)))
       AND NOT EXISTS (SELECT FROM parallel_group g
                       WHERE g.id = ANY (process_scopes(doer)) AND g.id <> ALL (process_scopes(thrower)) AND g.live > 0)
$fn$;

CREATE TABLE incident (
    id          uuid        NOT NULL DEFAULT workflow_uuid() PRIMARY KEY,
    instance_id uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    token_id    uuid        REFERENCES process_token,
    node        text COLLATE "C" NOT NULL,
    code        text COLLATE "C" NOT NULL,
    message     text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    resolved_at timestamptz,
    resolved_by text
);
CREATE INDEX incident_instance_idx ON incident (instance_id);
CREATE INDEX incident_token_idx ON incident (token_id) WHERE resolved_at IS NULL;
CREATE INDEX incident_open_idx ON incident (created_at) WHERE resolved_at IS NULL;
COMMENT ON TABLE incident IS 'Where an instance cannot go on by itself, and why.';

CREATE TABLE process_state_history (
    id          bigint      GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    instance_id uuid        NOT NULL, -- no foreign key: it would be looked up for each row
    from_status text COLLATE "C",
    to_status   text COLLATE "C" NOT NULL,
    version     bigint      NOT NULL,
    reason      text,
    actor       text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX process_state_history_instance_idx ON process_state_history (instance_id, id);
COMMENT ON TABLE process_state_history IS 'Every change of an instance''s status.';

CREATE TABLE process_event (
    id          bigint      GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    instance_id uuid        NOT NULL, -- no foreign key: it would be looked up for each row
    token_id    uuid,
    event_type  text COLLATE "C" NOT NULL,
    node        text COLLATE "C",
    version     bigint      NOT NULL,
    data        jsonb,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX process_event_instance_idx ON process_event (instance_id, id);
COMMENT ON TABLE  process_event IS 'What happened within instances. Rows of one transaction carry one version.';

-- A run is the visit that it was enqueued for. Tasks, scopes, lists and races have none of their own, nor has what waits
-- for a message or for an instance until that has come: such visits are told by their events, from the one of their
-- beginning to the next of that token.

-- What happened goes with the instance, as by a foreign key: whoever may delete that.
CREATE FUNCTION process_facts_go() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        TRUNCATE process_state_history, process_event, join_arrival;
        RETURN NULL;
    END IF;
    DELETE FROM process_state_history WHERE instance_id = ANY (ARRAY(SELECT id FROM gone));
    DELETE FROM process_event WHERE instance_id = ANY (ARRAY(SELECT id FROM gone));
    RETURN NULL;
END
$fn$;
CREATE TRIGGER process_facts_go AFTER DELETE ON process_instance
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION process_facts_go();
CREATE TRIGGER process_facts_go_all AFTER TRUNCATE ON process_instance
    FOR EACH STATEMENT EXECUTE FUNCTION process_facts_go();

CREATE VIEW activity_instance AS
    WITH visit AS NOT MATERIALIZED (
        SELECT e.instance_id, e.token_id, e.event_type, e.node, e.created_at,
               lead(e.event_type) OVER line AS next_type, lead(e.node) OVER line AS next_node, lead(e.created_at) OVER line AS until
        FROM process_event e
        WHERE e.event_type IN ('node.entered', 'node.completed', 'node.failed') AND e.token_id IS NOT NULL
        WINDOW line AS (PARTITION BY e.instance_id, e.token_id ORDER BY e.id))
    SELECT r.id, t.instance_id, r.token_id, r.node AS node_id, r.type AS run_type, r.status, r.attempt AS attempts,
           r.payload AS input, r.result AS output, r.last_error,
           coalesce(v.created_at, r.created_at) AS created_at, coalesce(v.created_at, r.started_at) AS started_at, r.finished_at AS completed_at
    FROM workflow_run r JOIN process_token t ON t.id = r.token_id
    LEFT JOIN visit v ON r.type = 'graph.arrive.v1' AND v.event_type = 'node.entered' AND v.instance_id = t.instance_id -- it came, and ended the waiting
        AND v.token_id = r.token_id AND v.node = r.node AND r.created_at > v.created_at AND (v.until IS NULL OR r.created_at < v.until)
    UNION ALL
    SELECT k.id, v.instance_id, v.token_id, v.node, NULL,
           CASE WHEN v.next_type = 'node.completed' AND v.next_node = v.node THEN 'succeeded'
                WHEN v.next_type = 'node.failed' AND v.next_node = v.node THEN 'failed'
                WHEN v.until IS NULL AND t.state IN ('Created', 'Ready', 'Waiting') AND t.node = v.node THEN 'waiting'
                ELSE 'cancelled' END,
           0, k.payload, k.output, NULL, v.created_at, v.created_at,
           coalesce(v.until, CASE WHEN t.node <> v.node OR t.state NOT IN ('Created', 'Ready', 'Waiting') THEN t.updated_at END)
    FROM visit v
    JOIN process_token t ON t.id = v.token_id
    LEFT JOIN LATERAL (
        SELECT u.id, u.payload, u.output FROM user_task u
        WHERE u.token_id = v.token_id AND u.node = v.node AND u.created_at <= v.created_at
        ORDER BY u.created_at DESC LIMIT 1) k ON true
    WHERE v.event_type = 'node.entered'
      AND NOT EXISTS (SELECT FROM workflow_run r
                      WHERE r.token_id = v.token_id AND r.node = v.node
                        AND CASE WHEN r.finished_at IS NULL THEN v.until IS NULL
                                 ELSE r.finished_at > v.created_at AND (v.until IS NULL OR r.finished_at < v.until) END);
COMMENT ON VIEW   activity_instance IS 'One row per visit of a node that takes time, from when it began. Ask by instance_id.';
COMMENT ON COLUMN activity_instance.id IS 'Its run; of a task the task; null for scopes, lists, races, and what waits for a message or for an instance until that has come.';
COMMENT ON COLUMN activity_instance.status IS 'That of the run; of visits without one waiting, succeeded, failed, or cancelled: left by another way.';

-- What operators say that the result of a node is.
CREATE TABLE process_correction (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    instance_id uuid        NOT NULL REFERENCES process_instance ON DELETE CASCADE,
    node        text COLLATE "C" NOT NULL,
    value       jsonb       NOT NULL,
    reason      text        NOT NULL,
    actor       text        NOT NULL DEFAULT concat_ws(' ', session_user, nullif(current_setting('application_name'), '')),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT process_correction_reason_check CHECK (reason ~ '\S'),
    CONSTRAINT process_correction_value_check CHECK (octet_length(value::text) <= 1024 * 1024)
);
CREATE INDEX process_correction_node_idx ON process_correction (instance_id, node);
COMMENT ON TABLE process_correction IS 'Facts that operators have corrected: steps.<node> is the value, until the node is visited again. See process_correct().';

CREATE FUNCTION process_correct(instance uuid, node text, value jsonb, reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    i process_instance;
BEGIN
    SELECT * INTO i FROM process_instance p WHERE p.id = process_correct.instance FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'not found';
    ELSIF i.completed_at IS NOT NULL THEN
        RETURN 'too late: ' || i.status;
    END IF;
    IF NOT EXISTS (SELECT FROM process_node n WHERE n.process_definition_id = i.process_definition_id
                   AND n.node = process_correct.node AND n.definition ?| ARRAY['do', 'human', 'call', 'each', 'await', 'wait']) THEN
        RAISE EXCEPTION 'process_correct: node % has no result in this process', quote_literal(process_correct.node)
            USING ERRCODE = 'check_violation', HINT = 'Name a step, task, call, list or message of it: SELECT node FROM process_node.';
    END IF;
    IF jsonb_path_exists(process_correct.value, 'strict $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))') THEN
        RAISE EXCEPTION 'process_correct: a number of the value is beyond ±1e308'
            USING ERRCODE = 'check_violation', HINT = 'Round it, or give it as a text.';
    END IF;
    INSERT INTO process_correction (instance_id, node, value, reason)
    VALUES (process_correct.instance, process_correct.node, coalesce(process_correct.value, 'null'), coalesce(process_correct.reason, ''));
    UPDATE process_instance p SET corrected = true, version = p.version + 1, updated_at = now() WHERE p.id = i.id;
    INSERT INTO process_event (instance_id, event_type, node, version, data)
    VALUES (i.id, 'fact.corrected', process_correct.node, i.version + 1, jsonb_build_object('reason', process_correct.reason,
        'actor', concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))));
    RETURN 'corrected';
END
$fn$;
COMMENT ON FUNCTION process_correct(uuid, text, jsonb, text) IS
    'Says what the result of a node is from now on, and why; the incident that it has caused is retried afterwards. Answers corrected, too late: …, or not found.';

-- What only the engine may change, because much hangs together: what people write by hand is
-- refused, in words.
CREATE FUNCTION process_guard() RETURNS trigger
LANGUAGE plpgsql AS $fn$
BEGIN
    RAISE EXCEPTION '%: this is changed by the engine alone', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation',
              HINT = 'To act on an instance: process_pause, process_resume, process_correct, or a run of graph.cancel.v1, graph.retry.v1, graph.message.v1, graph.complete_task.v1.';
END
$fn$;
DO $do$
DECLARE
    guarded text;
BEGIN
    FOREACH guarded IN ARRAY ARRAY[
        'AFTER UPDATE OF status, output_payload, failure_reason, live_tokens, ready_tokens, joining_tokens, open_incidents,
                         ending, ending_reason, started_at, completed_at ON process_instance FOR EACH ROW',
        'AFTER UPDATE OF instance_id, node, edge, state, mode, item, parallel_group_id, version ON process_token FOR EACH ROW',
        'AFTER UPDATE ON parallel_group FOR EACH ROW',
        'AFTER UPDATE ON parallel_join FOR EACH ROW',
        'AFTER UPDATE ON compensation_record FOR EACH ROW',
        'AFTER UPDATE ON incident FOR EACH ROW',
        'BEFORE UPDATE ON process_state_history FOR EACH STATEMENT',
        'BEFORE UPDATE ON process_event FOR EACH STATEMENT',
        'BEFORE UPDATE ON process_correction FOR EACH STATEMENT'] LOOP
        EXECUTE format('CREATE TRIGGER process_guard %s WHEN (current_setting(''workflow.advance'', true) IS DISTINCT FROM ''on'') EXECUTE FUNCTION process_guard()', guarded);
    END LOOP;
END
$do$;

-- What nobody may change.
CREATE FUNCTION process_instance_guard() RETURNS trigger
LANGUAGE plpgsql AS $fn$
BEGIN
    IF TG_OP = 'DELETE' OR NEW.deleted_at IS NOT NULL AND OLD.deleted_at IS NULL AND OLD.completed_at IS NULL THEN
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
CREATE TRIGGER process_instance_kept AFTER UPDATE OF id, process_definition_id, tenant_id, input_payload, parent_process_instance_id, parent_token_id, parent_visit,
        undone_with_parent, created_at ON process_instance
    FOR EACH ROW WHEN (current_setting('workflow.advance', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION process_instance_guard();
CREATE TRIGGER process_instance_final AFTER UPDATE OF status ON process_instance
    FOR EACH ROW WHEN (OLD.completed_at IS NOT NULL AND NEW.status <> OLD.status) EXECUTE FUNCTION process_instance_guard();
CREATE TRIGGER process_instance_deleted AFTER UPDATE OF deleted_at ON process_instance
    FOR EACH ROW WHEN (NEW.deleted_at IS NOT NULL AND OLD.deleted_at IS NULL AND OLD.completed_at IS NULL) EXECUTE FUNCTION process_instance_guard();
-- The mark is a change like others.
CREATE FUNCTION process_instance_marked() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    NEW.version := OLD.version + 1;
    NEW.updated_at := now();
    INSERT INTO process_event (instance_id, event_type, version, data)
    VALUES (NEW.id, CASE WHEN NEW.deleted_at IS NULL THEN 'instance.undeleted' ELSE 'instance.deleted' END, NEW.version,
            jsonb_build_object('actor', concat_ws(' ', session_user, nullif(current_setting('application_name'), ''))));
    RETURN NEW;
END
$fn$;
CREATE TRIGGER process_instance_marked BEFORE UPDATE OF deleted_at ON process_instance
    FOR EACH ROW WHEN ((NEW.deleted_at IS NULL) <> (OLD.deleted_at IS NULL)) EXECUTE FUNCTION process_instance_marked();
CREATE TRIGGER process_instance_removed AFTER DELETE ON process_instance
    FOR EACH ROW WHEN (OLD.completed_at IS NULL) EXECUTE FUNCTION process_instance_guard();

CREATE VIEW process_starting AS -- by index: those that wait, and those that run
    SELECT r.id AS run_id, (r.payload->'parent'->>'token')::uuid AS token_id, (r.payload->'parent'->>'instance')::uuid AS instance_id
    FROM workflow_open r
    WHERE r.suspect IN (false, true) AND r.type = 'graph.start.v1' AND r.payload ? 'parent'
    UNION ALL
    SELECT r.id, (r.payload->'parent'->>'token')::uuid, (r.payload->'parent'->>'instance')::uuid
    FROM workflow_run r
    WHERE r.status = 'leased' AND r.type = 'graph.start.v1' AND r.payload ? 'parent';
COMMENT ON VIEW process_starting IS 'Instances that are about to be started by others that call them.';

-- Empty on a healthy system. Each view names what is wrong with an instance.

-- An instance as a whole, or one of its tokens, that lives, and has nothing that will ever move it.
CREATE VIEW process_without_mover AS
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
COMMENT ON VIEW process_without_mover IS 'Unfinished instances that nothing will ever move, or a token of which nothing will, and no incident says why. Empty, or there is a bug.';

CREATE VIEW process_miscounted AS
    SELECT i.id AS instance_id, i.live_tokens, t.live, i.ready_tokens, t.ready, i.joining_tokens, t.joining, i.open_incidents, x.open, g.groups
    FROM process_instance i
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE t.state IN ('Created', 'Ready', 'Waiting')) AS live,
               count(*) FILTER (WHERE t.state = 'Ready') AS ready,
               count(*) FILTER (WHERE t.state = 'Waiting' AND EXISTS (SELECT FROM join_arrival a WHERE a.token_id = t.id)) AS joining
        FROM process_token t WHERE t.instance_id = i.id) t
    CROSS JOIN LATERAL (SELECT count(*) AS open FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL) x
    CROSS JOIN LATERAL (
        SELECT count(*) AS groups
        FROM parallel_group g
        WHERE g.instance_id = i.id AND i.completed_at IS NULL AND i.ending IS NULL
          AND g.live <> (SELECT count(*) FROM process_token t WHERE t.parallel_group_id = g.id AND t.state IN ('Created', 'Ready', 'Waiting'))
                      + (SELECT count(*) FROM parallel_group c WHERE c.parent_group_id = g.id AND c.live > 0)) g
    WHERE (i.live_tokens, i.ready_tokens, i.joining_tokens, i.open_incidents, 0) IS DISTINCT FROM (t.live, t.ready, t.joining, x.open, g.groups);
COMMENT ON VIEW process_miscounted IS 'Instances whose counts, or groups whose counts, differ from what there is. Empty, or there is a bug.';

CREATE VIEW process_undead AS
    SELECT i.id AS instance_id, t.id AS token_id, t.state, r.id AS run_id, r.status, w.place AS waits_at, k.id AS task_id
    FROM process_instance i
    JOIN process_token t ON t.instance_id = i.id
    LEFT JOIN workflow_run r ON r.token_id = t.id AND (r.finished_at IS NULL OR r.status <> 'cancelled' AND r.finished_at > i.completed_at)
    LEFT JOIN message_wait w ON w.token_id = t.id
    LEFT JOIN user_task k ON k.token_id = t.id AND k.state = 'open'
    WHERE (i.completed_at IS NOT NULL OR t.state IN ('Completed', 'Failed', 'Terminated'))
      AND (i.completed_at IS NOT NULL AND t.state IN ('Created', 'Ready', 'Waiting') OR coalesce(r.id, w.token_id, k.id) IS NOT NULL);
COMMENT ON VIEW process_undead IS 'Instances or tokens that are over, with something that still lives, or did so for a while: a token, run, timer, wait or task. Empty, or there is a bug.';

-- What definitions say of their nodes, those in scopes included.
CREATE VIEW process_node AS
    SELECT DISTINCT d.id AS process_definition_id, n->>'key' AS node, n->'value' AS definition
    FROM process_definition d
    CROSS JOIN LATERAL jsonb_path_query(d.definition, '$.**.nodes ? (@.type() == "object").keyvalue()') AS n;
COMMENT ON VIEW process_node IS 'The nodes of all processes.';

CREATE VIEW process_untimed AS
    SELECT t.instance_id, t.id AS token_id, t.node, x.timer
    FROM process_node n
    CROSS JOIN LATERAL (
        SELECT n.node || '/on/' || h.place - 1 AS timer
        FROM jsonb_path_query(n.definition, 'lax $.on[*]') WITH ORDINALITY AS h (handler, place) WHERE h.handler ?| '{after,every}'
        UNION ALL
        SELECT n.node WHERE n.definition ? 'wait'
        UNION ALL
        SELECT o.node
        FROM jsonb_path_query(n.definition, 'lax $.race[*]') AS r (option)
        JOIN process_node o ON o.process_definition_id = n.process_definition_id AND o.node = r.option #>> '{}' AND o.definition ? 'wait') x
    JOIN process_instance i ON i.process_definition_id = n.process_definition_id AND i.completed_at IS NULL
    JOIN process_token t ON t.instance_id = i.id AND t.node = n.node COLLATE "C" AND t.state IN ('Ready', 'Waiting') AND t.mode = 'Forward' AND t.item IS NULL
    WHERE NOT EXISTS (SELECT FROM incident y WHERE y.token_id = t.id AND y.resolved_at IS NULL)
      AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.token_id = t.id AND r.node = x.timer COLLATE "C" AND r.type = 'graph.timer.v1'
                        AND (r.status <> 'cancelled' OR r.last_error IS DISTINCT FROM 'cancelled: its token has moved on')); -- but by somebody
COMMENT ON VIEW process_untimed IS 'Tokens at a node that has a timer, without that timer. Empty, or there is a bug.';

CREATE VIEW process_misjoined AS
    SELECT j.instance_id, j.id AS join_id, j.node, j.round, j.expected, j.joined, j.fired, a.arrivals, a.edges
    FROM parallel_join j
    JOIN process_instance i ON i.id = j.instance_id
    JOIN process_node n ON n.process_definition_id = i.process_definition_id AND n.node = j.node COLLATE "C"
    CROSS JOIN LATERAL (SELECT count(*) AS arrivals, count(DISTINCT edge) AS edges FROM join_arrival a WHERE a.join_id = j.id AND NOT a.surplus) a
    WHERE a.arrivals <> j.joined
       OR j.fired AND j.joined = 0
       OR j.expected > 0 AND j.fired <> (j.joined >= j.expected) OR j.joined > j.expected AND j.expected > 0
       OR n.definition->'join' = '"all"' AND a.edges <> a.arrivals
       OR (SELECT count(*) FROM process_event e WHERE e.instance_id = j.instance_id AND e.event_type = 'join.fired' AND e.node = j.node)
          <> (SELECT count(*) FROM parallel_join o WHERE o.instance_id = j.instance_id AND o.node = j.node AND o.fired);
COMMENT ON VIEW process_misjoined IS 'Joins that fired too early, too late, or not once, or that took two tokens from one edge. Empty, or there is a bug.';

-- The later of two is undone first, if it was there already: by its transaction's begin, and by its id, which is drawn in it.
CREATE VIEW process_misundone AS
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
                                                        WHERE e.instance_id = i.id AND e.event_type = 'compensation.started'));
COMMENT ON VIEW process_misundone IS 'Completed steps that were not recorded to be undone, undone twice, out of order, or not at all. Empty, or there is a bug.';

CREATE VIEW process_unearned AS
    SELECT e.instance_id, e.token_id, e.node, e.completions, r.successes
    FROM (SELECT instance_id, token_id, node, count(*) AS completions
          FROM process_event WHERE event_type = 'node.completed' GROUP BY 1, 2, 3) e
    JOIN process_instance i ON i.id = e.instance_id
    JOIN process_node n ON n.process_definition_id = i.process_definition_id AND n.node = e.node COLLATE "C" AND n.definition ? 'do'
    CROSS JOIN LATERAL (SELECT count(*) AS successes FROM workflow_run r WHERE r.token_id = e.token_id AND r.node = e.node AND r.status = 'succeeded') r
    WHERE e.completions > r.successes;
COMMENT ON VIEW process_unearned IS 'Tokens that moved on from a step without a success of its run, as if by a worker that had lost its lease. Empty, or there is a bug.';

CREATE VIEW process_mismatched AS
    SELECT m.id AS message_id, m.name, m.key, m.token_id
    FROM message m
    WHERE CASE
        WHEN m.consumed_at IS NOT NULL THEN
            EXISTS (SELECT FROM process_token t WHERE t.id = m.token_id) -- it may be gone with its instance
            AND NOT EXISTS (SELECT FROM workflow_run r WHERE r.token_id = m.token_id AND r.payload->>'message' = m.id::text AND r.status IN ('succeeded', 'failed'))
        WHEN m.token_id IS NOT NULL THEN
            (SELECT count(*) FROM workflow_run r WHERE r.token_id = m.token_id AND r.payload->>'message' = m.id::text AND r.finished_at IS NULL) <> 1
        ELSE m.expires_at > now() AND EXISTS (SELECT FROM message_wait w WHERE w.name = m.name AND w.key = m.key)
             AND NOT EXISTS (SELECT FROM workflow_run r
                             WHERE r.type = 'graph.match.v1' AND r.finished_at IS NULL AND r.payload->>'name' = m.name AND r.payload->>'key' = m.key)
        END;
COMMENT ON VIEW process_mismatched IS 'Messages that miss who waits for them, or were consumed without having been brought, or are on no way. Empty, or there is a bug.';

CREATE VIEW process_misrecorded AS
    SELECT i.id AS instance_id, h.id AS history_id, i.status, i.version
    FROM process_instance i
    JOIN (SELECT h.*, lag(to_status) OVER line AS was, lag(version) OVER line AS version_before, lead(h.id) OVER line AS next
          FROM process_state_history h
          WINDOW line AS (PARTITION BY instance_id ORDER BY id)) h ON h.instance_id = i.id
    WHERE h.from_status IS DISTINCT FROM coalesce(h.was, 'CREATED') OR h.version < h.version_before OR h.version > i.version
       OR h.next IS NULL AND h.to_status <> i.status
    UNION ALL
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    WHERE i.status <> 'CREATED' AND NOT EXISTS (SELECT FROM process_state_history h WHERE h.instance_id = i.id)
    UNION -- versions only grow: of instances with each event, and of tokens with each node
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    JOIN (SELECT instance_id, version, lag(version) OVER (PARTITION BY instance_id ORDER BY id) AS before FROM process_event) e ON e.instance_id = i.id
    WHERE e.version < e.before OR e.version > i.version
    UNION
    SELECT i.id, NULL, i.status, i.version
    FROM process_instance i
    JOIN process_token t ON t.instance_id = i.id
    JOIN (SELECT token_id, count(DISTINCT version) AS entered FROM process_event WHERE event_type = 'node.entered' GROUP BY token_id) e ON e.token_id = t.id
    WHERE t.version < e.entered;
COMMENT ON VIEW process_misrecorded IS 'Instances whose history does not lead to what they are, step by step, or whose versions, or those of their tokens, have not grown with it. Empty, or there is a bug.';

-- What people look for.
CREATE VIEW process_stuck AS
    SELECT i.id AS instance_id, d.name, d.version, i.status, s.why, s.since
    FROM (
        SELECT x.instance_id, 'incident ' || x.code || ' at ' || x.node AS why, x.created_at AS since
        FROM incident x
        WHERE x.resolved_at IS NULL
        UNION ALL
        SELECT m.instance_id, 'nothing moves it', m.updated_at
        FROM process_without_mover m
        WHERE m.updated_at < now() - interval '1 minute'
        UNION ALL
        SELECT t.instance_id, 'no worker takes its step ' || r.node || ' of type ' || r.type, r.run_at
        FROM process_instance i
        JOIN process_token t ON t.instance_id = i.id AND t.state = 'Ready'
        JOIN workflow_run r ON r.token_id = t.id
        WHERE i.completed_at IS NULL AND i.ready_tokens > 0
          AND r.status = 'pending' AND r.deleted_at IS NULL AND r.held_at IS NULL AND r.run_at < now() - interval '1 hour') s
    JOIN process_instance i ON i.id = s.instance_id
    JOIN process_definition d ON d.id = i.process_definition_id
    WHERE i.completed_at IS NULL;
COMMENT ON VIEW process_stuck IS 'Instances that somebody should look at, and why. One that waits for a person, a message or a time is not among them. It looks at all that are open: see incident for a quick look.';
CREATE VIEW process_duration AS
    SELECT d.name, d.version, count(*) AS completed, avg(i.completed_at - i.started_at) AS average
    FROM (SELECT * FROM process_instance WHERE completed_at IS NOT NULL ORDER BY completed_at DESC LIMIT 1000) i
    JOIN process_definition d ON d.id = i.process_definition_id
    WHERE i.status = 'COMPLETED'
    GROUP BY d.name, d.version;
COMMENT ON VIEW process_duration IS 'How long instances take from their start to their completion: by the latest thousand that have ended, of all processes.';

-- Since when all are known: what was created since then is open, and among the latest that are, or has ended since.
CREATE VIEW process_rate AS
    WITH ended AS MATERIALIZED (
        SELECT process_definition_id, status, created_at, completed_at FROM process_instance
        WHERE completed_at > now() - interval '1 hour' ORDER BY completed_at DESC LIMIT 1000
    ), open AS MATERIALIZED (
        SELECT process_definition_id, status, created_at, completed_at FROM process_instance
        WHERE completed_at IS NULL ORDER BY created_at DESC LIMIT 1000
    ), known AS (
        SELECT o.many, least(now() - interval '1 second', greatest(now() - interval '1 hour', CASE WHEN o.many THEN o.first END, CASE WHEN e.many THEN e.first END)) AS since
        FROM (SELECT count(*) = 1000 AS many, min(created_at) AS first FROM open) o, (SELECT count(*) = 1000 AS many, min(completed_at) AS first FROM ended) e
    )
    SELECT d.name, d.version, round(3600 * x.created / x.seconds, 1) AS created_per_hour, round(3600 * x.completed / x.seconds, 1) AS completed_per_hour,
           round(3600 * x.failed / x.seconds, 1) AS failed_per_hour, round(3600 * x.cancelled / x.seconds, 1) AS cancelled_per_hour,
           x.active, x.or_more, x.seconds * interval '1 second' AS over
    FROM (SELECT i.process_definition_id, extract(epoch FROM now() - k.since) AS seconds, k.many AS or_more,
                 count(*) FILTER (WHERE i.created_at >= k.since) AS created,
                 count(*) FILTER (WHERE i.status = 'COMPLETED' AND i.completed_at >= k.since) AS completed,
                 count(*) FILTER (WHERE i.status = 'FAILED' AND i.completed_at >= k.since) AS failed,
                 count(*) FILTER (WHERE i.status = 'CANCELLED' AND i.completed_at >= k.since) AS cancelled,
                 count(*) FILTER (WHERE i.completed_at IS NULL) AS active
          FROM (SELECT * FROM ended UNION ALL SELECT * FROM open) i, known k
          GROUP BY i.process_definition_id, k.since, k.many) x
    JOIN process_definition d ON d.id = x.process_definition_id;
COMMENT ON VIEW   process_rate IS 'How many instances are started and end in an hour, and how many are open: by the last hour, or by the latest thousand that are open and that have ended.';
COMMENT ON COLUMN process_rate.active IS 'Instances that are open, waiting or not; they are looked at up to a thousand, the latest first.';
COMMENT ON COLUMN process_rate.or_more IS 'A thousand are open, of all processes: there may be more.';
COMMENT ON COLUMN process_rate.over IS 'The time by which the rates were told.';

-- Pausing: nothing of the instance is leased until it is resumed. What is leased goes on, and is
-- accepted; what it leads to waits. Timers that fall due meanwhile fire when it is resumed.
-- What it has called is paused and resumed with it. Those who start instances hold the row of the one that calls:
-- what is called later is paused from its start.

-- Locks an instance and, unless they are over, all that it has called, in order of id. One that is called meanwhile
-- comes after that: hence another look.
CREATE FUNCTION process_lock_called(id uuid) RETURNS uuid[]
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    held uuid[] := '{}';
    tree uuid[];
BEGIN
    LOOP
        WITH RECURSIVE called AS (
            SELECT i.id, i.completed_at FROM process_instance i WHERE i.id = process_lock_called.id
            UNION ALL
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

CREATE FUNCTION process_pause(id uuid) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    ids uuid[] := process_lock_called(process_pause.id);
BEGIN
    IF NOT EXISTS (SELECT FROM process_instance i WHERE i.id = process_pause.id AND i.completed_at IS NULL AND i.paused_at IS NULL) THEN
        RETURN coalesce((SELECT CASE WHEN i.completed_at IS NULL THEN 'already paused' ELSE 'too late: ' || i.status END
                         FROM process_instance i WHERE i.id = process_pause.id), 'not found');
    END IF;
    WITH paused AS (
        UPDATE process_instance i SET paused_at = now(), version = version + 1, updated_at = now()
        WHERE i.id = ANY (ids) AND i.completed_at IS NULL AND i.paused_at IS NULL RETURNING i.id
    )
    SELECT array_agg(p.id) INTO ids FROM paused p;
    UPDATE workflow_run r SET held_at = now(), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at IS NULL
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    INSERT INTO process_event (instance_id, event_type, version, data)
    SELECT i.id, 'instance.paused', i.version, jsonb_build_object('actor', concat_ws(' ', session_user, nullif(current_setting('application_name'), '')))
    FROM process_instance i WHERE i.id = ANY (ids);
    RETURN 'paused';
END
$fn$;
COMMENT ON FUNCTION process_pause(uuid) IS 'Pauses an instance, and what it has called. Answers paused, already paused, too late: …, or not found.';

-- What was paused with it has its time, runs as well: one that somebody holds by hand has another, and stays held.
-- An instance may end while it is paused, by a task that is completed, say: what it has called still waits to be resumed.
CREATE FUNCTION process_resume(id uuid) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    ids   uuid[] := process_lock_called(process_resume.id);
    since timestamptz := (SELECT i.paused_at FROM process_instance i WHERE i.id = process_resume.id);
BEGIN
    WITH resumed AS (
        UPDATE process_instance i SET paused_at = NULL, version = version + 1, updated_at = now()
        WHERE i.id = ANY (ids) AND i.completed_at IS NULL AND i.paused_at = since
        RETURNING i.id
    )
    SELECT array_agg(r.id) INTO ids FROM resumed r;
    IF ids IS NULL THEN
        RETURN coalesce((SELECT CASE WHEN i.completed_at IS NULL THEN 'not paused' ELSE 'too late: ' || i.status END
                         FROM process_instance i WHERE i.id = process_resume.id), 'not found');
    END IF;
    UPDATE workflow_run r SET held_at = NULL, run_at = greatest(r.run_at, now()), updated_at = clock_timestamp()
    WHERE r.id IN (SELECT h.id FROM workflow_run h JOIN process_token t ON t.id = h.token_id
                   WHERE t.instance_id = ANY (ids) AND h.status IN ('pending', 'leased') AND h.held_at = since
                   ORDER BY h.id FOR NO KEY UPDATE OF h);
    INSERT INTO process_event (instance_id, event_type, version, data)
    SELECT i.id, 'instance.resumed', i.version, jsonb_build_object('actor', concat_ws(' ', session_user, nullif(current_setting('application_name'), '')))
    FROM process_instance i WHERE i.id = ANY (ids);
    RETURN 'resumed';
END
$fn$;
COMMENT ON FUNCTION process_resume(uuid) IS 'Resumes a paused instance, and what was paused with it. Answers resumed, not paused, too late: …, or not found.';

CREATE FUNCTION process_paused_with(id uuid) RETURNS uuid
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $fn$
    WITH RECURSIVE up AS (
        SELECT process_paused_with.id, 0 AS place
        UNION ALL
        SELECT elder.id, up.place + 1
        FROM up
        JOIN process_instance own ON own.id = up.id
        JOIN process_instance elder ON elder.id = own.parent_process_instance_id AND elder.paused_at = own.paused_at
    )
    SELECT up.id FROM up ORDER BY up.place DESC LIMIT 1
$fn$;
COMMENT ON FUNCTION process_paused_with(uuid) IS 'The instance that was paused, if this one was paused because that one has called it; otherwise this one.';
