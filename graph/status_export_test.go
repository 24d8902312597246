package graph

// Status is the state of an instance.
type Status = status

// The states that tests ask for.
const (
	Waiting   = statusWaiting
	Completed = statusCompleted
	Failed    = statusFailed
	Cancelled = statusCancelled
)
