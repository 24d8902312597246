package handlers_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

// as calls the handler of an entry as a worker does, which gives it a token.
func as(t *testing.T, file string, info run.Info) (string, error) {
	t.Helper()
	mux := worker.NewMux()
	mux.HandleRaw("media.", handler(t, file))
	info.Type = "media.thumb.v1"
	data, err := worker.Try(t.Context(), nil, mux, info, struct{}{})
	return string(data), err
}

// The status 202 and the exit code 202 are no success: the run goes on elsewhere, for as long as the answer says, a day at most, or as its type has it.
func TestElsewhere(t *testing.T) {
	for _, c := range []struct {
		after, says string
		want        time.Duration
	}{
		{"", "", 0},
		{"0", `{"within": 0}`, 0},
		{"soon", `soon`, 0},
		{"7200", `{"within": 7200}`, 2 * time.Hour},
		{"99999999999999999999", `{"within": 1e300}`, shipped.MaxElsewhere},
	} {
		_, posted := post(t, answer(t, 202, `{"a": 1}`, "Retry-After", c.after))
		_, executed := execute(t, "echo '"+c.says+"'; exit 202", "{}")
		for how, err := range map[string]error{"url": posted, "program": executed} {
			if within, ok := run.IsElsewhere(err); !ok || within != c.want || !errors.Is(err, run.ErrElsewhere) {
				t.Errorf("%s, %q and %q: %s, %t (%v), want %s", how, c.after, c.says, within, ok, err, c.want)
			}
		}
	}
}

// Programs and URLs get a token, the same at no other run, and of a step of a process its instance, the instance's key, and its node; others get none of these. The token is not repeated in errors.
func TestTokenAndStep(t *testing.T) {
	shows := script(t, `printf '"%s"' "$WORKFLOW_TOKEN|$WORKFLOW_INSTANCE|$WORKFLOW_BUSINESS_KEY|$WORKFLOW_NODE"`)
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		h := r.Header
		_, _ = io.WriteString(w, `"`+strings.Join([]string{h.Get("Workflow-Token"), h.Get("Workflow-Instance"), h.Get("Workflow-Business-Key"), h.Get("Workflow-Node")}, "|")+`"`)
	})
	step := run.Info{Instance: uuid.New(), BusinessKey: "order 17", Node: "Pay/item"}
	for how, file := range map[string]string{"program": "media.: {program: " + shows + "}", "url": "media.: {url: " + url + "}"} {
		got, err := as(t, file, step)
		token, rest, _ := strings.Cut(strings.Trim(got, `"`), "|")
		if _, bad := uuid.Parse(token); err != nil || bad != nil || rest != step.Instance.String()+"|order 17|Pay/item" {
			t.Errorf("%s, a step: %s, %v", how, got, err)
		}
		got, err = as(t, file, run.Info{})
		if other, rest, _ := strings.Cut(strings.Trim(got, `"`), "|"); err != nil || other == token || rest != "||" {
			t.Errorf("%s, no step: %s, %v", how, got, err)
		}
	}
	tells := script(t, `echo "it is $WORKFLOW_TOKEN" >&2; exit 1`)
	if _, err := as(t, "media.: {program: "+tells+"}", step); err == nil || !strings.Contains(err.Error(), "it is ***") {
		t.Errorf("the program's error: %v", err)
	}
	failing := serve(t, func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "it is "+r.Header.Get("Workflow-Token"), 500)
	})
	if _, err := as(t, "media.: {url: "+failing+"}", step); err == nil || !strings.Contains(err.Error(), "it is ***") {
		t.Errorf("the server's error: %v", err)
	}
}
