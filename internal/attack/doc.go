// Package attack changes every column of every table in every state, as every role, and calls every
// function, and looks whether anything but what was changed suffers. It has tests only.
//
// The way through it: a world is a database with things in all states (world_test.go); what is tried
// comes from the catalogs (generate_test.go), as whom from actors_test.go, which has the table of
// rights; what was accepted is done to a copy of the world, beside workers and a dispatcher, and
// judged (verdict_test.go); what fails is narrowed down to one statement (report_test.go). What each role has is
// listed from the catalogs (granted_test.go), and what it can change by functions from calls (rights_test.go).
package attack
