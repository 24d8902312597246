package leasing

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/simple-workflow/simple-workflow/internal/column"
	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/naming"
)

// discover finds the lanes that have open runs, and the first open run of each. A lane costs one or
// two index probes, however many rows it has. The same statement returns what is paused and which
// types meet an outage, even if no run is open.
func (p *Poller) discover(ctx context.Context) error {
	start := time.Now()
	rows, _ := p.DB.Query(ctx, `
		SELECT outages, probes_in, paused, coalesce(suspect, false), coalesce(type, ''), coalesce(priority, 0), coalesce(run_at, now()),
		       coalesce(id, '00000000-0000-0000-0000-000000000000'), coalesce(due_in, 0)
		FROM workflow_lanes_v2($1)`, p.Prefixes)
	heads, err := pgx.CollectRows(rows, pgx.RowToStructByPos[head])
	if err != nil {
		return fmt.Errorf("look for due runs: %w", err)
	}
	p.drained = false
	p.paused = heads[0].Paused // there is at least one row
	if p.Paused != nil {
		p.Paused(p.paused)
	}
	if p.werePaused == nil {
		p.werePaused = map[string]time.Time{}
	}
	for _, prefix := range p.paused {
		p.werePaused[prefix] = start
	}
	p.met(heads[0], start)
	p.merge(slices.DeleteFunc(heads, func(h head) bool { return h.Type == "" || p.isPaused(h.Type) }), start)
	return nil
}

// isPaused reports whether the type is paused: it, or a prefix of it that ends with a dot, is in
// workflow_pause.
func (p *Poller) isPaused(typ string) bool {
	return slices.ContainsFunc(p.paused, func(prefix string) bool { return naming.Covers(prefix, typ) })
}

// A head is the first open run of a lane. If Type is empty, no lane has an open run.
type head struct {
	Outages  []string  // types that meet an outage, the same in all heads
	ProbesIn []float64 // seconds until the next probe of each of Outages; negative: its breaker is not open
	Paused   []string  // prefixes and types, the same in all heads
	Suspect  bool
	Type     string
	Priority int
	RunAt    time.Time
	ID       uuid.UUID
	DueIn    float64 // seconds
}

// merge updates the lanes with what discovery, begun at start, has found: all lanes that have open runs.
func (p *Poller) merge(heads []head, start time.Time) {
	if p.lanes == nil {
		p.lanes = make(map[lane]*position, len(heads))
	}
	for _, h := range heads {
		key := lane{h.Suspect, h.Type, h.Priority}
		at := p.lanes[key]
		wait := time.Duration(min(h.DueIn, 1e9) * float64(time.Second))
		switch {
		case at == nil && wait > 0:
			at = &position{runAt: h.RunAt.Add(-wait - slack)}
		case at == nil:
			at = &position{}
		}
		if wait <= 0 {
			at.runAt, at.id, at.wasDue = h.RunAt, h.ID, start
		}
		at.seen = start
		at.dueFrom = start.Add(wait + p.Terms(h.Type).Grace)
		p.lanes[key] = at
	}
	for key, at := range p.lanes {
		if at.seen.Equal(start) {
			continue
		}
		at.dueFrom = time.Time{}
		if start.Sub(at.seen) > memory {
			delete(p.lanes, key)
		}
	}
}

// How many runs at the head of the lanes are tried one by one after a lease was refused. At first they are few, because
// each try is written and rolled back. The number doubles each time that the next lease is refused too.
const (
	leastTried = 100
	mostTried  = 2000
)

