package handlers_test

import (
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/run"
)

// What a program or a server itself says about its failure is obeyed. Output of another form is shown
// unchanged.
func TestTold(t *testing.T) {
	for _, c := range []struct {
		status    int
		exit      string
		says      string
		code      string
		text      string
		permanent bool
		delay     time.Duration
		free      bool
	}{
		{402, "1", `{"error": {"code": "CARD_DECLINED", "message": "no money left", "permanent": true}}`, "CARD_DECLINED", "no money left", true, 0, false},
		{422, "65", `{"error": {"code": "CARD_DECLINED"}}`, "CARD_DECLINED", "", true, 0, false},
		{500, "1", `{"error": {"code": "db.down"}}`, "db.down", "", false, 0, false},
		{500, "1", `{"error": {"permanent": true}}`, "", "", true, 0, false},
		{400, "64", `{"error": {"permanent": false, "message": "not yet"}}`, "", "not yet", false, 0, false},
		{500, "1", `{"error": {"retry_after": 90, "code": "busy", "more": [1]}, "more": 1}`, "busy", "", false, 90 * time.Second, false},
		{404, "78", `{"error": {"again_after": 0.5, "code": "busy"}}`, "", "try again in 500ms", false, 500 * time.Millisecond, true},
		{500, "1", `{"error": {"again_after": -1}}`, "", "try again in 0s", false, 0, true},
		{500, "1", `{"error": {"retry_after": 1e300}}`, "", "", false, 365 * 24 * time.Hour, false},
		{500, "1", `{"error": {"code": "no code"}}`, "", "", false, 0, false},
		{500, "1", `{"error": {"code": 17}}`, "", "", false, 0, false},
		{500, "1", `{"error": "down"}`, "", "", false, 0, false},
		{500, "1", `not JSON`, "", "", false, 0, false},
		{500, "1", ``, "", "", false, 0, false},
	} {
		_, posted := post(t, answer(t, c.status, c.says))
		_, executed := execute(t, "cat <<'END'\n"+c.says+"\nEND\nexit "+c.exit, "{}")
		for how, err := range map[string]error{"url": posted, "program": executed} {
			if err == nil {
				t.Errorf("%s, %s: no error", how, c.says)
				continue
			}
			delay, free, delayed := run.Delay(err)
			if run.Code(err) != c.code || run.IsPermanent(err) != c.permanent || delay != c.delay || free != c.free || delayed != (c.delay > 0 || c.free) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s, %s: code %q, permanent %t, delay %s, free %t, %q; want code %q, permanent %t, delay %s, free %t, %q", how, c.says,
					run.Code(err), run.IsPermanent(err), delay, free, err, c.code, c.permanent, c.delay, c.free, c.text)
			}
		}
	}
	// A header applies if the answer says nothing.
	_, err := post(t, answer(t, 503, `{"error": {"code": "down"}}`, "Retry-After", "7"))
	if delay, _, _ := run.Delay(err); delay != 7*time.Second || run.Code(err) != "down" {
		t.Errorf("with a header: %s, %q", delay, run.Code(err))
	}
	// A secret repeated in the answer is not shown.
	t.Setenv("BILLING_TOKEN", "s3cret-token")
	_, err = call(t, handler(t, "media.: {program: "+script(t, `echo "{\"error\": {\"message\": \"bad $BILLING_TOKEN\"}}"; exit 1`)+", env: [BILLING_TOKEN]}"), "{}")
	if err == nil || !strings.Contains(err.Error(), "bad ***") {
		t.Errorf("with a secret: %v", err)
	}
}
