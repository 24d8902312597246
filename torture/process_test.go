package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// The graphs and the requests to their instances depend on the seed alone. Each kind of graph has instances, and what
// they wait for is sent.
func TestProcesses(t *testing.T) {
	draw := func(seed uint64) (all []any) {
		p := longPlan(seed)
		processes := drawProcesses(p.random("processes"))
		r := p.random("instances")
		for range 500 {
			x := drawInstance(r, processes, "")
			all = append(all, x.tag, x.process, x.expect, x.ends, x.starts(), x.letters())
		}
		for _, p := range processes {
			all = append(all, string(p.definition))
		}
		return all
	}
	if !reflect.DeepEqual(draw(7), draw(7)) || reflect.DeepEqual(draw(7), draw(8)) {
		t.Error("the processes do not depend on the seed, and on it alone")
	}
	if n := longPlan(1).Instances * (30 + 480 + 20); n < 1000 {
		t.Errorf("%.0f instances, want 1000", n)
	}
}

// A tale is an instance whose story is played: it writes by hand what the engine would write.
type tale struct {
	s       *stage
	id      uuid.UUID
	process string
	status  string
}

// told are the processes of the stories.
var told = map[string]string{
	"line": `{"process": "line", "version": 1, "start": "A", "nodes": {"A": {"do": "chaos.step", "to": "W"}, "W": {"wait": "PT10S", "to": "M"},
		"M": {"await": {"message": "m", "key": "input.tag"}, "to": "H"}, "H": {"human": {}, "to": "B"}, "B": {"do": "chaos.step"}}}`,
	"forked": `{"process": "forked", "version": 1, "start": "F", "nodes": {"F": {"fork": ["A", "B"]}, "A": {"do": "chaos.step", "to": "J"}, "B": {"do": "chaos.step", "to": "J"},
		"J": {"join": "all", "to": "C"}, "C": {"do": "chaos.step"}}}`,
	"saga": `{"process": "saga", "version": 1, "start": "A", "nodes": {"A": {"do": "chaos.step", "undo": "chaos.undo", "to": "B"}, "B": {"do": "chaos.step", "undo": "chaos.undo", "to": "D"},
		"D": {"do": "chaos.step"}}}`,
}

// defineAll deploys the processes of the stories.
func (s *stage) defineAll() {
	facts := map[string]string{"line": `{"joins": null, "waits": {"W": 10000}}`, "forked": `{"joins": [{"after": "C", "branches": ["A", "B"]}], "waits": {}}`, "saga": `{"joins": [], "waits": {}}`}
	for _, name := range []string{"line", "forked", "saga"} {
		s.do("torture", `INSERT INTO process_definition (definition) VALUES ($1)`, told[name])
		s.tell(entry{Kind: "define", Process: name, Payload: json.RawMessage(facts[name])})
	}
}

func (s *stage) id() uuid.UUID {
	s.last++
	return uuid.MustParse(fmt.Sprintf("00000000-0000-4000-8000-%012d", s.last))
}

// command enqueues a command to the engine, as a client, and lets it succeed or not.
func (s *stage) command(name, typ string, payload any, succeeds bool) uuid.UUID {
	s.t.Helper()
	text, err := json.Marshal(payload)
	if err != nil {
		s.t.Fatal(err)
	}
	e := entry{Kind: "enqueue", Run: s.id().String(), Type: typ, Case: name, Payload: text, Answer: "done"}
	s.insert(e, wish{})
	s.tell(e)
	id := uuid.MustParse(e.Run)
	s.work(id, w1)
	if succeeds {
		s.finish(id, w1)
	} else {
		s.fail(id, w1, "failed")
	}
	return id
}

// A birth is what a client wants of an instance, apart from its process.
type birth struct {
	key    string
	ends   string
	expect string
}

// begin starts an instance as a client, and creates it as the engine.
func (s *stage) begin(process string, b birth) *tale {
	s.t.Helper()
	x := s.born(process, b)
	x.start(b.key)
	x.create(b.key)
	return x
}

func (s *stage) born(process string, b birth) *tale {
	s.t.Helper()
	x := &tale{s: s, id: s.id(), process: process}
	if b.ends == "" {
		b.ends = "COMPLETED"
	}
	if b.expect == "" {
		b.expect = map[string]string{"line": `{"A": [1, 1], "B": [1, 1]}`, "forked": `{"A": [1, 1], "B": [1, 1], "C": [1, 1]}`, "saga": `{"A": [1, 1], "B": [1, 1]}`}[process]
	}
	s.tell(entry{Kind: "instance", Text: x.id.String(), Process: process, Key: b.key, Answer: b.ends, Expect: json.RawMessage(b.expect)})
	return x
}

