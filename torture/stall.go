package main

import (
	"context"
	"os"
	"path/filepath"
	"time"
)

const (
	lookAtDisk = 100 * time.Millisecond
	stallAfter = 500 * time.Millisecond
)

// noteStalls writes down when the disk, or the whole machine, stands still: nobody can commit then, and no rule
// asks a worker to. It ends with ctx.
func (l *lab) noteStalls(ctx context.Context) error {
	file, err := os.Create(filepath.Join(l.dir, "stall"))
	if err != nil {
		return err
	}
	go func() {
		defer file.Close()
		for ctx.Err() == nil {
			began := time.Now()
			sleep(ctx, lookAtDisk)
			_, _ = file.WriteAt([]byte(began.String()), 0)
			_ = file.Sync()
			if end := time.Now(); end.Sub(began) > lookAtDisk+stallAfter {
				l.ledger.add(entry{Kind: "stall", At: began, Until: &end, Fault: "stall", Worker: everyone})
			}
		}
	}()
	return nil
}
