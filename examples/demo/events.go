package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// events is the file to which the dispatcher publishes.
func (d *demo) events() string { return filepath.Join(d.dir, "logs", "events.out") }

// arrivals are the events that arrived, each counted once.
type arrivals struct {
	types  map[string]int
	last   string // the line of the last event of a completed process
	repeat int    // events that arrived more than once
}

// arrived waits until the outbox is empty, and reads what arrived as any consumer would.
func (d *demo) arrived(ctx context.Context) (*arrivals, error) {
	for open := true; open; {
		if err := d.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_event WHERE published_at IS NULL)`).Scan(&open); err != nil {
			return nil, fmt.Errorf("look at the outbox: %w", err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	text, err := os.ReadFile(d.events())
	if err != nil {
		return nil, err
	}
	a, seen := &arrivals{types: map[string]int{}}, map[string]bool{}
	for line := range strings.Lines(string(text)) {
		var event struct{ ID, Type, Source, Subject string }
		if err := json.Unmarshal([]byte(line), &event); err != nil {
			return nil, fmt.Errorf("read an event: %w", err)
		}
		if seen[event.ID] {
			a.repeat++
			continue
		}
		seen[event.ID] = true
		a.types[event.Type]++
		if event.Type == "process.completed" {
			a.last = line
		}
	}
	return a, nil
}

// showEvents prints what arrived, and one of the events.
func (d *demo) showEvents(ctx context.Context) error {
	a, err := d.arrived(ctx)
	if err != nil {
		return err
	}
	say("\nEvents, in the transactions of what they tell, published as CloudEvents:")
	var lines []line
	for _, typ := range slices.Sorted(maps.Keys(a.types)) {
		lines = append(lines, line{typ, a.types[typ]})
	}
	table(os.Stdout, append(lines, line{"came twice", a.repeat}))
	say("one of them:\n    %s", strings.TrimSpace(a.last))
	if n := a.types["process.started"]; n != orderCount {
		return fmt.Errorf("%d orders were started, and %d events tell of it", orderCount, n)
	}
	return nil
}
