//go:build unix

package service

import "syscall"

// fileLimit returns how many files the process may have open. ok is false if that is not known.
func fileLimit() (uint64, bool) {
	var limit syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit)
	return uint64(limit.Cur), err == nil //nolint:unconvert // another type on some systems
}
