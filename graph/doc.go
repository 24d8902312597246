// Package graph runs process graphs on the runs and leases that there are.
//
// A process is nodes and edges; tokens mark where an instance of it is. A token at a step has
// a run (workflow_run.token_id), which any worker leases by its type. Settling that run moves
// the token, in the same transaction: gateways, forks and joins between two steps cost no lease
// of their own.
//
// The way through the package: [Definition] is what an author writes, [Compile] checks it and
// makes a [Process], which the core walks: it takes an instance as far as it is known (instance.go)
// and one event (core.go), and decides what changes, without a database, a clock or new ids.
// [Engine] is the shell: as a hook in the worker's settle transaction it locks (lock.go), loads
// (load.go), has the core decide (act.go) and writes (write.go); the runs that ask for something
// have their handlers in handler.go.
package graph
