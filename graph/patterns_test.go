package graph_test

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// done waits until a run has succeeded.
func (s *site) done(id uuid.UUID) {
	s.t.Helper()
	if got := s.finished(id); got != "succeeded" {
		s.t.Fatalf("run %s is %s, want succeeded", id, got)
	}
}

func (s *site) message(name string) {
	s.t.Helper()
	s.done(s.enqueue("graph.message.v1", fmt.Sprintf(`{"name": %q, "key": "k"}`, name)))
}

// begun waits until n runs of a node have started.
func (s *site) begun(node string, n int) {
	s.t.Helper()
	await(s.t, node+" to begin", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM activity_instance WHERE node_id = $1 AND started_at IS NOT NULL`, node) == n
	})
}

func (s *site) waiting(what string) {
	s.t.Helper()
	await(s.t, "somebody to wait for "+what, func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM message_wait WHERE name = $1`, what) > 0
	})
}

// before checks that the last run of one node ended before the first run of the other.
func (s *site) before(one, other string) {
	s.t.Helper()
	if !query[bool](s.t, s.pool, `
		SELECT (SELECT max(completed_at) FROM activity_instance WHERE node_id = $1) < (SELECT min(completed_at) FROM activity_instance WHERE node_id = $2)`, one, other) {
		s.t.Errorf("%s does not come before %s", one, other)
	}
}

