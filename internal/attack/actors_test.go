//go:build attack

package attack

import (
	"fmt"
	"slices"
	"strings"
)

// An actor is a role, or a superuser with guards off, who can create rows as they may exist from before a guard.
type actor struct {
	name string
	role string // empty: a superuser, guards off
	// settings are what anybody can set. They must not give rights to roles that they are not meant for.
	settings string
}

const liar = "SET LOCAL workflow.advance = 'on'; SET LOCAL workflow.retry = 'on'; SET LOCAL workflow.audit = 'off'; SET LOCAL workflow.append = 'on'; SET LOCAL workflow.override = 'a lie';\n"

// actors, the weakest first.
var actors = []*actor{
	{"viewer", "workflow_viewer", liar},
	{"enqueue", "workflow_enqueue", liar},
	{"tasks", "workflow_tasks", liar},
	{"dispatcher", "workflow_dispatcher", liar},
	{"media", "media", liar},
	{"billing", "billing", liar},
	{"console", "desk", liar + "SET LOCAL attack.person = 'anna'; SET LOCAL workflow.on_behalf_of = 'anna';\n"},
	{"operator", "workflow_operator", liar + "SET LOCAL workflow.on_behalf_of = 'somebody else';\n"},
	{"engine", "workflow_engine", ""},
	{"owner", "workflow_owner", ""},
	{"before", "", ""},
}

// begin starts a transaction as the actor.
func (a *actor) begin() string {
	if a.role == "" {
		return "BEGIN; " + unguarded
	}
	return "BEGIN; SET LOCAL SESSION AUTHORIZATION " + a.role + "; " + a.settings
}

// A change of one row, found afterwards.
type change struct {
	table, key    string
	before, after map[string]any // nil: the row was inserted, or deleted
	columns       []string       // those that differ
}

func (c change) op() string {
	switch {
	case c.before == nil:
		return "insert"
	case c.after == nil:
		return "delete"
	}
	return "update"
}

func (c change) only(columns ...string) bool {
	return !slices.ContainsFunc(c.columns, func(name string) bool { return !slices.Contains(columns, name) })
}

// of reports whether a run was and is a plain run of a type with the prefix.
func (c change) of(prefix string) bool {
	for _, data := range []map[string]any{c.before, c.after} {
		typ, _ := data["type"].(string)
		if data != nil && (!strings.HasPrefix(typ, prefix) || data["token_id"] != nil) {
			return false
		}
	}
	return true
}

// under reports whether a row was and is of a prefix that begins with the given one.
func (c change) under(prefix string) bool {
	for _, data := range []map[string]any{c.before, c.after} {
		if its, _ := data["prefix"].(string); data != nil && !strings.HasPrefix(its, prefix) {
			return false
		}
	}
	return true
}

// begins reports whether the change inserts an instance in the state that it has before its start.
func (c change) begins() bool {
	return c.table == "process_instance" && c.op() == "insert" && c.after["status"] == "CREATED" && fmt.Sprint(c.after["version"], c.after["live_tokens"]) == "1 0"
}

// keys are tables whose rows are held and never stay. A row that the owner leaves there harms nobody: a transaction
// that needs it takes it over.
var keys = []string{"outbox_aggregate", "message_key"}

// engines are the tables that only the engine writes, whoever owns them.
var engines = []string{"process_token", "parallel_group", "parallel_join", "join_arrival", "each_progress", "message", "message_wait", "user_task", "incident",
	"compensation_record", "process_state_history", "process_event", "process_correction", "workflow_history", "workflow_override", "workflow_set_aside", "workflow_fault", "workflow_policy", "workflow_kept", "workflow_binding", "workflow_console_role", "message_key", "outbox_aggregate", "outbox_replayed",
	"workflow_retention", "workflow_retention_turn",
	"workflow_accepted",
	"workflow_begun",
	"workflow_outage",
	"workflow_policy_history",
	"process_broadcast", "process_unreached",
	"workflow_minute",
	"workflow_member"}

// histories are only appended to, and removed together with what they describe.
var histories = []string{"workflow_history", "process_event", "process_state_history", "process_correction", "workflow_override", "outbox_replayed",
	"workflow_policy_history"}

// fixed are the columns of a run that never change; outcome, those that never change once it has succeeded.
var (
	fixed   = []string{"id", "type", "payload", "tenant_id", "token_id", "node", "created_at", "created_by"}
	outcome = []string{"result", "error", "last_error", "settled_token", "settled_by", "started_at", "finished_at", "attempt", "lease_no"}
)

