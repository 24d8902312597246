// Package graph executes process graphs on top of runs and leases.
//
// A process consists of nodes and edges. Tokens mark where an instance of the process is. A token at a step has a run
// (workflow_run.token_id), which any worker leases by its type. Settling that run moves the token in the same
// transaction. The token passes the gateways, forks and joins up to the next step in that transaction, so they need no
// leases.
//
// # One token through a fork and a join
//
//	        ┌─► B ─┐
//	A ─► F ─┤      ├─► J ─► D      F forks, J joins all
//	        └─► C ─┘
//
//	settled    what the settle transaction does to the instance, whose row it has locked
//	run of A   Token 1 leaves A and enters F. It becomes Completed. Tokens 2 and 3, of a new group,
//	           enter B and C. They become Ready: each has a run.
//	run of B   Token 2 leaves B and arrives at J. It becomes Waiting.
//	run of C   Token 3 arrives at J, which expects no more. J fires: tokens 2 and 3 become Completed,
//	           and token 4, of the group that token 1 was in, enters D. It becomes Ready.
//	run of D   Token 4 has no edge to follow. It becomes Completed. No token is left, so the
//	           instance becomes COMPLETED.
//
// The scripts in testdata show what the core decides for this process and for two dozen others. To follow them in the
// code, read done → goOn → leave → follow → enter, and from there forkAll → fork, arrive → fire, or startStep.
//
// # The files
//
// [Definition] is what an author writes. [Compile] checks it and returns a [Process]. The core walks the process: given
// the loaded part of an instance and one event, it decides what changes. It uses no database and no clock and draws no
// ids, so the same instance and event always give the same changes, and tests run it in memory. [Engine] is the shell,
// a hook in the worker's settle transaction: it locks and loads instances, calls the core, and writes the changes.
//
// The files form four groups. A group may use the groups listed before it, and none listed after it. In particular, the
// core and the definitions refer to nothing that reads or writes a database. TestSeamOfGraph in internal/arrows enforces
// this. It lists every file, so a new file has to be added there.
//
//   - definitions: definition, duration; kind is the table of node kinds; compile, check, shape, flow and
//     expression check it; process is its compiled form; label and picture draw it
//   - the core: instance holds the loaded state and the changes; core has the events; token, move, join, each, waiting,
//     saga, end and fact move tokens; legacy restarts a failed instance as another one
//   - requests: command has the functions by which programs start, signal, cancel and retry; payload has the payloads of these
//     runs
//   - the shell: run_type has, for each of the engine's own run types, its handler, what it locks and what settling it does;
//     answer has the handlers; lock and load* read; act and start pass settled runs to the core; write* and message write;
//     lasting chooses how statements are planned
//
// # Changing it
//
// To add a kind of node, add its key to [Node], its row to verbs in kind.go, and its case to entering in move.go; a
// test fails if one of them is missing. Then describe the kind in docs/processes.md, and add it to a script in testdata
// and to torture/processes.go. To add a run type of the engine's own, add its row to run_type.go.
//
// A change of how tokens move belongs to the core. The scripts in testdata show what it changes. make graph-random,
// graph-mortal and graph-statements then execute processes under workers that die. Exported names are promises
// (docs/api.txt); everything else may change. The worker calls the engine only through internal/hook. Workers of two
// versions may run at the same time, so what is stored must stay readable for the version before.
//
// Methods of Engine execute runs, methods of scene load instances and turn settled runs into events, methods of instance
// decide, and methods of writer write.
package graph
