package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// A ledger is an append-only file of what happened outside the database under test, one JSON object per line. It is a
// file so that it survives what happens to that database.
type ledger struct {
	mu   sync.Mutex
	file *os.File
}

func openLedger(dir string) (*ledger, error) {
	file, err := os.OpenFile(filepath.Join(dir, "ledger.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the ledger: %w", err)
	}
	return &ledger{file: file}, nil
}

// An entry is one line. Empty fields are omitted.
type entry struct {
	Kind string    `json:"kind"`
	At   time.Time `json:"at"` // set by add if it is zero

	Run     string          `json:"run,omitempty"`
	Type    string          `json:"type,omitempty"`
	Case    string          `json:"case,omitempty"` // case of the workload
	Key     string          `json:"key,omitempty"`
	Payload json.RawMessage `json:"payload,omitempty"`
	RunAt   *time.Time      `json:"run_at,omitempty"`
	Emit    int             `json:"emit,omitempty"`
	Process string          `json:"process,omitempty"`
	Expect  json.RawMessage `json:"expect,omitempty"` // how often each node takes effect: minimum and maximum
	Answer  string          `json:"answer,omitempty"`
	Sent    *time.Time      `json:"sent,omitempty"`
	LeaseNo int64           `json:"lease_no,omitempty"`
	Attempt int             `json:"attempt,omitempty"`

	Worker    string     `json:"worker,omitempty"`
	PID       int        `json:"pid,omitempty"`
	Code      int        `json:"code,omitempty"`
	Fault     string     `json:"fault,omitempty"`
	Until     *time.Time `json:"until,omitempty"`
	Statement string     `json:"statement,omitempty"`
	Committed bool       `json:"committed,omitempty"`
	Text      string     `json:"text,omitempty"`
}

// add appends an entry. It fails only if the disk does, and then nothing can be judged.
func (l *ledger) add(e entry) {
	if e.At.IsZero() {
		e.At = time.Now()
	}
	line, err := json.Marshal(e)
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		_, err = l.file.Write(append(line, '\n'))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture: the ledger cannot be written:", err)
		os.Exit(1)
	}
}
