package graph

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// Every key of a Node is a verb or is allowed beside one, and every verb has a function for a token that enters the
// node.
func TestVerbs(t *testing.T) {
	var beside []string
	for _, k := range besides {
		beside = append(beside, k.key)
	}
	var keys []string
	for field := range reflect.TypeFor[Node]().Fields() {
		key, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		keys = append(keys, key)
	}
	if known := append(kindsOf(verbs), beside...); !slices.Equal(slices.Sorted(slices.Values(keys)), slices.Sorted(slices.Values(known))) {
		t.Errorf("a Node has the keys %v, known are %v", keys, known)
	}
	for _, v := range verbs {
		if entering(v.kind) == nil {
			t.Errorf("nothing happens when a token comes to a %s", v.kind)
		}
		for key := range strings.FieldsSeq(v.keys) {
			if !slices.Contains(beside, key) {
				t.Errorf("%s may have %s beside it, which is no key", v.kind, key)
			}
		}
	}
}
