// Package survival tests what shipped processes survive: real signals, real crashes, a
// server that goes away. It has tests only.
package survival
