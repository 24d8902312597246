-- simple-workflow 0021: the bounds of every column.
--
--   workflow_bound          which column has which bounds: the one list, from which the CHECKs of 0022 are made
--   workflow_bound_rule     the same as SQL
--   workflow_bound_check    those CHECKs: one for each table and kind of bound
--   workflow_mend_v1        brings rows back within their bounds, a batch at a time; before 0022
--   workflow_out_of_bounds  rows that are beyond a bound
--
-- Each statement reads all CHECKs of its table anew, which takes longer than to evaluate them, and evaluates them with each row that it
-- changes. So they are short: least and greatest pass over nulls and ask of many columns at once, and of texts and documents only their
-- size is asked, which needs none of them to be fetched. What another guard or CHECK holds is asked once.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- Lanes that nobody serves: dispatchers make those anew that are missing.
DO $do$
DECLARE
    before text := workflow_advance('on');
BEGIN
    DELETE FROM outbox_lane WHERE lane NOT BETWEEN 0 AND 63;
    PERFORM workflow_advance(before);
END
$do$;
-- Never served: long ago.
ALTER TABLE outbox_lane ALTER COLUMN served_at SET DEFAULT '1970-01-01 00:00:00+00';

-- Times are from 1900 to 9999: with any interval of ours added, the end of time is far. Numbers are within low and high; texts have at most
-- high bytes, documents as they are stored, and lists high elements, of one dimension and without nulls, in 100 bytes each.
--
-- No counter can come to its end: at a million steps a second, 10^15 take thirty years. What the engine writes has limits that are narrower by far;
-- these are for what anybody could write.
CREATE VIEW workflow_bound AS
    SELECT b.relation COLLATE "C" AS relation, c.name::text COLLATE "C" AS "column", b.kind COLLATE "C" AS kind, b.low, b.high, b.guard COLLATE "C" AS guard, c.place
    FROM (VALUES
        -- Each kind of a table is one CHECK.
        ('workflow_run', 'times', '{run_at, started_at, finished_at, updated_at, deadline_at, lease_until}', NULL::bigint, NULL::bigint, NULL::text),
        ('workflow_run', 'times', '{held_at, deleted_at}', NULL, NULL, 'workflow_run_mark_guard'),
        ('workflow_run', 'times', '{created_at}', NULL, NULL, 'workflow_run_update_guard_fixed'),
        ('workflow_run', 'numbers', '{priority}', -100, 100, NULL),
        ('workflow_run', 'numbers', '{attempt}', 0, 1000, NULL),
        ('workflow_run', 'numbers', '{max_attempts}', 1, 1000, NULL),
        ('workflow_run', 'numbers', '{policy_attempts}', 0, 1000, NULL),
        ('workflow_run', 'numbers', '{postponed}', 0, 1000000000, NULL),
        ('workflow_run', 'numbers', '{lease_no}', 0, 1000000000000000, NULL),
        ('workflow_run', 'texts', '{leased_by, settled_by, node}', NULL, 4096, NULL),
        ('workflow_run', 'texts', '{status}', NULL, 4096, 'workflow_run_status_check'),
        ('workflow_run', 'texts', '{type, created_by}', NULL, 4096, 'workflow_run_update_guard_fixed'),
        ('workflow_run', 'texts', '{idempotency_key, tenant_id}', NULL, 4096, 'workflow_run_input_guard'),
        ('workflow_run', 'texts', '{last_error}', NULL, 16384, 'workflow_run_outcome_guard'),
        ('workflow_run', 'texts', '{delete_reason}', NULL, 16384, 'workflow_run_mark_guard'),
        ('workflow_run', 'documents', '{payload, metadata}', NULL, 16777216, 'workflow_run_input_guard'),
        ('workflow_run', 'documents', '{result, error}', NULL, 16777216, 'workflow_run_outcome_guard'),
        ('workflow_history', 'times', '{created_at, started_at}', NULL, NULL, NULL),
        ('workflow_history', 'numbers', '{id, lease_no}', 0, 4611686018427387904, NULL),
        ('workflow_history', 'numbers', '{attempt}', 0, 1000, NULL),
        ('workflow_history', 'texts', '{event_type, actor, leased_by}', NULL, 16384, NULL),
        ('workflow_history', 'documents', '{data}', NULL, 16777216, NULL),
        ('workflow_worker', 'times', '{started_at, seen_at, lost_at}', NULL, NULL, NULL),
        ('workflow_worker', 'numbers', '{concurrency, running, pid}', 0, 2000000000, NULL),
        ('workflow_worker', 'texts', '{name, version, host}', NULL, 4096, NULL),
        ('workflow_worker', 'lists', '{prefixes, handlers}', NULL, 10000, NULL),
        ('workflow_worker', 'bytes', '{secret_hash}', NULL, 64, NULL),
        ('workflow_pause', 'times', '{paused_at, resumed_at}', NULL, NULL, NULL),
        ('workflow_pause', 'numbers', '{id}', 0, 4611686018427387904, NULL),
        ('workflow_pause', 'texts', '{prefix, reason, paused_by, resumed_by}', NULL, 16384, NULL),
        ('workflow_override', 'times', '{created_at}', NULL, NULL, NULL),
        ('workflow_override', 'numbers', '{id}', 0, 4611686018427387904, NULL),
        ('workflow_override', 'texts', '{actor, reason, table_name, operation, statement}', NULL, 16384, NULL),
        ('workflow_override', 'documents', '{row_key}', NULL, 16777216, NULL),
        ('workflow_binding', 'lists', '{prefixes}', NULL, 1000, NULL),
        ('workflow_set_aside', 'times', '{since, last_tried_at}', NULL, NULL, NULL),
        ('workflow_set_aside', 'texts', '{kind, type, statement, sqlstate, message, constraint}', NULL, 16384, NULL),
        ('workflow_kept', 'times', '{since}', NULL, NULL, 'workflow_kept_since_check'),
        ('workflow_kept', 'numbers', '{delay}', 0, 3153600000, 'workflow_kept_delay_check'),
        ('workflow_kept', 'texts', '{verdict}', NULL, 20, 'workflow_kept_verdict_check'),
        ('workflow_kept', 'texts', '{last_error, worker}', NULL, 16384, 'workflow_kept_size_check'),
        ('workflow_kept', 'documents', '{result, error, events}', NULL, 67108864, 'workflow_kept_size_check'),
        ('workflow_accepted', 'times', '{until, since}', NULL, NULL, 'workflow_accepted_time_check'),
        ('workflow_accepted', 'texts', '{type}', NULL, 200, 'workflow_accepted_type_check'),
        ('workflow_policy', 'times', '{set_at}', NULL, NULL, 'workflow_policy_set_check'),
        ('workflow_policy', 'numbers', '{attempts}', 1, 1000, 'workflow_policy_attempts_check'),
        ('workflow_policy', 'numbers', '{backoff_base, backoff_cap}', 0, 31557600, 'workflow_policy_backoff_check'),
        ('workflow_policy', 'numbers', '{deadline}', 1, 315576000, 'workflow_policy_deadline_check'),
        ('workflow_policy', 'texts', '{pattern}', NULL, 200, 'workflow_policy_pattern_check'),
        ('workflow_policy', 'texts', '{curve}', NULL, 20, 'workflow_policy_curve_check'),
        ('workflow_policy', 'texts', '{dead_letter}', NULL, 200, 'workflow_policy_letter_check'),
        ('workflow_policy', 'texts', '{set_by}', NULL, 4096, 'workflow_policy_set_check'),
        ('workflow_outage', 'times', '{said_at, opened_at, next_probe}', NULL, NULL, 'workflow_outage_time_check'),
        ('workflow_outage', 'numbers', '{in_a_row}', 0, 1000, 'workflow_outage_number_check'),
        ('workflow_outage', 'numbers', '{runs}', 0, 3, 'workflow_outage_number_check'),
        ('workflow_outage', 'numbers', '{probes}', 0, 1000000, 'workflow_outage_number_check'),
        ('workflow_outage', 'texts', '{type}', NULL, 200, 'workflow_outage_text_check'),
        ('workflow_outage', 'texts', '{code}', NULL, 100, 'workflow_outage_text_check'),
        ('workflow_member', 'times', '{joined_at, left_at}', NULL, NULL, 'workflow_member_time_check'),
        ('workflow_member', 'numbers', '{id}', 0, 4611686018427387904, 'workflow_member_id_check'),
        ('workflow_member', 'texts', '{group_name, joined_by, left_by}', NULL, 4096, 'workflow_member_size_check'),
        ('workflow_policy_history', 'times', '{changed_at}', NULL, NULL, 'workflow_policy_history_time_check'),
        ('workflow_policy_history', 'numbers', '{id}', 0, 4611686018427387904, 'workflow_policy_history_id_check'),
        ('workflow_policy_history', 'texts', '{actor}', NULL, 4096, 'workflow_policy_history_actor_check'),
        ('workflow_policy_history', 'texts', '{pattern}', NULL, 200, 'workflow_policy_history_pattern_check'),
        ('workflow_policy_history', 'documents', '{was, became}', NULL, 4096, 'workflow_policy_history_size_check'),
        ('workflow_fault', 'times', '{since}', NULL, NULL, 'workflow_fault_since_check'),
        ('workflow_fault', 'times', '{seen_at}', NULL, NULL, 'workflow_fault_seen_at_check'),
        ('workflow_fault', 'texts', '{statement}', NULL, 20, 'workflow_fault_statement_check'),
        ('workflow_fault', 'texts', '{role}', NULL, 63, 'workflow_fault_role_check'),
        ('workflow_fault', 'texts', '{sqlstate}', NULL, 5, 'workflow_fault_sqlstate_check'),
        ('workflow_fault', 'texts', '{message}', NULL, 4096, 'workflow_fault_message_check'),
        ('workflow_retention', 'times', '{set_at, asked_at}', NULL, NULL, 'workflow_retention_set_check'),
        ('workflow_retention', 'numbers', '{period}', 0, 3153600000, 'workflow_retention_period_check'),
        ('workflow_retention', 'texts', '{prefix}', NULL, 200, 'workflow_retention_prefix_check'),
        ('workflow_retention', 'texts', '{kind}', NULL, 20, 'workflow_retention_kind_check'),
        ('workflow_retention', 'texts', '{set_by}', NULL, 63, 'workflow_retention_set_check'),
        ('workflow_retention_turn', 'times', '{taken_at, reached, swept_at}', NULL, NULL, 'workflow_retention_turn_time_check'),
        ('workflow_retention_turn', 'numbers', '{every}', 0, 31536000, 'workflow_retention_turn_every_check'),
        ('workflow_retention_turn', 'numbers', '{removed}', 0, 1000000000000000, 'workflow_retention_turn_count_check'),
        ('workflow_retention_turn', 'texts', '{prefix}', NULL, 200, 'workflow_retention_turn_name_check'),
        ('workflow_retention_turn', 'texts', '{kind}', NULL, 20, 'workflow_retention_turn_name_check'),
        ('workflow_minute', 'times', '{minute}', NULL, NULL, 'workflow_minute_minute_check'),
        ('workflow_minute', 'times', '{counted_at}', NULL, NULL, 'workflow_minute_counted_at_check'),
        ('workflow_minute', 'numbers', '{leased, succeeded, failed, retried, due, seconds, waited, oldest}', 0, 1000000000000000, 'workflow_minute_count_check'),
        ('workflow_minute', 'texts', '{role}', NULL, 63, 'workflow_minute_role_check'),
        ('workflow_minute', 'texts', '{type}', NULL, 800, 'workflow_minute_type_check'),
        ('process_broadcast', 'times', '{taken_up_at, refused_at}', NULL, NULL, 'process_broadcast_time_check'),
        ('process_broadcast', 'numbers', '{reached, set_aside, failed}', 0, 1000000000, 'process_broadcast_count_check'),
        ('process_broadcast', 'texts', '{name}', NULL, 1000, 'process_broadcast_name_check'),
        ('process_broadcast', 'texts', '{sqlstate, message}', NULL, 16384, 'process_broadcast_refused_check'),
        ('process_broadcast', 'lists', '{tokens, places, began}', NULL, 10000000, 'process_broadcast_left_check'),
        ('process_unreached', 'times', '{since}', NULL, NULL, 'process_unreached_since_check'),
        ('process_unreached', 'numbers', '{visit}', 1, 9223372036854775807, 'process_unreached_visit_check'),
        ('process_unreached', 'texts', '{place}', NULL, 4096, 'process_unreached_place_check'),
        ('outbox_event', 'times', '{created_at, published_at, parked_at}', NULL, NULL, NULL),
        ('outbox_event', 'numbers', '{id}', -4611686018427387904, 4611686018427387904, NULL),
        ('outbox_event', 'numbers', '{bytes}', 0, 8388608, 'outbox_event_payload_check'),
        ('outbox_event', 'texts', '{event_type}', NULL, 800, 'outbox_event_type_check'),
        ('outbox_event', 'documents', '{payload, headers}', NULL, 67108864, NULL),
        ('outbox_event', 'lists', '{delivered_to, parked_by}', NULL, 1000, NULL),
        ('outbox_sink', 'times', '{created_at, seen_at, paused_until}', NULL, NULL, NULL),
        ('outbox_sink', 'times', '{down_since, back_at}', NULL, NULL, 'outbox_sink_down_check'),
        ('outbox_sink', 'texts', '{name, last_error}', NULL, 16384, NULL),
        ('outbox_sink', 'lists', '{types}', NULL, 10000, NULL),
        ('outbox_lane', 'times', '{claim_until, served_at}', NULL, NULL, NULL),
        ('outbox_lane', 'numbers', '{lane}', 0, 63, NULL),
        ('outbox_lane', 'numbers', '{floor, next_floor}', -4611686018427387904, 4611686018427387904, NULL),
        ('outbox_lane', 'numbers', '{replays}', 0, 1000000000000000, NULL),
        ('outbox_lane', 'texts', '{sink, claimed_by}', NULL, 4096, NULL),
        ('outbox_delivery', 'times', '{next_attempt_at, updated_at, parked_at}', NULL, NULL, NULL),
        ('outbox_delivery', 'numbers', '{event_id}', -4611686018427387904, 4611686018427387904, NULL),
        ('outbox_delivery', 'numbers', '{attempt, rejected}', 0, 1000000000, NULL),
        ('outbox_delivery', 'texts', '{sink, last_error}', NULL, 16384, NULL),
        ('outbox_replayed', 'times', '{created_at}', NULL, NULL, NULL),
        ('outbox_replayed', 'numbers', '{id, events}', 0, 4611686018427387904, NULL),
        ('outbox_replayed', 'texts', '{actor, sink}', NULL, 4096, NULL),
        ('outbox_replayed', 'lists', '{types}', NULL, 10000, NULL),
        ('process_definition', 'times', '{created_at}', NULL, NULL, NULL),
        ('process_definition', 'numbers', '{version}', 1, 2147483646, NULL),
        ('process_definition', 'texts', '{name, hash, created_by}', NULL, 4096, NULL),
        ('process_definition', 'documents', '{definition}', NULL, 16777216, NULL),
        ('process_instance', 'times', '{created_at, updated_at, started_at, completed_at, paused_at, deleted_at}', NULL, NULL, NULL),
        ('process_instance', 'numbers', '{priority}', -100, 100, NULL),
        ('process_instance', 'numbers', '{depth}', 0, 1000, NULL),
        ('process_instance', 'numbers', '{version, parent_visit}', 1, 1000000000000000, NULL),
        ('process_instance', 'numbers', '{live_tokens, open_incidents}', 0, 1000000, NULL),
        ('process_instance', 'numbers', '{ready_tokens, joining_tokens}', 0, 1000000, 'process_instance_count_check'), -- with the others at most live_tokens
        ('process_instance', 'texts', '{status}', NULL, 65536, 'process_instance_status_check'),
        ('process_instance', 'texts', '{tenant_id}', NULL, 65536, 'process_instance_tenant_check'),
        ('process_instance', 'texts', '{business_key, failure_reason, ending, ending_reason}', NULL, 65536, NULL),
        ('process_instance', 'documents', '{input_payload, output_payload, metadata}', NULL, 16777216, NULL),
        ('process_token', 'times', '{created_at, updated_at}', NULL, NULL, NULL),
        ('process_token', 'numbers', '{version}', 1, 1000000000000000, NULL),
        ('process_token', 'numbers', '{item}', 0, 10000000, NULL),
        ('process_token', 'texts', '{node, edge}', NULL, 4096, NULL),
        ('process_token', 'texts', '{state}', NULL, 4096, 'process_token_state_check'),
        ('process_token', 'texts', '{mode}', NULL, 4096, 'process_token_mode_check'),
        ('process_state_history', 'times', '{created_at}', NULL, NULL, NULL),
        ('process_state_history', 'numbers', '{id, version}', 0, 4611686018427387904, NULL),
        ('process_state_history', 'texts', '{from_status, to_status, reason, actor}', NULL, 65536, NULL),
        ('process_event', 'times', '{created_at}', NULL, NULL, NULL),
        ('process_event', 'numbers', '{id, version}', 0, 4611686018427387904, NULL),
        ('process_event', 'texts', '{event_type, node}', NULL, 4096, NULL),
        ('process_event', 'documents', '{data}', NULL, 16777216, NULL),
        ('process_correction', 'times', '{created_at}', NULL, NULL, NULL),
        ('process_correction', 'numbers', '{id}', 0, 4611686018427387904, NULL),
        ('process_correction', 'texts', '{node, reason, actor}', NULL, 16384, NULL),
        ('process_correction', 'documents', '{value}', NULL, 16777216, NULL),
        ('parallel_group', 'numbers', '{live}', 0, 1000000, NULL),
        ('parallel_group', 'texts', '{node}', NULL, 4096, NULL),
        ('parallel_join', 'numbers', '{round, expected, joined}', 0, 1000000000, NULL),
        ('parallel_join', 'texts', '{node}', NULL, 4096, NULL),
        ('join_arrival', 'texts', '{edge}', NULL, 4096, NULL),
        ('each_progress', 'times', '{over_at}', NULL, NULL, NULL),
        ('each_progress', 'numbers', '{next, done, total}', 0, 10000000, NULL),
        ('each_progress', 'texts', '{node}', NULL, 4096, NULL),
        ('each_progress', 'documents', '{items}', NULL, 16777216, NULL),
        ('message', 'times', '{received_at, expires_at, consumed_at}', NULL, NULL, NULL),
        ('message', 'texts', '{message_id, name, key}', NULL, 4096, NULL),
        ('message', 'documents', '{payload}', NULL, 16777216, NULL),
        ('message_wait', 'times', '{created_at}', NULL, NULL, NULL),
        ('message_wait', 'texts', '{place, node, name, key}', NULL, 4096, NULL),
        ('user_task', 'times', '{due_at, created_at, completed_at}', NULL, NULL, NULL),
        ('user_task', 'numbers', '{version}', 1, 1000000000000000, NULL),
        ('user_task', 'texts', '{node, assignee, completed_by}', NULL, 65536, NULL),
        ('user_task', 'texts', '{state}', NULL, 65536, 'user_task_state_check'),
        ('user_task', 'documents', '{payload, output}', NULL, 16777216, NULL),
        ('user_task', 'lists', '{groups}', NULL, 10000, NULL),
        ('incident', 'times', '{created_at, resolved_at}', NULL, NULL, NULL),
        ('incident', 'texts', '{node, code, message, resolved_by}', NULL, 65536, NULL),
        ('compensation_record', 'times', '{not_before, created_at}', NULL, NULL, NULL),
        ('compensation_record', 'numbers', '{order}', 0, 4611686018427387904, NULL),
        ('compensation_record', 'texts', '{node_id, handler_ref}', NULL, 4096, NULL),
        ('compensation_record', 'texts', '{status}', NULL, 4096, 'compensation_record_status_check')
    ) AS b (relation, kind, columns, low, high, guard)
    CROSS JOIN LATERAL unnest(b.columns::text[]) WITH ORDINALITY AS c (name, place);
