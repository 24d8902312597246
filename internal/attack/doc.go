// Package attack changes every column of every table in every state, as every role, calls every function, and checks
// that nothing suffers except what was changed. It has tests only.
//
// To read it: a world is a database with things in all states (world_test.go). The mutations come from the catalogs
// (generate_test.go). The actors are in actors_test.go, together with the table of rights. Mutations that were
// accepted are done in a copy of the world, beside workers and a dispatcher, and judged (verdict_test.go). Failures
// are narrowed down to one statement (report_test.go). What is granted to each role is listed from the catalogs
// (granted_test.go), and what it can change through functions from calls (rights_test.go).
package attack
