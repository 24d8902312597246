package main

import "syscall"

// attributes shield the workers from the terminal's signals, and end them if the demo is killed.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