// take leases runs from the chosen lanes, in the order of the lanes, as many as a asks for. due is how many runs were
// due. It may exceed the number of leases where lanes share their room, and for suspects.
//
// Runs that the database refuses to lease are set aside, which takes a quarter of a second at most. If the
// rest of their lanes is refused too, it waits for the next call, and take leases from the other lanes. A
// fault.Error means that no run can be leased.
func (p *Poller) take(ctx context.Context, chosen []request, a ask) (leases []Lease, due int, err error) {
	n := p.most.Of(a.n + a.ahead)
	a = a.upTo(n)
	leases, due, err = p.lease(ctx, chosen, a)
	if err == nil {
		p.tried = 0
		p.most.Through()
		p.reached(chosen, leases, n, due)
		return leases, due, nil
	}
	suspected, first := p.failed(chosen, err), fault.Of(err)
	anyCode := len(suspected) > 0
	switch {
	case (first == fault.Again || first == fault.Anew) && !anyCode:
		return nil, 0, err
	case first == fault.Fewer && n > 1:
		p.most.Less(n)
		return nil, 0, err
	case first == fault.Fewer:
		p.tried, anyCode = 1, true
	default:
		p.tried = min(max(n, leastTried, 2*p.tried), mostTried)
	}
	if first != fault.Again && first != fault.Anew {
		suspected = chosen
	}
	aside, problem := p.setAside(ctx, suspected, p.tried, anyCode)
	switch {
	case problem != nil:
		return nil, 0, fault.OfStatement("lease", problem)
	case len(aside) == 0:
		return nil, 0, fault.OfStatement("lease", err)
	case p.SetAside != nil:
		p.SetAside(aside)
	}
	refused := func(err error) bool {
		first := fault.Of(err)
		return first != fault.None && (anyCode || first != fault.Again && first != fault.Anew)
	}
	leases, due, err = p.lease(ctx, chosen, a)
	if !refused(err) {
		if err == nil {
			p.reached(chosen, leases, n, due)
		}
		return leases, due, err
	}
	types := make(map[string]bool, len(aside))
	for _, a := range aside {
		types[a.Type] = true
	}
	others := slices.DeleteFunc(slices.Clone(chosen), func(r request) bool { return types[r.typ] })
	if len(others) > 0 {
		leases, _, err = p.lease(ctx, others, a)
	}
	if refused(err) {
		return nil, n, nil // some were set aside: the caller continues at once
	}
	return leases, n, err // due is n, because the lanes that were left out have more
}

// failed notes that a lease from the chosen lanes has failed, and returns the lanes that have failed for
// fault.Patience.
func (p *Poller) failed(chosen []request, err error) (lasting []request) {
	p.failing = true
	for _, r := range chosen {
		if _, r.from.lasting = r.from.failures.Of(err); r.from.lasting {
			lasting = append(lasting, r)
		}
	}
	return lasting
}

// reached notes that a lease of n runs from the chosen lanes succeeded, and ends the failures of the lanes that the
// statement reached. It may not have reached a lane that none of the leases is from, if n runs were due or the lane had
// less room than n, or if the lane is one of suspects. If no run was due, it has reached all.
func (p *Poller) reached(chosen []request, leases []Lease, n, due int) {
	if !p.failing {
		return
	}
	gave := make(map[lane]bool, len(leases))
	for _, l := range leases {
		gave[lane{l.Suspect, l.Type, l.Priority}] = true
	}
	for _, r := range chosen {
		if gave[r.lane] || due == 0 || due < n && r.Room >= n && !r.suspect {
			r.from.failures, r.from.lasting = fault.Series{}, false
		}
	}
	p.failing = false
	for _, at := range p.lanes {
		p.failing = p.failing || at.failures != fault.Series{}
	}
}

// lease sends the statement that leases, for take.
func (p *Poller) lease(ctx context.Context, chosen []request, a ask) (leases []Lease, due int, err error) {
	tokens, err := p.tokens(a.ahead)
	if err != nil {
		return nil, 0, err
	}
	sent := time.Now()
	statement, args := p.statement(chosen, a, tokens)
	rows, _ := p.DB.Query(ctx, statement, args...)
	var token [16]byte
	var givenBack, follows bool
	var enqueued pgtype.Timestamptz // pgtype costs less than pointers
	var instance pgtype.UUID
	var key, node pgtype.Text
	scanner := scanLeases(&due, &token, &givenBack, &follows, &enqueued, &instance, &key, &node)
	for rows.Next() {
		l, err := scanner.scan(rows)
		l.Token, l.Alone, l.Follows, l.Enqueued = token, givenBack, follows, enqueued.Time
		l.Instance, l.BusinessKey, l.Node = instance.Bytes, key.String, node.String
		if err != nil {
			rows.Close()
			p.Doubts.add(tokens, sent, longestOf(chosen)) // the runs are leased, but it is unknown which
			return nil, 0, err
		}
		if leases == nil {
			leases = make([]Lease, 0, due)
		}
		leases = append(leases, l)
	}
	if err := rows.Err(); err != nil || ctx.Err() != nil {
		// A server whose commits wait for a standby answers a cancelled statement with success, though the commit may be
		// lost if that server is.
		if err == nil || lost(err) {
			p.Doubts.add(tokens, sent, longestOf(chosen))
		}
		return nil, 0, fmt.Errorf("lease runs: %w", cmp.Or(err, ctx.Err()))
	}
	p.granted(leases, chosen, sent)
	return leases, due, nil
}

