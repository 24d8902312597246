//go:build !linux

package main

import "syscall"

// attributes shield the workers from the terminal's signals.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
