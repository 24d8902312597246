package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/protocol"
)

// Rules about the trace of runs, in addition to those of verdict.sql: each lease, heartbeat, settle, take-back and
// other change is a step of the model in internal/protocol.
const (
	ruleStep     = "I51 change of a run that the model of its protocol does not have"
	ruleSlots    = "I51b worker that held more charged leases than it may"
	ruleTogether = "I51c suspect leased beside one at its last attempt"
)

var replayRules = []string{ruleStep, ruleSlots, ruleTogether}

// watch is how long suspects must at least be alone, as the database sees it. It is two seconds by the worker's
// clock, which starts when the worker has the answer.
const watch = time.Second

// replay checks the trace against the model.
func (l *lab) replay(ctx context.Context, v *verdict) error {
	v.Rules = append(v.Rules, replayRules...)
	rows, _ := l.admin.Query(ctx, `SELECT DISTINCT run FROM t.enqueue WHERE kase = 'unleasable'`)
	spoilt, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return fmt.Errorf("look for runs that were spoilt where no trigger looks: %w", err)
	}
	leave := make(map[uuid.UUID]bool, len(spoilt))
	for _, id := range spoilt {
		leave[id] = true
	}
	start := time.Now()
	r := protocol.Replay{Most: 6 * slots, Watch: watch, LeaveOut: func(run uuid.UUID) bool { return leave[run] }}
	if err := protocol.Read(ctx, l.admin, r.Add); err != nil {
		return err
	}
	found := r.Verdicts()
	took := time.Since(start).Seconds()
	for _, w := range found.Wrong {
		v.wrong(w)
	}
	runs, events, edits, removed, left := float64(found.Runs), float64(found.Events), float64(found.Edits), float64(found.Removed), float64(found.LeftOut)
	most := float64(8 * l.plan.count("unleasable"))
	v.Figures = append(v.Figures,
		figure{Name: "runs replayed against the model", Value: &runs},
		figure{Name: "their changes", Value: &events},
		figure{Name: "of these by hand, or by the engine's plain statements", Value: &edits},
		figure{Name: "runs removed by retention", Value: &removed},
		figure{Name: "runs left out, which were spoilt where no trigger looks", Value: &left, Goal: &most, Strict: true},
		figure{Name: "the replay took", Value: &took, Unit: "s"})
	if found.Runs == 0 {
		v.Troubles = append(v.Troubles, "the trace of runs is empty")
	}
	return nil
}

// wrong adds a violation that the replay has found to the broken rules.
func (v *verdict) wrong(w protocol.Wrong) {
	rule := ruleStep
	switch w.Kind {
	case protocol.Crowded:
		rule = ruleSlots
	case protocol.Together:
		rule = ruleTogether
	}
	i := slices.IndexFunc(v.Broken, func(b broken) bool { return b.Rule == rule })
	if i < 0 {
		i = len(v.Broken)
		v.Broken = append(v.Broken, broken{Rule: rule, Story: []string{w.String()}})
	}
	b := &v.Broken[i]
	b.N++
	if len(b.Examples) < 3 {
		b.Examples = append(b.Examples, w.Run)
	}
}
