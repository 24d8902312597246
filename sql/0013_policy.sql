-- simple-workflow 0013: how often, and how long, work is tried.
--
--   workflow_policy            for a type, or a prefix of types: how often a run is started, the pauses between, and when it is too late
--   workflow_policy_of         what holds for one type: of each setting, that of the longest pattern which has it
--   workflow_set_policy, workflow_drop_policy   for operators
--   workflow_policies_v1       for workers, which read all of them every second
--   workflow_settle_v2         as workflow_settle_v1, and has a run follow its policy
--
-- A run that is enqueued with max_attempts 3, the default, follows the policy of its type. When it is settled or taken back, the number is
-- written into its row, and beside it as policy_attempts: for as long as they are the same, the run goes on to follow its policy, as that is by then.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE TABLE workflow_policy (
    pattern      text COLLATE "C" PRIMARY KEY,
    attempts     integer,
    backoff_base double precision,
    backoff_cap  double precision,
    curve        text COLLATE "C",
    deadline     double precision,
    dead_letter  text COLLATE "C",
    breaker      boolean,
    set_at       timestamptz NOT NULL DEFAULT now(),
    set_by       text        NOT NULL DEFAULT workflow_actor(),
    CONSTRAINT workflow_policy_pattern_check  CHECK (octet_length(pattern) <= 200 AND (pattern = '*' OR pattern ~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$')),
    CONSTRAINT workflow_policy_attempts_check CHECK (attempts BETWEEN 1 AND 1000),
    CONSTRAINT workflow_policy_backoff_check  CHECK (backoff_base BETWEEN 0.001 AND 31557600 AND backoff_cap BETWEEN 0.001 AND 31557600 AND (backoff_base > backoff_cap) IS NOT TRUE),
    CONSTRAINT workflow_policy_curve_check    CHECK (curve IN ('exponential', 'linear', 'constant')),
    CONSTRAINT workflow_policy_deadline_check CHECK (deadline BETWEEN 1 AND 315576000),
    CONSTRAINT workflow_policy_letter_check   CHECK (octet_length(dead_letter) <= 200 AND (dead_letter = 'none' OR dead_letter ~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' AND NOT dead_letter ^@ 'graph.')),
    CONSTRAINT workflow_policy_set_check      CHECK (set_at BETWEEN '2000-01-01 00:00Z' AND '2200-01-01 00:00Z' AND octet_length(set_by) <= 4096)
);
COMMENT ON TABLE  workflow_policy IS 'How often runs of a type are tried, and how long. Of each setting that of the longest pattern counts which has it.';
COMMENT ON COLUMN workflow_policy.pattern IS 'A type, a prefix that ends with a dot, or * for all types.';
COMMENT ON COLUMN workflow_policy.attempts IS 'The most starts of a run that was enqueued with max_attempts 3, the default. Null: a shorter pattern says it; if none does, 25, as shipped.';
COMMENT ON COLUMN workflow_policy.backoff_base IS 'Seconds before the second attempt. Null: a shorter pattern says it; if none does, 1. If no pattern says anything of base, cap and curve, the worker does.';
COMMENT ON COLUMN workflow_policy.backoff_cap IS 'The most seconds between two attempts, jitter of up to a half aside. Null: as for backoff_base, at last 300.';
COMMENT ON COLUMN workflow_policy.curve IS 'How the pause grows: exponential (twice as long each time), linear (by the base each time), constant. Null: as for backoff_base, at last exponential.';
COMMENT ON COLUMN workflow_policy.breaker IS 'Whether the breaker of a type may open: see workflow_breaker. Null: a shorter pattern says it; if none does, it may.';
COMMENT ON COLUMN workflow_policy.deadline IS 'Seconds since it was enqueued after which a run is started no more, but fails as too_late. Null: a shorter pattern says it; if none does, there is no end.';
COMMENT ON COLUMN workflow_policy.dead_letter IS 'The type of the run that is enqueued, in the same transaction, for each run that has failed for good; none: no run is. Null: a shorter pattern says it; if none does, no run is.';

-- The functions below say that it is they.
CREATE TRIGGER workflow_policy_guard BEFORE INSERT OR UPDATE ON workflow_policy
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_set_policy(pattern, attempts => …) sets a policy; workflowctl policy does the same.');
CREATE TRIGGER workflow_policy_delete_guard BEFORE DELETE ON workflow_policy
    FOR EACH ROW WHEN (NOT workflow_at_work()) EXECUTE FUNCTION workflow_guard('SELECT workflow_drop_policy(pattern) removes a policy.');
CREATE TRIGGER workflow_policy_kept BEFORE TRUNCATE ON workflow_policy
    FOR EACH STATEMENT EXECUTE FUNCTION workflow_guard('SELECT workflow_drop_policy(pattern) removes a policy.');

-- Nullable and without a default: no row is written. Runs that were never tried again have no value.
ALTER TABLE workflow_run ADD COLUMN policy_attempts integer;
COMMENT ON COLUMN workflow_run.policy_attempts IS 'What the policy of the type said when the run was last settled or taken back. While max_attempts is the same, or this is null and that is 3, the run follows its policy; any other number was given. 0: a person has given it.';
COMMENT ON COLUMN workflow_run.max_attempts IS 'The most starts that may be charged, 1 to 1000. 3, the default, means what the policy of the type says.';

-- As shipped, which no row says, so that data can be restored into an empty schema: 25 attempts. With the workers' backoff of 1 s up to 5 min they last for 83 minutes
-- at least.
CREATE FUNCTION workflow_policy_of(type text, OUT attempts integer, OUT attempts_from text, OUT backoff_base float8, OUT backoff_cap float8, OUT curve text, OUT deadline float8, OUT breaker boolean)
LANGUAGE sql STABLE AS $fn$
    SELECT coalesce((array_agg(p.attempts ORDER BY length(p.pattern) DESC) FILTER (WHERE p.attempts IS NOT NULL))[1], 25),
           coalesce((array_agg(p.pattern  ORDER BY length(p.pattern) DESC) FILTER (WHERE p.attempts IS NOT NULL))[1], 'as shipped'),
           (array_agg(p.backoff_base ORDER BY length(p.pattern) DESC) FILTER (WHERE p.backoff_base IS NOT NULL))[1],
           (array_agg(p.backoff_cap  ORDER BY length(p.pattern) DESC) FILTER (WHERE p.backoff_cap  IS NOT NULL))[1],
           (array_agg(p.curve        ORDER BY length(p.pattern) DESC) FILTER (WHERE p.curve        IS NOT NULL))[1],
           (array_agg(p.deadline     ORDER BY length(p.pattern) DESC) FILTER (WHERE p.deadline     IS NOT NULL))[1],
           (array_agg(p.breaker      ORDER BY length(p.pattern) DESC) FILTER (WHERE p.breaker      IS NOT NULL))[1]
    FROM (SELECT p.pattern, p.attempts, CASE WHEN NOT type ^@ 'graph.' THEN p.backoff_base END AS backoff_base, CASE WHEN NOT type ^@ 'graph.' THEN p.backoff_cap END AS backoff_cap,
                 CASE WHEN NOT type ^@ 'graph.' THEN p.curve END AS curve, CASE WHEN NOT type ^@ 'graph.' THEN p.deadline END AS deadline, p.breaker
          FROM workflow_policy p
          WHERE p.pattern = '*' OR workflow_covers(p.pattern, type)) AS p -- the engine's own runs wait for as long as a process says
$fn$;
COMMENT ON FUNCTION workflow_policy_of(text) IS 'What the policies say of a type; attempts as shipped if none says how many. Null: none says anything.';

-- Whether it is the policy that says how often a run is tried.
CREATE FUNCTION workflow_follows(max_attempts integer, policy_attempts integer) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(max_attempts = policy_attempts, max_attempts = 3);

-- A number that somebody gives is the run's own, but 3, which has it follow its policy again: as that is by now, so that the run is not at its end
-- at once. What is granted to a run that has failed is its own, whatever it is. The engine writes both columns.
CREATE FUNCTION workflow_run_grant() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
BEGIN
    NEW.policy_attempts := 0;
    IF NEW.max_attempts = 3 AND OLD.status <> 'failed' THEN
        NEW.policy_attempts := NULL;
        IF NEW.attempt >= 3 THEN
            NEW.max_attempts := greatest((workflow_policy_of(NEW.type)).attempts, NEW.attempt + CASE NEW.status WHEN 'pending' THEN 1 ELSE 0 END);
            NEW.policy_attempts := NEW.max_attempts;
        END IF;
    END IF;
    RETURN NEW;
END
$fn$;
CREATE TRIGGER workflow_run_granted BEFORE UPDATE OF max_attempts ON workflow_run
    FOR EACH ROW WHEN (OLD.status = 'failed' AND NEW.status = 'pending'
        OR NEW.max_attempts <> OLD.max_attempts AND NEW.policy_attempts IS NOT DISTINCT FROM OLD.policy_attempts)
    EXECUTE FUNCTION workflow_run_grant();

-- The most attempts of a run whose lease has expired. Of one that follows its policy three leases in a row may: it may be what kills its process, and
-- that each time. An outcome in between, which a worker reports, brings back what the policy says. A suspect that was not known to be at its
-- last attempt was not alone at it, and has another.
CREATE FUNCTION workflow_most(type text, max_attempts integer, policy_attempts integer, attempt integer, suspect boolean) RETURNS integer
LANGUAGE sql STABLE
RETURN CASE WHEN workflow_follows(max_attempts, policy_attempts)
            THEN greatest(least((workflow_policy_of(type)).attempts, CASE WHEN suspect THEN max_attempts ELSE attempt + 2 END), attempt + CASE WHEN suspect AND attempt < max_attempts THEN 1 ELSE 0 END)
            ELSE max_attempts END;

-- The seconds after a failure that n failures came before, jitter aside. Where the policy says nothing of pauses it is as the worker's delays have it,
-- of which the last goes for all further ones; else what it leaves out is as shipped.
CREATE FUNCTION workflow_backoff(type text, delays float8[], n integer) RETURNS float8
LANGUAGE sql STABLE AS $fn$
    SELECT CASE WHEN p.backoff_base IS NULL AND p.backoff_cap IS NULL AND p.curve IS NULL THEN delays[least(greatest(n, 0) + 1, cardinality(delays))]
                ELSE least(coalesce(p.backoff_cap, greatest(300, p.backoff_base)),
                           coalesce(p.backoff_base, least(1, p.backoff_cap)) * CASE p.curve WHEN 'constant' THEN 1 WHEN 'linear' THEN greatest(n, 0) + 1 ELSE 2.0 ^ least(greatest(n, 0), 60) END) END
    FROM workflow_policy_of(type) AS p
$fn$;

CREATE FUNCTION workflow_policies_v1() RETURNS TABLE (pattern text, attempts integer, backoff_base float8, backoff_cap float8, curve text, deadline float8, breaker boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN QUERY SELECT p.pattern::text, p.attempts, p.backoff_base, p.backoff_cap, p.curve::text, p.deadline, p.breaker FROM workflow_policy p ORDER BY p.pattern LIMIT 1000;
END
$fn$;
COMMENT ON FUNCTION workflow_policies_v1() IS 'For workers: all policies.';

-- Before the outcome: the verdict was made of the number. A run that is not the caller's any more stays as it is.
CREATE FUNCTION workflow_settle_v2(ids uuid[], tokens uuid[], verdicts text[], results jsonb[], errors jsonb[], last_errors text[], delays float8[], worker text, mosts integer[])
RETURNS integer[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $fn$
DECLARE
    bound text[] := workflow_bound_prefixes();
BEGIN
    UPDATE workflow_run w
    SET max_attempts = o.most, policy_attempts = o.most
    FROM unnest(ids, tokens, mosts) AS o (id, token, most)
    WHERE w.id = ANY (ids) AND w.id = o.id AND w.lease_token = o.token AND o.most > 0 AND workflow_follows(w.max_attempts, w.policy_attempts)
      AND (bound IS NULL OR w.token_id IS NULL AND w.type ^@ ANY (bound));
    RETURN workflow_settle_v1(ids, tokens, verdicts, results, errors, last_errors, delays, worker);
END
$fn$;
COMMENT ON FUNCTION workflow_settle_v2(uuid[], uuid[], text[], jsonb[], jsonb[], text[], float8[], text, integer[]) IS
    'For workers: as workflow_settle_v1; mosts are the attempts of runs that follow a policy, which are written into their rows. 0 or null: that is left as it is.';

-- ---------------------------------------------------------------------------------
-- For operators. Each answers what it did.
-- ---------------------------------------------------------------------------------

CREATE FUNCTION workflow_set_policy(pattern text, attempts integer DEFAULT NULL, backoff_base interval DEFAULT NULL, backoff_cap interval DEFAULT NULL, curve text DEFAULT NULL,
    deadline interval DEFAULT NULL, dead_letter text DEFAULT NULL, breaker boolean DEFAULT NULL, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
#variable_conflict use_column
DECLARE
    p       CONSTANT text   := workflow_set_policy.pattern;
    base    CONSTANT float8 := extract(epoch FROM workflow_set_policy.backoff_base);
    longest CONSTANT float8 := extract(epoch FROM workflow_set_policy.backoff_cap);
    ends    CONSTANT float8 := extract(epoch FROM workflow_set_policy.deadline);
    before  CONSTANT text   := coalesce(current_setting('workflow.advance', true), '');
    problem text;
    fix     text;
BEGIN
    PERFORM workflow_behalf(workflow_set_policy.on_behalf_of, 'workflow_set_policy(text, integer, interval, interval, text, interval, text, boolean, text)'::regprocedure);
    IF p IS NULL OR octet_length(p) > 200 OR p <> '*' AND p !~ '^([a-z0-9_-]+\.)+([a-z0-9_-]+)?$' THEN
        problem := format('pattern %s is neither a type, nor a prefix that ends with a dot, nor *', coalesce(quote_literal(left(p, 120)), 'null'));
        fix := 'Use billing. for all its types, one type such as billing.invoice_charge.v1, or * for all types.';
    ELSIF p ^@ 'graph.' THEN
        problem := format('pattern %L is of the engine''s own types', p);
        fix := 'Say it in the definition of the process: retry at a node, and after in on.';
    ELSIF num_nonnulls(workflow_set_policy.attempts, base, longest, workflow_set_policy.curve, ends, workflow_set_policy.dead_letter, workflow_set_policy.breaker) = 0 THEN
        problem := format('nothing is given for pattern %L', p);
        fix := 'Give attempts, backoff_base, backoff_cap, curve, deadline, dead_letter or breaker; to remove the policy, SELECT workflow_drop_policy(pattern).';
    ELSIF workflow_set_policy.attempts NOT BETWEEN 1 AND 1000 THEN
        problem := format('attempts %s is outside 1 to 1000', workflow_set_policy.attempts);
        fix := 'Say how often a run may be started.';
    ELSIF base NOT BETWEEN 0.001 AND 31557600 OR longest NOT BETWEEN 0.001 AND 31557600 THEN
        problem := format('backoff_base %s to backoff_cap %s is outside 1 ms to 1 year', coalesce(workflow_set_policy.backoff_base::text, 'null'), coalesce(workflow_set_policy.backoff_cap::text, 'null'));
        fix := 'Use intervals such as ''10 s'' and ''1 hour''.';
    ELSIF base > longest THEN
        problem := format('backoff_base %s is longer than backoff_cap %s', workflow_set_policy.backoff_base, workflow_set_policy.backoff_cap);
        fix := 'backoff_base is the first pause, backoff_cap the longest.';
    ELSIF workflow_set_policy.curve NOT IN ('exponential', 'linear', 'constant') THEN
        problem := format('curve %s is unknown', quote_literal(left(workflow_set_policy.curve, 40)));
        fix := 'Use exponential, linear or constant.';
    ELSIF ends NOT BETWEEN 1 AND 315576000 THEN
        problem := format('deadline %s is outside 1 s to 10 years', workflow_set_policy.deadline);
        fix := 'Say how long after it was enqueued a run may still be started.';
    ELSIF octet_length(workflow_set_policy.dead_letter) > 200 OR workflow_set_policy.dead_letter <> 'none' AND workflow_set_policy.dead_letter !~ '^[a-z0-9_-]+(\.[a-z0-9_-]+)+$' THEN
        problem := format('dead_letter %s is not a type', quote_literal(left(workflow_set_policy.dead_letter, 120)));
        fix := 'Use a type such as ops.dead_letter.v1, or none.';
    ELSIF workflow_set_policy.dead_letter ^@ 'graph.' THEN
        problem := format('dead_letter %L is one of the engine''s own types', workflow_set_policy.dead_letter);
        fix := 'Use a type of yours; its handler may start a process.';
    ELSIF workflow_set_policy.dead_letter = p THEN
        problem := format('dead_letter %L is the pattern itself', p);
        fix := 'A dead letter that fails makes none: name another type.';
    ELSIF (SELECT count(*) FROM workflow_policy x WHERE x.pattern <> p) >= 1000 THEN
        problem := 'there are 1000 policies, which is the most';
        fix := 'Use prefixes; SELECT workflow_drop_policy(pattern) removes one.';
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'workflow_set_policy: %', problem USING ERRCODE = 'check_violation', HINT = fix;
    END IF;
    PERFORM set_config('workflow.advance', 'on', true); -- for the guard
    INSERT INTO workflow_policy AS x (pattern, attempts, backoff_base, backoff_cap, curve, deadline, dead_letter, breaker)
    VALUES (p, workflow_set_policy.attempts, base, longest, workflow_set_policy.curve, ends, workflow_set_policy.dead_letter, workflow_set_policy.breaker)
    ON CONFLICT (pattern) DO UPDATE
    SET attempts = excluded.attempts, backoff_base = excluded.backoff_base, backoff_cap = excluded.backoff_cap, curve = excluded.curve, deadline = excluded.deadline, dead_letter = excluded.dead_letter, breaker = excluded.breaker,
        set_at = excluded.set_at, set_by = excluded.set_by;
    PERFORM set_config('workflow.advance', before, true);
    RETURN 'set; workers read it every second';
END
$fn$;
COMMENT ON FUNCTION workflow_set_policy(text, integer, interval, interval, text, interval, text, boolean, text) IS
    'Sets the policy of a type, of a prefix that ends with a dot, or of all types (*), as a whole: what is not given, a shorter pattern says.';

CREATE FUNCTION workflow_drop_policy(pattern text, on_behalf_of text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    before CONSTANT text := coalesce(current_setting('workflow.advance', true), '');
    dropped boolean;
BEGIN
    PERFORM workflow_behalf(workflow_drop_policy.on_behalf_of, 'workflow_drop_policy(text, text)'::regprocedure);
    PERFORM set_config('workflow.advance', 'on', true);
    DELETE FROM workflow_policy x WHERE x.pattern = workflow_drop_policy.pattern;
    dropped := FOUND;
    PERFORM set_config('workflow.advance', before, true);
    RETURN CASE WHEN dropped THEN 'dropped' ELSE 'there is none for it' END;
END
$fn$;
COMMENT ON FUNCTION workflow_drop_policy(text, text) IS 'Removes a policy: shorter patterns count from then on, at last what was shipped. Answers dropped, or that there is none.';

REVOKE ALL ON FUNCTION workflow_settle_v2(uuid[], uuid[], text[], jsonb[], jsonb[], text[], float8[], text, integer[]), workflow_policies_v1(),
    workflow_set_policy(text, integer, interval, interval, text, interval, text, boolean, text), workflow_drop_policy(text, text),
    workflow_policy_of(text), workflow_most(text, integer, integer, integer, boolean), workflow_follows(integer, integer), workflow_backoff(text, float8[], integer), workflow_run_grant() FROM PUBLIC;

-- Whoever may settle, pause, ask why or read views goes on to.
DO $do$
DECLARE
    f regprocedure;
    r regrole;
BEGIN
    FOR f, r IN
        SELECT n.oid, x.grantee
        FROM (VALUES ('workflow_settle_v1', 'workflow_settle_v2'), ('workflow_settle_v1', 'workflow_policies_v1'), ('workflow_pause', 'workflow_set_policy'), ('workflow_pause', 'workflow_drop_policy'),
                     ('workflow_why', 'workflow_policy_of'), ('workflow_why', 'workflow_follows'),
                     ('workflow_age', 'workflow_policy_of'), ('workflow_age', 'workflow_follows')) AS as_with (known, fresh) -- views ask the last two of whoever reads them
        JOIN pg_proc o ON o.proname = known AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass)
        CROSS JOIN LATERAL aclexplode(o.proacl) AS x JOIN pg_proc n ON n.pronamespace = o.pronamespace AND n.proname = fresh
        WHERE x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', f, r);
    END LOOP;
    FOR r IN
        SELECT x.grantee FROM pg_proc o CROSS JOIN LATERAL aclexplode(o.proacl) AS x
        WHERE o.proname = 'workflow_why' AND o.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND x.grantee NOT IN (0, o.proowner)
    LOOP
        EXECUTE format('GRANT SELECT ON workflow_policy TO %s', r);
    END LOOP;
END
$do$;
