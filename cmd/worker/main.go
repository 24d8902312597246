// Command worker leases due runs, executes their handlers and records the outcomes. Its
// settings come from the environment; see worker --help.
package main

import "github.com/simple-workflow/simple-workflow/service"

func main() { service.Main(service.Program{Name: "worker"}) }
