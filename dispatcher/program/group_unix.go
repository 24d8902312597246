//go:build unix

package program

import (
	"os/exec"
	"syscall"
)

// ownGroup has the program not get the signals of our terminal: it ends after us.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// killGroup kills the program with what it has started.
func killGroup(cmd *exec.Cmd) { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
