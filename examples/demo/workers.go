package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A process is a worker, or the dispatcher.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string
	gone chan struct{} // closed when it has ended
	dead bool          // it was killed on purpose
}

// A group is a worker and its settings.
type group struct{ name, program, prefixes, concurrency string }

// startWorkers starts workers that share nothing but the database.
func (d *demo) startWorkers(all ...group) error {
	for _, w := range all {
		p, err := d.spawn(w.name, w.program,
			"WORKER_TYPE_PREFIXES="+w.prefixes, "WORKER_CONCURRENCY="+w.concurrency, "WORKER_ID="+w.name,
			"WORKER_LEASE=3s", "WORKER_LOG_FORMAT=text", "WORKER_CLEANUP_EVERY=0s",
			"WORKER_HANDLERS="+filepath.Join(d.home, "handlers.yaml"), "SHOP_HOME="+d.home, "SHOP_DIR="+d.shop())
		if err != nil {
			return fmt.Errorf("start worker %s: %w", w.name, err)
		}
		say("started %-8s pid %-7d %s", w.name, p.cmd.Process.Pid, w.prefixes)
	}
	return nil
}

// startDispatcher starts a dispatcher that publishes to its standard output, which is a file.
func (d *demo) startDispatcher() error {
	p, err := d.spawn("events", "dispatcher", "DISPATCHER_SINKS=stdout:", "DISPATCHER_SOURCE=/demo", "DISPATCHER_LOG_FORMAT=text")
	if err != nil {
		return fmt.Errorf("start dispatcher: %w", err)
	}
	say("started %-8s pid %-7d publishes to %s", p.name, p.cmd.Process.Pid, d.events())
	return nil
}

func (d *demo) spawn(name, program string, env ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(d.dir, "logs", name), gone: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	out, err := os.Create(p.log + ".out")
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p.cmd = exec.Command(d.bin(program))
	p.cmd.Env = append(inherited(), append(env, "DATABASE_URL="+d.url)...)
	p.cmd.Stdout, p.cmd.Stderr = out, log
	p.cmd.SysProcAttr = attributes()
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // its log says how it ended
		close(p.gone)
	}()
	d.processes = append(d.processes, p)
	return p, nil
}

// inherited is the environment without variables that would configure a worker.
func inherited() (env []string) {
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "WORKER_") && !strings.HasPrefix(variable, "DISPATCHER_") && !strings.HasPrefix(variable, "DATABASE_URL=") {
			env = append(env, variable)
		}
	}
	return env
}

// stopWorkers asks all to end, and kills those that do not.
func (d *demo) stopWorkers() {
	for _, p := range d.processes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // if it has ended already, that is fine
	}
	patience := time.After(5 * time.Second)
	for _, p := range d.processes {
		select {
		case <-p.gone:
		case <-patience:
			_ = p.cmd.Process.Kill()
			<-p.gone
			patience = time.After(0)
		}
	}
}

// running returns an error if a worker has ended that should not have.
func (d *demo) running() error {
	for _, p := range d.processes {
		select {
		case <-p.gone:
			if !p.dead {
				return fmt.Errorf("%s has ended: %s", p.name, p.cmd.ProcessState)
			}
		default:
		}
	}
	return nil
}

func (d *demo) named(name string) *process {
	return d.processes[slices.IndexFunc(d.processes, func(p *process) bool { return p.name == name })]
}

// murder kills a worker with SIGKILL once it is busy, and prints how many leases it held.
func (d *demo) murder(ctx context.Context, victim *process, busy func(snapshot) bool) error {
	for {
		if err := d.watch(ctx, busy); err != nil {
			return err
		}
		// The worker is stopped first, so that nothing changes during the look.
		if err := victim.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // by then the server has finished what it had sent
		s, err := d.look(ctx)
		if err != nil {
			return err
		}
		if busy(s) {
			break
		}
		if err := victim.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			return err
		}
	}
	victim.dead = true
	if err := victim.cmd.Process.Kill(); err != nil {
		return err
	}
	<-victim.gone
	s, err := d.look(ctx)
	if err != nil {
		return err
	}
	d.clearLine()
	say("killed %s (pid %d, %s): its %d leases are left behind, and nobody replaces it",
		victim.name, victim.cmd.Process.Pid, victim.cmd.ProcessState, s.held(victim))
	return nil
}

// logTails returns the end of each worker's log.
func (d *demo) logTails() error {
	var tails []error
	for _, p := range d.processes {
		text, err := os.ReadFile(p.log)
		if err != nil {
			return err
		}
		tails = append(tails, fmt.Errorf("log of %s:\n%s", p.name, text[max(0, len(text)-1500):]))
	}
	return errors.Join(tails...)
}