// forbids is the table of rights, as in docs/roles.md. It returns why an actor must not have made a change, depending
// on the kind of statement, or "" if the actor may.
func (a *actor) forbids(m *mutation, c change) string {
	if a.role == "" {
		return ""
	}
	op, direct := c.op(), m.op != "call" && m.op != "command"
	if op == "update" {
		switch {
		case slices.Contains(histories, c.table):
			return "history is not changed"
		case c.table == "workflow_run" && slices.ContainsFunc(c.columns, func(n string) bool { return slices.Contains(fixed, n) }):
			return "what a run was given never changes"
		case c.table == "workflow_run" && c.before["status"] == "succeeded" && slices.ContainsFunc(c.columns, func(n string) bool { return slices.Contains(outcome, n) }):
			return "a success is not rewritten"
		}
	}
	if op == "delete" && slices.Contains(histories, c.table) && a.name != "engine" && m.on != "workflow_remove_v1" {
		return "history is not removed"
	}
	switch a.name {
	case "viewer":
		return "it only looks"
	case "enqueue", "media", "billing":
		if m.on == "workflow_complete" && slices.Contains([]string{"workflow_accepted", "workflow_kept", "workflow_history"}, c.table) {
			return "" // the token of the start permits it
		}
	}
	switch a.name {
	case "enqueue":
		if op != "insert" || c.table != "workflow_run" && !c.begins() && (direct || c.table != "outbox_event") {
			return "it only inserts runs and instances, and appends events by functions"
		}
	case "tasks":
		return "nothing here is of its groups"
	case "dispatcher":
		if c.table == "workflow_fault" && !direct { // its own
			break
		}
		if !strings.HasPrefix(c.table, "outbox_") || c.table == "outbox_event" && (op != "update" || !c.only("published_at", "parked_at", "delivered_to", "parked_by")) {
			return "it only marks events"
		}
	case "media", "billing":
		switch {
		case direct:
			return "it acts by functions"
		case c.table == "workflow_run" && op == "update" && c.of(a.name+"."), c.table == "workflow_history" && op == "insert":
		case c.table == "workflow_worker" && op == "insert", c.table == "outbox_event" && op == "insert":
		case c.table == "workflow_worker" && op == "update" && m.on == "workflow_take_back_v1" && c.only("lost_at"): // of a worker whose lease ran out
		case c.table == "workflow_fault": // its own
		case (c.table == "workflow_retention" || c.table == "workflow_retention_turn") && c.under(a.name+"."):
		case m.on == "workflow_remove_v1" && op == "delete" && (c.table == "workflow_history" || c.table == "workflow_run" && c.of(a.name+".")):
		case c.table == "workflow_minute" && (c.of(a.name+".") || c.after["type"] == "other"): // its role's own
		case c.table == "workflow_set_aside" && (c.of(a.name+".") || m.on == "workflow_try_again_v1"): // which has rows tried again when they are due
		case c.table == "workflow_accepted" && (m.on == "workflow_accepted_v1" || m.on == "workflow_take_back_v1" || m.on == "workflow_try_again_v1"): // likewise
		case c.table == "workflow_kept" && (m.on == "workflow_try_again_v1" || m.on == "workflow_unsettled_v2" || m.on == "workflow_kept_over_v1"): // fenced by the token
		default:
			return "it only works on runs of its prefix"
		}
	case "console":
		if direct {
			return "it acts by functions"
		}
	case "operator":
		switch {
		case !direct, op == "insert" && slices.Contains([]string{"workflow_run", "process_definition"}, c.table), c.begins():
		case c.table == "workflow_run" && op == "update" && c.only("held_at", "updated_at", "run_at"), c.table == "workflow_history" && op == "insert" && m.on == "workflow_run":
		default:
			return "it acts by functions"
		}
	case "owner":
		switch {
		case !direct:
		case op == "delete" && (c.table == "workflow_set_aside" || c.table == "workflow_fault" || c.table == "workflow_binding"): // it will be found again; and a role is no longer bound
		case slices.Contains(engines, c.table) && !slices.Contains(keys, c.table) && m.on == c.table:
			return "the engine alone writes this"
		case c.table == "process_instance" && m.on == c.table && op == "insert" && !c.begins():
			return "an instance that is inserted is not started yet"
		case c.table == "process_instance" && m.on == c.table && op == "delete" && c.before["completed_at"] == nil:
			return "an instance that is open is not deleted"
		case c.table == "workflow_run" && m.on == c.table && op == "delete" && c.before["token_id"] != nil:
			return "a step goes with its instance"
		}
	}
	return ""
}