COMMENT ON VIEW   workflow_bound IS 'The bounds of columns: a CHECK of each table and kind has them.';
COMMENT ON COLUMN workflow_bound.guard IS 'What keeps it where it is no CHECK of workflow_bound_check: a trigger or CHECK by another name. Null: it is.';
COMMENT ON COLUMN workflow_bound.place IS 'The order within a CHECK.';
COMMENT ON COLUMN workflow_bound.kind IS 'times: from 1900 to 9999; numbers: from low to high; texts, documents, bytes: of at most high bytes as they are stored; lists: of at most high elements.';

-- The same with what each says as SQL: whether a row keeps it, the nearest value that does (null: there is none), and in words.
CREATE VIEW workflow_bound_rule AS
    SELECT b.relation, b."column", b.kind,
           CASE b.kind
           WHEN 'times'   THEN format('%I BETWEEN ''1900-01-01 00:00:00+00'' AND ''9999-01-01 00:00:00+00''', b."column")
           WHEN 'numbers' THEN format('%I BETWEEN %s AND %s', b."column", b.low, b.high)
           WHEN 'texts'   THEN format('octet_length(%I) <= %s', b."column", b.high)
           WHEN 'lists'   THEN format('(cardinality(%1$I) <= %2$s AND (array_ndims(%1$I) = 1) IS NOT FALSE AND array_position(%1$I, NULL) IS NULL AND pg_column_size(%1$I) <= %3$s)',
                                      b."column", b.high, b.high::numeric * 100 + 1000)
           ELSE format('pg_column_size(%I) <= %s', b."column", b.high) END AS rule,
           CASE b.kind
           WHEN 'times'   THEN format('least(greatest(%I, ''1900-01-01 00:00:00+00''), ''9999-01-01 00:00:00+00'')', b."column")
           WHEN 'numbers' THEN format('least(greatest(%I, %s), %s)', b."column", b.low, CASE WHEN b.high >= 1000000000 THEN b.high / 2 ELSE b.high END) -- a counter can go on from there
           WHEN 'texts'   THEN format('left(%I, %s)', b."column", b.high / 4)
           WHEN 'lists'   THEN format('ARRAY(SELECT left(e, 100) FROM (SELECT DISTINCT e FROM unnest(%I) AS e WHERE e IS NOT NULL) AS x ORDER BY e LIMIT %s)', b."column", b.high / 4) END AS nearest,
           CASE b.kind
           WHEN 'times'   THEN 'a time from 1900 to 9999'
           WHEN 'numbers' THEN format('%s to %s', b.low, b.high)
           WHEN 'texts'   THEN format('a text of at most %s bytes', b.high)
           WHEN 'lists'   THEN format('a list of at most %s elements, of one dimension, none of them null', b.high)
           ELSE format('at most %s bytes as they are stored', b.high) END AS allowed
    FROM workflow_bound b
    JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column" AND NOT a.attisdropped;
