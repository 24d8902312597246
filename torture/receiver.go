package main

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
)

// A receiver is the world outside: it takes calls that no transaction protects.
type receiver struct {
	server *httptest.Server
	calls  atomic.Int64
}

func newReceiver(l *ledger) (*receiver, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &receiver{}
	r.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
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
		if n%20 == 0 { // the call counts, and nobody learns of it
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	r.server.Listener = listener
	r.server.Start()
	return r, nil
}

func (r *receiver) close() { r.server.Close() }
