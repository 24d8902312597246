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
