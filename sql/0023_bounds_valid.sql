-- simple-workflow 0023: rows from before are within their bounds.
--
-- As in 0022 this was done before, table by table, by workflowctl migrate up. A CHECK that some row does not keep stays not
-- valid: it goes for what is written, and SELECT * FROM workflow_out_of_bounds() names the rows. workflowctl doctor tells of them.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

DO $do$
DECLARE
    t      text;
    beyond text[];
BEGIN
    FOR t IN SELECT DISTINCT c.relation FROM workflow_bound_check c WHERE NOT c.valid ORDER BY 1 LOOP
        beyond := workflow_validate_bounds_v1(t);
        IF cardinality(beyond) > 0 THEN
            RAISE WARNING '%: rows from before are beyond %', t, array_to_string(beyond, ', ')
                USING HINT = format('SELECT * FROM workflow_out_of_bounds(%L) names them.', t);
        END IF;
    END LOOP;
END
$do$;
