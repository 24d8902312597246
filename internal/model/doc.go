// Package model tells in one short function what a run may do, and holds the product to it:
// the function alone against what must never happen, then against PostgreSQL step by step, and
// a register with a token against what several workers see at once. It has tests only.
//
// More of it: go test ./internal/model -rapid.checks=5000 -rapid.steps=100 -histories=1000
package model
