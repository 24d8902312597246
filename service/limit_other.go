//go:build !unix

package service

func fileLimit() (uint64, bool) { return 0, false }