func (x *tale) start(key string) uuid.UUID {
	x.s.t.Helper()
	payload := map[string]any{"process": x.process, "input": map[string]string{"tag": x.id.String()}}
	if key != "" {
		payload["key"] = key
	}
	run := x.s.command("start", "graph.start.v1", payload, true)
	x.s.do("w1", `UPDATE workflow_run SET result = jsonb_build_object('instance', $2::text) WHERE id = $1`, run, x.id.String())
	return run
}

func (x *tale) create(key string) {
	x.s.t.Helper()
	x.s.do("w1", `
		INSERT INTO process_instance (id, process_definition_id, business_key, input_payload)
		SELECT $1, id, nullif($3, ''), jsonb_build_object('tag', $1::uuid) FROM process_definition WHERE name = $2`, x.id, x.process, key)
	x.status = "CREATED"
	x.become("IN_PROGRESS")
}

// become sets the status of the instance, counts its tokens, and emits the event.
func (x *tale) become(status string) {
	x.s.t.Helper()
	s := x.s
	s.do("w1", `
		UPDATE process_instance i
		SET status = $2, version = i.version + 1, completed_at = CASE WHEN $2 IN ('COMPLETED', 'FAILED', 'CANCELLED') THEN now() END,
		    live_tokens = k.live, ready_tokens = k.ready, joining_tokens = k.joining,
		    open_incidents = (SELECT count(*) FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL)
		FROM (SELECT count(*) FILTER (WHERE state IN ('Ready', 'Waiting')) AS live, count(*) FILTER (WHERE state = 'Ready') AS ready,
		             count(*) FILTER (WHERE state = 'Waiting' AND EXISTS (SELECT FROM join_arrival a WHERE a.token_id = k.id)) AS joining
		      FROM process_token k WHERE k.instance_id = $1) k
		WHERE i.id = $1`, x.id, status)
	if status == x.status {
		return
	}
	s.do("w1", `INSERT INTO process_state_history (instance_id, from_status, to_status, version, actor) SELECT id, $2, $3, version, 'w1' FROM process_instance WHERE id = $1`, x.id, x.status, status)
	if x.status == "CREATED" {
		s.do("w1", `SELECT outbox_emit($1, 'process.started', '{}')`, x.id)
	}
	if status != "IN_PROGRESS" && status != "WAITING" {
		s.do("w1", `SELECT outbox_emit($1, 'process.' || lower($2), '{}')`, x.id, status)
	}
	x.status = status
}

// place creates a token. Its state says whether a run is due at the node.
func (x *tale) place(node, state string) uuid.UUID {
	id := x.s.id()
	x.s.do("w1", `INSERT INTO process_token (id, instance_id, node, state) VALUES ($1, $2, $3, $4)`, id, x.id, node, state)
	return id
}

func (x *tale) move(token uuid.UUID, node, state string) {
	x.s.do("w1", `UPDATE process_token SET node = $2, state = $3, version = version + 1 WHERE id = $1`, token, node, state)
}

// visit enqueues the run of a visit of a node.
func (x *tale) visit(token uuid.UUID, node, typ, payload string, delay time.Duration) uuid.UUID {
	id := x.s.id()
	x.s.do("w1", `
		INSERT INTO workflow_run (id, token_id, node, type, payload, run_at, max_attempts)
		VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::interval, 5)`, id, token, node, typ, payload, delay)
	return id
}

// enter moves a token to a step, and returns the step's run.
func (x *tale) enter(token uuid.UUID, node, more string) uuid.UUID {
	x.move(token, node, "Ready")
	return x.visit(token, node, "chaos.step", fmt.Sprintf(`{"tag": %q, "node": %q%s}`, x.id, node, more), 0)
}

// begun places a new token at a step.
func (x *tale) begun(node, more string) (token, run uuid.UUID) {
	token = x.place(node, "Ready")
	return token, x.visit(token, node, "chaos.step", fmt.Sprintf(`{"tag": %q, "node": %q%s}`, x.id, node, more), 0)
}

// done executes a step, or the undo of a step.
func (x *tale) done(run uuid.UUID, node string, undoes any) {
	x.s.work(run, w1)
	x.did(run, node, undoes)
}