COMMENT ON VIEW workflow_bound_rule IS 'The bounds of columns, as SQL: the rule that a row keeps (null: it does), and the nearest value that does.';

-- The CHECKs: one for each table and kind, named table_kind_bound, which asks of columns at once what they have in common.
CREATE VIEW workflow_bound_check AS
    WITH asked (kind, part, whole, of, holds) AS (
        VALUES ('times',     1, 'least',    '%I',                       '>= ''1900-01-01 00:00:00+00'''),
               ('times',     2, 'greatest', '%I',                       '<= ''9999-01-01 00:00:00+00'''),
               ('numbers',   1, 'least',    '%I',                       '>= %1$s'),
               ('numbers',   2, 'greatest', '%I',                       '<= %2$s'),
               ('texts',     1, 'greatest', 'octet_length(%I)',         '<= %2$s'),
               ('documents', 1, 'greatest', 'pg_column_size(%I)',       '<= %2$s'),
               ('bytes',     1, 'greatest', 'pg_column_size(%I)',       '<= %2$s'),
               ('lists',     1, 'greatest', 'cardinality(%I)',          '<= %2$s'),
               ('lists',     2, 'greatest', 'array_ndims(%I)',          '<= 1'),
               ('lists',     3, 'coalesce', 'array_position(%I, NULL)', 'IS NULL'),
               ('lists',     4, 'greatest', 'pg_column_size(%I)',       '<= %3$s')
    ), parts AS (
        SELECT b.relation, b.kind, k.part, min(b.place) AS place, format('%s %s', CASE count(*)
                   WHEN 1 THEN min(format(k.of, b."column"))
                   ELSE format('%s(%s)', k.whole, string_agg(format(k.of, b."column"), ', ' ORDER BY b.place, b."column")) END,
               format(k.holds, b.low, b.high, b.high::numeric * 100 + 1000)) AS rule
        FROM workflow_bound b
        JOIN pg_attribute a ON a.attrelid = to_regclass(b.relation) AND a.attname = b."column" AND NOT a.attisdropped
        JOIN asked k ON k.kind = b.kind
        WHERE b.guard IS NULL
        GROUP BY b.relation, b.kind, k.part, k.whole, format(k.holds, b.low, b.high, b.high::numeric * 100 + 1000), a.atttypid
    ), made AS (
        SELECT relation, kind, relation || '_' || kind || '_bound' AS name, string_agg(rule, ' AND ' ORDER BY part, place, rule) AS rule, NULL AS unlike
        FROM parts GROUP BY relation, kind
        UNION ALL -- The same as from 0001 and 0005, with one constant for a list: PostgreSQL reads it in a third of the time.
        SELECT relation, 'states', format('%s_%s_check', relation, what), rule, '%ARRAY[%'
        FROM (VALUES
            ('workflow_run',        'status',    'status = ANY (''{pending,leased,succeeded,failed,cancelled}'')'),
            ('workflow_run',        'finished',  '(status = ANY (''{succeeded,failed,cancelled}'')) = (finished_at IS NOT NULL)'),
            ('process_instance',    'status',    'status = ANY (''{CREATED,IN_PROGRESS,WAITING,COMPLETED,FAILED,CANCELLED}'')'),
            ('process_instance',    'completed', '(status = ANY (''{COMPLETED,FAILED,CANCELLED}'')) = (completed_at IS NOT NULL)'),
            ('process_token',       'state',     'state = ANY (''{Created,Ready,Waiting,Completed,Failed,Terminated}'')'),
            ('process_token',       'mode',      'mode = ANY (''{Forward,Compensation}'')'),
            ('user_task',           'state',     'state = ANY (''{open,completed,cancelled}'')'),
            ('compensation_record', 'status',    'status = ANY (''{Pending,Completed,Failed}'')')
        ) AS states (relation, what, rule)
        WHERE EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = to_regclass(relation) AND c.conname = format('%s_%s_check', relation, what)) -- where somebody has dropped it, rows may not keep it
    )
    SELECT m.relation, m.kind, m.name, m.rule, c.convalidated AS valid
    FROM made m
    LEFT JOIN pg_constraint c ON c.conrelid = to_regclass(m.relation) AND c.conname = m.name AND pg_get_constraintdef(c.oid) NOT LIKE coalesce(m.unlike, '');
