-- simple-workflow 0022: every column is bounded.
--
-- workflowctl migrate up and sql.Up bring rows that are beyond a bound back within it before this, a thousand at a time, and add the
-- CHECKs table by table; here those are added that are still missing. By hand: SELECT * FROM workflow_mend_v1('workflow_run', NULL, 1000), and so
-- on with the key that it returns, for each relation of workflow_bound_check. A row that is not over and is still beyond a bound stops this: its CHECK would
-- refuse every change of it, a cancel too.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

DO $do$
DECLARE
    t     text;
    place jsonb;
    b     record;
BEGIN
    FOR t IN SELECT DISTINCT c.relation FROM workflow_bound_check c WHERE c.valid IS NULL ORDER BY 1 LOOP
        place := NULL;
        LOOP
            FOR b IN SELECT * FROM workflow_beyond(t, place, 10000) LOOP
                place := b.key;
                IF b.open AND EXISTS (SELECT FROM workflow_bound o WHERE o.relation = t AND o."column" = ANY (b.columns) AND o.guard IS NULL) THEN
                    RAISE EXCEPTION '% %: % is beyond its bound', t, b.key, array_to_string(b.columns, ', ')
                        USING ERRCODE = 'check_violation', TABLE = t, COLUMN = b.columns[1],
                              HINT = format('Run workflowctl migrate up, which mends what it can. SELECT * FROM workflow_out_of_bounds(%L) tells what to do.', t);
                END IF;
            END LOOP;
            EXIT WHEN place IS NULL;
        END LOOP;
        PERFORM workflow_add_bounds_v1(t);
    END LOOP;
END
$do$;
