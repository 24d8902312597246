package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// failoverPlan loses the primary once, under load and other faults.
func failoverPlan(seed uint64) *plan {
	p := shortPlan(seed)
	p.Name, p.Strikes = "failover", nil
	counts := map[string]int{"failover": 1, "kill": 4, "freeze": 3, "sessions": 6, "answer-lost": 8, "never-sent": 4, "deadlock": 3, "rows": 2, "dispatcher-kill": 2}
	p.schedule(func(f fault) int { return counts[f.key] })
	return p
}

const standbyName = "standby"

// addStandby starts a synchronous standby: without it the server acknowledges no commit.
func (l *lab) addStandby(ctx context.Context) (err error) {
	if l.standby, err = l.server.Standby(ctx, standbyName); err != nil {
		return err
	}
	return l.calm(ctx, `ALTER SYSTEM SET synchronous_standby_names = '`+standbyName+`'`, `SELECT pg_reload_conf()`)
}

// failOver kills the primary, promotes the standby and redirects every client to it, as a cluster manager would.
func failOver(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	if l.standby == nil {
		return noOne, errors.New("there is no standby")
	}
	defer l.trouble()()
	start := time.Now()
	l.server.Kill()
	sleep(ctx, between(r, time.Second, 3*time.Second)) // until the manager has noticed
	const promote = `DO $$ BEGIN IF NOT pg_promote() THEN RAISE 'not promoted within a minute'; END IF; END $$`
	if err := onServer(context.WithoutCancel(ctx), l.standby, "postgres", promote); err != nil {
		return noOne, fmt.Errorf("promote the standby: %w", err)
	}
	l.server, l.standby = l.standby, l.server
	for _, k := range slices.Concat(l.links, l.sides, []*link{l.front, l.back}) {
		if err := k.redirect(l.address()); err != nil {
			return noOne, err
		}
	}
	ready := time.Now()
	l.ledger.add(entry{Kind: "outage", At: start, Until: &ready})
	return everyone, nil
}
