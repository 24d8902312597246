package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/run"
)

const (
	maxCompletion    = jsondoc.MaxResult + 64<<10 // bytes of a body: a result and the other members
	completeAtOnce   = 16                         // requests handled at once; only one at a time uses the pool, which others need too
	completeTimeout  = 10 * time.Second
	completePatience = 5 * time.Second // how long a report waits for the handler to hand its run on: the other system may be quicker
	completePause    = 200 * time.Millisecond
)

// completions answers POST /complete: it completes a run that is executed elsewhere. The caller proves its
// right with the token that the handler got, and with nothing else. Nothing of a body is logged.
type completions struct {
	db      run.DB
	log     *slog.Logger
	inside  chan struct{}
	turn    chan struct{}
	patient time.Duration // completePatience, shorter in tests
}

func newCompletions(db run.DB, log *slog.Logger) *completions {
	return &completions{db: db, log: log, inside: make(chan struct{}, completeAtOnce), turn: make(chan struct{}, 1), patient: completePatience}
}

// A completion is the body of a request.
type completion struct {
	Run    string          `json:"run"`
	Token  string          `json:"token"`
	Result json.RawMessage `json:"result"`
	Error  json.RawMessage `json:"error"`
}

// A refusal is an answer that is not a success.
type refusal struct {
	status int
	text   string
	early  bool // the run is not handed on yet, but may be soon
}

func (c *completions) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, text := http.StatusOK, ""
	select {
	case c.inside <- struct{}{}:
		ctx, done := context.WithTimeout(r.Context(), completeTimeout)
		answer, refused := c.answer(ctx, w, r)
		done()
		<-c.inside
		if text = answer; refused != nil {
			status, text = refused.status, refused.text
		}
	default:
		status, text = http.StatusServiceUnavailable, "too many requests at once; repeat this one"
	}
	h := w.Header()
	switch status {
	case http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	case http.StatusMethodNotAllowed:
		h.Set("Allow", http.MethodPost)
	}
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}

func (c *completions) answer(ctx context.Context, w http.ResponseWriter, r *http.Request) (string, *refusal) {
	if r.Method != http.MethodPost {
		return "", &refusal{status: http.StatusMethodNotAllowed, text: "only POST"}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxCompletion))
	if errors.As(err, new(*http.MaxBytesError)) {
		return "", &refusal{status: http.StatusRequestEntityTooLarge, text: fmt.Sprintf("the body has more than %d bytes; keep a large result elsewhere, and give a reference", maxCompletion)}
	} else if err != nil {
		return "", &refusal{status: http.StatusBadRequest, text: "the body broke off; send it again"}
	}
	said, id, token, problem := parseCompletion(body)
	if problem != "" {
		return "", &refusal{status: http.StatusBadRequest, text: problem}
	}
	for begun := time.Now(); ; {
		answer, refused := c.complete(ctx, id, token, said)
		if refused == nil || !refused.early || time.Since(begun) >= c.patient {
			return answer, refused
		}
		select {
		case <-ctx.Done():
			return answer, refused
		case <-time.After(completePause):
		}
	}
}

// parseCompletion reads a body. problem quotes nothing of the body, which may hold secrets.
func parseCompletion(body []byte) (said completion, id, token uuid.UUID, problem string) {
	const form = `; send {"run": "…", "token": "…", "result": …}, or "error": {"code": "…", "message": "…", "permanent": true} in place of the result`
	if err := jsonv2.Unmarshal(body, &said, jsonv2.RejectUnknownMembers(true)); err != nil {
		return said, id, token, "the body is not a JSON object of run, token, and result or error" + form
	}
	var err error
	if id, err = uuid.Parse(said.Run); err != nil || len(said.Run) != 36 {
		return said, id, token, "run is not an id of 36 characters; take it from the header Workflow-Run-Id"
	}
	if token, err = uuid.Parse(said.Token); err != nil || len(said.Token) != 36 {
		return said, id, token, "token is not a token of 36 characters; take it from the header Workflow-Token"
	}
	if string(said.Error) == "null" {
		said.Error = nil
	}
	if said.Error != nil && said.Result != nil {
		return said, id, token, "there are both a result and an error; send one of the two"
	}
	if said.Result != nil {
		if err := jsondoc.CheckResult(said.Result); err != nil {
			return said, id, token, err.Error()
		}
	}
	return said, id, token, ""
}

const notHandedOn = pgerrcode.ObjectInUse

// statuses maps SQLSTATEs of workflow_complete to HTTP statuses.
var statuses = map[string]int{
	"P0002":                         http.StatusNotFound,
	pgerrcode.InsufficientPrivilege: http.StatusForbidden,
	notHandedOn:                     http.StatusConflict,
	pgerrcode.UniqueViolation:       http.StatusConflict,
	pgerrcode.CheckViolation:        http.StatusBadRequest,
}

// complete calls workflow_complete once.
func (c *completions) complete(ctx context.Context, id, token uuid.UUID, said completion) (string, *refusal) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return "", &refusal{status: http.StatusServiceUnavailable, text: "the database takes too long; repeat the request"}
	}
	rows, _ := c.db.Query(ctx, `
		WITH s AS MATERIALIZED (SELECT set_config('lock_timeout', '300ms', true)) -- whoever holds a run must not have all others wait
		SELECT workflow_complete($1, $2, $3, $4) FROM s`, id, token, said.Result, said.Error)
	answer, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err == nil {
		return answer, nil
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return "", &refusal{status: http.StatusServiceUnavailable, text: "the database cannot be reached; repeat the request"}
	}
	if pg.Code == pgerrcode.LockNotAvailable {
		return "", &refusal{status: http.StatusServiceUnavailable, text: "somebody has this run locked; repeat the request"}
	}
	words, ours := strings.CutPrefix(pg.Message, "workflow_complete: ")
	status, known := statuses[pg.Code]
	if !ours || !known {
		c.log.Error("a run that goes on elsewhere could not be completed", "run", id, "sqlstate", pg.Code)
		return "", &refusal{status: http.StatusServiceUnavailable, text: "the database refuses it (SQLSTATE " + pg.Code + "); repeat the request, or ask the operators"}
	}
	return "", &refusal{status: status, text: words + ". " + pg.Hint, early: pg.Code == notHandedOn}
}
