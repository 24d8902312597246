//go:build !unix

package main

func fileLimit() (uint64, bool) { return 0, false }
