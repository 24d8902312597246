package handlers_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Only what the answer itself says is declared: a status that says to fail at once declares nothing, with a code or without.
func TestDeclared(t *testing.T) {
	for body, want := range map[string]bool{
		"no such page":                        false,
		`{"error": {"code": "unauthorized"}}`: false,
		`{"error": {"code": "CARD_DECLINED", "permanent": true}}`: true,
		`{"error": {"permanent": true}}`:                          true,
	} {
		_, err := post(t, answer(t, 422, body))
		if f := settling.NewFailure(err, run.Info{}); !f.Permanent || f.Declared != want {
			t.Errorf("%s: permanent %t, declared %t, want true, %t", body, f.Permanent, f.Declared, want)
		}
	}
}