// did ends a step that is executing.
func (x *tale) did(run uuid.UUID, node string, undoes any) {
	x.s.do("w1", `INSERT INTO chaos_effect (run_id, lease_no, key, tag, node, undoes) SELECT id, lease_no, '', $2, $3, $4 FROM workflow_run WHERE id = $1`, run, x.id.String(), node, undoes)
	x.s.finish(run, w1)
}

// owes records that a step can be undone.
func (x *tale) owes(run uuid.UUID, node string) (record uuid.UUID) {
	record = x.s.id()
	x.s.do("w1", `INSERT INTO compensation_record (id, instance_id, token_id, run_id, node_id, handler_ref) SELECT $1, $2, token_id, $3, $4, 'chaos.undo' FROM workflow_run WHERE id = $3`, record, x.id, run, node)
	return record
}

// undo undoes a step by its record.
func (x *tale) undo(token, record, run uuid.UUID, node string) uuid.UUID {
	u := x.visit(token, node+"/undo", "chaos.undo", fmt.Sprintf(`{"run": %q, "input": {"tag": %q, "node": %q}}`, run, x.id, node), 0)
	x.s.do("w1", `UPDATE compensation_record SET undo_run_id = $2 WHERE id = $1`, record, u)
	x.done(u, node, run)
	x.s.do("w1", `UPDATE compensation_record SET status = 'Completed' WHERE id = $1`, record)
	return u
}

// incident stops a token with an incident.
func (x *tale) incident(token uuid.UUID) (id uuid.UUID) {
	id = x.s.id()
	x.s.do("w1", `INSERT INTO incident (id, instance_id, token_id, node, code, message) VALUES ($1, $2, $3, 'A', 'x', 'x')`, id, x.id, token)
	x.s.do("w1", `SELECT outbox_emit($1, 'incident.opened', '{}')`, x.id)
	return id
}

// end ends the last token and the instance.
func (x *tale) end(token uuid.UUID, node, state, status string) {
	x.move(token, node, state)
	if x.status == "WAITING" && status == "COMPLETED" {
		x.become("IN_PROGRESS")
	}
	x.become(status)
}

// walkLine plays the process line up to a node.
func (x *tale) walkLine(to string) (token uuid.UUID) {
	s := x.s
	token, a := x.begun("A", "")
	x.become("IN_PROGRESS")
	if to == "A" {
		s.work(a, w1)
		return token
	}
	x.done(a, "A", nil)
	x.move(token, "W", "Waiting")
	w := x.visit(token, "W", "graph.timer.v1", "{}", 10*seconds)
	x.become("WAITING")
	s.wait(w, 10*seconds)
	s.work(w, w1)
	s.finish(w, w1)
	x.message(token)
	x.task(token)
	if to == "H" {
		return token
	}
	b := x.enter(token, "B", "")
	x.become("IN_PROGRESS")
	x.done(b, "B", nil)
	return token
}

func (x *tale) message(token uuid.UUID) (arrival uuid.UUID) {
	m := x.s.command("message", "graph.message.v1", map[string]string{"name": "m", "key": x.id.String(), "id": "m " + x.id.String()}, true)
	x.s.do("w1", `INSERT INTO message (id, message_id, name, key, payload, expires_at, token_id, consumed_at) VALUES ($1, $2, 'm', $3, '{}', now() + interval '1 day', $4, now())`, m, "m "+x.id.String(), x.id.String(), token)
	x.move(token, "M", "Waiting")
	return x.arrives(token, m)
}

func (x *tale) arrives(token, message uuid.UUID) uuid.UUID {
	r := x.visit(token, "M", "graph.arrive.v1", fmt.Sprintf(`{"message": %q}`, message), 0)
	x.s.work(r, w1)
	x.s.finish(r, w1)
	return r
}

func (x *tale) task(token uuid.UUID) (task uuid.UUID) {
	task = x.s.id()
	x.move(token, "H", "Waiting")
	x.s.do("w1", `INSERT INTO user_task (id, instance_id, token_id, node, payload) VALUES ($1, $2, $3, 'H', '{}')`, task, x.id, token)
	x.s.command("task", "graph.complete_task.v1", map[string]any{"task": task, "by": "anna"}, true)
	x.s.do("w1", `UPDATE user_task SET state = 'completed', completed_at = now(), completed_by = 'anna' WHERE id = $1`, task)
	return task
}

