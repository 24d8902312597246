-- simple-workflow 0030: tasks, for the people whose they are.
--
--   workflow_member            which role is in which group
--   workflow_join_group, workflow_leave_group    for operators
--   process_tasks              the open tasks of whoever asks: of his groups, or assigned to him
--   process_task_claim, process_task_release, process_task_complete    for him, and of these alone
--
-- A person is a role: the role in effect, or the one on whose behalf a console asks. Of a task that is none of his he learns nothing: it is not
-- found, and nothing of it is locked.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE TABLE workflow_member (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    role       regrole     NOT NULL,
    group_name text        NOT NULL,
    joined_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    joined_by  text        NOT NULL DEFAULT workflow_actor(),
    left_at    timestamptz,
    left_by    text,
    CONSTRAINT workflow_member_id_check   CHECK (id BETWEEN 0 AND 4611686018427387904),
    CONSTRAINT workflow_member_time_check CHECK (least(joined_at, left_at) >= '1900-01-01 00:00:00+00' AND greatest(joined_at, left_at) <= '9999-01-01 00:00:00+00'),
    CONSTRAINT workflow_member_size_check CHECK (greatest(octet_length(group_name), octet_length(joined_by), octet_length(left_by)) <= 4096)
);
CREATE UNIQUE INDEX workflow_member_idx ON workflow_member (role, group_name) WHERE left_at IS NULL;
COMMENT ON TABLE  workflow_member IS 'Which role is in which group of tasks, and who has said so. Whoever has the rights of such a role is in its groups, too.';
COMMENT ON COLUMN workflow_member.group_name IS 'As in groups of a human node.';
COMMENT ON COLUMN workflow_member.left_at IS 'Null: it is in the group.';

CREATE TRIGGER workflow_member_guard BEFORE INSERT OR UPDATE OR DELETE ON workflow_member
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_join_group(role, group) and workflow_leave_group(role, group) say who is in which group; that somebody was stays on record.');
CREATE TRIGGER workflow_member_kept BEFORE TRUNCATE ON workflow_member
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('SELECT workflow_leave_group(role, group) ends a membership; that it was there stays on record.');

-- The groups of a task as they are in an index, which takes no long texts. What is open is said in other words than in user_task_open_idx: a plan made while there were
-- few tasks would go by that one for good.
CREATE FUNCTION process_group_keys(groups text[]) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ARRAY(SELECT left(g, 200) FROM unnest(groups) AS g);

CREATE INDEX user_task_groups_idx ON user_task USING gin (process_group_keys(groups)) WITH (fastupdate = off) WHERE state <> 'completed' AND state <> 'cancelled';
CREATE INDEX user_task_assignee_idx ON user_task USING hash (assignee) WHERE state <> 'completed' AND state <> 'cancelled';

CREATE FUNCTION process_groups_of(person text) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN (SELECT coalesce(array_agg(DISTINCT m.group_name), '{}') FROM workflow_member m WHERE m.left_at IS NULL AND pg_has_role(person, m.role, 'USAGE'));
END
$fn$;

