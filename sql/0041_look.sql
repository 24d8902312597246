-- simple-workflow 0041: one look tells an idle worker that nothing is to be tended to.
--   workflow_look_v1   for workers, which ask it every second

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE FUNCTION workflow_look_v1(OUT faults text[], OUT aside boolean, OUT kept boolean, OUT policies bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '200ms'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $fn$
BEGIN
    faults := ARRAY(SELECT f.statement FROM workflow_fault f WHERE f.role = workflow_role() AND f.seen_at > clock_timestamp() - interval '15 seconds');
    kept := EXISTS (SELECT FROM workflow_kept);
    aside := kept OR EXISTS (SELECT FROM workflow_set_aside) OR EXISTS (SELECT FROM process_unreached) OR EXISTS (SELECT FROM process_broadcast)
        OR EXISTS (SELECT FROM workflow_accepted a WHERE a.until < statement_timestamp() - interval '1 minute')
        OR EXISTS (SELECT FROM incident c WHERE c.resolved_at IS NULL AND c.code IN ('not_leased', 'not_reached'));
    policies := coalesce((SELECT hashtextextended(string_agg(p::text, E'\n' ORDER BY p.pattern), 0) FROM (SELECT * FROM workflow_policy ORDER BY pattern LIMIT 1000) AS p), 0);
END
$fn$;
COMMENT ON FUNCTION workflow_look_v1() IS
    'For workers, once a second: faults are the statements that fail for every row, as others of the same role have found out (while leases cannot be extended, none is taken back). aside: something is set aside, or owed to a process, so workflow_try_again_v1, process_try_again_v1 and process_incidents_v1 have work. kept: an outcome is kept, see workflow_kept_v1. policies is a number that changes with the policies, see workflow_policies_v1.';

COMMENT ON FUNCTION workflow_faults_v1() IS 'For workers that cannot look, see workflow_look_v1: their statements that fail for every row, as others of the same role have found out. While leases cannot be extended, none is taken back.';
COMMENT ON FUNCTION workflow_try_again_v1() IS 'For workers: has runs that are set aside be tried again, when it is time. They call it every second while workflow_look_v1 says that something is aside.';
COMMENT ON FUNCTION process_try_again_v1() IS 'For the engine: gives signals to those for whom they were set aside, when it is time. Workers call it every second while workflow_look_v1 says that something is aside. Returns to how many.';
COMMENT ON FUNCTION process_incidents_v1() IS
    'For the engine: opens incidents of steps that no worker may lease (not_leased) and of waits that a signal does not reach (not_reached), and ends those of which nothing is refused any more; some at a time. Workers call it every second while workflow_look_v1 says that something is aside, and again while it returns more than 0.';

-- As in 0026, but an index finds the rows, however many wait.
DO $do$
DECLARE
    was text := pg_get_functiondef('workflow_try_again_v1()'::regprocedure);
    now text := replace(was, $q$x.until < clock_timestamp() - interval '1 minute'$q$, $q$x.until < statement_timestamp() - interval '1 minute'$q$);
BEGIN
    IF now = was THEN
        RAISE EXCEPTION 'the function workflow_try_again_v1 is not that of 0026';
    END IF;
    EXECUTE now;
END
$do$;

-- It is ours, in the list of 0020, and called by whoever calls those that it stands before.
DO $do$
DECLARE
    was text := pg_get_functiondef('workflow_functions()'::regprocedure);
    now text := replace(was, $q$'{$q$, $q$'{workflow_look_v1, $q$);
    r   regrole;
BEGIN
    IF now = was THEN
        RAISE EXCEPTION 'the function workflow_functions is not that of 0020';
    END IF;
    EXECUTE now;
    REVOKE ALL ON FUNCTION workflow_look_v1() FROM PUBLIC;
    FOR r IN SELECT DISTINCT x.grantee FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS x WHERE p.oid = 'workflow_policies_v1()'::regprocedure AND x.grantee <> p.proowner LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION workflow_look_v1() TO %s', CASE WHEN r = 0::regrole THEN 'PUBLIC' ELSE r::text END);
    END LOOP;
    EXECUTE format('ALTER FUNCTION workflow_look_v1() OWNER TO %s', (SELECT c.relowner::regrole FROM pg_class c WHERE c.oid = 'workflow_run'::regclass));
END
$do$;
