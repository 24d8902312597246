package worker

import "github.com/simple-workflow/simple-workflow/internal/hook"

// Hooks are those that act before that of Processes.
func (c *Config) Hooks() *[]hook.Hook { return &c.hooks }
