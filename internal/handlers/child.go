package handlers

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// drainTime is how long pipes may stay open after the process group is dead. Only a process that has left the
// group can hold them.
const drainTime = time.Second

// A child is a running program. It leads a process group of its own.
type child struct {
	cmd     *exec.Cmd
	stdout  *capture
	pipes   []io.Closer // our ends of the pipes
	copying sync.WaitGroup
	exited  chan struct{} // closed once state or err is set
	state   *os.ProcessState
	err     error
}

// start starts cmd with stdin as its input. The caller must call c.wait and not cmd.Wait, because the group
// must be killed after the program has ended and before its pipes are read to the end.
func start(cmd *exec.Cmd, stdin []byte, stdout *capture, stderr *tail) (*child, error) {
	c := &child{cmd: cmd, stdout: stdout, exited: make(chan struct{})}
	ownGroup(cmd)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c.pipes = []io.Closer{in, out, errs}
	c.copying.Go(func() {
		_, _ = in.Write(stdin) // a program need not read its input
		in.Close()
	})
	c.copying.Go(func() { _, _ = io.Copy(stdout, out) })
	c.copying.Go(func() { _, _ = io.Copy(stderr, errs) })
	go func() {
		defer close(c.exited)
		c.state, c.err = cmd.Process.Wait()
	}()
	return c, nil
}

// wait returns once the program and its group are gone and all output is read. If ctx ended first, the error is
// its cause.
func (c *child) wait(ctx context.Context, grace time.Duration) (*os.ProcessState, error) {
	var stopped error
	select {
	case <-c.exited:
	case <-c.stdout.full:
	case <-ctx.Done():
		if !c.gone() {
			stopped = context.Cause(ctx)
			c.terminate(grace)
		}
	}
	// The kernel does not reuse the number while the group has a member. If it has none, the number became free
	// only a moment ago, and it takes long until numbers come round again.
	killGroup(c.cmd.Process.Pid)
	<-c.exited
	timer := time.AfterFunc(drainTime, c.closePipes)
	c.copying.Wait()
	timer.Stop()
	c.closePipes()
	return c.state, errors.Join(stopped, c.err)
}

// terminate asks the group to end, and waits until it has or grace is over.
func (c *child) terminate(grace time.Duration) {
	const interval = 20 * time.Millisecond
	terminateGroup(c.cmd.Process.Pid)
	over := time.After(grace)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return
		case <-tick.C:
			if c.gone() && !groupAlive(c.cmd.Process.Pid) {
				return
			}
		}
	}
}

func (c *child) gone() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

func (c *child) closePipes() {
	for _, p := range c.pipes {
		p.Close()
	}
}
