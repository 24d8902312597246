//go:build unix

package program

import (
	"os/exec"
	"syscall"
)

// ownGroup starts the program in a process group of its own, so that it does not get the signals of the dispatcher's
// terminal. It ends when the sink is closed.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// killGroup kills the program and the processes that it started.
func killGroup(cmd *exec.Cmd) { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
