-- simple-workflow 0015: a signal reaches those who can take it, whoever cannot.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;
