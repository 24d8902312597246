package run

// A Task is a type of runs, with the type of their payload. Declare it once, for whoever enqueues and for whoever handles: then neither
// name nor payload can be mistyped.
//
//	var Charge = run.Task[ChargeRequest]("billing.charge.v1")
//
//	run.Enqueue(ctx, tx, Charge.New(ChargeRequest{Order: 17}))
//	worker.Handle(mux, Charge, charge)
type Task[In any] string

// New returns a run of the task that is to be enqueued. Its other fields may be set: a delay, a key, a priority.
func (t Task[In]) New(payload In) New { return New{Type: string(t), Payload: payload} }
