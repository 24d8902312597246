package pgtest

// AwaitFor is Await with another limit.
var AwaitFor = awaitFor
