-- simple-workflow 0011: what nobody can do to the outbox.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

ALTER TABLE outbox_lane ADD COLUMN replays bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN outbox_lane.replays IS 'Grows with each replay of its events: what a sink had acknowledged before, and could not be marked, is published again.';

-- Who appends an event holds its aggregate until his transaction ends: he has inserted a row here, and
-- deleted it again. Whoever inserts the same key meanwhile waits for him, as unique indexes have it. So this
-- table is always empty to everybody else, takes no room in the lock table and none in the log, and nobody can hold
-- an aggregate but who may append. A key that somebody has left here by hand stops nobody: it is taken over, and goes.
CREATE UNLOGGED TABLE outbox_aggregate (id uuid PRIMARY KEY)
    WITH (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_threshold = 1000000000);
COMMENT ON TABLE outbox_aggregate IS 'The aggregates of which a transaction that is under way appends events. To all others it is empty.';

-- Ids are drawn while the aggregate is held for the rest of the transaction, so that within one
-- aggregate a later id is always a later commit; and after the transaction has got its number, so that who has
-- drawn one can be seen to be under way: outbox_lane.next_xid.
--
-- Its name has a number because programs of several versions call it: what it takes and does stays as it is.
CREATE FUNCTION outbox_append_v1(ids uuid[], aggregates uuid[], types text[], payloads jsonb[], headers jsonb[] DEFAULT NULL, held boolean[] DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
DECLARE
    engine boolean := has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE');
    one    boolean := cardinality(aggregates) = 1; -- the usual case, which costs half of what many cost
    wanted uuid[]  := aggregates;
    before tid[]   := nullif(current_setting('workflow.appended', true), '')::tid[];
    here   tid;
    all_of_them tid[];
    last   bigint;
    done   text;
BEGIN
    IF NOT engine THEN
        IF array_to_string(types, ' ') ~ '(^| )(run\.|process\.|incident\.|no_handler_registered( |$))' THEN
            RAISE EXCEPTION 'outbox_append: role % may not tell run.…, process.…, incident.… or no_handler_registered: the engine does', workflow_role()
                USING ERRCODE = 'insufficient_privilege', HINT = 'Use another type.';
        -- Whoever may enqueue may append events of anything; a worker, of its own runs.
        ELSIF NOT has_function_privilege(workflow_role(), 'outbox_emit(uuid, text, jsonb, jsonb)', 'EXECUTE') AND EXISTS (
            SELECT FROM unnest(aggregates) AS a
            WHERE NOT EXISTS (SELECT FROM workflow_run r WHERE r.id = a AND r.token_id IS NULL AND r.type ^@ ANY (workflow_bound_prefixes())))
        THEN
            RAISE EXCEPTION 'outbox_append: role % may append events of its own runs alone: the aggregate is the id of one', workflow_role()
                USING ERRCODE = 'insufficient_privilege', HINT = 'Grant workflow_enqueue, too, if it shall append others: see docs/roles.md.';
        END IF;
    ELSIF true = ANY (held) THEN
        SELECT array_agg(u.a) INTO wanted FROM unnest(aggregates, held) AS u (a, h) WHERE h IS NOT TRUE;
    END IF;

    IF one AND wanted IS NOT NULL THEN
        -- What this transaction has appended shows what it holds. Else the key of one aggregate would come
        -- a thousand times, and each time be compared with all before.
        IF before IS NOT NULL AND EXISTS (
            SELECT FROM outbox_event e WHERE e.ctid = ANY (before) AND e.aggregate_id = wanted[1] AND e.xmin = pg_current_xact_id_if_assigned()::xid)
        THEN
            wanted := NULL;
        ELSE
            INSERT INTO outbox_aggregate VALUES (wanted[1]) ON CONFLICT ON CONSTRAINT outbox_aggregate_pkey DO UPDATE SET id = excluded.id RETURNING ctid INTO here;
            DELETE FROM outbox_aggregate WHERE ctid = here;
        END IF;
    ELSIF wanted IS NOT NULL THEN -- in one order, that of all who do this
        WITH mine AS (
            INSERT INTO outbox_aggregate SELECT DISTINCT a FROM unnest(wanted) AS a ORDER BY a
            ON CONFLICT ON CONSTRAINT outbox_aggregate_pkey DO UPDATE SET id = excluded.id RETURNING outbox_aggregate.ctid
        )
        SELECT array_agg(mine.ctid) INTO all_of_them FROM mine;
        DELETE FROM outbox_aggregate WHERE ctid = ANY (all_of_them);
    END IF;

    done := pg_current_xact_id()::text;
    done := set_config('workflow.append', 'on', true); -- for outbox_event_door
    IF one THEN
        INSERT INTO outbox_event (event_uuid, aggregate_id, event_type, payload, headers)
        VALUES (coalesce(ids[1], workflow_uuid()), aggregates[1], types[1], coalesce(payloads[1], 'null'), outbox_append_v1.headers[1])
        RETURNING id, ctid INTO last, here;
    ELSE
        WITH new AS (
            INSERT INTO outbox_event (event_uuid, aggregate_id, event_type, payload, headers)
            SELECT coalesce(e.id, workflow_uuid()), e.aggregate, e.type, coalesce(e.payload, 'null'), e.header
            FROM unnest(ids, aggregates, types, payloads, outbox_append_v1.headers) WITH ORDINALITY AS e (id, aggregate, type, payload, header, place)
            ORDER BY e.place
            RETURNING id
        )
        SELECT max(new.id) INTO last FROM new;
    END IF;
    done := set_config('workflow.append', '', true);
    IF one AND wanted IS NOT NULL THEN
        done := set_config('workflow.appended', (CASE WHEN cardinality(before) < 64 THEN before || here ELSE ARRAY[here] END)::text, true);
    END IF;
    RETURN last;
END
$fn$;
COMMENT ON FUNCTION outbox_append_v1(uuid[], uuid[], text[], jsonb[], jsonb[], boolean[]) IS
    'For programs: appends events to the outbox in the caller''s transaction, in the order given, and returns the last id. An id that is null is drawn. held: the caller has locked a row that all lock who append events of that aggregate; believed of the engine.';

-- The same for one event of a program, without arrays and without a call of another function, which would be half
-- of what it costs.
CREATE OR REPLACE FUNCTION outbox_emit(aggregate_id uuid, event_type text, payload jsonb, headers jsonb DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
#variable_conflict use_variable
DECLARE
    held  text    := current_setting('workflow.emitted', true); -- some of what this transaction holds: each the aggregate, and where an event of it is
    at    integer := strpos(held, aggregate_id::text);
    holds boolean := false;
    here  tid;
    last  bigint;
    done  text;
BEGIN
    IF event_type ^@ ANY ('{run.,process.,incident.,no_handler_registered}') THEN -- there it is judged who may
        RETURN outbox_append_v1(ARRAY[NULL::uuid], ARRAY[aggregate_id], ARRAY[event_type], ARRAY[payload], ARRAY[headers]);
    END IF;
    IF at > 0 THEN -- so it says; the event proves it
        here := split_part(substr(held, at + 36), ' ', 1)::tid;
        holds := EXISTS (SELECT FROM outbox_event e WHERE e.ctid = here AND e.aggregate_id = outbox_emit.aggregate_id AND e.xmin = pg_current_xact_id_if_assigned()::xid);
    END IF;
    IF NOT holds THEN
        INSERT INTO outbox_aggregate VALUES (aggregate_id) ON CONFLICT ON CONSTRAINT outbox_aggregate_pkey DO UPDATE SET id = excluded.id RETURNING ctid INTO here;
        DELETE FROM outbox_aggregate WHERE ctid = here;
    END IF;
    done := set_config('workflow.append', 'on', true); -- for outbox_event_door
    INSERT INTO outbox_event (aggregate_id, event_type, payload, headers)
    VALUES (aggregate_id, event_type, coalesce(payload, 'null'), headers)
    RETURNING id, ctid INTO last, here;
    done := set_config('workflow.append', '', true);
    IF NOT holds THEN
        done := set_config('workflow.emitted', CASE WHEN at = 0 AND length(held) < 400 THEN held ELSE '' END || aggregate_id || here || ' ', true);
    END IF;
    RETURN last;
END
$fn$;
DO $do$
DECLARE
    caller record;
BEGIN
    -- Who could append until now can go on, before roles are made anew.
    FOR caller IN
        SELECT a.grantee::regrole AS name FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a
        WHERE p.oid = 'outbox_emit(uuid, text, jsonb, jsonb)'::regprocedure AND a.grantee <> 0 AND a.grantee <> p.proowner
        UNION
        SELECT a.grantee::regrole FROM pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) a
        WHERE t.attrelid = 'outbox_event'::regclass AND t.attname = 'aggregate_id' AND a.privilege_type = 'INSERT' AND a.grantee <> 0
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_append_v1(uuid[], uuid[], text[], jsonb[], jsonb[], boolean[]) TO %s', caller.name);
    END LOOP;
END
$do$;

-- A plain INSERT does by this what outbox_append_v1 does, row by row. Only the owner can pass it by, by the
-- setting, or with ids of his own, which is recorded.
CREATE FUNCTION outbox_event_door() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $fn$
DECLARE
    ids   text := pg_get_serial_sequence('outbox_event', 'id');
    drawn bigint;
    here  tid;
    holds text;
BEGIN
    BEGIN
        drawn := currval(ids);
    EXCEPTION WHEN object_not_in_prerequisite_state THEN -- this session has drawn none
    END;
    IF NEW.id IS DISTINCT FROM drawn THEN
        IF workflow_overrides('outbox_event', 'INSERT', jsonb_build_object('id', NEW.id)) THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'outbox_event: id % was given by hand; ids are drawn, so that they are in the order of commits', NEW.id
            USING ERRCODE = 'integrity_constraint_violation', TABLE = 'outbox_event', CONSTRAINT = TG_NAME,
                  HINT = 'Leave it out, or call outbox_emit(…). The owner can restore events, on record: SET workflow.override = ''why''.';
    END IF;
    holds := pg_current_xact_id()::text || ' ' || NEW.aggregate_id;
    IF current_setting('workflow.inserted', true) IS DISTINCT FROM holds THEN
        INSERT INTO outbox_aggregate VALUES (NEW.aggregate_id) ON CONFLICT ON CONSTRAINT outbox_aggregate_pkey DO UPDATE SET id = excluded.id RETURNING ctid INTO here;
        DELETE FROM outbox_aggregate WHERE ctid = here;
        PERFORM set_config('workflow.inserted', holds, true);
    END IF;
    NEW.id := nextval(ids);
    RETURN NEW;
END
$fn$;
CREATE TRIGGER outbox_event_door BEFORE INSERT ON outbox_event
    FOR EACH ROW WHEN (coalesce(current_setting('workflow.append', true), '') <> 'on' OR NOT has_table_privilege('outbox_aggregate'::regclass, 'INSERT'))
    EXECUTE FUNCTION outbox_event_door();

-- What is set for the database, or what the session says instead, which is believed of the owner and the engine alone: nobody else keeps quiet
-- about what he does. Not set at all: null.
CREATE FUNCTION outbox_setting(name text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    said text := current_setting(outbox_setting.name, true);
BEGIN
    IF said IS NULL OR has_table_privilege(workflow_role(), 'process_token'::regclass, 'UPDATE') THEN
        RETURN said;
    END IF;
    RETURN (SELECT substr(c, strpos(c, '=') + 1)
            FROM pg_db_role_setting s CROSS JOIN unnest(s.setconfig) AS c
            WHERE s.setrole = 0 AND s.setdatabase IN (0, (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
              AND lower(split_part(c, '=', 1)) = outbox_setting.name
            ORDER BY s.setdatabase = 0 LIMIT 1);
END
$fn$;
COMMENT ON FUNCTION outbox_setting(text) IS 'What a setting that tells which events of runs are told says: by ALTER DATABASE; or by the session, of the owner and the engine.';

-- As in 0003; outbox_event_door holds the aggregate, since others may append events of the run.
CREATE OR REPLACE FUNCTION outbox_run_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    types text[];
    code  text   := NEW.error->>'code';
    fact  jsonb  := jsonb_build_object('run', NEW.id, 'type', NEW.type, 'status', NEW.status, 'attempt', NEW.attempt)
                    || CASE WHEN NEW.status = 'failed' AND code IS NOT NULL THEN jsonb_build_object('code', code) ELSE '{}' END;
    heads jsonb  := CASE WHEN NEW.metadata ? 'traceparent' THEN jsonb_build_object('traceparent', NEW.metadata->>'traceparent') END;
BEGIN
    IF NOT EXISTS (SELECT FROM outbox_sink)
       OR NOT (CASE outbox_setting('workflow.run_events') WHEN 'all' THEN true WHEN 'none' THEN false ELSE NEW.status = 'failed' END) THEN
        RETURN NULL;
    END IF;
    types := string_to_array(replace(coalesce(outbox_setting('workflow.run_event_types'), ''), ' ', ''), ',');
    IF NOT outbox_wants(types, NEW.type) THEN
        RETURN NULL;
    END IF;
    INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) VALUES (NEW.id, 'run.' || NEW.status, fact, heads); -- by outbox_event_door
    IF NEW.status = 'failed' AND code = 'no_handler_registered' THEN
        INSERT INTO outbox_event (aggregate_id, event_type, payload, headers) VALUES (NEW.id, code, fact, heads);
    END IF;
    RETURN NULL;
END
$fn$;

-- Short, as each UPDATE has to read it: while nothing is set, no function is called but for what failed.
CREATE OR REPLACE TRIGGER outbox_run_event AFTER UPDATE ON workflow_run
    FOR EACH ROW WHEN (NEW.status <> OLD.status AND NEW.status = ANY ('{failed,succeeded,cancelled}')
        AND (NEW.status = 'failed' OR current_setting('workflow.run_events', true) IS NOT NULL))
    EXECUTE FUNCTION outbox_run_event();

REVOKE ALL ON FUNCTION outbox_append_v1(uuid[], uuid[], text[], jsonb[], jsonb[], boolean[]), outbox_event_door(), outbox_setting(text) FROM PUBLIC;
