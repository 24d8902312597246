package spelling

import "testing"

// An inserted, deleted or replaced letter counts as one, in both directions.
func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"charge", "chrage", 2}, {"charge", "charges", 1}, {"kitten", "sitting", 3}, {"a", "b", 1}} {
		if got, back := Distance(c.a, c.b), Distance(c.b, c.a); got != c.want || back != c.want {
			t.Errorf("%q to %q: %d, and back %d; want %d", c.a, c.b, got, back, c.want)
		}
	}
}
