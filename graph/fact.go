package graph

import (
	"encoding/json"
)

// failure is what expressions read of a step that has failed.
func failure(code, message string) any {
	return map[string]any{"error": map[string]any{"code": code, "message": message}}
}

// failedAs returns the code if a fact is a failure.
func failedAs(fact any) string {
	f, _ := fact.(map[string]any)
	e, _ := f["error"].(map[string]any)
	code, _ := e["code"].(string)
	return code
}

// learn takes note of the latest result of a node, as part of a decision.
func (i *instance) learn(n *node, result json.RawMessage) { i.note(n, result, i.facts.spent) }

// remember does the same where nothing is decided.
func (i *instance) remember(n *node, result json.RawMessage) { i.note(n, result, nil) }

func (i *instance) note(n *node, result json.RawMessage, spent *uint64) {
	value, err := fact(n, result, spent)
	if err != nil {
		delete(i.facts.steps, n.name)
		i.unfit[n.name] = err
		return
	}
	i.know(n.name, value)
}

// know takes note of what a node has to tell.
func (i *instance) know(name string, value any) {
	i.facts.steps[name] = value
	delete(i.unfit, name)
}

// told reports whether it could be told what the result of a token's node means. Otherwise the
// token, which is done there, stops.
func (i *instance) told(t *token) bool {
	err := i.unfit[t.node.name]
	if err != nil {
		i.stop(t, mappingFailed, err.Error())
	}
	return err == nil
}

// fact is what expressions read of a step that has succeeded with a result.
func fact(n *node, result json.RawMessage, spent *uint64) (any, error) {
	var value any
	if len(result) > 0 {
		if err := json.Unmarshal(result, &value); err != nil {
			return nil, err
		}
	}
	if n.out == nil {
		return value, nil
	}
	text, err := object(n.out, facts{result: value, spent: spent})
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
