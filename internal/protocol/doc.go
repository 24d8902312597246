// Package protocol has models of how runs are leased, settled and taken back: as the engine does it, and as
// it might do more. All that can happen within small bounds is explored (make model), and what really happened, as a
// trace tells it, is replayed through the same steps. No program imports it; the tests of internal/survival and
// the torture do. README.md says what is in which file, and what was found.
package protocol
