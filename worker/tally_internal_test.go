package worker

import (
	"fmt"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/settling"
)

// A tally holds a hundred types and the rest, and loses nothing.
func TestTallyIsBounded(t *testing.T) {
	var c tally
	for i := range 1000 {
		c.settled(fmt.Sprintf("a.t%d", i), settling.Succeed, 0)
	}
	all := c.take()
	if len(all) != tallied+1 || all[otherTypes].succeeded != 1000-tallied {
		t.Errorf("%d types, %d others", len(all), all[otherTypes].succeeded)
	}
	c.settled("a.t1", settling.Fail, 0)
	c.putBack(all)
	if all = c.take(); len(all) > tallied+1 {
		t.Errorf("%d types after they were put back", len(all))
	}
	n := int64(0)
	for _, x := range all {
		n += x.succeeded + x.failed
	}
	if n != 1001 {
		t.Errorf("%d are counted, want 1001", n)
	}
}
