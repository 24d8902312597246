// Package protocol has models of how runs are leased, settled and taken back: how the engine does it, and designs
// that were considered. The search explores everything that can happen within small bounds (make model). The replay
// checks a trace of what really happened against the same steps. No program imports the package; the tests of
// internal/survival and torture do. README.md describes the files and the findings.
package protocol
