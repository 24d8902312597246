package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/simple-workflow/simple-workflow/run"
)

// badResults are results that JSON or the database refuses.
var badResults = map[string]func() string{
	"nul":       func() string { return `{"text":"before\u0000after"}` },
	"surrogate": func() string { return `{"text":"half of a pair: \ud83d"}` },
	"big":       func() string { return `{"text":"` + strings.Repeat("x", 2<<20) + `"}` },
	"nan":       func() string { return `{"number":NaN}` },
	"deep":      func() string { return strings.Repeat("[", 5000) + strings.Repeat("]", 5000) },
}

// badResult returns the bad result that its payload's kind selects.
func badResult(_ context.Context, payload json.RawMessage) (json.RawMessage, error) {
	var in struct {
		Kind string `json:"kind"`
	}
	if err := json.Unmarshal(payload, &in); err != nil {
		return nil, run.Permanent(err)
	}
	result, ok := badResults[in.Kind]
	if !ok {
		kinds := slices.Sorted(maps.Keys(badResults))
		return nil, run.Permanent(fmt.Errorf("chaos: no kind %q; there are %s", in.Kind, strings.Join(kinds, ", ")))
	}
	return json.RawMessage(result()), nil
}
