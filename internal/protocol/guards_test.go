package protocol

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// guards are replacements in row.go that remove a guard or an effect.
var guards = []struct{ name, old, new string }{
	{"lease: that it is pending", `r.Status != Pending && !g.LeasesAny || r.Hidden`, `r.Hidden`},
	{"lease: that it is not held", ` || r.Hidden && !g.LeasesHidden`, ``},
	{"lease: the charge", "r.Attempt++\n\t}\n\tr.Status, r.Expired = Leased, false", "}\n\tr.Status, r.Expired = Leased, false"},
	{"extend: that it is held", `!g.held(r, lease) && !g.ExtendsAny`, `false`},
	{"the fence: the token", `r.Status == Leased && (r.Lease == lease || g.NoFence)`, `r.Status == Leased`},
	{"the fence: that it is leased", `r.Status == Leased && (r.Lease == lease || g.NoFence)`, `r.Lease == lease`},
	{"take back: that it has expired", `r.Status != Leased || !r.Expired && !g.TakesLiving`, `r.Status != Leased`},
	{"take back: that its outcome is not kept", `!g.TakesLiving || r.kept() && !g.TakesKept`, `!g.TakesLiving`},
	{"keep: that the lease is held", `!g.held(r, lease) && !g.KeepsAny || r.Kept == lease`, `r.Kept == lease`},
	{"kept: under the lease that is held", `r.Status == Leased && r.Kept == r.Lease`, `r.Status == Leased && r.Kept != 0`},
	{"fail: that its outcome is kept", "if !r.kept() {", "if false {"},
	{"settle: that its outcome is kept", `!r.kept() && !(g.SettlesOlder && r.Kept != 0) || v`, `v`},
	{"settle: the outcome that is kept", ` || v != r.Keeps && !g.SettlesOther`, ``},
	{"over: that it is settled", ` || r.kept() && r.Keeps != Effects && !g.ForgetsKept`, ``},
	{"release: that its outcome is not kept", `!g.ReleasesAny || r.kept() && !g.ReleasesKept`, `!g.ReleasesAny`},
	{"take back: that an attempt is left", `case r.Attempt < r.Most || g.FreeCrash || g.TakesForever:`, `case true:`},
	{"take back: once", ` && r.Attempt > 0 && !r.Spared`, ` && r.Attempt > 0`},
	{"take back: the last attempt of a suspect", `spare && r.Suspect && !r.Uncharged`, `spare && !r.Uncharged`},
	{"release: that it is leased", "if r.Status != Leased && !g.ReleasesAny || r", "if r"},
	{"cancel: that it is open", `r.Status != Pending && r.Status != Leased && !g.CancelsAny`, `false`},
	{"retry: that it has failed", `r.Attempt >= 1000 || r.Status != Failed && !(g.RetriesAny && r.Status.Over())`, `r.Attempt >= 1000`},
	{"retry: that it is not deleted", `r.Deleted && !g.RetriesDeleted || r.Attempt`, `r.Attempt`},
	{"delete: that it is cancelled", `if r.Status == Leased && !g.DeleteLeaves {`, `if false {`},
	{"remove: that it is not leased", ` || r.Status == Leased && !g.RemovesLeased`, ``},
}

// If a guard is removed from a transition of the model, the tests of this package fail. Each run tries every fifteenth guard;
// GUARDS=all, as in make model, tries all of them.
func TestGuards(t *testing.T) {
	text, err := os.ReadFile("row.go")
	if err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs("row.go")
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range guards {
		if n := strings.Count(string(text), g.old); n != 1 {
			t.Errorf("%s: %q is there %d times, want once", g.name, g.old, n)
			continue
		}
		if i%15 != 0 && os.Getenv("GUARDS") != "all" {
			continue
		}
		t.Run(strings.ReplaceAll(g.name, " ", "_"), func(t *testing.T) {
			dir := t.TempDir()
			file, overlay := filepath.Join(dir, "row.go"), filepath.Join(dir, "overlay.json")
			list, err := json.Marshal(map[string]any{"Replace": map[string]string{here: file}})
			if err != nil {
				t.Fatal(err)
			}
			for name, text := range map[string]string{file: strings.Replace(string(text), g.old, g.new, 1), overlay: string(list)} {
				if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("go", "test", "-overlay", overlay, "-run", "^(TestRightHistories|TestWrongHistories)$", ".")
			out, err := cmd.CombinedOutput()
			switch {
			case err == nil:
				t.Errorf("without the guard nothing fails")
			case !strings.Contains(string(out), "--- FAIL: Test"):
				t.Errorf("it does not compile: %s", out)
			}
		})
	}
}
