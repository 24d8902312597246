// Package model describes in one short function what a run may do, and checks the product against it. First it checks
// the function alone against what must never happen, then PostgreSQL against the function step by step, and then the
// observations of concurrent workers against a register with a token. It has tests only.
//
// To run more: go test ./internal/model -rapid.checks=5000 -rapid.steps=100 -histories=1000
package model
