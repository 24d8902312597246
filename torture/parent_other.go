//go:build !linux

package main

import "syscall"

// dieWithParent needs a kernel that offers it.
func dieWithParent() *syscall.SysProcAttr { return nil }
