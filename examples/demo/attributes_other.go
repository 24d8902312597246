//go:build !linux

package main

import "syscall"

// attributes keep the terminal's signals from the workers.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
