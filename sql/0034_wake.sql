-- simple-workflow 0034: fewer commits wait for each other to wake workers.
--
--   workflow_run_wake  no more than eight transactions of a second are on their way to notify
--
-- A commit that notifies waits for all others that do, one after the other: PostgreSQL has it so. A server that is short of processors passes the turn on
-- slowly. Dozens waited for more than a second, and what they had locked waited with them. The others enqueue without a word: a worker that is told by one of
-- the eight looks for all that is due, and every worker looks once in a poll interval.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

CREATE OR REPLACE FUNCTION workflow_run_wake() RETURNS trigger
LANGUAGE plpgsql AS $fn$
DECLARE
    moment numeric := extract(epoch FROM clock_timestamp());
BEGIN
    -- Once in a transaction: each lock stays until its end. A transaction that takes long keeps none of the later seconds.
    IF pg_try_advisory_xact_lock(1685003, (moment * 100)::bigint::bit(32)::integer)
        AND EXISTS (SELECT FROM generate_series(0, 7) AS seat WHERE pg_try_advisory_xact_lock(1685004, (moment::bigint * 8 + seat)::bit(32)::integer)) THEN
        PERFORM pg_notify('workflow_run', ''), set_config('workflow.woken', 'on', true);
    END IF;
    RETURN NULL;
END
$fn$;
