-- Tests install this to record every change of a run as the database made it. Nothing that ships has it. The rows of
-- one run are in the order of their commits, because its row is locked meanwhile. A change that is rolled back leaves
-- no row.

CREATE TYPE workflow_traced AS (
    status text, attempt integer, most integer, lease_no bigint, token uuid, settled uuid, leased_by text, settled_by text,
    lease_until timestamptz, suspect boolean, hidden boolean, deleted boolean, uncharged boolean, company boolean, follows boolean);

CREATE TABLE workflow_trace (
    seq    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    run    uuid        NOT NULL,
    op     text        NOT NULL, -- the function of the engine that did it; enqueue, remove, or edit: another statement; keep, fail, over or begin; fault
    over   boolean     NOT NULL, -- the lease had expired
    was    workflow_traced,
    became workflow_traced,
    kept   uuid,                 -- for keep, fail, over and begin, which change no run: the token under which an outcome is kept, or which may begin,
    keeps  text,                 -- its verdict, or effects,
    worker text                  -- and its worker
);

CREATE FUNCTION workflow_trace() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    stack  text;
    was    workflow_traced;
    became workflow_traced;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        was := ROW(OLD.status, OLD.attempt, OLD.max_attempts, OLD.lease_no, OLD.lease_token, OLD.settled_token, OLD.leased_by, OLD.settled_by,
                   OLD.lease_until, OLD.suspect, OLD.held_at IS NOT NULL OR OLD.deleted_at IS NOT NULL, OLD.deleted_at IS NOT NULL, OLD.status = 'leased' AND OLD.deadline_at IS NOT DISTINCT FROM OLD.started_at,
                   CASE WHEN OLD.suspect THEN OLD.alone IS FALSE
                   AND (OLD.deadline_at IS NULL OR OLD.updated_at <= OLD.deadline_at - interval '1 second') END, coalesce(OLD.max_attempts = OLD.policy_attempts, OLD.max_attempts = 3));
    END IF;
    IF TG_OP <> 'DELETE' THEN
        became := ROW(NEW.status, NEW.attempt, NEW.max_attempts, NEW.lease_no, NEW.lease_token, NEW.settled_token, NEW.leased_by, NEW.settled_by,
                      NEW.lease_until, NEW.suspect, NEW.held_at IS NOT NULL OR NEW.deleted_at IS NOT NULL, NEW.deleted_at IS NOT NULL, NEW.status = 'leased' AND NEW.deadline_at IS NOT DISTINCT FROM NEW.started_at,
                   CASE WHEN NEW.suspect THEN NEW.alone IS FALSE END, coalesce(NEW.max_attempts = NEW.policy_attempts, NEW.max_attempts = 3));
    END IF;
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF TG_OP = 'INSERT' AND NEW.status = 'leased' AND stack ~ 'PL/pgSQL function (?:\w+\.)?workflow_carry_v1\(' THEN -- enqueued and leased at once
        was := ROW('pending', 0, NEW.max_attempts, 0, NULL, NULL, NULL, NULL, NULL, false, became.hidden, became.deleted, false, NULL, became.follows);
        INSERT INTO workflow_trace (run, op, over, became) VALUES (NEW.id, 'enqueue', false, was);
        INSERT INTO workflow_trace (run, op, over, was, became) VALUES (NEW.id, 'lease', false, was, became);
        RETURN NULL;
    END IF;
    INSERT INTO workflow_trace (run, op, over, was, became)
    VALUES (coalesce(NEW.id, OLD.id),
            CASE WHEN TG_OP = 'INSERT' THEN 'enqueue' WHEN TG_OP = 'DELETE' THEN 'remove'
            WHEN stack ~ 'workflow_settle_v2\(' AND stack !~ 'workflow_settle_v1\(' THEN 'policy' -- the attempts, before the outcome
            ELSE coalesce(replace(substring(stack FROM 'PL/pgSQL function (?:\w+\.)?workflow_(lease|extend|settle|take_back|give_back|cancel|retry|release|delete)(?:_ahead)?(?:_v\d+)?\('), '_', ' '), 'edit') END,
            coalesce(TG_OP <> 'INSERT' AND (OLD.lease_until < clock_timestamp() OR OLD.lease_until > clock_timestamp() + interval '25 hours'), false),
            was, became);
    RETURN NULL;
END
$$;

-- Kept outcomes. The trigger is deferred, so that it fires at the end of its transaction: after the changes of the
-- run, whose row stays locked from then on.
CREATE FUNCTION workflow_trace_kept() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    k workflow_kept := OLD;
BEGIN
    IF TG_OP <> 'DELETE' THEN
        k := NEW;
    END IF;
    INSERT INTO workflow_trace (run, op, over, kept, keeps, worker)
    VALUES (k.run, CASE TG_OP WHEN 'DELETE' THEN 'over' WHEN 'INSERT' THEN 'keep' ELSE CASE WHEN NEW.token = OLD.token THEN 'fail' ELSE 'keep' END END, false,
            k.token, CASE WHEN k.effects THEN 'effects' ELSE k.verdict END, k.worker);
    RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER workflow_trace_kept AFTER INSERT OR UPDATE OR DELETE ON workflow_kept
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION workflow_trace_kept();

-- Runs that were leased ahead, and may begin.
CREATE FUNCTION workflow_trace_begun() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO workflow_trace (run, op, over, kept) SELECT r.id, 'begin', false, NEW.token FROM workflow_run r WHERE r.status = 'leased' AND r.lease_token = NEW.token;
    RETURN NULL;
END
$$;

CREATE TRIGGER workflow_trace_begun AFTER INSERT ON workflow_begun FOR EACH ROW WHEN (NEW.begun) EXECUTE FUNCTION workflow_trace_begun();

-- Workers that find out that they can settle nothing report it repeatedly. These rows belong to no run.
CREATE FUNCTION workflow_trace_fault() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO workflow_trace (run, op, over) VALUES ('00000000-0000-0000-0000-000000000000', 'fault', false);
    RETURN NULL;
END
$$;

CREATE TRIGGER workflow_trace_fault AFTER INSERT OR UPDATE ON workflow_fault
    FOR EACH ROW WHEN (NEW.statement = 'settle') EXECUTE FUNCTION workflow_trace_fault();

CREATE TRIGGER workflow_trace_rows AFTER INSERT OR DELETE ON workflow_run FOR EACH ROW EXECUTE FUNCTION workflow_trace();
CREATE TRIGGER workflow_trace_changes AFTER UPDATE ON workflow_run
    FOR EACH ROW WHEN ((OLD.status, OLD.attempt, OLD.max_attempts, OLD.lease_no, OLD.suspect) <> (NEW.status, NEW.attempt, NEW.max_attempts, NEW.lease_no, NEW.suspect)
        OR (OLD.lease_token, OLD.settled_token, OLD.leased_by, OLD.lease_until) IS DISTINCT FROM (NEW.lease_token, NEW.settled_token, NEW.leased_by, NEW.lease_until)
        OR (OLD.held_at IS NULL AND OLD.deleted_at IS NULL) <> (NEW.held_at IS NULL AND NEW.deleted_at IS NULL) OR (OLD.deleted_at IS NULL) <> (NEW.deleted_at IS NULL))
    EXECUTE FUNCTION workflow_trace();