COMMENT ON VIEW   workflow_bound_check IS 'The CHECKs that hold the bounds of columns.';
COMMENT ON COLUMN workflow_bound_check.valid IS 'Whether all rows keep it. False: rows from before may not; null: there is no such CHECK.';

-- Which rows of a table are not over: those that somebody will change.
CREATE FUNCTION workflow_open_rows(relation text) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN relation = 'workflow_run' THEN 'status NOT IN (''succeeded'', ''failed'', ''cancelled'')'
    WHEN relation = 'process_instance' THEN 'completed_at IS NULL'
    WHEN relation = 'incident' THEN 'resolved_at IS NULL'
    WHEN relation = 'user_task' THEN 'state = ''open'''
    WHEN relation = 'workflow_pause' THEN 'resumed_at IS NULL'
    WHEN relation = 'outbox_event' THEN 'published_at IS NULL AND parked_at IS NULL'
    WHEN relation = 'process_token' THEN 'state IN (''Created'', ''Ready'', ''Waiting'')'
    WHEN relation = 'compensation_record' THEN 'status = ''Pending'''
    WHEN relation = 'message' THEN 'consumed_at IS NULL'
    WHEN relation = ANY ('{workflow_history, workflow_override, outbox_replayed, process_state_history, process_event, process_correction, process_definition, join_arrival}') THEN 'false'
    ELSE 'true' END;

