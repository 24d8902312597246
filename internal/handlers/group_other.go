//go:build !unix

package handlers

import "os/exec"

// programsWork is false because without process groups one cannot be sure that a program and its children are
// gone.
const programsWork = false

func ownGroup(*exec.Cmd)  {}
func terminateGroup(int)  {}
func killGroup(int)       {}
func groupAlive(int) bool { return false }
