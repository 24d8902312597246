package graph

// Copy makes an engine insert every event of the core into a table, too: also those that runs report.
func Copy(e *Engine, table string) { e.copies = table }
