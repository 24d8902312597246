package graph

// maxSubject is the maximum length of the name of a message or signal, in bytes.
const maxSubject = 200

// The run types by which programs and people send requests to the engine, see command.go. The first four are open to
// every role that may enqueue runs; the others are for operators.
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

// The types of the runs that the engine enqueues for itself. The database refuses such runs from anybody else. It also
// refuses, from anybody else, runs with a token or a node and starts with startPayload.Parent.
const (
	arriveType = "graph.arrive.v1"  // a message, a signal or the end of a called instance has arrived for a token
	matchType  = "graph.match.v1"   // the token that a message was brought to is gone: match the message again
	cutOffType = "graph.cut_off.v1" // somebody has cancelled or deleted a step
	timerType  = "graph.timer.v1"   // a timer of a token is due
	undoType   = "graph.undo.v1"    // look for the next step to undo; due once the leases that were cut off have expired

	// No run has this type. A worker that lists it among its handlers, in its row, is one that accepts a signal whose run
	// is not over yet.
	broadcastType = "graph.broadcast.v1"
)
