// Package graph runs process graphs on the runs and leases that there are.
//
// A process is nodes and edges; tokens mark where an instance of it is. A token at a step has
// a run (workflow_run.token_id), which any worker leases by its type. Settling that run moves
// the token, in the same transaction: gateways, forks and joins between two steps cost no lease
// of their own.
//
// The way through the package: [Definition] is what an author writes, [Compile] checks it and
// makes a [Process], which the core (core.go) walks: it takes an instance as far as it is known
// and one event, and decides what changes, without a database, a clock or new ids. [Engine] is
// the shell: it locks and loads (load.go), has the core decide, and writes (write.go), as a
// hook in the worker's settle transaction (engine.go).
package graph
