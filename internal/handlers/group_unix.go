//go:build unix

package handlers

import (
	"os/exec"
	"syscall"
)

const programsWork = true

func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func terminateGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGTERM) } // an error means that nothing is left of it
func killGroup(pid int)      { _ = syscall.Kill(-pid, syscall.SIGKILL) }

func groupAlive(pid int) bool { return syscall.Kill(-pid, 0) == nil }
