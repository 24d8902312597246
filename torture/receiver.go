package main

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"time"
)

// A receiver is the outside world: it receives calls that no transaction protects.
type receiver struct {
	server *httptest.Server
	calls  atomic.Int64
	away   atomic.Int32 // outages in progress: no call is answered
}

func newReceiver(l *ledger) (*receiver, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &receiver{}
	r.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if r.away.Load() > 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		var call struct {
			RunID   string `json:"run_id"`
			LeaseNo int64  `json:"lease_no"`
			Attempt int    `json:"attempt"`
		}
		if err := json.NewDecoder(request.Body).Decode(&call); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		n := r.calls.Add(1)
		l.add(entry{Kind: "call", Run: call.RunID, LeaseNo: call.LeaseNo, Attempt: call.Attempt})
		if n%20 == 0 { // the call counts, but the answer is lost
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	r.server.Listener = listener
	r.server.Start()
	return r, nil
}

// outage makes the outside world unavailable for some seconds: handlers that call it report that, and the breaker of
// their type opens. Nothing else is hit, and no run may be lost.
func outage(ctx context.Context, l *lab, r *rand.Rand) (string, error) {
	l.outside.away.Add(1)
	defer l.outside.away.Add(-1)
	sleep(ctx, l.plan.hold(r, 4*time.Second, 12*time.Second))
	return nobody, nil
}

func (r *receiver) close() { r.server.Close() }
