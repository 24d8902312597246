package graph_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/simple-workflow/simple-workflow/graph"
)

// The same process and the same events lead to the same decisions; and after each of them the
// instance has counted the tokens that there are, and something can move or an incident says why.
func TestCore(t *testing.T) {
	finished := 0
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		play := func() *graph.Play {
			r := rand.New(rand.NewPCG(seed, 1))
			plan := newPlan(r, "p", []*plan{newPlan(r, "child", nil)})
			p, err := graph.NewPlay(plan.definition, plan.input)
			for more := true; more && err == nil && len(p.Story) < 400; {
				more, err = p.Next(r.IntN)
			}
			if err != nil {
				text, _ := plan.definition.JSON()
				t.Fatalf("%v\n%s\n%s", err, text, strings.Join(p.Story[max(0, len(p.Story)-4):], "\n\n"))
			}
			if len(p.Story) < 400 {
				finished++
			}
			return p
		}
		one, two := play(), play()
		if !slices.Equal(one.Story, two.Story) {
			for k := range one.Story {
				if k >= len(two.Story) || one.Story[k] != two.Story[k] {
					t.Fatalf("two ways to decide:\n%s\n\n%s", one.Story[k], two.Story[min(k, len(two.Story)-1)])
				}
			}
		}
	})
	if finished == 0 {
		t.Error("no instance came to its end")
	}
}