// Each workflow pattern can be written as a process whose steps succeed and are cancelled as often as the pattern says.
func TestPatterns(t *testing.T) {
	for _, p := range []struct {
		number, name string
		nodes        string // see deployShort
		input        string
		act          func(s *site, instance uuid.UUID)
		want         string // A2: step A succeeded twice; A-2: it was cancelled twice
		status       graph.Status
	}{
		{number: "1", name: "sequence", nodes: `A>B B>`, want: "A1 B1"},
		{number: "2 and 3", name: "parallel split and synchronization",
			nodes: `"F": {"fork": ["A", "B"]}, A>J B(200)>J "J": {"join": "all", "to": "C"}, C>`, want: "A1 B1 C1",
			act: func(s *site, _ uuid.UUID) { s.done(s.last("C")); s.before("B", "C") }},
		{number: "4 and 5", name: "exclusive choice and simple merge",
			nodes: `"X": {"choose": [{"if": "input.n > 5", "to": "A"}, {"if": "input.n > 2", "to": "B"}], "else": "C"}, A>D B>D C>D D>`, input: `{"n": 4}`, want: "B1 D1"},
		{number: "6 and 7", name: "multi-choice and structured synchronizing merge",
			nodes: `"O": {"any": [{"if": "input.n > 2", "to": "A"}, {"if": "input.n > 3", "to": "B"}, {"if": "input.n > 4", "to": "C"}]}, A(200)>J B>J C>J "J": {"join": "taken", "to": "D"}, D>`,
			input: `{"n": 4}`, want: "A1 B1 D1", act: func(s *site, _ uuid.UUID) { s.done(s.last("D")); s.before("A", "D") }},
		{number: "8", name: "multi-merge", nodes: `"F": {"fork": ["A", "B"]}, A>C B>C C>`, want: "A1 B1 C2"},
		{number: "9", name: "structured discriminator",
			nodes: `"F": {"fork": ["A", "U"]}, A>J "U": {"human": {}, "to": "J"} "J": {"join": {"need": 1}, "to": "C"}, C>`, want: "A1 C1",
			act: func(s *site, _ uuid.UUID) { s.succeeded("C", 1); s.finish("U") }},
		{number: "10", name: "arbitrary cycles",
			nodes: `A>B B>C "C": {"do": "test.step.v1", "in": {"n": "'C' in steps ? steps.C.n + 1.0 : 1.0"}, "to": "X"},
				"X": {"choose": [{"if": "steps.C.n == 1.0", "to": "B"}, {"if": "steps.C.n == 2.0", "to": "A"}], "else": "D"}, D>`, want: "A2 B3 C3 D1"},
		{number: "11", name: "implicit termination", nodes: `"F": {"fork": ["A", "B"]}, A> B(200)>`, want: "A1 B1"},
		{number: "12", name: "multiple instances without synchronization",
			nodes: `"F": {"fork": ["E", "A"]}, "E": {"each": {"list": "[3000, 3000]", "do": "test.step.v1"}, "in": {"ms": "item"}}, A>B B>`, want: "A1 B1 E/item2",
			act: func(s *site, i uuid.UUID) { s.status(i, graph.Completed); s.before("B", "E/item") }},
		{number: "13", name: "multiple instances, number known when designed",
			nodes: `"E": {"each": {"list": "['a', 'b', 'c']", "do": "test.step.v1"}, "in": {"n": "item"}, "to": "A"}, A>`, want: "A1 E/item3"},
		{number: "14", name: "multiple instances, number known when it starts",
			nodes: `A>E "E": {"each": {"list": "input.list", "do": "test.step.v1"}, "in": {"ms": "item"}, "to": "B"}, B>`, input: `{"list": [100, 1, 1, 50]}`, want: "A1 B1 E/item4",
			act: func(s *site, _ uuid.UUID) { s.done(s.last("B")); s.before("E/item", "B") }},
		{number: "16", name: "deferred choice",
			nodes: `"R": {"race": ["M", "N", "T"]}, "M": {"await": {"message": "m", "key": "'k'"}, "to": "A"}, "N": {"await": {"message": "n", "key": "'k'"}, "to": "B"},
				"T": {"wait": "1h", "to": "C"}, A> B> C>`, want: "B1 T-1",
			act: func(s *site, _ uuid.UUID) { s.waiting("n"); s.message("n") }},
		{number: "19", name: "cancel activity",
			nodes: `"A": {"do": "test.step.v1", "in": {"ms": "60000"}, "to": "B", "on": [{"message": "stop", "key": "'k'", "to": "C"}]}, B> C>`, want: "A-1 C1",
			act: func(s *site, _ uuid.UUID) { s.begun("A", 1); s.message("stop") }},
		{number: "20", name: "cancel case", nodes: `"F": {"fork": ["A", "T"]}, A(60000)>B B> "T": {"wait": "1h"}`, want: "A-1 T-1", status: graph.Cancelled,
			act: func(s *site, i uuid.UUID) {
				s.begun("A", 1)
				s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, i))
			}},
		{number: "21", name: "structured loop",
			nodes: `"X": {"choose": [{"if": "!('A' in steps) || steps.A.n < 3.0", "to": "A"}], "else": "B"},
				"A": {"do": "test.step.v1", "in": {"n": "'A' in steps ? steps.A.n + 1.0 : 1.0"}, "to": "X"}, B>`, want: "A3 B1"},
		{number: "22", name: "recursion",
			nodes: `"X": {"choose": [{"if": "input.n > 0", "to": "A"}], "else": "over"}, A>C "C": {"call": {"process": "itself", "undo": "none"}, "in": {"n": "input.n - 1.0"}}, "over": {"end": true}`,
			input: `{"n": 3}`, want: "A1", act: func(s *site, i uuid.UUID) {
				s.status(i, graph.Completed)
				if n := query[int](s.t, s.pool, `SELECT count(*) FROM process_instance WHERE status = 'COMPLETED'`); n != 4 {
					s.t.Errorf("%d instances, want 4", n)
				}
			}},
		{number: "23", name: "transient trigger", nodes: `A>S "S": {"await": {"signal": "go"}, "to": "B"}, B>`, want: "A1 B1",
			act: func(s *site, i uuid.UUID) {
				s.waiting("go")
				s.done(s.enqueue("graph.signal.v1", `{"name": "go"}`))
				s.status(i, graph.Completed)
				late := s.start(query[string](s.t, s.pool, `SELECT d.name FROM process_definition d`), `{}`) // the signal is gone
				s.waiting("go")
				s.status(late, graph.Waiting)
				s.enqueue("graph.cancel.v1", fmt.Sprintf(`{"instance": %q}`, late))
				s.status(late, graph.Cancelled)
			}},
		{number: "24", name: "persistent trigger", nodes: `A(300)>M "M": {"await": {"message": "m", "key": "'k'"}, "to": "B"}, B>`, want: "A1 B1",
			act: func(s *site, _ uuid.UUID) { s.message("m") }},
		{number: "25", name: "cancel region",
			nodes: `"S": {"scope": {"start": "F", "nodes": {"F": {"fork": ["A", "W"]}, A(60000)> "W": {"wait": "1h"}}}, "to": "B", "on": [{"message": "stop", "key": "'k'", "to": "C"}]}, B> C>`,
			want:  "A-1 C1 W-1", act: func(s *site, _ uuid.UUID) { s.begun("A", 1); s.message("stop") }},
		{number: "26", name: "cancel multiple instance activity",
			nodes: `"E": {"each": {"list": "[1, 60000, 60000]", "do": "test.step.v1"}, "in": {"ms": "item"}, "to": "A", "on": [{"message": "stop", "key": "'k'", "to": "B"}]}, A> B>`,
			want:  "B1 E/item-2 E/item1", act: func(s *site, _ uuid.UUID) { s.begun("E/item", 3); s.succeeded("E/item", 1); s.message("stop") }},
		{number: "27", name: "complete multiple instance activity",
			nodes: `"E": {"each": {"list": "[1, 60000, 60000]", "do": "test.step.v1"}, "in": {"ms": "item"}, "to": "A", "on": [{"message": "enough", "key": "'k'", "to": "A"}]}, A>`,
			want:  "A1 E/item-2 E/item1", act: func(s *site, _ uuid.UUID) { s.begun("E/item", 3); s.succeeded("E/item", 1); s.message("enough") }},
		{number: "29", name: "cancelling discriminator",
			nodes: `"F": {"fork": ["A", "B"]}, A>J B(60000)>J "J": {"join": {"need": 1, "rest": "cancel"}, "to": "C"}, C>`, want: "A1 B-1 C1"},
		{number: "30", name: "structured partial join",
			nodes: `"F": {"fork": ["A", "B", "U"]}, A>J B(100)>J "U": {"human": {}, "to": "J"} "J": {"join": {"need": 2}, "to": "D"}, D>`, want: "A1 B1 D1",
			act: func(s *site, _ uuid.UUID) { s.succeeded("D", 1); s.before("B", "D"); s.finish("U") }},
		{number: "32", name: "cancelling partial join",
			nodes: `"F": {"fork": ["A", "B", "C"]}, A>J B(100)>J C(60000)>J "J": {"join": {"need": 2, "rest": "cancel"}, "to": "D"}, D>`, want: "A1 B1 C-1 D1"},
		{number: "33", name: "generalised AND-join",
			nodes: `"F": {"fork": ["A", "B", "C", "D"]}, A>M B>M C(300)>N D(300)>N M>J N>J "J": {"join": "all", "to": "E"}, E>`, want: "A1 B1 C1 D1 E2 M2 N2"},
		{number: "34", name: "static partial join for multiple instances",
			nodes: `"E": {"each": {"list": "[2500, 1, 1]", "do": "test.step.v1", "need": 2}, "in": {"ms": "item"}, "to": "A"}, A>`, want: "A1 E/item3",
			act: func(s *site, _ uuid.UUID) {
				s.done(s.last("A"))
				if n := query[int](s.t, s.pool, `SELECT count(*) FROM activity_instance WHERE node_id = 'E/item' AND status = 'succeeded'`); n != 2 {
					s.t.Errorf("A is done after %d elements, want 2", n)
				}
			}},
		{number: "35", name: "cancelling partial join for multiple instances",
			nodes: `"E": {"each": {"list": "[60000, 1, 1]", "do": "test.step.v1", "need": 2, "rest": "cancel"}, "in": {"ms": "item"}, "to": "A"}, A>`, want: "A1 E/item-1 E/item2"},
		{number: "37", name: "local synchronizing merge",
			nodes: `"F": {"fork": ["A", "B"]}, A>J B(200)>X "X": {"choose": [{"if": "input.n > 2", "to": "J"}], "else": "C"}, C> "J": {"join": "taken", "to": "D"}, D>`,
			input: `{"n": 1}`, want: "A1 B1 C1 D1", act: func(s *site, _ uuid.UUID) { s.done(s.last("D")); s.before("B", "D") }},
		{number: "38", name: "general synchronizing merge",
			nodes: `"F": {"fork": ["A", "B"]}, A>J "B": {"do": "test.step.v1", "in": {"n": "'B' in steps ? steps.B.n + 1.0 : 1.0", "ms": "100"}, "to": "X"},
				"X": {"choose": [{"if": "steps.B.n < 3.0", "to": "B"}, {"if": "steps.B.n > 5.0", "to": "J"}], "else": "over"}, "over": {"end": true}, "J": {"join": "taken", "to": "D"}, D>`,
			want: "A1 B3 D1", act: func(s *site, _ uuid.UUID) { s.done(s.last("D")); s.before("B", "D") }},
		{number: "41", name: "thread merge", nodes: `"F": {"fork": ["A", "B"]}, A>M B>M M>J "J": {"join": {"need": 2}, "to": "C"}, C>`, want: "A1 B1 C1 M2"},
		{number: "42", name: "thread split", nodes: `"F": {"fork": ["A", "A", "A"]}, A>`, want: "A3"},
		{number: "43", name: "explicit termination",
			nodes: `"F": {"fork": ["A", "B"]}, A(100)>over "over": {"terminate": true}, B(60000)>C C>`, want: "A1 B-1"},
	} {
		t.Run(p.number+" "+p.name, func(t *testing.T) {
			s := newSite(t)
			if p.input == "" {
				p.input = `{}`
			}
			if p.status == "" {
				p.status = graph.Completed
			}
			i := s.start(s.deployShort(p.nodes), p.input)
			if p.act != nil {
				p.act(s, i)
			}
			s.status(i, p.status)
			if got := s.steps(i); got != p.want {
				t.Errorf("steps: %s, want %s", got, p.want)
			}
			s.healthy()
		})
	}
}