// halt cancels an instance that has one live token. The leases of the runs are revoked with it.
func (x *tale) halt(token uuid.UUID, node string, runs ...uuid.UUID) {
	x.s.command("halt", "graph.cancel.v1", map[string]any{"instance": x.id}, true)
	x.end(token, node, "Terminated", "CANCELLED")
	for _, r := range runs {
		x.s.do("w1", `UPDATE workflow_run SET status = 'cancelled', lease_token = NULL, lease_until = NULL, leased_by = NULL, deadline_at = NULL, finished_at = now() WHERE id = $1`, r)
	}
}

// walkForked plays both branches up to the join.
func (x *tale) walkForked() (token uuid.UUID) {
	s := x.s
	a, ra := x.begun("A", "")
	b, rb := x.begun("B", "")
	x.become("IN_PROGRESS")
	s.work(ra, w1)
	s.exit(w1, 0)
	s.wait(ra, 4*seconds)
	s.expire(ra, w2)
	s.work(ra, w2)
	s.do("w2", `INSERT INTO chaos_effect (run_id, lease_no, key, tag, node) SELECT id, lease_no, '', $2, 'A' FROM workflow_run WHERE id = $1`, ra, x.id.String())
	s.finish(ra, w2)
	j := x.join(a)
	x.done(rb, "B", nil)
	x.joined(j, b)
	return x.fire(j, a, b)
}

// join opens an activation of the join with its first arrival.
func (x *tale) join(first uuid.UUID) (id uuid.UUID) {
	id = x.s.id()
	x.s.do("w1", `INSERT INTO parallel_join (id, instance_id, node, expected, joined) VALUES ($1, $2, 'J', 2, 0)`, id, x.id)
	x.joined(id, first)
	return id
}

func (x *tale) joined(join, token uuid.UUID) {
	x.move(token, "J", "Waiting")
	x.s.do("w1", `INSERT INTO join_arrival (join_id, token_id, edge) VALUES ($1, $2, $3)`, join, token, token.String())
	x.s.do("w1", `UPDATE parallel_join SET joined = joined + 1 WHERE id = $1`, join)
}

// fire continues with a new token at C for the tokens that arrived.
func (x *tale) fire(join uuid.UUID, came ...uuid.UUID) (token uuid.UUID) {
	x.s.do("w1", `UPDATE parallel_join SET fired = true WHERE id = $1`, join)
	for _, k := range came {
		x.move(k, "J", "Completed")
	}
	token, c := x.begun("C", "")
	x.become("IN_PROGRESS")
	x.done(c, "C", nil)
	return token
}

// A fall is a saga whose last step has failed, before anything is undone.
type fall struct {
	token, a, b  uuid.UUID // the last two are runs
	owesA, owesB uuid.UUID // compensation records
}

const owes = `, "owes": true`

func (x *tale) walkSaga() (f fall) {
	s := x.s
	f.token, f.a = x.begun("A", owes)
	x.become("IN_PROGRESS")
	x.done(f.a, "A", nil)
	f.owesA = x.owes(f.a, "A")
	f.b = x.enter(f.token, "B", owes)
	x.done(f.b, "B", nil)
	f.owesB = x.owes(f.b, "B")
	s.wait(f.a, seconds) // work lets time pass for what undoes them; this makes them as old
	s.wait(f.b, seconds)
	d := x.enter(f.token, "D", `, "fail": "declined"`)
	s.work(d, w1)
	s.fail(d, w1, "failed")
	s.do("w1", `UPDATE process_instance SET ending = 'FAILED' WHERE id = $1`, x.id)
	s.do("w1", `UPDATE process_token SET mode = 'Compensation', version = version + 1 WHERE id = $1`, f.token)
	return f
}

var sagaFails = birth{ends: "FAILED"}

