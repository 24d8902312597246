-- simple-workflow 0042: what is looked up by its key is found by its key.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Plans are kept from when these tables had a few rows. Then an index of the first column of the key costs the same as the index of the key, and the planner
-- may take either. When ten thousand runs of a lane are set aside, a walk past them has read all ten thousand for each: a minute in which no lane is found.
--
-- So these two have a condition that is always true, and that no look-up by kind and id has. Queries that are to go by them repeat it.
DROP INDEX workflow_set_aside_reason_idx;
CREATE INDEX workflow_set_aside_reason_idx ON workflow_set_aside (kind, type, statement, sqlstate, "constraint", last_tried_at) WHERE type >= '';
DROP INDEX workflow_set_aside_some_idx;
CREATE INDEX workflow_set_aside_some_idx ON workflow_set_aside (kind, uuid_hash(id)) WHERE type >= '';

DO $do$
DECLARE
    f   record;
    was text;
    now text;
BEGIN
    FOR f IN SELECT * FROM (VALUES
        ('workflow_aside_some(text)', 's.kind = workflow_aside_some.kind', 's.kind = workflow_aside_some.kind AND s.type >= ''''', 2),
        ('workflow_aside_turn(text, text[])', 's.kind = workflow_aside_turn.kind', 's.kind = workflow_aside_turn.kind AND s.type >= ''''', 1),
        ('workflow_aside_turn(text, text[])', 'SELECT max(s.last_tried_at) FROM', 'SELECT s.last_tried_at FROM', 1), -- max() reads them all by a kept plan
        ('workflow_aside_turn(text, text[])', 's.kind = x.kind AND s.type = x.type AND s.statement = x.statement AND s.sqlstate = x.sqlstate AND s."constraint" = x."constraint"',
            's.kind = x.kind AND s.type >= '''' AND s.type = x.type AND s.statement = x.statement AND s.sqlstate = x.sqlstate AND s."constraint" = x."constraint" ORDER BY s.last_tried_at DESC LIMIT 1', 1),
        ('workflow_aside_turn(text, text[])', '> (x.kind, x.type, x.statement, x.sqlstate, x."constraint")', '> (x.kind, x.type, x.statement, x.sqlstate, x."constraint") AND s.type >= ''''', 1),
        ('workflow_put_back(uuid[])', 'a.type = reason.type', 'a.type >= '''' AND a.type = reason.type', 1),
        ('workflow_kept_over_v1(uuid[], uuid[], text[], boolean[])', 'y.kind = ''run''', 'y.kind = ''run'' AND y.type >= ''''', 1)
    ) AS x (name, old, new, times)
    LOOP
        was := pg_get_functiondef(f.name::regprocedure);
        now := replace(was, f.old, f.new);
        IF length(now) - length(was) <> f.times * (length(f.new) - length(f.old)) THEN
            RAISE EXCEPTION 'the function % is not that of an earlier migration', f.name;
        END IF;
        EXECUTE now;
    END LOOP;
END
$do$;

-- Here the index that finds those of a signal has all columns of the key, so that it finds one of them as well as the key does.
DROP INDEX process_unreached_signal_idx;
CREATE INDEX process_unreached_signal_idx ON process_unreached (signal_id, token_id, place);
