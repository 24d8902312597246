package graph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/graph"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
	"github.com/simple-workflow/simple-workflow/internal/worktest"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// install reads and deploys a definition that is known to be right.
func install(ctx context.Context, pool *pgxpool.Pool, text string) {
	definition, err := graph.Parse([]byte(text))
	if err != nil {
		panic(err)
	}
	if _, err := graph.Deploy(ctx, pool, definition); err != nil {
		panic(err)
	}
}

// purchase is the input of the processes below.
type purchase struct {
	Order string `json:"order"`
}

// printing returns a handler that prints its words and the number of the order.
func printing(words string) func(context.Context, purchase) (struct{}, error) {
	return func(_ context.Context, in purchase) (struct{}, error) {
		fmt.Println(words, in.Order)
		return struct{}{}, nil
	}
}

// undoing returns a handler of an undo step, which is given the input of what it undoes.
func undoing(words string) func(context.Context, undo) (struct{}, error) {
	return func(ctx context.Context, in undo) (struct{}, error) { return printing(words)(ctx, in.Input) }
}

type undo struct {
	Input purchase `json:"input"`
}

// A purchase and the instance that ships it are stored together, or not at all.
func ExampleStart() {
	ctx, pool, done := pgtest.Example()
	defer done()
	_, _ = pool.Exec(ctx, `CREATE TABLE purchase (id text PRIMARY KEY)`)
	install(ctx, pool, `{"process": "order", "version": 1, "start": "pack", "nodes": {
		"pack": {"do": "shop.pack.v1", "to": "ship"},
		"ship": {"do": "shop.ship.v1"}}}`)

	var instance uuid.UUID
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		if _, err := tx.Exec(ctx, `INSERT INTO purchase VALUES ('o-17')`); err != nil {
			return err
		}
		instance, err = graph.Start(ctx, tx, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
		return err
	})
	fmt.Println("started:", err)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.pack.v1", printing("packing"))
	worker.Handle(mux, "shop.ship.v1", printing("shipping"))
	fmt.Println(worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// started: <nil>
	// packing o-17
	// shipping o-17
	// COMPLETED
}