-- Whether a task is a person's. It locks nothing.
CREATE FUNCTION process_task_own(task uuid, person text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN EXISTS (SELECT FROM user_task u WHERE u.id = task AND (u.assignee = person OR u.groups && process_groups_of(person)));
END
$fn$;

-- ---------------------------------------------------------------------------------
-- Assigning, as in 0012: what follows once it is known who asks.
-- ---------------------------------------------------------------------------------

-- With own, only if the task is one of the person's own still: what a transaction has changed that was under way as he asked counts.
CREATE FUNCTION process_task_hand(task uuid, assignee text, version bigint, "by" text, own boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    was  user_task;
    t    user_task;
    last bigint;
    before text;
BEGIN
    PERFORM FROM process_instance i WHERE i.id = (SELECT u.instance_id FROM user_task u WHERE u.id = task) FOR NO KEY UPDATE; -- before the task, as all do
    SELECT * INTO was FROM user_task u WHERE u.id = task FOR UPDATE;
    IF NOT FOUND OR own AND NOT process_task_own(task, process_task_hand.by) THEN
        RETURN 'not found';
    ELSIF was.state <> 'open' THEN
        RETURN 'too late: ' || was.state;
    ELSIF process_task_hand.version <> was.version
       OR process_task_hand.version IS NULL AND was.assignee NOT IN (coalesce(process_task_hand.assignee, ''), coalesce(process_task_hand.by, '')) THEN
        RETURN format('conflict: assigned to %s, version %s', coalesce(was.assignee, 'nobody'), was.version);
    ELSIF was.assignee IS NOT DISTINCT FROM process_task_hand.assignee THEN
        RETURN coalesce('assigned to ' || was.assignee, 'released'); -- as it was
    END IF;
    before := workflow_advance('on');
    UPDATE user_task u SET assignee = process_task_hand.assignee, version = u.version + 1 WHERE u.id = task RETURNING u.* INTO t;
    UPDATE process_instance i SET version = i.version + 1, updated_at = now() WHERE i.id = t.instance_id RETURNING i.version INTO last;
    INSERT INTO process_event (instance_id, token_id, event_type, node, version, data)
    VALUES (t.instance_id, t.token_id, CASE WHEN t.assignee IS NULL THEN 'task.released' WHEN was.assignee IS NULL THEN 'task.claimed' ELSE 'task.assigned' END, t.node, last,
            jsonb_build_object('by', coalesce(process_task_hand.by, workflow_actor()), 'actor', workflow_actor(), 'assignee', t.assignee, 'version', t.version));
    PERFORM workflow_advance(before);
    RETURN coalesce('assigned to ' || t.assignee, 'released');
END
$fn$;

CREATE OR REPLACE FUNCTION process_task_assign(task uuid, assignee text, version bigint DEFAULT NULL, by text DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    PERFORM workflow_behalf(process_task_assign.on_behalf_of, 'process_task_assign(uuid, text, bigint, text, text)'::regprocedure);
    IF process_task_assign.assignee !~ '\S' OR process_task_assign.by !~ '\S' THEN
        RAISE EXCEPTION 'process_task_assign: a name is empty'
            USING ERRCODE = 'check_violation', HINT = 'Name a person; NULL as assignee releases the task.';
    END IF;
    RETURN process_task_hand(process_task_assign.task, process_task_assign.assignee, process_task_assign.version, process_task_assign.by);
END
$fn$;

-- ---------------------------------------------------------------------------------
-- For the people.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION process_tasks(most integer DEFAULT 100, on_behalf_of text DEFAULT NULL)
RETURNS TABLE (task uuid, process text, instance uuid, business_key text, node text, groups text[], assignee text, payload jsonb, version bigint, due_at timestamptz, created_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
#variable_conflict use_column
DECLARE
    person text := coalesce(process_tasks.on_behalf_of, workflow_role());
    mine   text[];
BEGIN
    PERFORM workflow_behalf(process_tasks.on_behalf_of, 'process_tasks(integer, text)'::regprocedure);
    IF most NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'process_tasks: most % is outside 1 to 1000', most USING ERRCODE = 'check_violation', HINT = 'The oldest come first; those that are completed make room.';
    END IF;
    mine := process_groups_of(person);
    RETURN QUERY
    SELECT u.id, d.name::text, u.instance_id, i.business_key, u.node::text, ARRAY(SELECT g FROM unnest(u.groups) AS g WHERE g = ANY (mine)), u.assignee, u.payload, u.version, u.due_at, u.created_at
    FROM (SELECT o.* FROM (SELECT u.* FROM user_task u WHERE u.state <> 'completed' AND u.state <> 'cancelled' AND process_group_keys(u.groups) && mine AND u.groups && mine
                           UNION ALL
                           SELECT u.* FROM user_task u WHERE u.state <> 'completed' AND u.state <> 'cancelled' AND u.assignee = person AND NOT u.groups && mine) AS o
          ORDER BY o.created_at, o.id LIMIT coalesce(most, 100)) AS u
    JOIN process_instance i ON i.id = u.instance_id JOIN process_definition d ON d.id = i.process_definition_id
    ORDER BY u.created_at, u.id;
END
$fn$;
COMMENT ON FUNCTION process_tasks(integer, text) IS 'The open tasks of whoever asks: those of his groups, and those that are assigned to him; the oldest first. Of groups it names his alone.';

CREATE FUNCTION process_task_claim(task uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    person text := coalesce(process_task_claim.on_behalf_of, workflow_role());
BEGIN
    PERFORM workflow_behalf(process_task_claim.on_behalf_of, 'process_task_claim(uuid, text)'::regprocedure);
    IF NOT process_task_own(process_task_claim.task, person) THEN
        RETURN 'not found';
    END IF;
    RETURN process_task_hand(process_task_claim.task, person, NULL, person, true);
END
$fn$;
COMMENT ON FUNCTION process_task_claim(uuid, text) IS 'Has an open task of one''s groups be one''s own, if it is nobody''s. Answers assigned to …, conflict: …, too late: …, or not found, which it is, too, if it is none of one''s groups.';

CREATE FUNCTION process_task_release(task uuid, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    person text := coalesce(process_task_release.on_behalf_of, workflow_role());
BEGIN
    PERFORM workflow_behalf(process_task_release.on_behalf_of, 'process_task_release(uuid, text)'::regprocedure);
    IF NOT process_task_own(process_task_release.task, person) THEN
        RETURN 'not found';
    END IF;
    RETURN process_task_hand(process_task_release.task, NULL, NULL, person, true);
END
$fn$;
COMMENT ON FUNCTION process_task_release(uuid, text) IS 'Gives back a task that one has claimed. Answers released, conflict: …, too late: …, or not found.';

-- A run completes it, as it does for everybody. What is refused here is refused there, too, but there nobody would tell him.
CREATE FUNCTION process_task_complete(task uuid, output jsonb DEFAULT '{}', version bigint DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    person text := coalesce(process_task_complete.on_behalf_of, workflow_role());
    t      user_task;
BEGIN
    PERFORM workflow_behalf(process_task_complete.on_behalf_of, 'process_task_complete(uuid, jsonb, bigint, text)'::regprocedure);
    IF jsonb_typeof(coalesce(process_task_complete.output, '{}')) <> 'object' THEN
        RAISE EXCEPTION 'process_task_complete: output is a JSON %, an object is required', jsonb_typeof(process_task_complete.output)
            USING ERRCODE = 'check_violation', HINT = 'Wrap the value: {"value": …}.';
    ELSIF NOT process_task_own(process_task_complete.task, person) THEN
        RETURN 'not found';
    END IF;
    SELECT * INTO t FROM user_task u WHERE u.id = process_task_complete.task;
    IF t.state <> 'open' THEN
        RETURN 'too late: ' || t.state;
    ELSIF t.assignee <> person OR t.version <> process_task_complete.version THEN
        RETURN format('conflict: assigned to %s, version %s', coalesce(t.assignee, 'nobody'), t.version);
    END IF;
    INSERT INTO workflow_run (type, payload, created_by)
    VALUES ('graph.complete_task.v1', jsonb_strip_nulls(jsonb_build_object('task', t.id, 'by', person, 'version', process_task_complete.version)) || jsonb_build_object('output', coalesce(process_task_complete.output, '{}')),
            session_user || coalesce(' [' || translate(nullif(current_setting('application_name'), ''), '[]', '()') || ']', '') || coalesce(' for ' || process_task_complete.on_behalf_of, ''));
    RETURN 'to be completed';
END
$fn$;
COMMENT ON FUNCTION process_task_complete(uuid, jsonb, bigint, text) IS
    'Completes an open task of one''s groups that is nobody else''s, with its output; with the version that was seen, only if nobody has changed it since. A worker does it within moments: it is no open task then. Answers to be completed, conflict: …, too late: …, or not found.';

-- ---------------------------------------------------------------------------------
-- For operators.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_join_group(role text, group_name text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    whose  regrole;
    before text;
    fresh  boolean;
BEGIN
    PERFORM workflow_behalf(workflow_join_group.on_behalf_of, 'workflow_join_group(text, text, text)'::regprocedure);
    whose := to_regrole(quote_ident(workflow_join_group.role));
    IF whose IS NULL THEN
        RAISE EXCEPTION 'workflow_join_group: there is no role %', coalesce(quote_literal(left(workflow_join_group.role, 120)), 'null')
            USING ERRCODE = 'undefined_object', HINT = 'Name the database role of a person, or a role that is granted to many.';
    ELSIF workflow_console(workflow_join_group.role) THEN
        RAISE EXCEPTION 'workflow_join_group: role % is a console, and no person', workflow_join_group.role
            USING ERRCODE = 'check_violation', HINT = 'Name the roles of those for whom it acts.';
    ELSIF (length(workflow_join_group.group_name) <= 200 AND workflow_join_group.group_name ~ '\S') IS NOT TRUE THEN
        RAISE EXCEPTION 'workflow_join_group: group_name % is not a name of 1 to 200 characters', coalesce(quote_literal(left(workflow_join_group.group_name, 120)), 'null')
            USING ERRCODE = 'check_violation', HINT = 'Use a name that is in groups of a human node.';
    ELSIF (SELECT count(*) FROM workflow_member m WHERE m.left_at IS NULL) >= 10000 THEN
        RAISE EXCEPTION 'workflow_join_group: there are 10000 members, which is the most'
            USING ERRCODE = 'check_violation', HINT = 'Have a role be in the group, and grant it to many; SELECT workflow_leave_group(role, group_name) takes one out.';
    END IF;
    before := workflow_advance('on');
    INSERT INTO workflow_member (role, group_name) VALUES (whose, workflow_join_group.group_name) ON CONFLICT DO NOTHING;
    fresh := FOUND;
    PERFORM workflow_advance(before);
    RETURN CASE WHEN fresh THEN 'joined' ELSE 'already in it' END;
END
$fn$;
COMMENT ON FUNCTION workflow_join_group(text, text, text) IS 'Has a role, and whoever has its rights, see, claim and complete the tasks of a group. Answers joined, or already in it.';

CREATE FUNCTION workflow_leave_group(role text, group_name text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text;
    gone   boolean;
BEGIN
    PERFORM workflow_behalf(workflow_leave_group.on_behalf_of, 'workflow_leave_group(text, text, text)'::regprocedure);
    before := workflow_advance('on');
    UPDATE workflow_member m SET left_at = clock_timestamp(), left_by = workflow_actor()
    WHERE m.left_at IS NULL AND m.group_name = workflow_leave_group.group_name
      AND (m.role = to_regrole(quote_ident(workflow_leave_group.role)) OR m.role::text = workflow_leave_group.role); -- of a role that was dropped, its number
    gone := FOUND;
    PERFORM workflow_advance(before);
    RETURN CASE WHEN gone THEN 'left' ELSE 'not in it' END;
END
$fn$;
COMMENT ON FUNCTION workflow_leave_group(text, text, text) IS 'Ends what workflow_join_group began. What the role has claimed stays its own. Answers left, or not in it.';

REVOKE ALL ON workflow_member FROM PUBLIC;
REVOKE ALL ON FUNCTION process_group_keys(text[]), process_groups_of(text), process_task_own(uuid, text), process_task_hand(uuid, text, bigint, text, boolean), process_tasks(integer, text), process_task_claim(uuid, text),
    process_task_release(uuid, text), process_task_complete(uuid, jsonb, bigint, text), workflow_join_group(text, text, text), workflow_leave_group(text, text, text) FROM PUBLIC;

-- Whoever may assign tasks may say who is in a group, and whoever stores tasks has their index kept.
DO $do$
DECLARE
    f regprocedure;
    r regrole;
BEGIN
    FOR f, r IN
        SELECT n.oid, x.grantee
        FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        JOIN pg_proc n ON n.pronamespace = o.pronamespace AND n.proname = ANY ('{process_tasks, process_task_claim, process_task_release, process_task_complete, workflow_join_group, workflow_leave_group}')
        WHERE o.oid = 'process_task_assign(uuid, text, bigint, text, text)'::regprocedure AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
        EXECUTE format('GRANT SELECT ON workflow_member TO %s', r);
    END LOOP;
    FOR r IN SELECT DISTINCT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x WHERE c.oid = 'user_task'::regclass AND x.privilege_type IN ('INSERT', 'UPDATE') AND x.grantee NOT IN (0, c.relowner) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION process_group_keys(text[]) TO %s', r);
    END LOOP;
END
$do$;
