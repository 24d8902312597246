// Command demo shows the engine at work in under a minute: a private Postgres, workers as separate processes, a few
// hundred runs, and a worker that is killed in the middle; then a hundred orders as instances of a process, some of
// which fail and are undone.
//
//	go run ./examples/demo
//
// It needs PostgreSQL's server binaries, or in DEMO_DATABASE_URL a database in which it may create a schema. No other
// variable makes it use a database.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/term"
)

// limit is the time from the first enqueued run to the last finished one.
const limit = 90 * time.Second

// On Linux the kernel ends a child together with the thread that started it, so this thread has to stay.
func init() { runtime.LockOSThread() }

func main() {
	keep := flag.Bool("keep", false, "stay up after the table until interrupted")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	d := &demo{terminal: term.IsTerminal(int(os.Stdout.Fd()))}
	summary, err := d.play(ctx, *keep)
	if err != nil && ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err := errors.Join(err, d.end()); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	fmt.Println(summary)
}

// play runs the demo, without the clean-up, and returns the last line.
func (d *demo) play(ctx context.Context, keep bool) (summary string, err error) {
	if err := d.prepare(ctx); err != nil {
		return "", err
	}
	if err := d.startWorkers(
		group{"media-1", "shop", "media.", "3"},
		group{"media-2", "shop", "media.", "3"},
		group{"billing", "shop", "billing.", "8"},
		group{"reports", "worker", "report.,default.", "2"},
	); err != nil {
		return "", err
	}
	if err := d.startDispatcher(); err != nil {
		return "", err
	}
	r, err := d.work(ctx)
	if err != nil {
		return "", errors.Join(err, d.logTails())
	}
	r.print(os.Stdout)
	if err := r.verdict(); err != nil {
		return "", errors.Join(err, d.logTails())
	}
	f, err := d.fulfil(ctx)
	if err != nil {
		return "", errors.Join(err, d.logTails())
	}
	if err := f.show(ctx, os.Stdout, d); err != nil {
		return "", err
	}
	if err := f.verdict(); err != nil {
		return "", errors.Join(err, d.logTails())
	}
	if err := d.showEvents(ctx); err != nil {
		return "", errors.Join(err, d.logTails())
	}
	if keep || d.terminal && term.IsTerminal(int(os.Stdin.Fd())) {
		d.lookAround(ctx, keep)
	} else {
		say("go run ./examples/demo -keep leaves the database and the workers up to look around with psql.")
	}
	return r.summary(), nil
}

// prepare creates everything that the workers need.
func (d *demo) prepare(ctx context.Context) error {
	if err := d.makeDir(); err != nil {
		return err
	}
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"start a database", d.startDatabase},
		{"build the workers", d.build},
		{"draw images", d.drawImages},
	}
	for _, step := range steps {
		start := time.Now()
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		say("%-22s %5.1f s", step.name, time.Since(start).Seconds())
	}
	return nil
}

// work enqueues runs, kills a worker that holds some of them, and waits for the end.
func (d *demo) work(ctx context.Context) (*result, error) {
	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not finished after %s", limit))
	defer stop()
	if err := d.enqueue(ctx); err != nil {
		return nil, err
	}
	victim := d.named("media-1")
	busy := func(s snapshot) bool { return s.Succeeded >= s.Enqueued/8 && s.held(victim) >= 2 }
	if err := d.murder(ctx, victim, busy); err != nil {
		return nil, err
	}
	if err := d.watch(ctx, func(s snapshot) bool { return s.open() == 0 }); err != nil {
		return nil, err
	}
	return d.measure(ctx, victim)
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
