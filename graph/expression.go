package graph

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"google.golang.org/protobuf/types/known/structpb"
)

// costLimit bounds what one evaluation may do, in CEL's own units. Definitions are data, and
// expressions are evaluated while an instance is locked: the bound holds where a deadline
// would come too late.
const costLimit = 100_000

// An expression is a CEL expression that has been compiled.
type expression struct {
	text    string
	program cel.Program
	gives   *cel.Type // as far as it is known before
	steps   []string  // nodes whose facts it reads; nil with every set: it may read any
	every   bool
}

// facts are what expressions may read.
type facts struct {
	input  any            // of the instance
	steps  map[string]any // the latest result of each node
	result any            // of a step, in its own mapping
	item   any            // of a list, in the mapping of an each
}

var environment = sync.OnceValues(func() (*cel.Env, error) {
	return cel.NewEnv(
		cel.Variable("input", cel.DynType),
		cel.Variable("steps", cel.MapType(cel.StringType, cel.DynType)),
		cel.Variable("result", cel.DynType),
		cel.Variable("item", cel.DynType),
		cel.CrossTypeNumericComparisons(true), // numbers of JSON are doubles
	)
})

func compile(text string) (*expression, error) {
	env, err := environment()
	if err != nil {
		return nil, err
	}
	compiled, issues := env.Compile(text)
	if issues.Err() != nil {
		return nil, fmt.Errorf("%s", strings.TrimPrefix(issues.String(), "ERROR: "))
	}
	program, err := env.Program(compiled, cel.CostLimit(costLimit), cel.EvalOptions(cel.OptOptimize))
	if err != nil {
		return nil, err
	}
	e := &expression{text: text, program: program, gives: compiled.OutputType()}
	e.readsOf(compiled.NativeRep().Expr())
	return e, nil
}

// readsOf finds the nodes whose facts are read: steps.name, steps["name"], "name" in steps. Any
// other use of steps may read all of them.
func (e *expression) readsOf(root ast.Expr) {
	named := map[int64]bool{} // uses of steps that say which
	note := func(steps ast.Expr, name string) {
		named[steps.ID()] = true
		e.steps = append(e.steps, name)
	}
	isSteps := func(x ast.Expr) bool { return x.Kind() == ast.IdentKind && x.AsIdent() == "steps" }
	text := func(x ast.Expr) (string, bool) {
		if x.Kind() != ast.LiteralKind {
			return "", false
		}
		s, ok := x.AsLiteral().Value().(string)
		return s, ok
	}
	ast.PreOrderVisit(root, ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.SelectKind:
			if s := x.AsSelect(); isSteps(s.Operand()) {
				note(s.Operand(), s.FieldName())
			}
		case ast.CallKind:
			args := x.AsCall().Args()
			if len(args) != 2 {
				return
			}
			switch x.AsCall().FunctionName() {
			case operators.Index:
				if name, ok := text(args[1]); ok && isSteps(args[0]) {
					note(args[0], name)
				}
			case operators.In:
				if name, ok := text(args[0]); ok && isSteps(args[1]) {
					note(args[1], name)
				}
			}
		case ast.IdentKind:
			e.every = e.every || isSteps(x) && !named[x.ID()]
		}
	}))
}

// canBeTrue reports whether what the expression gives can be true or false at all.
func (e *expression) canBeTrue() bool {
	return e.gives.IsExactType(cel.BoolType) || e.gives.IsExactType(cel.DynType)
}

func (e *expression) eval(f facts) (ref.Val, error) {
	value, _, err := e.program.Eval(map[string]any{"input": f.input, "steps": f.steps, "result": f.result, "item": f.item})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.text, err)
	}
	return value, nil
}

// condition gives true or false. A key that is missing is an error, never false.
func (e *expression) condition(f facts) (bool, error) {
	value, err := e.eval(f)
	if err != nil {
		return false, err
	}
	b, ok := value.(types.Bool)
	if !ok {
		return false, fmt.Errorf("%s: gives %s, a condition gives true or false", e.text, value.Type())
	}
	return bool(b), nil
}

// value gives a JSON value.
func (e *expression) value(f facts) (json.RawMessage, error) {
	value, err := e.eval(f)
	if err != nil {
		return nil, err
	}
	native, err := value.ConvertToNative(jsonValue)
	if err != nil {
		return nil, fmt.Errorf("%s: gives what is no JSON value: %w", e.text, err)
	}
	return native.(*structpb.Value).MarshalJSON()
}

var jsonValue = reflect.TypeFor[*structpb.Value]()
