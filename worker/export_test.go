package worker

import "github.com/simple-workflow/simple-workflow/internal/hook"

// Hooks returns the hooks that are called before that of Processes, to be set by tests.
func (c *Config) Hooks() *[]hook.Hook { return &c.hooks }
