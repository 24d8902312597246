package main

import "golang.org/x/sys/unix"

// clock returns nanoseconds of a clock that all processes of this machine share and that is never set. Node calls it
// process.hrtime.
func clock() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // every kernel has it
	}
	return t.Nano()
}