// statement returns the statement that leases what a asks for, and its arguments.
func (p *Poller) statement(chosen []request, a ask, tokens []uuid.UUID) (string, []any) {
	if a.ahead > 0 {
		return `
			SELECT due, token, false, follows, created_at, instance, business_key, node, ` + leaseColumns + `
			FROM workflow_lease_ahead_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`,
			slices.Concat(placeColumns(chosen), []any{p.Steps, a.n + a.ahead, p.Ahead.Bytes, a.n, p.Ahead.Group, column.Of(tokens, func(t uuid.UUID) [16]byte { return t }), p.Worker}, termColumns(chosen))
	}
	function := "workflow_lease_v2"
	if chosen[0].probe { // then all requests are probes of one type
		function = "workflow_probe_v1"
	}
	shared := slices.ContainsFunc(chosen, func(r request) bool { return r.suspect || r.Room < a.n })
	return `
		SELECT due, $16::uuid, given_back, follows, created_at, instance, business_key, node, ` + leaseColumns + `
		FROM ` + function + `($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25)`,
		slices.Concat(laneColumns(chosen, a.n), []any{p.Steps, a.suspects, a.n, shared, p.Suspects.Watched, p.alone, tokens[0], p.Worker}, termColumns(chosen), p.besideColumns())
}

// leaseColumns are the columns that a scanner reads.
const leaseColumns = `id, type, attempt, max_attempts, lease_no, idempotency_key, tenant_id, metadata, started_at, payload, priority, postponed, suspect, exhausted, run_at, token_id`

// longestOf returns the greatest length of the requested leases.
func longestOf(chosen []request) (longest time.Duration) {
	for _, r := range chosen {
		longest = max(longest, r.Length)
	}
	return longest
}

// granted adds the terms to leases, and sorts them by priority and due time. It also notes which kind of suspect was
// leased.
func (p *Poller) granted(leases []Lease, chosen []request, sent time.Time) {
	terms := make(map[string]Terms, len(chosen))
	for _, r := range eachType(chosen) {
		terms[r.typ] = r.Terms
	}
	for i := range leases {
		l := &leases[i]
		l.Taken, l.Worker = sent, p.Worker
		l.Length, l.Timeout = terms[l.Type].Length, terms[l.Type].Timeout
		last := l.Suspect && !l.Exhausted && (l.Attempt >= l.MaxAttempts || terms[l.Type].Limit > 0 && l.Attempt >= terms[l.Type].Limit)
		if l.Suspect && !l.Exhausted {
			p.alone = last
		}
		if l.Alone = l.Alone && last; l.Alone {
			p.kept = sent
		}
	}
	slices.SortFunc(leases, func(a, b Lease) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.runAt.Compare(b.runAt), bytes.Compare(a.ID[:], b.ID[:]))
	})
}

// A scanner reads leased runs row by row. It allocates the scan targets once, not for each row.
type scanner struct {
	lease             Lease
	key, tenant       pgtype.Text
	step              pgtype.UUID
	metadata, payload []byte
	columns           []any
}

// scanLeases returns a scanner of rows that begin with the columns of first, followed by those of a lease.
func scanLeases(first ...any) *scanner {
	s := &scanner{}
	l := &s.lease
	id := (*[16]byte)(&l.ID) // has no Scan method, which pgx would call on a slow path
	s.columns = append(first, id, &l.Type, &l.Attempt, &l.MaxAttempts, &l.LeaseNo, &s.key, &s.tenant, &s.metadata,
		&l.StartedAt, &s.payload, &l.Priority, &l.Postponed, &l.Suspect, &l.Exhausted, &l.runAt, &s.step)
	return s
}

func (s *scanner) scan(row pgx.CollectableRow) (Lease, error) {
	s.lease, s.metadata, s.payload = Lease{}, nil, nil
	err := row.Scan(s.columns...)
	l := s.lease
	l.IdempotencyKey, l.Tenant, l.Step = s.key.String, s.tenant.String, s.step.Bytes
	l.Metadata, l.Payload = json.RawMessage(s.metadata), json.RawMessage(s.payload)
	return l, err
}
