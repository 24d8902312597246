//go:build !linux

package pgserver

// freeBytes returns 0, because only Linux has /dev/shm.
func freeBytes(string) uint64 { return 0 }
