package main

import (
	"os/exec"
	"strings"
	"sync"
)

// commitOnce asks git once. Only changes to the sources of the engine and the bench make it a changed state.
var commitOnce = sync.OnceValue(func() string {
	out, err := exec.Command("git", "rev-parse", "--short=10", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	name := strings.TrimSpace(string(out))
	changed, err := exec.Command("git", "status", "--porcelain", "--", "..", ":!RESULTS.md", ":!results.json", ":!../docs").Output()
	if err == nil && len(changed) > 0 {
		name += " with changes"
	}
	return name
})
