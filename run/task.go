package run

// A Task is a type of runs, together with the Go type of their payload. Declare it once and use it both to enqueue and to
// handle runs. Then the compiler checks that name and payload are the same on both sides.
//
//	var Charge = run.Task[ChargeRequest]("billing.charge.v1")
//
//	run.Enqueue(ctx, tx, Charge.New(ChargeRequest{Order: 17}))
//	worker.Handle(mux, Charge, charge)
type Task[In any] string

// New returns a run of the task, to be enqueued. The caller may set its other fields, such as a delay, a key or a
// priority.
func (t Task[In]) New(payload In) New { return New{Type: string(t), Payload: payload} }
