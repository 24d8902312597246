package pgserver

import "syscall"

// freeBytes returns how much a user may still write below dir, 0 if it is not
// there.
func freeBytes(dir string) uint64 {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		return 0
	}
	return stat.Bavail * uint64(stat.Bsize)
}
