package shipped

import "time"

// Defaults of a dispatcher.
const (
	EventBatch        = 1000
	EventBatchBytes   = 8 << 20
	EventPollInterval = 20 * time.Millisecond
	EventClaim        = time.Minute
	EventAttempts     = 20
	EventGrace        = 10 * time.Second
)

// Defaults of sinks.
const (
	WebhookTimeout  = 10 * time.Second // for a request and its answer
	ProgramPatience = 30 * time.Second // for a program to answer
	ProgramAtOnce   = 16               // most events that a program has at once
	ProgramGrace    = 5 * time.Second  // for a program to end
)
