// Package survival tests what the shipped programs survive: real signals, real crashes, and a server that goes away.
// It has tests only.
package survival
