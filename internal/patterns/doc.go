// Package patterns runs the workflow patterns that docs/processes.md lists, each as the process
// that the table says, on one worker and a real database. It has tests only.
package patterns
