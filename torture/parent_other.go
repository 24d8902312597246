//go:build !linux

package main

import "syscall"

// dieWithParent returns nil, because only Linux offers this.
func dieWithParent() *syscall.SysProcAttr { return nil }
