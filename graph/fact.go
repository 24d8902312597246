package graph

import (
	"encoding/json"
)

// failure is what expressions read of a step that has failed.
func failure(code, message string) any {
	return map[string]any{"error": map[string]any{"code": code, "message": message}}
}

// fact is what expressions read of a step that has succeeded with a result.
func fact(n *node, result json.RawMessage) (any, error) {
	var value any
	if len(result) > 0 {
		if err := json.Unmarshal(result, &value); err != nil {
			return nil, err
		}
	}
	if n.out == nil {
		return value, nil
	}
	text, err := object(n.out, facts{result: value})
	if err != nil {
		return nil, err
	}
	value = nil
	err = json.Unmarshal(text, &value)
	return value, err
}

// object evaluates a mapping.
func object(all []mapping, f facts) (json.RawMessage, error) {
	values := make(map[string]json.RawMessage, len(all))
	for _, m := range all {
		value, err := m.value.value(f)
		if err != nil {
			return nil, err
		}
		values[m.key] = value
	}
	return json.Marshal(values)
}
