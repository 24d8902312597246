-- simple-workflow 0017: what cannot be settled is kept, and told of.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;
