package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The conversation between the bench and a child process, line by line. The child says
//
//	ready               it is connected and waits for go
//	handled 500 700     so far handlers have seen 500 foreground runs, and 700 in all
//	seen -17 123456     the run with payload n = -17 was seen, at that time of the clock
//	done {"a": 1}       its task is done, with these facts
//
// and receives go, begin (start counting what it will report), release (sleeping handlers), and the end of its input,
// which means that it must end.
type conversation struct {
	out             sync.Mutex
	foreground, all atomic.Int64
	goOn            chan struct{} // closed by go
	begun           chan struct{} // closed by begin
	released        chan struct{} // closed by release
	ended           chan struct{}
}

// A resident executes tasks inside the bench's own program, started as a child.
type resident interface {
	carryOut(ctx context.Context, t task, c *conversation) error
}

// child executes the task that argument describes.
func child(argument string) error {
	var t task
	if err := json.Unmarshal([]byte(argument), &t); err != nil {
		return err
	}
	who, ok := map[string]resident{ours{}.name(): ours{}, riverQueue{}.name(): riverQueue{}, transact{}.name(): transact{}, forwarded{}.name(): forwarded{}}[t.Engine]
	if !ok {
		return fmt.Errorf("engine %q has no part in this program", t.Engine)
	}
	c := &conversation{goOn: make(chan struct{}), begun: make(chan struct{}), released: make(chan struct{}), ended: make(chan struct{})}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		c.listen()
		stop()
	}()
	err := who.carryOut(ctx, t, c)
	if ctx.Err() != nil {
		return nil // it was told to end
	}
	return err
}

// listen reads what the bench says until the bench ends the conversation.
func (c *conversation) listen() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "go":
			close(c.goOn)
		case "begin":
			close(c.begun)
		case "release":
			close(c.released)
		}
	}
	close(c.ended)
}

func (c *conversation) say(line string, args ...any) {
	c.out.Lock()
	defer c.out.Unlock()
	fmt.Printf(line+"\n", args...)
}

// ready waits for go. It returns false if the conversation ends first.
func (c *conversation) ready() bool {
	c.say("ready")
	select {
	case <-c.goOn:
		go c.count()
		return true
	case <-c.ended:
		return false
	}
}

// count reports how many runs were handled, a hundred times a second.
func (c *conversation) count() {
	said := int64(0)
	for range time.Tick(10 * time.Millisecond) {
		if all := c.all.Load(); all != said {
			c.say("handled %d %d", c.foreground.Load(), all)
			said = all
		}
	}
}

// handle records that a handler was called with the payload {"n": n}.
func (c *conversation) handle(n int) {
	c.all.Add(1)
	switch {
	case n > 0:
		c.foreground.Add(1)
	case n < -1:
		c.say("seen %d %d", n, clock())
	}
}

// done ends the task and reports facts about it.
func (c *conversation) done(facts map[string]float64) {
	text, _ := json.Marshal(facts) // numbers only
	c.say("done %s", text)
	<-c.ended
}

// produce enqueues t.Runs runs: in bulk from 4 producers, one by one from 8.
func produce(ctx context.Context, t task, p producer, c *conversation) error {
	workers, step := 8, 1
	if t.Bulk {
		workers, step = 4, 1000
	}
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make(chan error, workers)
	for range workers {
		all.Go(func() {
			ns := make([]int, 0, step)
			for {
				end := int(next.Add(int64(step)))
				if end > t.Runs {
					return
				}
				ns = ns[:0]
				for n := end - step + 1; n <= end; n++ {
					ns = append(ns, n)
				}
				var err error
				if t.Bulk {
					err = p.many(ctx, ns)
				} else {
					err = p.one(ctx, end)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	if err := <-errs; err != nil {
		return err
	}
	c.done(nil)
	return nil
}

// String returns the argument that tells a child of this program what to do.
func (t task) String() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return strings.TrimSpace(string(text))
}
