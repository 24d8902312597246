// Package graph runs process graphs on the runs and leases that there are.
//
// A process is nodes and edges; tokens mark where an instance of it is. A token at a step has
// a run (workflow_run.token_id), which any worker leases by its type. Settling that run moves
// the token, in the same transaction: gateways, forks and joins between two steps cost no lease
// of their own.
//
// The way through the package: [Definition] is what an author writes, [Compile] checks it and
// makes a [Process], which the core walks: it takes an instance as far as it is known, and one event,
// and decides what changes, without a database, a clock or new ids. [Engine] is the shell: as a hook
// in the worker's settle transaction it locks, loads, has the core decide, and writes.
//
//   - authors: definition, builder, place, duration; compile, shape, flow and expression check
//   - the core: process is what is walked, instance what is known of one and changed; core has its
//     events; token, move, join, each, waiting, saga, end and fact say how tokens move
//   - the shell: lock and load* read, act and start tell the core what was settled, write* and
//     message write; lasting says how statements are planned; answer has the handlers of runs that
//     ask for something
//
// A method of Engine answers a run, one of scene reads how it was settled, one of instance decides,
// one of writer writes.
package graph
