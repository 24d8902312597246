package graph

import (
	"encoding/json"
)

// The fact of a node is what expressions read as steps.<node>: the latest result of the node, or what the node's mapping
// (Node.Out) makes of it. Each decision of the core computes facts anew from the results that the shell has loaded.

// failure returns the fact of a step that has failed, as expressions read it.
func failure(code, message string) any {
	return map[string]any{"error": map[string]any{"code": code, "message": message}}
}

// failedAs returns the code of a fact that is a failure, and "" for any other fact.
func failedAs(fact any) string {
	f, _ := fact.(map[string]any)
	e, _ := f["error"].(map[string]any)
	code, _ := e["code"].(string)
	return code
}

// learn sets the fact of a node to a new result. The cost of the mapping (Out) counts against the limit of the decision
// (facts.spent).
func (i *instance) learn(n *node, result json.RawMessage) { i.note(n, result, i.facts.spent) }

// remember sets the fact of a node to a stored result of an earlier decision. It counts no cost: otherwise the cost of a
// decision would depend on the facts that are loaded for other events of its batch.
func (i *instance) remember(n *node, result json.RawMessage) { i.note(n, result, nil) }

// note sets the fact of a node. If the mapping fails, the node has no fact, and the error is in unfit. The error
// becomes an incident when a token is about to leave the node: see told.
func (i *instance) note(n *node, result json.RawMessage, spent *uint64) {
	value, err := fact(n, result, spent)
	if err != nil {
		delete(i.facts.steps, n.name)
		i.unfit[n.name] = err
		return
	}
	i.know(n.name, value)
}

// know sets the fact of a node.
func (i *instance) know(name string, value any) {
	i.facts.steps[name] = value
	delete(i.unfit, name)
}

// told reports whether the mapping (Out) of a token's node succeeded. If it failed, told stops the token with an
// incident: the step is done, but the token cannot leave the node.
func (i *instance) told(t *token) bool {
	err := i.unfit[t.node.name]
	if err != nil {
		i.stop(t, mappingFailed, err.Error())
	}
	return err == nil
}

// fact returns the fact of a step that has succeeded: its result, or what its mapping (Out) makes of that.
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

// object evaluates a mapping to a JSON object.
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
