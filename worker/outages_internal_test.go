package worker

import "testing"

// A success whose report failed is reported again, since it may be the last one of its type. What was heard
// after it counts more.
func TestSuccessIsToldAgain(t *testing.T) {
	o := outages{known: map[string]bool{"a.b": true}, heard: map[string]*heard{}, some: make(chan struct{}, 1)}
	o.over("a.b")
	<-o.some
	o.putBack("a.b", o.take()["a.b"])
	if len(o.some) == 0 {
		t.Error("nobody is told that there is something to tell")
	}
	again := o.take()["a.b"]
	if again == nil || !again.over {
		t.Fatalf("it is not told again: %+v", again)
	}
	o.over("a.c") // nothing is known of this type
	o.heard["a.b"] = &heard{times: 2}
	o.putBack("a.b", again)
	if h := o.take()["a.b"]; h == nil || h.over || h.times != 2 {
		t.Errorf("an outage that was met since is not what is told: %+v", h)
	}
}