CREATE FUNCTION workflow_key_of(relation text) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
BEGIN
    RETURN (SELECT array_agg(a.attname::text ORDER BY k.place)
            FROM pg_index x CROSS JOIN unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, place) JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
            WHERE x.indrelid = to_regclass(relation) AND x.indisprimary);
END
$fn$;

-- Among the next so many rows of a table after a key, those that are beyond a bound, and in which columns. The last row
-- has the key after which to go on, and no columns; it is null at the end of the table.
CREATE FUNCTION workflow_beyond(relation text, after jsonb, most integer) RETURNS TABLE (key jsonb, columns text[], open boolean)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $fn$
DECLARE
    keys   text[] := workflow_key_of(relation);
    names  text   := (SELECT string_agg(format('%I', k), ', ') FROM unnest(keys) AS k);
    made   text   := (SELECT string_agg(format('%L, %I', k, k), ', ') FROM unnest(keys) AS k);
    here   text   := (SELECT string_agg(format('(%L::jsonb->>%L)::%s', after, k.k, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY k.place)
                      FROM unnest(keys) WITH ORDINALITY AS k (k, place) JOIN pg_attribute a ON a.attrelid = to_regclass(relation) AND a.attname = k.k);
    rules  text   := (SELECT string_agg(format('CASE WHEN (%s) IS FALSE THEN %L END', b.rule, b."column"), ', ') FROM workflow_bound_rule b WHERE b.relation = workflow_beyond.relation);
    checks text   := (SELECT string_agg('(' || b.rule || ')', ' AND ') FROM workflow_bound_rule b WHERE b.relation = workflow_beyond.relation);
BEGIN
    IF checks IS NULL THEN
        RETURN; -- it has none
    END IF;
    RETURN QUERY EXECUTE format('
        WITH batch AS MATERIALIZED (
            SELECT * FROM %1$I WHERE %2$s ORDER BY %3$s LIMIT %4$s
        )
        SELECT jsonb_build_object(%5$s), array_remove(ARRAY[%7$s], NULL)::text[], %8$s
        FROM (SELECT * FROM batch WHERE (%9$s) IS FALSE) AS beyond
        UNION ALL
        (SELECT CASE WHEN (SELECT count(*) FROM batch) >= %4$s THEN jsonb_build_object(%5$s) END, NULL, NULL FROM batch ORDER BY %6$s LIMIT 1)',
        relation, CASE WHEN after IS NULL THEN 'true' ELSE format('(%s) > (%s)', names, here) END, names, most, made,
        (SELECT string_agg(format('%I DESC', k), ', ') FROM unnest(keys) AS k), rules, workflow_open_rows(relation), checks);
END
$fn$;

-- The condition that finds a row by its key.
CREATE FUNCTION workflow_row_is(key jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN (SELECT string_agg(format('%I = %L', k.key, k.value), ' AND ' ORDER BY k.key) FROM jsonb_each_text(key) AS k);

-- What was mended is on record, too; and nobody says of another that he did.
CREATE OR REPLACE TRIGGER workflow_override_insert_guard BEFORE INSERT ON workflow_override
    FOR EACH ROW WHEN (pg_trigger_depth() = 0 AND (NEW.reason <> 'it was beyond its bound' OR NEW.actor <> workflow_actor()))
    EXECUTE FUNCTION workflow_guard('Guards append to it: SET LOCAL workflow.override = ''why'' and make the change.', 'always');

-- Sets what is beyond its bound, among the next so many rows of a table after a key, to the nearest value that is not, and where somebody
-- will change the row, so that it can go on. The values before stand in workflow_override. A row that is locked for two seconds or refuses the change
-- stays as it is, and so does what has no nearest value: a document, a key, what is generated.
CREATE FUNCTION workflow_mend_v1(relation text, after jsonb, most integer, OUT next jsonb, OUT mended integer, OUT stuck integer)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $fn$
DECLARE
    b       record;
    sets    text;
    was     text;
    changed bigint;
    found   boolean := false;
BEGIN
    mended := 0;
    stuck  := 0;
    PERFORM set_config('workflow.override', 'it was beyond its bound', true), set_config('workflow.advance', 'on', true), set_config('lock_timeout', '2s', true);
    FOR b IN SELECT * FROM workflow_beyond(relation, after, most) LOOP
        IF b.columns IS NULL THEN
            next := b.key;
            CONTINUE;
        END IF;
        found := true;
        SELECT string_agg(format('%I = %s', r."column", CASE WHEN a.attidentity <> '' THEN 'DEFAULT' ELSE r.nearest END), ', '), string_agg(format('%L, left(%I::text, 1000)', r."column", r."column"), ', ') INTO sets, was
        FROM workflow_bound_rule r
        JOIN pg_attribute a ON a.attrelid = to_regclass(workflow_mend_v1.relation) AND a.attname = r."column"
        WHERE r.relation = workflow_mend_v1.relation AND r."column" = ANY (b.columns) AND r.nearest IS NOT NULL AND a.attgenerated = ''
          AND (a.attidentity <> '' OR r."column" <> ALL (workflow_key_of(workflow_mend_v1.relation)));
        CONTINUE WHEN sets IS NULL;
        BEGIN
            EXECUTE format('
                WITH old AS (
                    SELECT jsonb_build_object(%s) AS was FROM %I WHERE %s FOR UPDATE
                )
                INSERT INTO workflow_override (actor, reason, table_name, operation, row_key, statement)
                SELECT workflow_actor(), ''it was beyond its bound'', %L, ''UPDATE'', %L::jsonb || jsonb_build_object(''was'', old.was), %L FROM old',
                was, relation, workflow_row_is(b.key), relation, b.key, left('SET ' || sets, 1000));
            EXECUTE format('UPDATE %I SET %s WHERE %s', relation, sets, workflow_row_is(b.key));
            GET DIAGNOSTICS changed = ROW_COUNT;
            mended := mended + changed;
        EXCEPTION WHEN OTHERS THEN
            NULL; -- it stays, and is counted below
        END;
    END LOOP;
    IF found THEN
        stuck := (SELECT count(*) FROM workflow_beyond(relation, after, most) AS x
                  WHERE x.open AND EXISTS (SELECT FROM workflow_bound o WHERE o.relation = workflow_mend_v1.relation AND o."column" = ANY (x.columns) AND o.guard IS NULL)); -- a guard lets be what was there before
    END IF;
    PERFORM set_config('workflow.override', '', true), set_config('workflow.advance', '', true);
END
$fn$;
COMMENT ON FUNCTION workflow_mend_v1(text, jsonb, integer) IS
    'For workflowctl migrate: brings rows of a table back within their bounds, those among the next so many after a key (null: from the beginning), and returns how many, how many that are not over could not be, and after which key to go on (null: that was the end).';

-- SELECT * FROM workflow_out_of_bounds();
CREATE FUNCTION workflow_out_of_bounds(relation text DEFAULT NULL, most integer DEFAULT 100)
RETURNS TABLE ("table" text, key jsonb, "column" text, value text, allowed text, open boolean, fix text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $fn$
DECLARE
    t     text;
    place jsonb;
    b     record;
    c     record;
    given text;
    found integer := 0;
BEGIN
    -- A table whose CHECKs are valid has none, and is not read.
    FOR t IN SELECT x.relation FROM workflow_bound_check x
             WHERE x.relation = workflow_out_of_bounds.relation OR workflow_out_of_bounds.relation IS NULL AND x.valid IS NOT TRUE
             GROUP BY x.relation ORDER BY x.relation LOOP
        place := NULL;
        LOOP
            FOR b IN SELECT * FROM workflow_beyond(t, place, 10000) LOOP
                place := b.key;
                CONTINUE WHEN b.columns IS NULL;
                FOR c IN SELECT r.kind, r."column", r.allowed, CASE WHEN a.attidentity <> '' THEN 'DEFAULT' ELSE r.nearest END AS nearest
                         FROM workflow_bound_rule r JOIN pg_attribute a ON a.attrelid = to_regclass(t) AND a.attname = r."column"
                         WHERE r.relation = t AND r."column" = ANY (b.columns) LOOP
                    EXECUTE format('SELECT left(%I::text, 100) FROM %I WHERE %s', c."column", t, workflow_row_is(b.key)) INTO given;
                    "table" := t; key := b.key; "column" := c."column"; allowed := c.allowed; open := b.open;
                    value := CASE WHEN c.kind IN ('times', 'numbers') THEN given ELSE 'too large' END; -- and nothing of a payload
                    fix := CASE WHEN t = 'workflow_override' THEN 'none: it is a record, which nobody changes'
                                WHEN t = 'workflow_run' AND c.nearest IS NULL AND b.open THEN format('SELECT workflow_cancel(%L, ''too large'')', b.key->>'id')
                                WHEN t = 'process_instance' AND c.nearest IS NULL AND b.open
                                    THEN format('INSERT INTO workflow_run (type, payload) VALUES (''graph.cancel.v1'', ''{"instance": "%s"}'')', b.key->>'id')
                                ELSE format('BEGIN; SET LOCAL workflow.override = ''it was beyond its bound''; UPDATE %I SET %I = %s WHERE %s; COMMIT', t, c."column", coalesce(c.nearest, '''{}'''), workflow_row_is(b.key)) END;
                    RETURN NEXT;
                    found := found + 1;
                    IF found >= most THEN
                        RETURN;
                    END IF;
                END LOOP;
            END LOOP;
            EXIT WHEN place IS NULL;
        END LOOP;
    END LOOP;
END
$fn$;
COMMENT ON FUNCTION workflow_out_of_bounds(text, integer) IS
    'Rows from before that are beyond a bound, at most so many, with what mends each: of the tables that have a CHECK which is not valid, or of one table, which is read as a whole.';

-- Adds the CHECKs of a table that it lacks, for what is written from now on. No row that is not over may be beyond them: a CHECK that
-- is not valid is asked at each change of a row all the same.
CREATE FUNCTION workflow_add_bounds_v1(relation text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '2s' AS $fn$
DECLARE
    acts text := (SELECT string_agg(format(CASE c.kind WHEN 'states' THEN 'DROP CONSTRAINT IF EXISTS %1$I, ' ELSE '' END || 'ADD CONSTRAINT %1$I CHECK (%2$s) NOT VALID', c.name, c.rule), ', ' ORDER BY c.name)
                  FROM workflow_bound_check c WHERE c.relation = workflow_add_bounds_v1.relation AND c.valid IS NULL);
BEGIN
    IF acts IS NOT NULL THEN
        EXECUTE format('ALTER TABLE %I %s %s', relation, acts,
                       CASE relation WHEN 'workflow_run' THEN ', DROP CONSTRAINT IF EXISTS workflow_run_range_check' -- what it holds is among them
                                     WHEN 'process_instance' THEN ', DROP CONSTRAINT IF EXISTS process_instance_version_check' END);
    END IF;
END
$fn$;
COMMENT ON FUNCTION workflow_add_bounds_v1(text) IS 'For workflowctl migrate: adds the CHECKs that hold the bounds of a table, not valid yet. It waits for the table for two seconds.';

-- While this looks at the rows, nobody waits.
CREATE FUNCTION workflow_validate_bounds_v1(relation text) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '2s' AS $fn$
DECLARE
    c      text;
    beyond text[] := '{}';
BEGIN
    FOR c IN SELECT x.name FROM workflow_bound_check x WHERE x.relation = workflow_validate_bounds_v1.relation AND NOT x.valid ORDER BY x.name LOOP
        BEGIN
            EXECUTE format('ALTER TABLE %I VALIDATE CONSTRAINT %I', relation, c);
        EXCEPTION WHEN check_violation THEN
            beyond := beyond || c;
        END;
    END LOOP;
    RETURN beyond;
END
$fn$;
COMMENT ON FUNCTION workflow_validate_bounds_v1(text) IS 'For workflowctl migrate: looks whether all rows of a table are within its bounds, and returns the CHECKs of which some are not. It can be called again at any time.';

REVOKE ALL ON FUNCTION workflow_open_rows(text), workflow_key_of(text), workflow_beyond(text, jsonb, integer), workflow_row_is(jsonb), workflow_mend_v1(text, jsonb, integer),
    workflow_out_of_bounds(text, integer), workflow_add_bounds_v1(text), workflow_validate_bounds_v1(text) FROM PUBLIC;

-- Whoever owns what was there owns what is new: functions with the owner's rights need it.
DO $do$
DECLARE
    own   oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'workflow_run'::regclass);
    thing text;
BEGIN
    FOR thing IN
        SELECT 'FUNCTION ' || p.oid::regprocedure FROM workflow_functions() AS ours JOIN pg_proc p ON p.oid = ours WHERE p.proowner <> own
        UNION ALL
        SELECT 'TABLE ' || c.oid::regclass FROM workflow_relations() AS ours JOIN pg_class c ON c.oid = ours WHERE c.relowner <> own
    LOOP
        EXECUTE format('ALTER %s OWNER TO %s', thing, own::regrole);
    END LOOP;
END
$do$;
