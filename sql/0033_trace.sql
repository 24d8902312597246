-- simple-workflow 0033: the trace of a start goes on in what its instance does; who has changed which policy.
--
--   process_trace            the metadata of the engine's runs and the headers of its events: the traceparent of the instance, if there is one
--   workflow_policy_history  each change of a policy: what it was and what it became, by whom

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Null if there is none, or nothing that is one: whatever people write there goes no further, so no event becomes too large, and no header is refused.
-- Stable, as what it calls: so it becomes a part of the statement, and costs no call for each step.
CREATE FUNCTION process_trace(metadata jsonb) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN metadata->>'traceparent' ~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' THEN jsonb_build_object('traceparent', metadata->>'traceparent') END;
COMMENT ON FUNCTION process_trace(jsonb) IS 'The traceparent of an instance''s metadata, as metadata of what the instance does; null: it has none that is well formed.';
REVOKE ALL ON FUNCTION process_trace(jsonb) FROM PUBLIC;

-- Whoever moves instances asks for it.
DO $do$
DECLARE
    r regrole;
BEGIN
    FOR r IN
        SELECT DISTINCT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        WHERE o.proname = 'process_undoes' AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION process_trace(jsonb) TO %s', r);
    END LOOP;
END
$do$;

-- As in 0010, with the trace.
CREATE OR REPLACE FUNCTION process_step_cut_off() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before text := coalesce(current_setting('workflow.advance', true), '');
    parent jsonb := NEW.payload->'parent';
BEGIN
    IF NEW.token_id IS NULL AND parent IS NULL OR NEW.type = 'graph.timer.v1' AND NEW.node LIKE '%/on/%' THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard of what is inserted here
    INSERT INTO workflow_run (type, payload, priority, tenant_id, metadata)
    SELECT 'graph.cut_off.v1', jsonb_build_object('token', t.id, 'visit', t.version, 'reason', coalesce(nullif(NEW.delete_reason, ''), NEW.last_error, 'cancelled'))
               || CASE WHEN NEW.token_id IS NULL THEN '{"code": "child_not_started"}' ELSE '{}' END::jsonb,
           NEW.priority, NEW.tenant_id, process_trace(i.metadata)
    FROM process_token t
    JOIN process_instance i ON i.id = t.instance_id
    WHERE t.id = coalesce(NEW.token_id, CASE WHEN parent->>'token' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN (parent->>'token')::uuid END)
      AND t.state IN ('Created', 'Ready', 'Waiting')
      AND (NEW.token_id IS NOT NULL
           OR t.state = 'Waiting' AND t.version::text = parent->>'visit' AND t.instance_id::text = parent->>'instance' AND (i.depth + 1)::text = parent->>'depth'
              AND NEW.tenant_id IS NOT DISTINCT FROM i.tenant_id AND NOT NEW.payload ?| '{id,key,tenant}'
              AND EXISTS (SELECT FROM process_node n
                          WHERE n.process_definition_id = i.process_definition_id AND n.node = t.node COLLATE "C" AND n.definition->'call'->>'process' = NEW.payload->>'process')
              AND NOT EXISTS (SELECT FROM process_instance c WHERE c.parent_token_id = t.id AND c.parent_visit = t.version));
    PERFORM set_config('workflow.advance', before, true);
    RETURN NULL;
END
$fn$;

-- ---------------------------------------------------------------------------------
-- Policies: who has changed which.
-- ---------------------------------------------------------------------------------