var (
	shortStep = regexp.MustCompile(`(?:^|[ {])([A-Z])(?:\((\d+)\))?>([A-Za-z]*)`)
	firstNode = regexp.MustCompile(`^"([A-Za-z]+)"`)
	between   = regexp.MustCompile(`\}\s+"`)
)

// deployShort deploys nodes as a process named "itself", which starts at the first of them. In nodes, A(ms)>B stands
// for a step A that takes ms milliseconds and leads to B.
func (s *site) deployShort(nodes string) string {
	s.t.Helper()
	nodes = shortStep.ReplaceAllStringFunc(nodes, func(short string) string {
		m := shortStep.FindStringSubmatch(short)
		text := fmt.Sprintf(`%q: {"do": "test.step.v1", "in": {"ms": "%s"}`, m[1], cmp.Or(m[2], "0"))
		if m[3] != "" {
			text += fmt.Sprintf(`, "to": %q`, m[3])
		}
		return strings.TrimRight(short[:1], m[1]) + text + "}"
	})
	text := between.ReplaceAllString(nodes, `}, "`)
	return s.deployAs("itself", firstNode.FindStringSubmatch(text)[1], text)
}

// last waits for a run of a node, and returns the latest one.
func (s *site) last(node string) (id uuid.UUID) {
	s.t.Helper()
	await(s.t, "a run of "+node, func() bool {
		return s.pool.QueryRow(s.t.Context(), `SELECT id FROM activity_instance WHERE node_id = $1 ORDER BY created_at DESC LIMIT 1`, node).Scan(&id) == nil
	})
	return id
}

// succeeded waits until n runs of a node have succeeded.
func (s *site) succeeded(node string, n int) {
	s.t.Helper()
	await(s.t, node+" to succeed", func() bool {
		return query[int](s.t, s.pool, `SELECT count(*) FROM activity_instance WHERE node_id = $1 AND status = 'succeeded'`, node) == n
	})
}

// steps returns how often each step of an instance succeeded and was cancelled, in the form of want in TestPatterns.
func (s *site) steps(i uuid.UUID) string {
	s.t.Helper()
	return strings.TrimSpace(query[string](s.t, s.pool, `
		SELECT coalesce(string_agg(word, ' ' ORDER BY word), '')
		FROM (SELECT node_id || CASE status WHEN 'cancelled' THEN '-' ELSE '' END || count(*) AS word
		      FROM activity_instance
		      WHERE instance_id = $1 AND (run_type = 'test.step.v1' OR status = 'cancelled' AND run_type IS NOT NULL)
		      GROUP BY node_id, status) AS w`, i))
}