// tales are legal histories of instances.
var tales = []func(*stage){
	func(s *stage) { // from its start to its end; two clients start it with the same key
		x := s.begin("line", birth{key: "order 7"})
		x.start("order 7")
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
	},
	func(s *stage) { // a step's lease expires; both branches arrive
		x := s.begin("forked", birth{})
		x.end(x.walkForked(), "C", "Completed", "COMPLETED")
	},
	func(s *stage) { // cancelled during a step, and too late
		x := s.begin("line", birth{})
		token, a := x.begun("A", "")
		x.become("IN_PROGRESS")
		s.work(a, w1)
		x.halt(token, "A", a)
		s.end(a, "cancelled")
		x = s.begin("line", birth{})
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
		s.command("halt", "graph.cancel.v1", map[string]any{"instance": x.id}, true)
	},
	func(s *stage) { // fails, and undoes; the first undo fails, too, and is retried
		x := s.begin("saga", sagaFails)
		f := x.walkSaga()
		u := x.visit(f.token, "B/undo", "chaos.undo", fmt.Sprintf(`{"run": %q, "input": {"tag": %q, "node": "B", "reluctant": true}}`, f.b, x.id), 0)
		s.work(u, w1)
		s.fail(u, w1, "failed")
		incident := x.incident(f.token)
		s.do("w1", `UPDATE compensation_record SET status = 'Failed', undo_run_id = $2 WHERE id = $1`, f.owesB, u)
		x.become("WAITING")
		s.command("again", "graph.retry.v1", map[string]any{"incident": incident}, true)
		s.do("w1", `UPDATE incident SET resolved_at = now() WHERE id = $1`, incident)
		again := x.owes(f.b, "B")
		x.become("IN_PROGRESS")
		x.undo(f.token, again, f.b, "B")
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
	},
	func(s *stage) { // paused and resumed; a start that was cancelled; of two people, one is too late
		x := s.begin("line", birth{})
		token := x.walkLine("H")
		s.do("client", `SELECT process_pause($1)`, x.id)
		s.do("client", `SELECT process_resume($1)`, x.id)
		s.command("task", "graph.complete_task.v1", map[string]any{"task": s.id(), "by": "bert"}, false)
		b := x.enter(token, "B", "")
		x.become("IN_PROGRESS")
		x.done(b, "B", nil)
		x.end(token, "B", "Completed", "COMPLETED")
		s.born("line", birth{})
	},
	func(s *stage) { // an incident that nobody resolves
		x := s.begin("line", birth{})
		token := x.place("X", "Waiting")
		x.incident(token)
		x.become("WAITING")
	},
	func(s *stage) { // a called instance
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		s.child(x, "COMPLETED")
		x.end(token, "B", "Completed", "COMPLETED")
	},
}

func (s *stage) child(of *tale, status string) *tale {
	c := &tale{s: s, id: s.id(), process: "line"}
	c.create("")
	s.do("w1", `UPDATE process_instance SET parent_process_instance_id = $2 WHERE id = $1`, c.id, of.id)
	c.become(status)
	return c
}

// whole plays an instance of a process without any fault.
func (s *stage) whole(process string) *tale {
	x := s.begin(process, birth{ends: map[string]string{"saga": "FAILED"}[process]})
	switch process {
	case "line":
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
	case "forked":
		x.end(x.walkForked(), "C", "Completed", "COMPLETED")
	case "saga":
		f := x.walkSaga()
		x.undo(f.token, f.owesB, f.b, "B")
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
	}
	return x
}

