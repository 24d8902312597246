package pgserver

import "syscall"

// freeBytes returns how many bytes a user may still write below dir, or 0 if dir does not exist.
func freeBytes(dir string) uint64 {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		return 0
	}
	return stat.Bavail * uint64(stat.Bsize)
}
