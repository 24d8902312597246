// Package graph executes process graphs. It is built on runs and leases.
//
// A process is nodes and edges. Tokens mark where an instance of it is. A token at a step has
// a run (workflow_run.token_id), which any worker leases by its type. Settling that run moves
// the token, in the same transaction: gateways, forks and joins between two steps cost no lease
// of their own.
//
// # One token through a fork and a join
//
//	        ┌─► B ─┐
//	A ─► F ─┤      ├─► J ─► D      F forks, J joins all
//	        └─► C ─┘
//
//	settled    what the settle transaction does to the instance, whose row it has locked
//	run of A   Token 1 leaves A and enters F. It is Completed. Tokens 2 and 3, of a new group,
//	           enter B and C. They are Ready: each has a run.
//	run of B   Token 2 leaves B and arrives at J. It is Waiting.
//	run of C   Token 3 arrives at J, the last that J expects. J fires: tokens 2 and 3 are Completed,
//	           and token 4, of the group that token 1 was in, enters D. It is Ready.
//	run of D   Token 4 has no edge to follow. It is Completed. No token is left, and the
//	           instance is COMPLETED.
//
// What the core decides for this, and for a dozen other processes, stands in testdata, as scripts to read. The calls: done → goOn → leave → follow → enter, and from there fork, arrive → fire, or startStep.
//
// # The files
//
// [Definition] is what an author writes. [Compile] checks it and makes a [Process]. The core walks the process: it takes
// an instance, as far as it is known, and one event, and decides what changes. It knows no database, no clock
// and no new ids. [Engine] is the shell, a hook in the worker's settle transaction: it locks, loads, lets the core
// decide, and writes.
//
// The files are in four groups, from below. Each refers to those above it in this list, and to none that follow; a test of
// internal/arrows keeps that.
//
//   - definitions: definition, duration; kind is the table of node kinds; compile, check, shape, flow and
//     expression check; process is what is walked
//   - the core: instance is what is known of one, and what changes; core has the events; token, move, join, each, waiting,
//     saga, end and fact say how tokens move; legacy starts again what has failed
//   - requests: command has what programs ask of instances, payload what those runs carry
//   - the shell: run_type says for each of the engine's own run types who answers it, what is locked for it, and what it does;
//     answer has the handlers; lock and load* read, act and start tell the core what was settled, write* and message write;
//     lasting says how statements are planned
//
// To add a kind of node, give [Node] its key, verbs in kind.go its row, and entering in move.go what happens when a token comes.
// To add a run type of the engine's, give run_type.go its row.
//
// A method of Engine answers a run, one of scene reads how it was settled, one of instance decides, one of writer writes.
package graph
