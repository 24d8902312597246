-- simple-workflow 0038: a step writes its token, and the row of its instance only if that changes.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Each step updates its token once. With so much room on a page, nearly all of these updates stay on it, and none of the three indexes changes.
ALTER TABLE process_token SET (fillfactor = 50);

COMMENT ON COLUMN process_instance.version IS 'Grows by one with each transaction that changes this row. A token that goes from one step to the next does not.';
COMMENT ON COLUMN process_instance.updated_at IS 'When this row last changed; those of process_token say when a token last moved.';

-- As in 0027, but what nothing moves has stood still since its instance or one of its tokens last moved.
DO $do$
DECLARE
    was text := pg_get_viewdef('process_without_mover'::regclass);
    now text := replace(was, 'i.updated_at', 'greatest(i.updated_at, (SELECT max(m.updated_at) FROM process_token m WHERE m.instance_id = i.id)) AS updated_at');
BEGIN
    IF now = was THEN
        RAISE EXCEPTION 'the view process_without_mover is not that of 0027';
    END IF;
    EXECUTE 'CREATE OR REPLACE VIEW process_without_mover AS ' || now;
END
$do$;

-- As in 0012. In a transaction with an older snapshot, a correction fails if the instance has moved since, as it did when each move changed its row.
DO $do$
DECLARE
    was text := pg_get_functiondef('process_correct(uuid, text, jsonb, text, text)'::regprocedure);
    now text := replace(was, $q$    IF NOT FOUND THEN
        RETURN 'not found';$q$, $q$    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM FROM process_token t WHERE t.instance_id = process_correct.instance ORDER BY t.id FOR SHARE;
    END IF;
    IF i.id IS NULL THEN
        RETURN 'not found';$q$);
BEGIN
    IF now = was THEN
        RAISE EXCEPTION 'the function process_correct is not that of 0012';
    END IF;
    EXECUTE now;
END
$do$;
