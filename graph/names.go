package graph

// maxSubject is the most bytes of the name of a message or signal.
const maxSubject = 200

// The run types by which others ask something of the engine, see command.go. Whoever may enqueue may enqueue the first four; the others are for operators.
const (
	startType        = "graph.start.v1"         // startPayload
	messageType      = "graph.message.v1"       // messagePayload
	signalType       = "graph.signal.v1"        // signalPayload
	completeTaskType = "graph.complete_task.v1" // completeTaskPayload
	cancelType       = "graph.cancel.v1"        // cancelPayload
	failType         = "graph.fail.v1"          // failPayload
	retryType        = "graph.retry.v1"         // retryPayload
	restartType      = "graph.restart.v1"       // restartPayload
)

// Runs that the engine enqueues for itself. The database refuses them from anybody else, and so it does
// runs with a token or a node, and startPayload.Parent.
const (
	arriveType = "graph.arrive.v1"  // something that a token waits for has come
	matchType  = "graph.match.v1"   // a message is free again
	cutOffType = "graph.cut_off.v1" // somebody has cancelled or deleted a step
	timerType  = "graph.timer.v1"   // a token has waited long enough
	undoType   = "graph.undo.v1"    // what is undone next is to be found; leases that were cut off have run out by then

	// Nobody enqueues this: that a worker has a handler for it, which its row says, tells that it takes a signal whose
	// run is not over yet.
	broadcastType = "graph.broadcast.v1"
)
