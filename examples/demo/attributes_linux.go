package main

import "syscall"

// attributes keep the terminal's signals from the workers, and let none of them outlive a
// demo that is killed.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