var processPlants = []plant{
	{only("I01b"), "step that a client has made", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{expect: `{"A": [1, 2], "B": [1, 1]}`})
		token := x.walkLine("B")
		id := s.id()
		s.do("client", `INSERT INTO workflow_run (id, token_id, node, type, payload) VALUES ($1, $2, 'A/undo', 'chaos.step', '{}')`, id, token)
		x.done(id, "A", nil)
		x.end(token, "B", "Completed", "COMPLETED")
		return id
	}},
	{only("I01c"), "started, and not there", func(s *stage) uuid.UUID { return s.born("line", birth{}).start("") }},
	{only("I01d"), "started by nobody", func(s *stage) uuid.UUID {
		x := s.born("line", birth{})
		x.create("")
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
		return x.id
	}},
	{only("I03"), "step without an effect", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{expect: `{"A": [0, 1], "B": [1, 1]}`})
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
		var run uuid.UUID
		if err := s.row(&run, `SELECT r.id FROM workflow_run r JOIN process_token k ON k.id = r.token_id WHERE k.instance_id = $1 AND r.node = 'A'`, x.id); err != nil {
			s.t.Fatal(err)
		}
		s.do("torture", `DELETE FROM chaos_effect WHERE run_id = $1`, run)
		return run
	}},
	{only("I14c"), "cancelled, and going on", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		s.command("halt", "graph.cancel.v1", map[string]any{"instance": x.id}, true)
		x.end(token, "B", "Completed", "COMPLETED")
		s.do("torture", `UPDATE t.turn SET begun = begun + interval '1 s' WHERE instance = $1 AND status = 'COMPLETED'`, x.id) // a transaction of its own
		return x.id
	}},
	{only("I15b"), "event of an instance that is not there", func(s *stage) uuid.UUID {
		id := s.enqueue("sleep", wish{})
		s.work(id, w1)
		s.finish(id, w1)
		s.do("w1", `SELECT outbox_emit($1, 'process.started', '{}')`, id)
		return id
	}},
	{only("I20"), "did not wait for a branch", func(s *stage) uuid.UUID {
		x := s.begin("forked", birth{})
		a, ra := x.begun("A", "")
		b, rb := x.begun("B", "")
		x.done(ra, "A", nil)
		s.work(rb, w1)
		j := x.join(a)
		x.joined(j, b)
		last := x.fire(j, a, b)
		x.did(rb, "B", nil)
		x.end(last, "C", "Completed", "COMPLETED")
		return x.id
	}},
	{only("I20b"), "fired twice", func(s *stage) uuid.UUID {
		x := s.whole("forked")
		for _, fired := range []bool{false, true} {
			s.do("w1", `UPDATE parallel_join SET fired = $2 WHERE instance_id = $1`, x.id, fired)
		}
		return x.id
	}},
	{only("I20b"), "arrival lost", func(s *stage) uuid.UUID {
		x := s.whole("forked")
		s.do("w1", `DELETE FROM join_arrival WHERE ctid IN (SELECT a.ctid FROM join_arrival a JOIN parallel_join j ON j.id = a.join_id WHERE j.instance_id = $1 LIMIT 1)`, x.id)
		return x.id
	}},
	{only("I21"), "still waits for a message", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.do("w1", `INSERT INTO message_wait (token_id, place, instance_id, node, name, key) SELECT id, '', instance_id, 'M', 'm', 'k' FROM process_token WHERE instance_id = $1`, x.id)
		return x.id
	}},
	{only("I21"), "incident left open", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		x.end(token, "B", "Completed", "COMPLETED")
		x.incident(token)
		return x.id
	}},
	{only("I21b"), "cancelled, and the step recorded", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token, a := x.begun("A", "")
		x.become("IN_PROGRESS")
		s.work(a, w1)
		x.halt(token, "A")
		x.did(a, "A", nil)
		return a
	}},
	{only("I22"), "forgotten", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.place("M", "Waiting")
		x.become("WAITING")
		return x.id
	}},
	{only("I22b"), "seen as it can never be", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.tell(entry{Kind: "odd", Run: x.id.String(), Text: "nothing can move it, and no incident says why"})
		return x.id
	}},
	{only("I23"), "due, and no run", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.place("X", "Waiting")
		s.do("w1", `UPDATE process_token SET state = 'Ready', mode = 'Compensation' WHERE id = $1`, token)
		x.incident(token)
		x.become("IN_PROGRESS")
		return x.id
	}},
	{only("I24"), "run of a token that is not there", func(s *stage) uuid.UUID {
		x := s.whole("line")
		r := x.visit(s.id(), "A", "chaos.step", `{}`, 0)
		s.work(r, w1)
		s.do("w1", `INSERT INTO chaos_effect (run_id, lease_no, key) VALUES ($1, 1, '')`, r)
		s.finish(r, w1)
		return r
	}},
	{only("I25"), "undone by two runs", func(s *stage) uuid.UUID {
		x := s.begin("saga", sagaFails)
		f := x.walkSaga()
		x.undo(f.token, f.owesB, f.b, "B")
		u := x.visit(f.token, "B/undo", "chaos.undo", `{"input": {}}`, 0)
		x.done(u, "B", f.b)
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
		return x.id
	}},
	{only("I25b"), "two records of one undoing", func(s *stage) uuid.UUID {
		x := s.whole("saga")
		s.do("w1", `
			INSERT INTO compensation_record (instance_id, token_id, run_id, node_id, handler_ref, status)
			SELECT instance_id, token_id, run_id, node_id, handler_ref, status FROM compensation_record WHERE instance_id = $1 LIMIT 1`, x.id)
		return x.id
	}},
	{only("I26"), "undone and never done", func(s *stage) uuid.UUID {
		x := s.begin("saga", sagaFails)
		f := x.walkSaga()
		var d uuid.UUID
		if err := s.row(&d, `SELECT id FROM workflow_run WHERE token_id = $1 AND node = 'D'`, f.token); err != nil {
			s.t.Fatal(err)
		}
		x.undo(f.token, x.owes(d, "D"), d, "D")
		x.undo(f.token, f.owesB, f.b, "B")
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
		return x.id
	}},
	{only("I27"), "one step left over", func(s *stage) uuid.UUID {
		x := s.begin("saga", sagaFails)
		f := x.walkSaga()
		x.undo(f.token, f.owesB, f.b, "B")
		x.end(f.token, "D", "Terminated", "FAILED")
		return x.id
	}},
	{only("I27"), "one step of what it had called left over", func(s *stage) uuid.UUID {
		x := s.begin("saga", sagaFails)
		c := s.child(x, "IN_PROGRESS")
		s.do("w1", `UPDATE process_instance SET undone_with_parent = true WHERE id = $1`, c.id)
		token, b := c.begun("B", owes)
		c.done(b, "B", nil)
		c.end(token, "B", "Completed", "COMPLETED")
		f := x.walkSaga()
		x.undo(f.token, f.owesB, f.b, "B")
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
		return c.id
	}},
	{only("I28"), "first step undone first", func(s *stage) uuid.UUID {
		x := s.begin("saga", sagaFails)
		f := x.walkSaga()
		x.undo(f.token, f.owesA, f.a, "A")
		x.undo(f.token, f.owesB, f.b, "B")
		x.end(f.token, "D", "Terminated", "FAILED")
		return x.id
	}},
	{only("I29"), "a branch goes on", func(s *stage) uuid.UUID {
		x := s.begin("saga", birth{ends: "FAILED", expect: `{"A": [1, 1], "B": [1, 1], "D": [0, 1]}`})
		f := x.walkSaga()
		other, e := x.begun("D", "")
		x.done(e, "D", nil)
		x.move(other, "D", "Completed")
		x.undo(f.token, f.owesB, f.b, "B")
		x.undo(f.token, f.owesA, f.a, "A")
		x.end(f.token, "D", "Terminated", "FAILED")
		return x.id
	}},
	{only("I30d"), "removed and started again", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
		s.do("w1", `INSERT INTO t.removed_process_instance SELECT i.* FROM process_instance i WHERE id = $1`, x.id)
		return x.id
	}},
	{only("I30c"), "two for one key", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{key: "order 8"})
		x.end(x.walkLine("B"), "B", "Completed", "COMPLETED")
		again := &tale{s: s, id: s.id(), process: "line"}
		again.create("order 8")
		again.become("COMPLETED")
		s.do("w1", `UPDATE process_instance SET input_payload = jsonb_build_object('tag', $2::text) WHERE id = $1`, again.id, x.id.String())
		s.do("w1", `DELETE FROM t.turn WHERE instance = $1 AND was = 'COMPLETED'`, again.id)
		return x.id
	}},
	{only("I31"), "two timers for one visit", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		w := x.visit(token, "W", "graph.timer.v1", "{}", 10*seconds)
		s.wait(w, 10*seconds)
		s.work(w, w1)
		s.finish(w, w1)
		x.end(token, "B", "Completed", "COMPLETED")
		return x.id
	}},
	{only("I32c"), "did not wait", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{expect: `{}`})
		token := x.place("W", "Waiting")
		w := x.visit(token, "W", "graph.timer.v1", "{}", 0)
		s.work(w, w1)
		s.finish(w, w1)
		x.halt(token, "W")
		return w
	}},
	{only("I39"), "step passed over", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.end(x.place("X", "Waiting"), "B", "Completed", "COMPLETED")
		return x.id
	}},
	{only("I40"), "failed for no reason", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.end(x.walkLine("B"), "B", "Failed", "FAILED")
		return x.id
	}},
	{only("I40"), "cancelled by nobody", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.end(x.walkLine("B"), "B", "Terminated", "CANCELLED")
		return x.id
	}},
	{only("I40b"), "child that was given up", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		c := s.child(x, "CANCELLED")
		x.end(token, "B", "Completed", "COMPLETED")
		return c.id
	}},
	{only("I41"), "a change that is not told", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.do("w1", `DELETE FROM process_state_history WHERE instance_id = $1 AND from_status = 'WAITING'`, x.id)
		return x.id
	}},
	{only("I41b"), "the end is not told", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.do("w1", `DELETE FROM process_state_history WHERE instance_id = $1 AND to_status = 'COMPLETED'`, x.id)
		return x.id
	}},
	{only("I41c"), "touched after its end", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.do("w1", `UPDATE process_instance SET version = version + 1 WHERE id = $1`, x.id)
		return x.id
	}},
	{only("I42"), "miscounted", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		x.incident(x.place("X", "Waiting"))
		x.become("WAITING")
		s.do("w1", `UPDATE process_instance SET live_tokens = 2 WHERE id = $1`, x.id)
		return x.id
	}},
	{only("I43"), "event lost", func(s *stage) uuid.UUID {
		x := s.whole("line")
		s.do("w1", `DELETE FROM outbox_event WHERE aggregate_id = $1 AND event_type = 'process.completed'`, x.id)
		return x.id
	}},
	{only("I44"), "came twice", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		var m uuid.UUID
		if err := s.row(&m, `SELECT id FROM message WHERE token_id = $1`, token); err != nil {
			s.t.Fatal(err)
		}
		x.arrives(token, m)
		x.end(token, "B", "Completed", "COMPLETED")
		return x.id
	}},
	{only("I44b"), "taken twice", func(s *stage) uuid.UUID {
		x := s.whole("line")
		var m uuid.UUID
		if err := s.row(&m, `SELECT id FROM message WHERE key = $1::text`, x.id); err != nil {
			s.t.Fatal(err)
		}
		again := s.command("message", "graph.message.v1", map[string]string{"name": "m", "key": x.id.String(), "id": "m " + x.id.String()}, true)
		s.do("w1", `INSERT INTO message (id, message_id, name, key, payload, expires_at) VALUES ($1, 'another', 'm', $2, '{}', now() + interval '1 day')`, again, x.id.String())
		return m
	}},
	{only("I45"), "completed by two", func(s *stage) uuid.UUID {
		task := s.id()
		first := s.command("task", "graph.complete_task.v1", map[string]any{"task": task, "by": "anna"}, true)
		s.command("task", "graph.complete_task.v1", map[string]any{"task": task, "by": "bert"}, true)
		return first
	}},
	{[]string{"I49", "I34", "I35"}, "signal removed before it was taken", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{expect: `{}`})
		token := x.place("M", "Waiting")
		r := x.visit(token, "M", "graph.arrive.v1", `{}`, 0)
		s.work(r, w1)
		s.fail(r, w1, "failed")
		s.do("torture", `UPDATE workflow_run SET error = jsonb_set(error, '{code}', '"gone"') WHERE id = $1`, r)
		x.halt(token, "M")
		return r
	}},
	{only("I49b"), "called instance removed too early", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		c := s.child(x, "COMPLETED")
		s.do("w1", `DELETE FROM process_instance WHERE id = $1`, c.id)
		s.do("torture", `UPDATE t.removed_process_instance SET completed_at = completed_at - interval '1 minute' WHERE id = $1`, c.id)
		x.end(token, "B", "Completed", "COMPLETED")
		return c.id
	}},
	{only("I50b"), "forged start carried out", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{})
		token := x.walkLine("B")
		c := s.child(x, "COMPLETED")
		s.tell(entry{Kind: "enqueue", Run: c.id.String(), Type: "graph.start.v1", Case: "forged", Answer: "unknown"})
		x.end(token, "B", "Completed", "COMPLETED")
		return c.id
	}},
	{only("I46"), "leased though paused", func(s *stage) uuid.UUID {
		x := s.begin("line", birth{expect: `{"A": [1, 1]}`})
		token, a := x.begun("A", "")
		s.do("client", `SELECT process_pause($1)`, x.id)
		s.do("torture", `UPDATE t.turn SET at = at - interval '3 s' WHERE instance = $1 AND paused`, x.id)
		s.do("w1", `UPDATE workflow_run SET held_at = NULL, run_at = now() WHERE id = $1`, a)
		x.done(a, "A", nil)
		s.do("client", `SELECT process_resume($1)`, x.id)
		x.end(token, "A", "Completed", "COMPLETED")
		return a
	}},
}

func init() {
	stories = append(stories, func(s *stage) {
		s.defineAll()
		for _, tell := range tales {
			tell(s)
		}
	})
	plants = append(plants, processPlants...)
}

// row reads one value.
func (s *stage) row(into any, sql string, args ...any) error {
	rows, _ := s.db.Query(s.t.Context(), sql, args...)
	defer rows.Close()
	if !rows.Next() {
		return fmt.Errorf("no row: %s: %v", strings.TrimSpace(sql), rows.Err())
	}
	err := rows.Scan(into)
	rows.Close()
	return err
}