CREATE TABLE workflow_policy_history (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text        NOT NULL DEFAULT workflow_actor(),
    pattern    text COLLATE "C" NOT NULL,
    was        jsonb,
    became     jsonb,
    CONSTRAINT workflow_policy_history_id_check      CHECK (id BETWEEN 1 AND 4611686018427387904),
    CONSTRAINT workflow_policy_history_time_check    CHECK (changed_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z'),
    CONSTRAINT workflow_policy_history_actor_check   CHECK (octet_length(actor) <= 4096),
    CONSTRAINT workflow_policy_history_pattern_check CHECK (octet_length(pattern) <= 200),
    CONSTRAINT workflow_policy_history_size_check    CHECK (greatest(pg_column_size(was), pg_column_size(became)) <= 4096)
);
COMMENT ON TABLE  workflow_policy_history IS 'What policies have been, and who has changed them: the last thousand changes, of at most a year. Older ones go with the next change.';
COMMENT ON COLUMN workflow_policy_history.was IS 'The settings before, with times in seconds; null: there was no policy for the pattern.';
COMMENT ON COLUMN workflow_policy_history.became IS 'The settings since, with times in seconds; null: the policy was dropped.';

-- Whoever changes a policy, by a function or past the guard, has it told in the same statement.
CREATE FUNCTION workflow_policy_told() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    was    jsonb := CASE WHEN TG_OP <> 'INSERT' THEN jsonb_strip_nulls(to_jsonb(OLD) - '{pattern, set_at, set_by}'::text[]) END;
    became jsonb := CASE WHEN TG_OP <> 'DELETE' THEN jsonb_strip_nulls(to_jsonb(NEW) - '{pattern, set_at, set_by}'::text[]) END;
    before text;
BEGIN
    IF was IS DISTINCT FROM became OR OLD.pattern <> NEW.pattern THEN
        before := workflow_advance('on'); -- for the guards
        IF TG_OP = 'UPDATE' AND OLD.pattern <> NEW.pattern THEN
            INSERT INTO workflow_policy_history (pattern, was) VALUES (OLD.pattern, was);
            was := NULL;
        END IF;
        INSERT INTO workflow_policy_history (pattern, was, became) VALUES (coalesce(NEW.pattern, OLD.pattern), was, became);
        DELETE FROM workflow_policy_history h
        WHERE h.changed_at < now() - interval '1 year' OR h.id < (SELECT k.id FROM workflow_policy_history k ORDER BY k.id DESC OFFSET 999 LIMIT 1);
        PERFORM workflow_advance(before);
    END IF;
    RETURN NULL;
END
$fn$;
REVOKE ALL ON FUNCTION workflow_policy_told() FROM PUBLIC;
CREATE TRIGGER workflow_policy_told AFTER INSERT OR UPDATE OR DELETE ON workflow_policy FOR EACH ROW EXECUTE FUNCTION workflow_policy_told();

CREATE TRIGGER workflow_policy_history_insert_guard BEFORE INSERT ON workflow_policy_history
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('What changes a policy writes its history.');
CREATE TRIGGER workflow_policy_history_update_guard BEFORE UPDATE ON workflow_policy_history
    FOR EACH ROW EXECUTE FUNCTION workflow_guard('What has happened stays as it was told.');
CREATE TRIGGER workflow_policy_history_delete_guard BEFORE DELETE ON workflow_policy_history
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('It goes after a year, or a thousand changes.');
CREATE TRIGGER workflow_policy_history_kept BEFORE TRUNCATE ON workflow_policy_history
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('It goes after a year, or a thousand changes.');

-- Whoever may see policies may see what they were.
DO $do$
DECLARE
    r regrole;
BEGIN
    FOR r IN
        SELECT DISTINCT x.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS x
        WHERE c.oid = 'workflow_policy'::regclass AND x.privilege_type = 'SELECT' AND x.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON workflow_policy_history TO %s', r);
    END LOOP;
END
$do$;

-- Whoever owns what was there owns what is new, as in 0021: functions with the owner's rights call it.
DO $do$
DECLARE
    own   oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    thing text;
BEGIN
    FOR thing IN
        SELECT 'FUNCTION ' || p.oid::regprocedure FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proowner <> own
        UNION ALL
        SELECT 'TABLE ' || c.oid::regclass FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours WHERE c.relowner <> own
    LOOP
        EXECUTE format('ALTER %s OWNER TO %s', thing, own::regrole);
    END LOOP;
END
$do$;
