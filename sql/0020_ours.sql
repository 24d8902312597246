-- simple-workflow 0020: what is ours.

DO $do$
BEGIN
    PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); -- as in 0001
END
$do$;

-- What is ours, as in 0006.
CREATE OR REPLACE FUNCTION workflow_relations() RETURNS SETOF regclass
LANGUAGE sql STABLE SET search_path FROM CURRENT
BEGIN ATOMIC
    SELECT to_regclass(n) FROM unnest('{workflow_schema, workflow_run, workflow_history, workflow_worker, workflow_pause, workflow_override, workflow_open,
    workflow_event, workflow_live_worker, workflow_lane, workflow_waiting, workflow_coverage, workflow_working, workflow_failing,
    workflow_overview, workflow_rate, workflow_prefix, workflow_blocker, workflow_bloat, outbox_event, outbox_sink,
    outbox_lane, outbox_delivery, outbox_lag, process_definition, process_instance, process_token, process_state_history,
    process_event, process_correction, parallel_group, parallel_join, join_arrival, each_progress, message,
    message_wait, user_task, incident, compensation_record, token, activity_instance, timer,
    process_node, process_starting, process_without_mover, process_miscounted, process_undead, process_untimed, process_misjoined,
    process_misundone, process_unearned, process_mismatched, process_misrecorded, process_stuck, process_duration, process_rate,
    process_overview, workflow_binding, workflow_console_role, workflow_set_aside, workflow_stalled, workflow_unleasable, outbox_aggregate, outbox_replayed, message_key, workflow_bound,
    workflow_bound_rule, workflow_bound_check,
    workflow_fault, workflow_policy,
    workflow_outage, workflow_breaker,
    workflow_member,
    workflow_policy_history,
    workflow_kept,
    workflow_retention, workflow_retention_turn,
    workflow_accepted,
    workflow_minute, workflow_erring, workflow_growing,
    process_broadcast, process_unreached, process_unreachable, process_fault}'::text[]) AS n
    WHERE to_regclass(n) IS NOT NULL;
END;

CREATE OR REPLACE FUNCTION workflow_functions() RETURNS SETOF regprocedure
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.oid::regprocedure
    FROM pg_proc p
    WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'workflow_run'::regclass) AND p.prokind = 'f'
      AND p.proname = ANY ('{workflow_uuid, workflow_run_refuse_insert, workflow_run_refuse_update, workflow_run_refuse_input, workflow_run_refuse_delete, workflow_run_tidy_row, workflow_run_refuse_undelete,
        workflow_event_id, workflow_run_audit_row, workflow_enqueue_once, workflow_enqueue, workflow_cancel, workflow_retry, workflow_delete,
        workflow_run_wake, workflow_covers, workflow_span, workflow_why, workflow_pause, workflow_resume, workflow_redrive,
        workflow_release, workflow_edit, workflow_reschedule, workflow_prioritize, workflow_relations, workflow_functions, outbox_event_keep,
        outbox_wants, outbox_emit, outbox_replay, outbox_replay_parked, outbox_run_event, process_definition_guard, process_steps_go,
        process_facts_go, process_step_cut_off, process_task_assign, process_task_finish, process_scopes, process_undoes, process_correct, process_retry_incidents,
        process_instance_guard, process_instance_marked, process_lock_called, process_pause, process_paused_with, process_resume, process_why,
        workflow_role, workflow_behalf, workflow_actor, workflow_at_work, workflow_overrides, workflow_guard, workflow_console, workflow_for_others,
        workflow_age, workflow_bound_prefixes, workflow_binding_of, workflow_try, workflow_take_back, workflow_works, workflow_isolate, workflow_put_back,
        workflow_try_again_v1, workflow_lanes_v1, workflow_narrow, workflow_lanes, workflow_stalled_types, workflow_due, workflow_lease_v1,
        workflow_lease_refused_v1, workflow_extend_v1, workflow_held_v1, workflow_locked_v1, workflow_unrecorded, workflow_as_worker, workflow_worker_name, workflow_settle_v1,
        workflow_unsettled_v1, workflow_recorded_v1, workflow_expired, workflow_take_back_v1, workflow_take_back_refused_v1, workflow_stalled_v1, workflow_give_back_v1, workflow_present_v1,
        workflow_absent_v1, workflow_run_refuse_outcome, workflow_document_problem, workflow_refuse_document, workflow_earlier, workflow_advance, workflow_run_refuse_reserved,
        outbox_event_door, outbox_append_v1, outbox_setting, process_hold_v1, workflow_refuse_bound, process_instance_refuse_words, workflow_run_refuse_mark, workflow_refuse_step, process_refuse_list,
        workflow_open_rows, workflow_key_of, workflow_beyond, workflow_row_is, workflow_mend_v1, workflow_out_of_bounds, workflow_add_bounds_v1, workflow_validate_bounds_v1,
        workflow_beside, workflow_lease_v2,
        workflow_lanes_v2, workflow_outage_v1, workflow_probe_v1, workflow_close_breaker,
        workflow_policy_of, workflow_run_grant, workflow_follows, workflow_most, workflow_backoff, workflow_policies_v1, workflow_settle_v2, workflow_set_policy, workflow_drop_policy,
        workflow_dead_letter,
        workflow_event_tell,
        workflow_join_group, workflow_leave_group, process_group_keys, process_groups_of, process_task_own, process_task_hand, process_tasks, process_task_claim, process_task_release, process_task_complete,
        workflow_remedy, workflow_is_cancel, workflow_works_v1, workflow_extend_refused_v1, workflow_fault_v1, workflow_faults_v1, workflow_unremoved_id, workflow_unremoved_v1,
        workflow_unsettled_v2, workflow_kept_v1, workflow_kept_refused_v1, workflow_kept_over_v1, workflow_control_v1, workflow_incident, workflow_incident_over, workflow_incident_end, workflow_kept_forget, workflow_settle_again, workflow_fail,
        workflow_retention_of, workflow_retention_where, workflow_retention_mine, workflow_retention_v1, workflow_removable_v1, workflow_remove_v1, workflow_removes_v1, workflow_retention_done_v1,
        workflow_handed, workflow_accepted_v1, workflow_elsewhere_v1, workflow_complete,
        process_trace,
        workflow_count_v1, workflow_due_types, workflow_backlog, workflow_backlog_v1,
        process_trace, workflow_policy_told,
        outbox_last_id_v1, outbox_event_refuse, outbox_mend_lanes, outbox_set_right_v1, outbox_behind,
        process_paused_since, process_lock_waits, process_give, process_give_all, process_waited, process_gives, process_wait_version, process_wait_problem, process_try_give, process_owe, workflow_anywhere, workflow_aside_some, workflow_aside_turn, process_signal_v1, process_try_again_v1, process_incidents_v1,
        process_instance_refuse_insert, process_instance_inserted, process_instance_moved}'::text[]);
END;