// Two starts with one key are one instance, if they ask for the same.
func ExampleStart_key() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "paid", "nodes": {
		"paid": {"await": {"message": "paid", "key": "input.order"}}}}`)

	mux := worker.NewMux()
	for _, input := range []string{"o-17", "o-17", "o-18"} {
		asked, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Key: "o-17", Input: purchase{input}})
		r := worktest.Finish(ctx, pool, mux, asked)
		fmt.Println(r.Status)
	}
	var instances int
	_ = pool.QueryRow(ctx, `SELECT count(*) FROM process_instance`).Scan(&instances)
	fmt.Println("instances:", instances)
	// Output:
	// succeeded
	// succeeded
	// failed
	// instances: 1
}

// A list has a step for each of its elements. Their results are in the order of the elements.
func ExampleStart_each() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "pack", "output": "steps.pack", "nodes": {
		"pack": {"each": {"list": "input.items", "do": "shop.pack.v1", "limit": 10}, "in": {"item": "item"}, "to": "done"},
		"done": {"end": true}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.pack.v1", func(_ context.Context, in struct {
		Item string `json:"item"`
	}) (string, error) {
		return in.Item + " is packed", nil
	})
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: map[string][]string{"items": {"tea", "cup"}}})
	status := worktest.Complete(ctx, pool, mux, instance)
	var output string
	_ = pool.QueryRow(ctx, `SELECT output_payload FROM process_instance WHERE id = $1`, instance).Scan(&output)
	fmt.Println(status, output)
	// Output: COMPLETED ["tea is packed", "cup is packed"]
}

// When a step declares that it has failed, the steps before it are undone, the latest first.
func ExampleStart_saga() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "reserve", "nodes": {
		"reserve": {"do": "shop.reserve.v1", "undo": "shop.release.v1", "to": "charge"},
		"charge":  {"do": "shop.charge.v1",  "undo": "shop.refund.v1",  "to": "ship"},
		"ship":    {"do": "shop.ship.v1"}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.reserve.v1", printing("reserve for"))
	worker.Handle(mux, "shop.charge.v1", printing("charge"))
	worker.Handle(mux, "shop.ship.v1", func(context.Context, purchase) (struct{}, error) {
		return struct{}{}, run.Permanent(run.WithCode("BROKEN", errors.New("the vase broke")))
	})
	worker.Handle(mux, "shop.refund.v1", undoing("refund"))
	worker.Handle(mux, "shop.release.v1", undoing("release what was reserved for"))
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	fmt.Println(worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// reserve for o-17
	// charge o-17
	// refund o-17
	// release what was reserved for o-17
	// FAILED
}

// An operator cancels an instance, and what it has done is undone first.
func ExampleCancel() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "reserve", "nodes": {
		"reserve": {"do": "shop.reserve.v1", "undo": "shop.release.v1", "to": "paid"},
		"paid":    {"await": {"message": "paid", "key": "input.order"}}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.reserve.v1", printing("reserve for"))
	worker.Handle(mux, "shop.release.v1", undoing("release what was reserved for"))
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	waiting(ctx, pool, mux, instance)

	_, err := graph.Cancel(ctx, pool, graph.Cancellation{Instance: instance, Reason: "withdrawn", By: "anna", Compensate: true})
	fmt.Println(err, worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// reserve for o-17
	// release what was reserved for o-17
	// <nil> CANCELLED
}

// waiting runs a worker until nothing of the instances is left to do for now.
func waiting(ctx context.Context, pool *pgxpool.Pool, mux *worker.Mux, instances ...uuid.UUID) {
	worktest.Until(ctx, pool, mux, func() (all bool) {
		_ = pool.QueryRow(ctx, `SELECT count(*) = $2 FROM process_instance WHERE id = ANY ($1) AND status = 'WAITING'`, instances, len(instances)).Scan(&all)
		return all
	})
}

// A message goes to the instance that waits for its name and key. One that is sent before anybody waits is kept for a day.
func ExampleSend() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "paid", "nodes": {
		"paid": {"await": {"message": "paid", "key": "input.order"}, "to": "ship"},
		"ship": {"do": "shop.ship.v1", "in": {"order": "input.order", "cents": "steps.paid.cents"}}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.ship.v1", func(_ context.Context, in struct {
		Order string `json:"order"`
		Cents int    `json:"cents"`
	}) (struct{}, error) {
		fmt.Println("shipping", in.Order, "for", in.Cents)
		return struct{}{}, nil
	})

	// The message comes first. ID is the sender's: a message that is sent twice counts once.
	paid := graph.Message{Name: "paid", Key: "o-17", Payload: map[string]int{"cents": 4900}, ID: "transfer-4711"}
	for range 2 {
		if _, err := graph.Send(ctx, pool, paid); err != nil {
			panic(err)
		}
	}
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	fmt.Println(worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// shipping o-17 for 4900
	// COMPLETED
}

// A signal goes to all that wait for it now. The result of its run says how many it has reached.
func ExampleSignal() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "preorder", "version": 1, "start": "released", "nodes": {
		"released": {"await": {"signal": "released"}, "to": "ship"},
		"ship":     {"do": "shop.ship.v1"}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.ship.v1", func(context.Context, purchase) (struct{}, error) { return struct{}{}, nil })
	one, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "preorder", Input: purchase{"o-17"}})
	two, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "preorder", Input: purchase{"o-18"}})
	waiting(ctx, pool, mux, one, two)

	asked, _ := graph.Signal(ctx, pool, "released", nil)
	r := worktest.Finish(ctx, pool, mux, asked)
	fmt.Println(string(r.Result))
	fmt.Println(worktest.Complete(ctx, pool, mux, one), worktest.Complete(ctx, pool, mux, two))
	// Output:
	// {"reached": 2, "set_aside": 0}
	// COMPLETED COMPLETED
}

// A task waits for a person. Her answer decides how the process goes on.
func ExampleComplete() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "approve", "nodes": {
		"approve": {"human": {"groups": ["sales"], "due": "PT4H"}, "to": "answer", "on": [{"after": "P2D", "to": "refuse"}]},
		"answer":  {"choose": [{"if": "steps.approve.ok", "to": "ship"}], "else": "refuse"},
		"ship":    {"do": "shop.ship.v1"},
		"refuse":  {"do": "shop.regret.v1"}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.ship.v1", printing("shipping"))
	worker.Handle(mux, "shop.regret.v1", printing("no"))
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	waiting(ctx, pool, mux, instance)

	var task uuid.UUID
	var claimed string
	_ = pool.QueryRow(ctx, `SELECT id, process_task_assign(id, 'anna') FROM user_task WHERE state = 'open' AND groups @> '{sales}'`).Scan(&task, &claimed)
	fmt.Println(claimed)
	_, err := graph.Complete(ctx, pool, graph.Completion{Task: task, By: "anna", Output: map[string]bool{"ok": true}})
	fmt.Println(err, worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// assigned to anna
	// shipping o-17
	// <nil> COMPLETED
}

// A step that fails for a reason which its process does not foresee opens an incident. Once the cause is mended, it is retried.
func ExampleRetry() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "ship", "nodes": {"ship": {"do": "shop.ship.v1", "attempts": 1}}}`)

	mended := false
	mux := worker.NewMux()
	worker.Handle(mux, "shop.ship.v1", func(ctx context.Context, in purchase) (struct{}, error) {
		if !mended {
			return struct{}{}, errors.New("the printer is out of paper")
		}
		return printing("shipping")(ctx, in)
	})
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	var code, message string
	worktest.Until(ctx, pool, mux, func() bool {
		err := pool.QueryRow(ctx, `SELECT code, message FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, instance).Scan(&code, &message)
		return err == nil
	})
	fmt.Println(code, "-", message)

	mended = true
	_, err := graph.Retry(ctx, pool, graph.Retrial{Instance: instance, By: "anna"})
	fmt.Println(err, worktest.Complete(ctx, pool, mux, instance))
	// Output:
	// handler_error - the printer is out of paper
	// shipping o-17
	// <nil> COMPLETED
}

// A failed instance is started again from where it failed: what is done, and was not undone, is not done again.
func ExampleRestart() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "pack", "nodes": {
		"pack": {"do": "shop.pack.v1", "to": "ship"},
		"ship": {"do": "shop.ship.v1"}}}`)

	closed := true
	mux := worker.NewMux()
	worker.Handle(mux, "shop.pack.v1", printing("packing"))
	worker.Handle(mux, "shop.ship.v1", func(ctx context.Context, in purchase) (struct{}, error) {
		if closed {
			return struct{}{}, run.Permanent(errors.New("the post office is closed"))
		}
		return printing("shipping")(ctx, in)
	})
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	fmt.Println(worktest.Complete(ctx, pool, mux, instance))

	closed = false
	asked, _ := graph.Restart(ctx, pool, instance, "anna")
	var started graph.Started
	if err := json.Unmarshal(worktest.Finish(ctx, pool, mux, asked).Result, &started); err != nil {
		panic(err)
	}
	fmt.Println(started.After == instance, worktest.Complete(ctx, pool, mux, started.Instance))
	// Output:
	// packing o-17
	// FAILED
	// shipping o-17
	// true COMPLETED
}

// A version that was deployed never changes: an edited definition needs a higher version. Instances stay with theirs.
func ExampleDeploy() {
	ctx, pool, done := pgtest.Example()
	defer done()

	for _, text := range []string{
		`{"process": "order", "version": 1, "start": "ship", "nodes": {"ship": {"do": "shop.ship.v1"}}}`,
		`{"process": "order", "version": 1, "start": "ship", "nodes": {"ship": {"do": "shop.ship.v1"}}}`,
		`{"process": "order", "version": 1, "start": "ship", "nodes": {"ship": {"do": "shop.ship.v2"}}}`,
		`{"process": "order", "version": 2, "start": "ship", "nodes": {"ship": {"do": "shop.ship.v2"}}}`,
	} {
		definition, err := graph.Parse([]byte(text))
		if err != nil {
			panic(err)
		}
		_, err = graph.Deploy(ctx, pool, definition)
		fmt.Println("deployed:", err == nil)
	}
	// Output:
	// deployed: true
	// deployed: true
	// deployed: false
	// deployed: true
}

// What is wrong with a definition is found before it is deployed, each mistake with its place and what to do.
func ExampleParse() {
	definition, err := graph.Parse([]byte(`{"process": "order", "version": 1, "start": "pack", "nodes": {
		"pack": {"do": "shop.pack.v1", "to": "shp"},
		"ship": {"do": "shop.ship.v1"}}}`))
	fmt.Println(err) // its form is right

	_, _, err = graph.Compile(definition)
	var invalid *graph.InvalidError
	if errors.As(err, &invalid) {
		for _, f := range invalid.Findings {
			fmt.Println(f.Path, f.Reason, "→", f.Fix)
		}
	}
	// Output:
	// <nil>
	// /nodes/pack/to there is no node "shp" → did you mean "ship"?
}

// A definition is drawn as a Mermaid flowchart, which GitHub and many editors show.
func ExampleMermaid() {
	definition, err := graph.Parse([]byte(`{"process": "order", "version": 1, "start": "size", "nodes": {
		"size":    {"choose": [{"if": "input.cents > 100000", "to": "approve"}], "else": "ship"},
		"approve": {"human": {"groups": ["sales"]}, "to": "ship"},
		"ship":    {"do": "shop.ship.v1"}}}`))
	if err != nil {
		panic(err)
	}
	fmt.Print(graph.Mermaid(definition, nil))
	// Output:
	// flowchart TD
	//   n1(( ))
	//   n2{"size<br/>choose"}
	//   n3[/"approve<br/>human sales"/]
	//   n4["ship<br/>shop.ship.v1"]
	//   n1 --> n2
	//   n2 -->|"input.cents #62; 100000"| n3
	//   n2 -->|"else"| n4
	//   n3 --> n4
}

// A definition may be written in Go. Compile checks it, and JSON gives the text that workflowctl define takes.
func ExampleDefinition() {
	definition := &graph.Definition{Process: "order", Version: 1, Start: "pack", Nodes: map[string]*graph.Node{
		"pack": {Do: "shop.pack.v1", To: "ship"},
		"ship": {Do: "shop.ship.v1", In: map[string]string{"parcel": "steps.pack.parcel"}},
	}}
	_, findings, err := graph.Compile(definition)
	fmt.Println(findings, err)
	text, err := definition.JSON()
	fmt.Println(string(text), err)
	// Output:
	// [] <nil>
	// {"process":"order","version":1,"start":"pack","nodes":{"pack":{"do":"shop.pack.v1","to":"ship"},"ship":{"do":"shop.ship.v1","in":{"parcel":"steps.pack.parcel"}}}} <nil>
}

// What an incident has stopped can be given up: the instance fails, and what it has done is undone.
func ExampleFail() {
	ctx, pool, done := pgtest.Example()
	defer done()
	install(ctx, pool, `{"process": "order", "version": 1, "start": "reserve", "nodes": {
		"reserve": {"do": "shop.reserve.v1", "undo": "shop.release.v1", "to": "ship"},
		"ship":    {"do": "shop.ship.v1", "attempts": 1}}}`)

	mux := worker.NewMux()
	worker.Handle(mux, "shop.reserve.v1", printing("reserve for"))
	worker.Handle(mux, "shop.release.v1", undoing("release what was reserved for"))
	worker.Handle(mux, "shop.ship.v1", func(context.Context, purchase) (struct{}, error) {
		return struct{}{}, errors.New("the printer is out of paper")
	})
	instance, _ := graph.Start(ctx, pool, graph.NewInstance{Process: "order", Input: purchase{"o-17"}})
	open := 0
	worktest.Until(ctx, pool, mux, func() bool {
		_ = pool.QueryRow(ctx, `SELECT count(*) FROM incident WHERE instance_id = $1 AND resolved_at IS NULL`, instance).Scan(&open)
		return open == 1
	})
	_, err := graph.Fail(ctx, pool, instance, "", "anna") // the reason is the incident's
	fmt.Println(err, worktest.Complete(ctx, pool, mux, instance))
	var reason string
	_ = pool.QueryRow(ctx, `SELECT failure_reason FROM process_instance WHERE id = $1`, instance).Scan(&reason)
	fmt.Println(reason)
	// Output:
	// reserve for o-17
	// release what was reserved for o-17
	// <nil> FAILED
	// ship: handler_error: the printer is out of paper
}
